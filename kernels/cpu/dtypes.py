"""Numbers of the floating types in the native library: those of GGUF."""

from __future__ import annotations

import torch

DTYPE_IDS: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}

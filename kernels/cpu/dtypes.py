"""Numbers of the floating types in the native library: those of GGUF."""

from __future__ import annotations

import torch

DTYPE_IDS: dict[torch.dtype, int] = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 30}

CACHE_IDS: dict[torch.dtype, int] = {
    **DTYPE_IDS,
    torch.float8_e4m3fn: 101,
    torch.float8_e5m2: 102,
    torch.int8: 103,
}
"""The same of everything keys and values may be kept in; see narrow.h."""

"""Every op that has CUDA kernels. Importing it loads triton, which runs the calls that are not for these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vkit.kernels.cuda import attention, norm, packed

OPS: Mapping[str, Callable[..., Any]] = {
    "add_rms_norm": norm.add_rms_norm,
    "paged_attention": attention.paged_attention,
    "quantized_linear": packed.quantized_linear,
    "rms_norm": norm.rms_norm,
}
"""Op name -> implementation, with the signature of the reference of that name."""

HALVES = (torch.bfloat16, torch.float16)


def find(op: str, dtype: torch.dtype) -> Callable[..., Any] | None:
    """The implementation of `op` for activations of `dtype`; tiles of attention are of 16-bit numbers alone."""
    return OPS.get(op) if dtype in HALVES or (dtype == torch.float32 and op != "paged_attention") else None

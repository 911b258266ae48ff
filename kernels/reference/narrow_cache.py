"""Rows of a narrow KV cache: fp8 as it is, and int8 with the float32 scale of its row behind the codes.

A cache of int8 is (N, S, K, D + 4): one scale per token and head, chosen when the row is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALE_BYTES = 4


def encode_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (..., D) as a cache of `dtype` keeps it: (..., D), or (..., D + 4) for int8. fp8 saturates; ties go to even."""
    if dtype in FP8:
        largest = torch.finfo(dtype).max
        return x.float().clamp(-largest, largest).to(dtype)
    if dtype is not torch.int8:
        return x.to(dtype)
    wide = x.float()
    peak = wide.abs().amax(-1, keepdim=True)
    # A division, which `127.0 / peak` is not: torch takes the reciprocal first, and ties fall the other way.
    inverse = torch.where(peak > 0, torch.full_like(peak, 127.0) / peak, torch.zeros_like(peak))
    codes = torch.round(wide * inverse).to(torch.int8)
    return torch.cat([codes, (peak / 127.0).view(torch.int8)], dim=-1)


def decode_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What `encode_rows` made, in `dtype`."""
    if rows.dtype is not torch.int8:
        return rows.to(dtype)
    codes, scales = rows[..., :-SCALE_BYTES], rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (codes.float() * scales).to(dtype)

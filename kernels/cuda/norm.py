"""RMS norm of rows, with and without the addition before it: the arguments of norm.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.cuda import library
from vkit.kernels.cuda.library import TYPES, Norm, is_aligned, pointer


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """As the reference of this name."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _start(x, None, weight, out, None, eps, offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As the reference of this name."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _start(x, residual.to(x.dtype), weight, out, total, eps, offset)
    return out, total


def _start(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    out: Tensor,
    total: Tensor | None,
    eps: float,
    offset: float,
) -> None:
    if not x.numel():
        return
    rows = _as_rows(x)
    added = rows if residual is None else _as_rows(residual)
    weight = None if weight is None else weight.contiguous()
    strides = (rows.stride(0), rows.stride(1), added.stride(0), added.stride(1))
    width = x.shape[-1]
    is_wide = (
        not any(stride * x.element_size() % 16 for stride in (*strides, width))
        and width % 8 == 0
        and is_aligned(rows, added, weight, out, total)
    )
    arguments = Norm(
        pointer(rows), pointer(added) if residual is not None else None, pointer(weight), pointer(out), pointer(total),
        rows.shape[0] * rows.shape[1], width, rows.shape[1], *strides, eps, float(offset),
        TYPES[x.dtype], TYPES[x.dtype if weight is None else weight.dtype], is_wide,
    )  # fmt: skip
    library.load_library().start("rms_norm", arguments, x.device)


def _as_rows(x: Tensor) -> Tensor:
    """x (outer, inner, width), a view where two strides can describe its rows."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.ndim == 3:
        return x
    return x.reshape(1, -1, x.shape[-1]) if x.ndim != 2 else x.unsqueeze(0)

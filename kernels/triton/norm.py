"""RMS norm of rows, with and without the addition before it. One program per row; bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import Ahead, power_of_two, rounded

MAX_BLOCK = 16384
"""Columns one program keeps in registers; wider rows are read twice."""


@triton.jit  # type: ignore[untyped-decorator]
def scaled_row(
    x: tl.tensor,
    inverse: tl.tensor,
    weight: tl.tensor,
    column: tl.tensor,
    is_column: tl.tensor,
    offset: tl.tensor,
    dtype: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> tl.tensor:
    """x · inverse · weight in `dtype`: rounded before the weight as well, unless the weight has an offset."""
    normed = x * inverse
    if HAS_WEIGHT:
        factor = tl.load(weight + column, mask=is_column, other=0.0)
        if HAS_OFFSET:
            normed = normed * (factor.to(tl.float32) + offset)
        else:
            factor = rounded(factor.to(tl.float32), dtype).to(tl.float32)
            normed = rounded(normed, dtype).to(tl.float32) * factor
    return rounded(normed, dtype)


@triton.jit(do_not_specialize=["inner"])  # type: ignore[untyped-decorator]
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    total: tl.tensor,
    width: tl.tensor,
    inner: tl.tensor,
    x_outer: tl.tensor,
    x_inner: tl.tensor,
    residual_outer: tl.tensor,
    residual_inner: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    BLOCK: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_WHOLE: tl.constexpr,
) -> None:
    """out[row] = rms_norm(x[row] (+ residual[row])); the sum is stored in `total` and normed as rounded.

    x (outer, inner, width) by strides, out and total contiguous. IS_WHOLE: a row fits in one block.
    """
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    x += (row // inner) * x_outer + (row % inner) * x_inner
    out += row * width
    if HAS_RESIDUAL:
        residual += (row // inner) * residual_outer + (row % inner) * residual_inner
        total += row * width
    column = tl.arange(0, BLOCK)
    if IS_WHOLE:
        is_column = column < width
        value = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            narrow = rounded(value + tl.load(residual + column, mask=is_column, other=0.0).to(tl.float32), dtype)
            tl.store(total + column, narrow, mask=is_column)
            value = narrow.to(tl.float32)
        inverse = 1.0 / tl.sqrt_rn(tl.sum(value * value, 0) / width + eps)
        scaled = scaled_row(value, inverse, weight, column, is_column, offset, dtype, HAS_WEIGHT, HAS_OFFSET)
        tl.store(out + column, scaled, mask=is_column)
    else:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            is_column = start + column < width
            value = tl.load(x + start + column, mask=is_column, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                addend = tl.load(residual + start + column, mask=is_column, other=0.0).to(tl.float32)
                narrow = rounded(value + addend, dtype)
                tl.store(total + start + column, narrow, mask=is_column)
                value = narrow.to(tl.float32)
            squares += value * value
        inverse = 1.0 / tl.sqrt_rn(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            at = start + column
            is_column = at < width
            value = tl.load(x + at, mask=is_column, other=0.0).to(tl.float32)
            if HAS_RESIDUAL:
                # Added again rather than read back: each thread would read what another has only just written.
                addend = tl.load(residual + at, mask=is_column, other=0.0).to(tl.float32)
                value = rounded(value + addend, dtype).to(tl.float32)
            scaled = scaled_row(value, inverse, weight, at, is_column, offset, dtype, HAS_WEIGHT, HAS_OFFSET)
            tl.store(out + at, scaled, mask=is_column)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
    """As the reference of this name."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, out, None, eps, offset)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """As the reference of this name."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps, offset)
    return out, total


def _launch(
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
    width = x.shape[-1]
    rows = _as_rows(x)
    added = rows if residual is None else _as_rows(residual)
    block = min(power_of_two(width), MAX_BLOCK)
    rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
        rows,
        added,
        rows if weight is None else weight.contiguous(),
        out,
        out if total is None else total,
        width,
        rows.shape[1],
        rows.stride(0),
        rows.stride(1),
        added.stride(0),
        added.stride(1),
        eps,
        float(offset),
        BLOCK=block,
        HAS_RESIDUAL=residual is not None,
        HAS_WEIGHT=weight is not None,
        HAS_OFFSET=bool(offset),
        IS_WHOLE=width <= block,
        num_warps=num_warps(block),
    )


def num_warps(block: int) -> int:
    """Warps for a row of `block` columns: 8 to 16 values a thread."""
    return min(16, max(1, block // 512))


def _as_rows(x: Tensor) -> Tensor:
    """x (outer, inner, width), a view where two strides can describe its rows."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    if x.ndim == 3:
        return x
    return x.reshape(1, -1, x.shape[-1]) if x.ndim != 2 else x.unsqueeze(0)


def _ahead(name: str, block: int, *, residual: bool, whole: bool = True) -> Ahead:
    pointers = dict.fromkeys(("x", "residual", "weight", "out", "total"), "*bf16")
    strides = dict.fromkeys(("x_outer", "x_inner", "residual_outer", "residual_inner"), "i32:16")
    return Ahead(
        name,
        rms_norm_kernel,
        {**pointers, "width": "i32:16", "inner": "i32", **strides, "eps": "fp32", "offset": "fp32"},
        {
            "BLOCK": block,
            "HAS_RESIDUAL": residual,
            "HAS_WEIGHT": True,
            "HAS_OFFSET": False,
            "IS_WHOLE": whole,
        },
        num_warps=num_warps(block),
    )


AHEAD = (
    _ahead("rms_norm_4096", 4096, residual=False),
    _ahead("rms_norm_wide", MAX_BLOCK, residual=False, whole=False),
    _ahead("add_rms_norm_4096", 4096, residual=True),
    _ahead("add_rms_norm_8192", 8192, residual=True),
)

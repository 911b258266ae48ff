"""Products with packed blocks laid out in planes. One token: every row of the weight is a sum in float32; more: tiles.

Values are decoded in registers, so the bytes of the weight are all that is read of it. A tile is rounded to the type of
the activations before it is multiplied, a low one in two parts that together lose nothing; sums are float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.block_formats import PLANE_SUFFIX, format_of
from vkit.kernels.reference import quantized_embedding as reference_embedding
from vkit.kernels.reference import quantized_linear as reference
from vkit.kernels.triton.blocks import FORMS, packed_values, weighted
from vkit.kernels.triton.common import Ahead, power_of_two, rounded
from vkit.kernels.triton.fallback import leave_to_torch

LINE_OUT, LINE_STEP = 8, 512
"""Rows and columns of a step of the sum of one token. Not measured."""
TILE_OUT, TILE_STEP = 64, 64
"""Rows and columns of a step of a tile. Not measured."""
TILE_STAGES = 3
"""Steps of a tile whose loads are under way at a time. Not measured."""
ROWS_STEP = 1024
"""Columns of a piece of a row that is looked up. Not measured."""


@triton.jit  # type: ignore[untyped-decorator]
def line_kernel(
    x: tl.tensor,
    data: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_bytes: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out (num_rows,) = W x + bias for one token, in float32. Grid (pieces of the rows,). Bound by the bytes of W."""
    GROUPS: tl.constexpr = STEP // GROUP
    output = tl.program_id(0) * OUT + tl.arange(0, OUT)
    at = data + tl.minimum(output, num_rows - 1).to(tl.int64) * row_bytes
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    total = tl.zeros([OUT, GROUPS], tl.float32)
    for start in range(0, num_columns, STEP):
        codes, scale, shift = packed_values(at, start, num_columns, FORMAT, GROUP, OUT, STEP, EVEN)
        if EVEN:
            a = tl.load(x + start + column).to(tl.float32)
        else:
            a = tl.load(x + start + column, mask=start + column < num_columns, other=0.0).to(tl.float32)
        total += tl.sum(codes * a[None, :, :], 2) * scale
        if HAS_SHIFT:
            total += tl.sum(a, 1)[None, :] * shift
    y = tl.sum(total, 1)
    if HAS_BIAS:
        y += tl.load(bias + output, mask=output < num_rows, other=0.0).to(tl.float32)
    tl.store(out + output, rounded(y, out.dtype.element_ty), mask=output < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def tile_kernel(
    x: tl.tensor,
    data: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_row: tl.tensor,
    row_bytes: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out (num_tokens, num_rows) = x Wᵀ + bias, with float32 sums. Grid (pieces of the tokens, pieces of the rows)."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    at = data + tl.minimum(output, num_rows - 1).to(tl.int64) * row_bytes
    column = tl.arange(0, STEP)
    x_at = x + token[:, None] * x_row + column[None, :]
    is_token = (token < num_tokens)[:, None]
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, num_columns, STEP):
        codes, scale, shift = packed_values(at, start, num_columns, FORMAT, GROUP, OUT, STEP, EVEN)
        w = codes * scale[:, :, None]
        if HAS_SHIFT:
            w += shift[:, :, None]
        a = tl.load(x_at + start, mask=is_token & (start + column < num_columns)[None, :], other=0.0)
        total += weighted(a, tl.reshape(w, [OUT, STEP]), SPLIT)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < num_rows, other=0.0).to(tl.float32)[None, :]
    to = out + token[:, None] * num_rows + output[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_token & (output < num_rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    ids: tl.tensor,
    data: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_bytes: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out[t] = row ids[t] of the table; NaN for an id outside it. Grid (tokens, pieces of a row)."""
    token, start = tl.program_id(0).to(tl.int64), tl.program_id(1) * STEP
    row = tl.load(ids + token).to(tl.int64)
    is_known = (row >= 0) & (row < num_rows)
    at = data + (tl.where(is_known, row, 0) + tl.zeros([1], tl.int64)) * row_bytes
    codes, scale, shift = packed_values(at, start, num_columns, FORMAT, GROUP, 1, STEP, EVEN)
    w = codes * scale[:, :, None]
    if HAS_SHIFT:
        w += shift[:, :, None]
    w = tl.where(is_known, tl.reshape(w, [STEP]), float("nan"))
    column = start + tl.arange(0, STEP)
    tl.store(out + token * num_columns + column, rounded(w, out.dtype.element_ty), mask=column < num_columns)


def quantized_linear(x: Tensor, data: Tensor, qtype: str, bias: Tensor | None) -> Tensor:
    """As the reference of this name; weights that are not in planes are left to it."""
    form = FORMS.get(qtype)
    if form is None or data.stride(1) != 1:
        leave_to_torch("quantized_linear", qtype)
        return reference.quantized_linear(x, data, qtype, bias)
    num_rows, columns = data.shape[0], x.shape[-1]
    flat = x.reshape(-1, columns)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    num_tokens = flat.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    settings = {**form.settings, "HAS_BIAS": bias is not None}
    if not out.numel():
        pass
    elif num_tokens == 1:
        line_kernel[(triton.cdiv(num_rows, LINE_OUT),)](
            flat, data, bias, out, num_rows, columns, data.stride(0),
            **settings, OUT=LINE_OUT, STEP=LINE_STEP, EVEN=columns % LINE_STEP == 0, num_warps=4,
        )  # fmt: skip
    else:
        rows = tile_rows(num_tokens)
        tile_kernel[(triton.cdiv(num_tokens, rows), triton.cdiv(num_rows, TILE_OUT))](
            flat, data, bias, out, num_tokens, num_rows, columns, flat.stride(0), data.stride(0),
            **settings, SPLIT=is_split(rows, x), ROWS=rows, OUT=TILE_OUT, STEP=TILE_STEP, EVEN=columns % TILE_STEP == 0,
            num_warps=tile_warps(rows), num_stages=TILE_STAGES,
        )  # fmt: skip
    return out.view(*x.shape[:-1], num_rows)


def quantized_embedding(ids: Tensor, data: Tensor, qtype: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """As the reference of this name, but an id outside the table gives a row of NaN: a card cannot raise for it."""
    form = FORMS.get(qtype)
    if form is None or data.stride(1) != 1:
        leave_to_torch("quantized_embedding", qtype)
        return reference_embedding.quantized_embedding(ids, data, qtype, dtype=dtype)
    columns = format_of(qtype, "quantized_embedding").num_columns(data.shape[1])
    out = torch.empty(*ids.shape, columns, dtype=dtype, device=data.device)
    if out.numel():
        rows_kernel[(ids.numel(), triton.cdiv(columns, ROWS_STEP))](
            ids.contiguous(), data, out, data.shape[0], columns, data.stride(0),
            **form.settings, STEP=ROWS_STEP, EVEN=columns % ROWS_STEP == 0, num_warps=4,
        )  # fmt: skip
    return out


def tile_rows(num_tokens: int) -> int:
    """Tokens of a tile, within what matrix instructions want. Not measured."""
    return min(128, max(16, power_of_two(num_tokens)))


def tile_warps(rows: int) -> int:
    """Warps of a tile of so many tokens: split ones of more than sixteen would not fit the registers of four."""
    return 8 if 16 < rows < 128 else 4


def is_split(rows: int, x: Tensor) -> bool:
    """Whether what rounding takes from a value is multiplied too: where bytes bound the product, it costs little."""
    return rows < 128 and x.dtype is not torch.float32


def _ahead(kernel: Any, name: str, qtype: str, **constants: object) -> Ahead:
    form, names = FORMS[qtype + PLANE_SUFFIX], kernel.arg_names
    types = {"x": "*bf16", "data": "*u8", "out": "*bf16", "ids": "*i64", "num_tokens": "i32"}
    types |= dict.fromkeys(("num_rows", "num_columns", "row_bytes", "x_row"), "i32:16")
    no_bias = {"bias": None, "HAS_BIAS": False} if "bias" in names else {}
    return Ahead(
        f"{name}_{qtype.lower()}",
        kernel,
        {name: kind for name, kind in types.items() if name in names},
        {**form.settings, **no_bias, **constants, "EVEN": True},
    )


def _tile_ahead(rows: int, qtype: str) -> Ahead:
    big = {"sm_80": ("mma.sync",), "sm_90": ("wgmma.mma_async",), "sm_100": ("tcgen05.mma",)}
    ahead = _ahead(tile_kernel, f"packed_tile_{rows}", qtype, SPLIT=rows < 128, ROWS=rows, OUT=TILE_OUT, STEP=TILE_STEP)
    expects = big if rows >= 64 else {"all": ("mma.sync",)}
    return replace(ahead, num_warps=tile_warps(rows), num_stages=TILE_STAGES, expects=expects)


_COMPILED = ("Q4_0", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
AHEAD: tuple[Ahead, ...] = (
    *(_ahead(line_kernel, "packed_line", qtype, OUT=LINE_OUT, STEP=LINE_STEP) for qtype in _COMPILED),
    *(_tile_ahead(128, qtype) for qtype in _COMPILED),
    *(_tile_ahead(16, "Q4_K"), _tile_ahead(32, "Q4_K"), _tile_ahead(64, "Q8_0")),
    _ahead(rows_kernel, "packed_rows", "Q6_K", STEP=ROWS_STEP),
)

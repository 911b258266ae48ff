"""Products with codes and scales (AWQ, GPTQ, FP8, MXFP4, NVFP4). One token: sums in float32; more: tiles.

Activations are never rounded to codes: a checkpoint that asks for it is multiplied as if it did not, and that is said
once. Where a row of the weight has one scale, or in a low tile a step of it, codes are multiplied as they are and the
scale is applied to float32 sums.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.reference import scaled_linear as reference
from vkit.kernels.scaled import ScaledMatrix
from vkit.kernels.triton.blocks import weighted
from vkit.kernels.triton.codes import Form, as_read, form_of, scaled_values, scales_at, step_codes
from vkit.kernels.triton.common import Ahead, product, rounded
from vkit.kernels.triton.fallback import leave_to_torch, say_once
from vkit.kernels.triton.packed import TILE_STAGES, is_split, tile_rows

LINE_OUT, LINE_STEP = 8, 512
"""Rows and columns of a step of the sum of one token. Not measured."""
TILE_OUT, TILE_STEP = 64, 64
"""Rows and columns of a step of a tile. Not measured."""


@triton.jit  # type: ignore[untyped-decorator]
def scaled_line_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    index: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    scale_row: tl.tensor,
    block_rows: tl.tensor,
    block_columns: tl.tensor,
    zero: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out (num_rows,) = W x + bias for one token, in float32. Grid (pieces of the rows,). Bound by the bytes of W."""
    GROUPS: tl.constexpr = STEP // GROUP
    output = tl.program_id(0) * OUT + tl.arange(0, OUT)
    row = tl.minimum(output, num_rows - 1).to(tl.int64)
    column = tl.arange(0, GROUPS)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    total = tl.zeros([OUT, GROUPS], tl.float32)
    for start in range(0, num_columns, STEP):
        w, scale = scaled_values(
            codes, scales, zeros, index, row, start, num_columns, row_stride, scale_row, block_rows, block_columns,
            zero, KIND, BITS, SCALE_KIND, HAS_ZEROS, HAS_INDEX, GROUP, OUT, STEP, EVEN,
        )  # fmt: skip
        if EVEN:
            a = tl.load(x + start + column).to(tl.float32)
        else:
            a = tl.load(x + start + column, mask=start + column < num_columns, other=0.0).to(tl.float32)
        total += tl.sum(w * a[None, :, :], 2) * scale
    y = tl.sum(total, 1)
    if HAS_FACTOR:
        y *= tl.load(factor)
    if HAS_BIAS:
        y += tl.load(bias + output, mask=output < num_rows, other=0.0).to(tl.float32)
    tl.store(out + output, rounded(y, out.dtype.element_ty), mask=output < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def scaled_tile_kernel(
    x: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    index: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_row: tl.tensor,
    row_stride: tl.tensor,
    scale_row: tl.tensor,
    block_rows: tl.tensor,
    block_columns: tl.tensor,
    zero: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out (num_tokens, num_rows) = x Wᵀ + bias, with float32 sums. Grid (pieces of the tokens, pieces of the rows)."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    row = tl.minimum(output, num_rows - 1).to(tl.int64)
    column = tl.arange(0, STEP)
    x_at = x + token[:, None] * x_row + column[None, :]
    is_token = (token < num_tokens)[:, None]
    scale_at = row // block_rows * scale_row
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, num_columns, STEP):
        if SCALED == "values":
            w, scale = scaled_values(
                codes, scales, zeros, index, row, start, num_columns, row_stride, scale_row, block_rows, block_columns,
                zero, KIND, BITS, SCALE_KIND, HAS_ZEROS, HAS_INDEX, GROUP, OUT, STEP, EVEN,
            )  # fmt: skip
            w = tl.reshape(w * scale[:, :, None], [OUT, STEP])
            a = tl.load(x_at + start, mask=is_token & (start + column < num_columns)[None, :], other=0.0)
            total += weighted(a, w, SPLIT)
        else:
            place = scale_at + start // block_columns
            w = step_codes(
                codes, zeros, place, row, start, num_columns, row_stride, zero, KIND, BITS, HAS_ZEROS, OUT, STEP, EVEN
            )
            a = tl.load(x_at + start, mask=is_token & (start + column < num_columns)[None, :], other=0.0)
            part = product(a, tl.trans(rounded(w, x.dtype.element_ty)))
            if SCALED == "steps":
                part *= scales_at(scales + place, output < num_rows, SCALE_KIND)[None, :]
            total += part
    if SCALED == "rows":
        total *= scales_at(scales + scale_at, output < num_rows, SCALE_KIND)[None, :]
    if HAS_FACTOR:
        total *= tl.load(factor)
    if HAS_BIAS:
        total += tl.load(bias + output, mask=output < num_rows, other=0.0).to(tl.float32)[None, :]
    to = out + token[:, None] * num_rows + output[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_token & (output < num_rows)[None, :])


def scaled_linear(x: Tensor, weight: ScaledMatrix, bias: Tensor | None) -> Tensor:
    """As the reference of this name, with activations as they are; codes the kernels do not read are left to it."""
    form = form_of(weight)
    if isinstance(form, str):
        leave_to_torch("scaled_linear", form)
        return reference.scaled_linear(x, weight, bias)
    if weight.inputs is not None:
        say_once("scaled_linear", f"activations are not rounded to {weight.inputs.kind}; only the weights are packed")
    num_rows, columns = weight.shape
    flat = x.reshape(-1, columns)
    if weight.input_scale is not None:
        flat = (flat * weight.input_scale).to(x.dtype)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    num_tokens = flat.shape[0]
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    index = None if form.has_one_scale else weight.group_index
    scales, zeros = as_read(weight.scales), weight.zeros
    tensors = (flat, as_read(weight.codes), scales, zeros, index, weight.factor, bias, out)
    strides = (weight.codes.stride(0), scales.stride(0), *form.block, form.zero)
    flags = {"HAS_FACTOR": weight.factor is not None, "HAS_BIAS": bias is not None}
    if not out.numel():
        pass
    elif num_tokens == 1:
        settings = form.settings(has_index=index is not None) | flags
        scaled_line_kernel[(triton.cdiv(num_rows, LINE_OUT),)](
            *tensors, num_rows, columns, *strides,
            **settings, OUT=LINE_OUT, STEP=LINE_STEP, EVEN=columns % LINE_STEP == 0, num_warps=4,
        )  # fmt: skip
    else:
        rows = tile_rows(num_tokens)
        settings = form.settings(has_index=index is not None) | flags
        settings["SCALED"] = what_is_scaled(form, rows, has_index=index is not None)
        scaled_tile_kernel[(triton.cdiv(num_tokens, rows), triton.cdiv(num_rows, TILE_OUT))](
            *tensors, num_tokens, num_rows, columns, flat.stride(0), *strides,
            **settings, SPLIT=is_split(rows, x), ROWS=rows, OUT=TILE_OUT, STEP=TILE_STEP, EVEN=columns % TILE_STEP == 0,
            num_warps=4, num_stages=TILE_STAGES,
        )  # fmt: skip
    return out.view(*x.shape[:-1], num_rows)


def what_is_scaled(form: Form, rows: int, *, has_index: bool) -> str:
    """Whether the sums of a row of the weight are scaled, those of a step, or the values before they are multiplied.

    Scaling the sums of every step of a tall tile would hold two tiles of them in registers.
    """
    if form.has_one_scale:
        return "rows"
    return "steps" if not has_index and form.block[1] % TILE_STEP == 0 and rows < 128 else "values"


def _ahead(kernel: Any, name: str, form: Form, **constants: object) -> Ahead:
    names = kernel.arg_names
    codes = "*i32" if form.kind == "words" else "*u8"
    scales = "*fp16" if form.scale_kind == "float" else "*u8"
    types = {"x": "*bf16", "codes": codes, "scales": scales, "out": "*bf16", "num_tokens": "i32", "zero": "i32"}
    types |= {"zeros": "*u8"} if form.has_zeros else {}
    sizes = ("num_rows", "num_columns", "x_row", "row_stride", "scale_row", "block_rows", "block_columns")
    types |= dict.fromkeys(sizes, "i32:16") | {"block_rows": "i32"}
    settings = form.settings(has_index=False)
    absent = dict.fromkeys({"bias", "factor", "index", "zeros"} - set(types))
    return Ahead(
        name,
        kernel,
        {name: kind for name, kind in types.items() if name in names},
        {**settings, **absent, **constants, "HAS_FACTOR": False, "HAS_BIAS": False, "EVEN": True},
    )


def _tile_ahead(name: str, rows: int, form: Form) -> Ahead:
    big = {"sm_80": ("mma.sync",), "sm_90": ("wgmma.mma_async",), "sm_100": ("tcgen05.mma",)}
    scaled = what_is_scaled(form, rows, has_index=False)
    ahead = _ahead(
        scaled_tile_kernel,
        f"{name}_{rows}",
        form,
        SCALED=scaled,
        SPLIT=rows < 128,
        ROWS=rows,
        OUT=TILE_OUT,
        STEP=TILE_STEP,
    )
    return replace(ahead, num_stages=TILE_STAGES, expects=big if rows == 128 else {"all": ("mma.sync",)})


_W4A16 = Form("words", 4, "float", (1, 128), has_zeros=True, zero=0)
_FORMS = {
    "w4a16": _W4A16,
    "fp8_block": Form("e4m3", 8, "float", (128, 128), has_zeros=False, zero=0),
    "int8": Form("int8", 8, "float", (1, 1 << 30), has_zeros=False, zero=0),
    "mxfp4": Form("e2m1", 8, "e8m0", (1, 32), has_zeros=False, zero=0),
    "nvfp4": Form("e2m1", 8, "e4m3", (1, 16), has_zeros=False, zero=0),
}
AHEAD: tuple[Ahead, ...] = (
    *(
        _ahead(scaled_line_kernel, f"scaled_line_{name}", form, OUT=LINE_OUT, STEP=LINE_STEP)
        for name, form in _FORMS.items()
    ),
    *(_tile_ahead(f"scaled_tile_{name}", 128, form) for name, form in _FORMS.items()),
    _tile_ahead("scaled_tile_w4a16", 16, _W4A16),
)

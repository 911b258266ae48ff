"""Products of grouped slots with experts whose weights are packed: blocks in planes, or codes with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.block_formats import PLANE_SUFFIX, format_of
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.scaled import ScaledMatrix
from vkit.kernels.triton import blocks, codes
from vkit.kernels.triton.blocks import packed_values, weighted
from vkit.kernels.triton.codes import as_read, scaled_values
from vkit.kernels.triton.common import Ahead, rounded
from vkit.kernels.triton.expert_groups import Groups, expert_of, slots_of
from vkit.kernels.triton.fallback import say_once
from vkit.kernels.triton.packed import TILE_OUT, TILE_STAGES, TILE_STEP, is_split, tile_warps

ALIGNMENT = 16
"""Bytes; what one load of a thread takes."""
_TYPES = {
    torch.int32: tl.int32,
    torch.uint8: tl.uint8,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit(do_not_specialize=["num_experts"])  # type: ignore[untyped-decorator]
def grouped_packed_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    slot_ends: tl.tensor,
    tile_ends: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_row: tl.tensor,
    row_bytes: tl.tensor,
    out_row: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """out[slot] = x[slot // SLOTS_PER_ROW] Wᵀ · factor of the slot's expert, with float32 sums.

    Grid (tiles at most, pieces of the rows). addresses (E,): where the rows in planes of each expert begin.
    """
    tile = tl.program_id(0)
    expert = expert_of(tile, tile_ends, num_experts)
    if expert >= num_experts:
        return
    slot, is_row = slots_of(tile, expert, order, slot_ends, tile_ends, ROWS)
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    address = tl.multiple_of(tl.load(addresses + expert), 16)
    data = tl.multiple_of(address.to(tl.pointer_type(tl.uint8)), 16)
    at = data + tl.minimum(output, num_rows - 1).to(tl.int64) * row_bytes
    column = tl.arange(0, STEP)
    x_at = x + (slot // SLOTS_PER_ROW)[:, None] * x_row + column[None, :]
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, num_columns, STEP):
        w, scale, shift = packed_values(at, start, num_columns, FORMAT, GROUP, OUT, STEP, EVEN)
        w = w * scale[:, :, None]
        if HAS_SHIFT:
            w += shift[:, :, None]
        a = tl.load(x_at + start, mask=is_row[:, None] & (start + column < num_columns)[None, :], other=0.0)
        total += weighted(a, tl.reshape(w, [OUT, STEP]), SPLIT)
    if HAS_FACTORS:
        total *= tl.load(factors + expert)
    to = out + slot[:, None] * out_row + output[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_row[:, None] & (output < num_rows)[None, :])


@triton.jit(do_not_specialize=["num_experts", "zero"])  # type: ignore[untyped-decorator]
def grouped_scaled_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    factors: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    slot_ends: tl.tensor,
    tile_ends: tl.tensor,
    num_experts: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    x_row: tl.tensor,
    row_stride: tl.tensor,
    scale_row: tl.tensor,
    block_rows: tl.tensor,
    block_columns: tl.tensor,
    zero: tl.tensor,
    out_row: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_INDEX: tl.constexpr,
    GROUP: tl.constexpr,
    CODE_TYPE: tl.constexpr,
    SCALE_TYPE: tl.constexpr,
    ZERO_TYPE: tl.constexpr,
    HAS_FACTORS: tl.constexpr,
    SLOTS_PER_ROW: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> None:
    """As `grouped_packed_kernel`; addresses (E, 3): where the codes, scales and zeros of each expert begin."""
    tile = tl.program_id(0)
    expert = expert_of(tile, tile_ends, num_experts)
    if expert >= num_experts:
        return
    slot, is_row = slots_of(tile, expert, order, slot_ends, tile_ends, ROWS)
    output = tl.program_id(1) * OUT + tl.arange(0, OUT)
    row = tl.minimum(output, num_rows - 1).to(tl.int64)
    address = tl.multiple_of(tl.load(addresses + expert * 3), 16)
    stored = tl.multiple_of(address.to(tl.pointer_type(CODE_TYPE)), 16)
    scales = tl.load(addresses + expert * 3 + 1).to(tl.pointer_type(SCALE_TYPE))
    zeros = tl.load(addresses + expert * 3 + 2).to(tl.pointer_type(ZERO_TYPE))
    column = tl.arange(0, STEP)
    x_at = x + (slot // SLOTS_PER_ROW)[:, None] * x_row + column[None, :]
    total = tl.zeros([ROWS, OUT], tl.float32)
    for start in range(0, num_columns, STEP):
        w, scale = scaled_values(
            stored, scales, zeros, addresses, row, start, num_columns, row_stride, scale_row, block_rows,
            block_columns, zero, KIND, BITS, SCALE_KIND, HAS_ZEROS, HAS_INDEX, GROUP, OUT, STEP, EVEN,
        )  # fmt: skip
        w = tl.reshape(w * scale[:, :, None], [OUT, STEP])
        a = tl.load(x_at + start, mask=is_row[:, None] & (start + column < num_columns)[None, :], other=0.0)
        total += weighted(a, w, SPLIT)
    if HAS_FACTORS:
        total *= tl.load(factors + expert)
    to = out + slot[:, None] * out_row + output[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_row[:, None] & (output < num_rows)[None, :])


@dataclass(frozen=True)
class PackedExperts:
    """One projection of all experts, in a form the kernels read."""

    kernel: Any
    addresses: Tensor
    factors: Tensor | None
    num_rows: int
    num_columns: int
    numbers: tuple[int, ...]
    """What the kernel takes between the row of x and the row of the result."""
    settings: dict[str, object]

    def multiply(self, x: Tensor, groups: Groups, out: Tensor, slots_per_row: int) -> None:
        """out[slot] = x[slot // slots_per_row] times the slot's expert."""
        self.kernel[(groups.most_tiles, triton.cdiv(self.num_rows, TILE_OUT))](
            x, self.addresses, self.factors, out, groups.order, groups.slot_ends, groups.tile_ends,
            self.addresses.shape[0], self.num_rows, self.num_columns, x.stride(0), *self.numbers, out.stride(0),
            **self.settings, HAS_FACTORS=self.factors is not None, SLOTS_PER_ROW=slots_per_row,
            SPLIT=is_split(groups.rows, x), ROWS=groups.rows, OUT=TILE_OUT, STEP=TILE_STEP,
            EVEN=self.num_columns % TILE_STEP == 0,
            num_warps=_num_warps(self.kernel, groups.rows), num_stages=TILE_STAGES,
        )  # fmt: skip


def packed_experts(matrix: ExpertMatrix) -> PackedExperts | str:
    """The experts as the kernels read them, or in a few words what they do not read."""
    scaled = [weight for weight in matrix.weights if isinstance(weight, ScaledMatrix)]
    if len(scaled) == len(matrix.weights):
        return _of_codes(scaled, matrix.scales)
    data = [weight for weight in matrix.weights if isinstance(weight, Tensor)]
    if matrix.qtype is None or len(data) < len(matrix.weights):
        return "experts stored in several ways"
    form = blocks.FORMS.get(matrix.qtype)
    if form is None:
        return f"experts of type {matrix.qtype}"
    first = data[0]
    reason = uneven(data)
    if reason:
        return reason
    columns = format_of(matrix.qtype, "run_experts").num_columns(first.shape[1])
    addresses = torch.tensor([weight.data_ptr() for weight in data], device=first.device)
    factors = None if matrix.scales is None else matrix.scales.float().contiguous()
    numbers = (first.stride(0),)
    return PackedExperts(grouped_packed_kernel, addresses, factors, first.shape[0], columns, numbers, form.settings)


def _of_codes(weights: Sequence[ScaledMatrix], scales: Tensor | None) -> PackedExperts | str:
    forms = {codes.form_of(weight) for weight in weights}
    first, form = weights[0], next(iter(forms))
    if isinstance(form, str):
        return f"experts of {form}"
    parts = [_parts(weight) for weight in weights]
    reason = uneven([part[0] for part in parts]) or uneven([part[1] for part in parts], alignment=1)
    if len(forms) > 1 or reason:
        return reason or "experts stored in several ways"
    if any(weight.group_index is not None or weight.input_scale is not None for weight in weights):
        return "experts with an activation order or factors of their inputs"
    if first.inputs is not None:
        say_once("run_experts", f"activations are not rounded to {first.inputs.kind}; only the weights are packed")
    stored, scale, zero = parts[0]
    types = {"CODE_TYPE": stored.dtype, "SCALE_TYPE": scale.dtype, "ZERO_TYPE": zero.dtype}
    if types["ZERO_TYPE"] not in _TYPES:
        return f"experts with zeros of {zero.dtype}"
    addresses = torch.tensor([[part.data_ptr() for part in item] for item in parts], device=stored.device)
    return PackedExperts(
        grouped_scaled_kernel,
        addresses,
        _factors(weights, scales),
        *first.shape,
        (stored.stride(0), scale.stride(0), *form.block, form.zero),
        {**form.settings(has_index=False), **{name: _TYPES[dtype] for name, dtype in types.items()}},
    )


def _parts(weight: ScaledMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros; the codes in place of zeros where there are none, never read as such."""
    stored = as_read(weight.codes)
    return stored, as_read(weight.scales), stored if weight.zeros is None else as_read(weight.zeros)


def _factors(weights: Sequence[ScaledMatrix], scales: Tensor | None) -> Tensor | None:
    """What each expert's product is multiplied by, (E,) float32."""
    own = [weight.factor for weight in weights]
    given = [factor.float().reshape(()) for factor in own if factor is not None]
    together = torch.stack(given) if len(given) == len(own) else None
    if scales is None:
        return together
    return scales.float().contiguous() if together is None else together * scales.float()


def uneven(tensors: Sequence[Tensor], alignment: int = ALIGNMENT) -> str | None:
    """Why these cannot be read one like the other, in a few words."""
    first = tensors[0]
    if any(item.stride() != first.stride() or item.stride(1) != 1 or item.dtype != first.dtype for item in tensors):
        return "experts whose rows lie in several ways"
    if any(item.data_ptr() % alignment for item in tensors):
        return f"experts that do not begin at a multiple of {alignment} bytes"
    return None


def _num_warps(kernel: Any, rows: int) -> int:
    return tile_warps(rows) if kernel is grouped_packed_kernel else 4


def _ahead(kernel: Any, name: str, rows: int, settings: dict[str, object]) -> Ahead:
    pointers = {"x": "*bf16", "addresses": "*i64", "out": "*bf16"}
    indices = dict.fromkeys(("order", "slot_ends", "tile_ends"), "*i64")
    names = ("num_rows", "num_columns", "x_row", "row_bytes", "row_stride", "scale_row", "block_columns", "out_row")
    sizes = {size: "i32:16" for size in names if size in kernel.arg_names}
    rest = {size: "i32" for size in ("num_experts", "block_rows", "zero") if size in kernel.arg_names}
    fixed = {"factors": None, "HAS_FACTORS": False, "SLOTS_PER_ROW": 8, "SPLIT": rows < 128, "EVEN": True}
    tile = {"ROWS": rows, "OUT": TILE_OUT, "STEP": TILE_STEP}
    big = {128: {"sm_80": ("mma.sync",), "sm_90": ("wgmma.mma_async",), "sm_100": ("tcgen05.mma",)}}
    return Ahead(
        f"{name}_{rows}",
        kernel,
        {**pointers, **indices, **sizes, **rest},
        {**settings, **fixed, **tile},
        num_warps=_num_warps(kernel, rows),
        num_stages=TILE_STAGES,
        expects=big.get(rows, {"all": ("mma.sync",)}),
    )


def _scaled_settings(form: codes.Form, code: tl.dtype, scale: tl.dtype) -> dict[str, object]:
    types = {"CODE_TYPE": code, "SCALE_TYPE": scale, "ZERO_TYPE": tl.uint8}
    return {**form.settings(has_index=False), **types}


_W4A16 = codes.Form("words", 4, "float", (1, 128), has_zeros=True, zero=0)
_NVFP4 = codes.Form("e2m1", 8, "e4m3", (1, 16), has_zeros=False, zero=0)

AHEAD: tuple[Ahead, ...] = tuple(
    ahead
    for rows in (16, 128)
    for ahead in (
        *(
            _ahead(grouped_packed_kernel, f"grouped_{qtype.lower()}", rows, blocks.FORMS[qtype + PLANE_SUFFIX].settings)
            for qtype in ("Q4_K", "Q6_K")
        ),
        _ahead(grouped_scaled_kernel, "grouped_w4a16", rows, _scaled_settings(_W4A16, tl.int32, tl.float16)),
        _ahead(grouped_scaled_kernel, "grouped_nvfp4", rows, _scaled_settings(_NVFP4, tl.uint8, tl.uint8)),
    )
)

"""Rows of codes with scales, as quantised safetensors checkpoints hold them: what every product with them reads.

A step is STEP columns of OUT rows. Its values are (code - zero) · scale, with a scale and a zero for each GROUP of
columns; codes less their zero are whole numbers or short floats, exact in every type of activations.
Source: OCP Microscaling Formats 1.0 (E2M1, E8M0); Micikevicius et al. 2022 (E4M3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.scaled import ScaledMatrix
from vkit.kernels.triton.blocks import e2m1, whole

WORD_BITS = (2, 4, 8)
"""Widths of codes of which a word holds a whole number."""

_ALL_COLUMNS = 1 << 30
"""Columns of the one scale of a row: no step ends beyond it, and steps divide it."""


@dataclass(frozen=True)
class Form:
    """What a product must know of a matrix beside its tensors: equal for all matrices one kernel call may mix."""

    kind: str
    """words, int8, e4m3 or e2m1."""
    bits: int
    scale_kind: str
    """float, e4m3 or e8m0."""
    block: tuple[int, int]
    has_zeros: bool
    zero: int

    @property
    def has_one_scale(self) -> bool:
        """Whether a row has one scale and one zero."""
        return self.block[1] == _ALL_COLUMNS

    def settings(self, *, has_index: bool) -> dict[str, object]:
        """The constants of a kernel that reads it.

        A group is at most 32 columns although a scale may serve more: wider ones are kept in more registers.
        """
        columns = self.block[1]
        group = 1 if has_index else min(32, columns & -columns)
        return {
            "KIND": self.kind,
            "BITS": self.bits,
            "SCALE_KIND": self.scale_kind,
            "HAS_ZEROS": self.has_zeros,
            "HAS_INDEX": has_index,
            "GROUP": group,
        }


def form_of(matrix: ScaledMatrix) -> Form | str:
    """The form the kernels read, or in a few words what they do not."""
    kind = _kind(matrix)
    scale_kinds = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
    is_float = matrix.scales.dtype in (torch.float32, torch.bfloat16, torch.float16)
    scale_kind = scale_kinds.get(matrix.scales.dtype, "float" if is_float else None)
    if kind is None or scale_kind is None:
        names = (matrix.layout, str(matrix.codes.dtype).removeprefix("torch."))
        return f"codes of {matrix.bits} bits as {names[0]} of {names[1]}, scales of {matrix.scales.dtype}"
    if matrix.codes.stride(1) != 1:
        return "codes that do not lie row by row"
    has_one_scale = matrix.scales.shape[1] == 1
    block = (matrix.block[0], _ALL_COLUMNS if has_one_scale else matrix.block[1])
    return Form(kind, matrix.bits, scale_kind, block, matrix.zeros is not None, matrix.zero)


def _kind(matrix: ScaledMatrix) -> str | None:
    if matrix.layout == "words":
        return "words" if matrix.bits in WORD_BITS else None
    if matrix.layout == "bytes":
        return {torch.int8: "int8", torch.float8_e4m3fn: "e4m3"}.get(matrix.codes.dtype)
    return "e2m1" if matrix.layout == "e2m1" else None


def as_read(values: Tensor) -> Tensor:
    """The tensor as a kernel gets it: bytes for what has one-byte floats or signs."""
    return values.view(torch.uint8) if values.itemsize == 1 else values


@triton.jit  # type: ignore[untyped-decorator]
def e4m3(code: tl.tensor) -> tl.tensor:
    """Bytes as E4M3 numbers, float32: a half-precision number is the same but for 2⁸, subnormals included."""
    magnitude = code & 0x7F
    bits = ((code & 0x80) << 8) | (magnitude << 7)
    value = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where(magnitude == 0x7F, float("nan"), value)


@triton.jit  # type: ignore[untyped-decorator]
def e8m0(code: tl.tensor) -> tl.tensor:
    """Bytes as powers of two, 2^(e - 127); the smallest is subnormal and 255 is NaN."""
    value = tl.where(code == 0, 0x400000, code << 23).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), value)


@triton.jit  # type: ignore[untyped-decorator]
def scales_at(at: tl.tensor, mask: tl.tensor, SCALE_KIND: tl.constexpr) -> tl.tensor:
    """The scales here, float32; 0 where masked."""
    if SCALE_KIND == "float":
        scale = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    else:
        stored = tl.load(at, mask=mask, other=0).to(tl.int32)
        scale = e4m3(stored) if SCALE_KIND == "e4m3" else tl.where(mask, e8m0(stored), 0.0)
    return scale


@triton.jit  # type: ignore[untyped-decorator]
def stored_codes(
    codes: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """The codes of a step (OUT, STEP), float32. row (OUT,) int64."""
    PER: tl.constexpr = 32 // BITS if KIND == "words" else (2 if KIND == "e2m1" else 1)
    unit = tl.arange(0, STEP // PER)
    at = codes + row[:, None] * row_stride + (start // PER + unit)[None, :]
    if EVEN:
        stored = tl.load(at).to(tl.int32)
    else:
        stored = tl.load(at, mask=(start + unit * PER < num_columns)[None, :], other=0).to(tl.int32)
    if KIND == "words":
        shift = tl.arange(0, PER) * BITS
        values = whole((stored[:, :, None] >> shift[None, None, :]) & ((1 << BITS) - 1))
    elif KIND == "e2m1":
        shift = tl.arange(0, 2) * 4
        values = e2m1((stored[:, :, None] >> shift[None, None, :]) & 15) * 0.5
    elif KIND == "int8":
        values = whole(stored ^ 128) - 128.0
    else:
        tl.static_assert(KIND == "e4m3")
        values = e4m3(stored)
    return tl.reshape(values, [OUT, STEP])


@triton.jit  # type: ignore[untyped-decorator]
def scaled_values(
    codes: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    index: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
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
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Codes less their zeros (OUT, groups, GROUP) and scales (OUT, groups) of a step, float32.

    What is beyond the row has a scale of 0. scales and zeros: rows of blocks, `scale_row` apart.
    """
    GROUPS: tl.constexpr = STEP // GROUP
    first = start + tl.arange(0, GROUPS) * GROUP
    is_in = first < num_columns
    block = tl.load(index + first, mask=is_in, other=0) if HAS_INDEX else first // block_columns
    place = (row // block_rows * scale_row)[:, None] + block[None, :]
    mask = is_in[None, :] & (row[:, None] >= 0)
    scale = scales_at(scales + place, mask, SCALE_KIND)
    values = stored_codes(codes, row, row_stride, start, num_columns, KIND, BITS, OUT, STEP, EVEN)
    values = tl.reshape(values, [OUT, GROUPS, GROUP])
    if HAS_ZEROS:
        values -= tl.load(zeros + place, mask=mask, other=0).to(tl.float32)[:, :, None]
    else:
        values -= zero
    return values, scale


@triton.jit  # type: ignore[untyped-decorator]
def step_codes(
    codes: tl.tensor,
    zeros: tl.tensor,
    place: tl.tensor,
    row: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    row_stride: tl.tensor,
    zero: tl.tensor,
    KIND: tl.constexpr,
    BITS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Codes less their zeros (OUT, STEP) of a step in which each row has one zero, at place (OUT,)."""
    values = stored_codes(codes, row, row_stride, start, num_columns, KIND, BITS, OUT, STEP, EVEN)
    if HAS_ZEROS:
        return values - tl.load(zeros + place).to(tl.float32)[:, None]
    return values - zero

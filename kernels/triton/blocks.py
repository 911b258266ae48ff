"""Rows of packed blocks, laid out in planes, as codes and scales: what every product with them reads.

A step is STEP columns of OUT rows. Its values are code · scale + shift, with a scale for each GROUP of columns. Codes
are whole numbers, exact in every type of activations. The planes are those of `block_formats.PLANES`, and what the
bytes mean is as in `reference/dequantize.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from vkit.kernels.block_formats import PLANE_FORMATS, PLANE_SUFFIX
from vkit.kernels.triton.common import product, rounded


@dataclass(frozen=True)
class Form:
    """What a product must know of a format."""

    name: str
    group: int
    """Columns of one scale."""
    has_shift: bool = False

    @property
    def settings(self) -> dict[str, object]:
        """The constants of a kernel that reads it."""
        return {"FORMAT": self.name, "GROUP": self.group, "HAS_SHIFT": self.has_shift}


FORMS = {
    form.name + PLANE_SUFFIX: form
    for form in (
        Form("Q4_0", 32),
        Form("Q4_1", 32, has_shift=True),
        Form("Q5_0", 32),
        Form("Q5_1", 32, has_shift=True),
        Form("Q8_0", 32),
        Form("Q2_K", 16, has_shift=True),
        Form("Q3_K", 16),
        Form("Q4_K", 32, has_shift=True),
        Form("Q5_K", 32, has_shift=True),
        Form("Q6_K", 16),
        Form("IQ4_NL", 32),
        Form("IQ4_XS", 32),
        Form("MXFP4", 32),
        Form("NVFP4", 16),
    )
}
assert FORMS.keys() == PLANE_FORMATS.keys()


@triton.jit  # type: ignore[untyped-decorator]
def weighted(a: tl.tensor, w: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """a wᵀ for float32 w rounded to a's type; SPLIT: what the rounding took away is multiplied too."""
    high = rounded(w, a.dtype)
    total = product(a, tl.trans(high))
    if SPLIT:
        total += product(a, tl.trans(rounded(w - high.to(tl.float32), a.dtype)))
    return total


@triton.jit  # type: ignore[untyped-decorator]
def whole(codes: tl.tensor) -> tl.tensor:
    """Codes from 0 to 2²³ - 1 as float32, without the conversion, which has a quarter of the throughput."""
    return (codes | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit  # type: ignore[untyped-decorator]
def fields(
    plane: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    WIDTH: tl.constexpr,
    RUN: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """Fields of WIDTH bits (OUT, STEP) int32; the fields of one byte belong to columns RUN apart. plane (OUT,)."""
    IN_BYTE: tl.constexpr = 8 // WIDTH
    SPAN: tl.constexpr = RUN * IN_BYTE
    COUNT: tl.constexpr = IN_BYTE if STEP >= SPAN else STEP // RUN
    RUNS: tl.constexpr = STEP // (RUN * COUNT)
    span = tl.arange(0, RUNS)[None, :, None]
    at = plane[:, None, None] + (start // SPAN * RUN + span * RUN) + tl.arange(0, RUN)[None, None, :]
    if EVEN:
        stored = tl.load(at).to(tl.int32)
    else:
        stored = tl.load(at, mask=start + span * SPAN < num_columns, other=0).to(tl.int32)
    first = start // RUN % IN_BYTE if COUNT < IN_BYTE else 0
    shift = (first + tl.arange(0, COUNT)) * WIDTH
    values = (stored[:, :, None, :] >> shift[None, None, :, None]) & ((1 << WIDTH) - 1)
    return tl.reshape(values, [OUT, STEP])


@triton.jit  # type: ignore[untyped-decorator]
def bits32(
    plane: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tl.tensor:
    """One bit for each column (OUT, STEP) int32, from words of 32 columns."""
    word = tl.arange(0, STEP // 32)[None, :]
    at = plane[:, None].to(tl.pointer_type(tl.int32), bitcast=True) + start // 32 + word
    stored = tl.load(at) if EVEN else tl.load(at, mask=start + word * 32 < num_columns, other=0)
    return tl.reshape((stored[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, [OUT, STEP])


@triton.jit  # type: ignore[untyped-decorator]
def half(at: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """The half-precision numbers at these bytes, as float32; 0 where masked."""
    place = at.to(tl.pointer_type(tl.float16), bitcast=True)
    if EVEN:
        return tl.load(place).to(tl.float32)
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def byte(at: tl.tensor, mask: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    """The bytes here, as int32; 0 where masked."""
    if EVEN:
        return tl.load(at).to(tl.int32)
    return tl.load(at, mask=mask, other=0).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def iq4(codes: tl.tensor) -> tl.tensor:
    """The values of IQ4 codes as float32: sixteen bytes, 128 too large, are held in four words."""
    low = tl.where(codes < 4, 0x3F2D1801, 0x766A5D4F)
    high = tl.where(codes < 12, -0x5966727F, -0x0E263A4B)
    word = tl.where(codes < 8, low, high)
    return whole((word >> ((codes & 3) * 8)) & 255) - 128.0


@triton.jit  # type: ignore[untyped-decorator]
def e2m1(codes: tl.tensor) -> tl.tensor:
    """Twice the values of E2M1 codes, as float32: the magnitudes are held in one word."""
    magnitude = whole((-0x379BCDF0 >> ((codes & 7) * 4)) & 15)
    return tl.where(codes >= 8, -magnitude, magnitude)


@triton.jit  # type: ignore[untyped-decorator]
def half_e8m0(exponent: tl.tensor) -> tl.tensor:
    """2^(e - 128), the smallest two subnormal."""
    bits = tl.where(exponent >= 2, (exponent - 1) << 23, 0x200000 << exponent)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def ue4m3(code: tl.tensor) -> tl.tensor:
    """The unsigned numbers of NVFP4 blocks; 0x7F is 0."""
    code = code & 0x7F
    small = whole(code) * 0.001953125
    large = ((code << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    return tl.where(code == 0x7F, 0.0, tl.where(code < 8, small, large))


@triton.jit  # type: ignore[untyped-decorator]
def packed_values(
    at: tl.tensor,
    start: tl.tensor,
    num_columns: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    OUT: tl.constexpr,
    STEP: tl.constexpr,
    EVEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Codes (OUT, groups, GROUP), scales and shifts (OUT, groups) of a step, float32.

    at (OUT,): where the rows begin. EVEN: the step ends within the row; else what is beyond has a scale of 0.
    """
    GROUPS: tl.constexpr = STEP // GROUP
    group = start // GROUP + tl.arange(0, GROUPS)[None, :]
    is_in = group * GROUP < num_columns
    row = at[:, None]
    if FORMAT == "Q8_0":
        blocks = num_columns // 32
        chunk = tl.arange(0, GROUPS)[None, :, None] * GROUP
        place = at[:, None, None] + (start + chunk + tl.arange(0, GROUP)[None, None, :])
        stored = byte(place, start + chunk < num_columns, EVEN)
        values = whole(stored ^ 128) - 128.0
        scale = half(row + 32 * blocks + 2 * group, is_in, EVEN)
        shift = scale
    elif FORMAT == "Q4_0" or FORMAT == "Q4_1" or FORMAT == "IQ4_NL" or FORMAT == "MXFP4":
        blocks = num_columns // 32
        codes = fields(at, start, num_columns, 4, 16, OUT, STEP, EVEN)
        scales = row + 16 * blocks
        if FORMAT == "Q4_0":
            values = whole(codes) - 8.0
            scale = half(scales + 2 * group, is_in, EVEN)
            shift = scale
        elif FORMAT == "Q4_1":
            values = whole(codes)
            scale = half(scales + 4 * group, is_in, EVEN)
            shift = half(scales + 4 * group + 2, is_in, EVEN)
        elif FORMAT == "IQ4_NL":
            values = iq4(codes)
            scale = half(scales + 2 * group, is_in, EVEN)
            shift = scale
        else:
            values = e2m1(codes)
            scale = tl.where(is_in, half_e8m0(byte(scales + group, is_in, EVEN)), 0.0)
            shift = scale
    elif FORMAT == "Q5_0" or FORMAT == "Q5_1":
        blocks = num_columns // 32
        codes = fields(at, start, num_columns, 4, 16, OUT, STEP, EVEN)
        codes = codes | bits32(at + 16 * blocks, start, num_columns, OUT, STEP, EVEN) << 4
        scales = row + 20 * blocks
        if FORMAT == "Q5_0":
            values = whole(codes) - 16.0
            scale = half(scales + 2 * group, is_in, EVEN)
            shift = scale
        else:
            values = whole(codes)
            scale = half(scales + 4 * group, is_in, EVEN)
            shift = half(scales + 4 * group + 2, is_in, EVEN)
    elif FORMAT == "NVFP4":
        values = e2m1(fields(at, start, num_columns, 4, 8, OUT, STEP, EVEN)) * 0.5
        scale = ue4m3(byte(row + 32 * (num_columns // 64) + group, is_in, EVEN))
        shift = scale
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        blocks = num_columns // 256
        codes = fields(at, start, num_columns, 4, 32, OUT, STEP, EVEN)
        if FORMAT == "Q5_K":
            codes = codes | fields(at + 128 * blocks, start, num_columns, 1, 32, OUT, STEP, EVEN) << 4
            heads = row + 160 * blocks
        else:
            heads = row + 128 * blocks
        place = heads + 12 * (group // 8) + group % 4
        first, second = byte(place, is_in, EVEN), byte(place + 4, is_in, EVEN)
        third = byte(place + 8, is_in, EVEN)
        is_low = group % 8 < 4
        scale = whole(tl.where(is_low, first & 63, (third & 15) | ((first >> 6) << 4)))
        least = whole(tl.where(is_low, second & 63, (third >> 4) | ((second >> 6) << 4)))
        halves = heads + 12 * blocks + 4 * (group // 8)
        scale = scale * half(halves, is_in, EVEN)
        shift = -(least * half(halves + 2, is_in, EVEN))
        values = whole(codes)
    elif FORMAT == "Q6_K":
        blocks = num_columns // 256
        codes = fields(at, start, num_columns, 4, 64, OUT, STEP, EVEN)
        codes = codes | fields(at + 128 * blocks, start, num_columns, 2, 32, OUT, STEP, EVEN) << 4
        scale = whole(byte(row + 192 * blocks + group, is_in, EVEN) ^ 128) - 128.0
        scale = scale * half(row + 208 * blocks + 2 * (group // 16), is_in, EVEN)
        values, shift = whole(codes) - 32.0, scale
    elif FORMAT == "Q2_K":
        blocks = num_columns // 256
        codes = fields(at, start, num_columns, 2, 32, OUT, STEP, EVEN)
        stored = byte(row + 64 * blocks + group, is_in, EVEN)
        halves = row + 80 * blocks + 4 * (group // 16)
        scale = whole(stored & 15) * half(halves, is_in, EVEN)
        shift = -(whole(stored >> 4) * half(halves + 2, is_in, EVEN))
        values = whole(codes)
    elif FORMAT == "Q3_K":
        blocks = num_columns // 256
        codes = fields(at, start, num_columns, 2, 32, OUT, STEP, EVEN)
        codes = codes | fields(at + 64 * blocks, start, num_columns, 1, 32, OUT, STEP, EVEN) << 2
        heads = row + 96 * blocks + 12 * (group // 16)
        place = group % 16
        low = byte(heads + place % 8, is_in, EVEN) >> (place // 8 * 4)
        high = byte(heads + 8 + place % 4, is_in, EVEN) >> (place // 4 * 2)
        scale = whole((low & 15) | ((high & 3) << 4)) - 32.0
        scale = scale * half(row + 108 * blocks + 2 * (group // 16), is_in, EVEN)
        values, shift = whole(codes) - 4.0, scale
    else:
        tl.static_assert(FORMAT == "IQ4_XS")
        blocks = num_columns // 256
        codes = fields(at, start, num_columns, 4, 16, OUT, STEP, EVEN)
        heads = row + 128 * blocks + 4 * (group // 8)
        low = byte(heads + group % 8 // 2, is_in, EVEN) >> (group % 2 * 4)
        high = byte(row + 132 * blocks + 2 * (group // 8) + group % 8 // 4, is_in, EVEN) >> (group % 4 * 2)
        scale = whole((low & 15) | ((high & 3) << 4)) - 32.0
        scale = scale * half(row + 134 * blocks + 2 * (group // 8), is_in, EVEN)
        values, shift = iq4(codes), scale
    return tl.reshape(values, [OUT, GROUPS, GROUP]), scale, shift

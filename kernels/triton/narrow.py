"""Rows of a narrow KV cache, as bytes: fp8 (e4m3, e5m2) and int8 with the float32 scale of its row behind the codes.

Encoding and decoding are arithmetic on bits: older cards have no instructions for e4m3, and the interpreter's casts to
fp8 neither saturate nor round to even. Every narrow value is exact in any type of 16 bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

PLAIN = tl.constexpr(0)
E4M3 = tl.constexpr(1)
E5M2 = tl.constexpr(2)
INT8 = tl.constexpr(3)


@triton.jit  # type: ignore[untyped-decorator]
def fp8_codes(x: tl.tensor, FORMAT: tl.constexpr) -> tl.tensor:
    """float32 x as bytes of fp8: clamped to what the format holds, ties to even, NaN stays.

    Numbers below the smallest normal one are rounded by adding a power of two whose last bit is the smallest step.
    """
    DROPPED: tl.constexpr = 20 if FORMAT == 1 else 21
    LARGEST: tl.constexpr = 448.0 if FORMAT == 1 else 57344.0
    SMALLEST: tl.constexpr = 0.015625 if FORMAT == 1 else 0.00006103515625
    STEPS: tl.constexpr = 16384.0 if FORMAT == 1 else 128.0
    REBIAS: tl.constexpr = (127 - 7) << 3 if FORMAT == 1 else (127 - 15) << 2
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.int32, bitcast=True)
    bits = bits + ((1 << (DROPPED - 1)) - 1) + ((bits >> DROPPED) & 1)
    normal = (bits >> DROPPED) - REBIAS
    small = (size + STEPS).to(tl.int32, bitcast=True) - tl.full(x.shape, STEPS, tl.float32).to(tl.int32, bitcast=True)
    code = tl.where(size < SMALLEST, small, normal)
    code = tl.where(x != x, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)


@triton.jit  # type: ignore[untyped-decorator]
def decoded(codes: tl.tensor, dtype: tl.constexpr, FORMAT: tl.constexpr) -> tl.tensor:
    """Bytes as numbers of `dtype`; those of int8 without their scale, and what is not narrow as it is."""
    if FORMAT == 0:
        return codes.to(dtype)
    if FORMAT == 3:
        return codes.to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    wide = codes.to(tl.uint16)
    if FORMAT == 2:
        return (wide << 8).to(tl.float16, bitcast=True).to(tl.float32).to(dtype)
    # The same digits with the exponent's bias of fp16, which is eight more.
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    number = half.to(tl.float32) * 256.0
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), number).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def scales_behind(at: tl.tensor, is_there: tl.tensor) -> tl.tensor:
    """float32 whose bytes begin at `at`, at any address; zero where there is none."""
    bits = tl.load(at, mask=is_there, other=0).to(tl.uint32)
    bits |= tl.load(at + 1, mask=is_there, other=0).to(tl.uint32) << 8
    bits |= tl.load(at + 2, mask=is_there, other=0).to(tl.uint32) << 16
    bits |= tl.load(at + 3, mask=is_there, other=0).to(tl.uint32) << 24
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def store_int8(x: tl.tensor, to: tl.tensor, is_value: tl.tensor, is_row: tl.tensor, WIDTH: tl.constexpr) -> None:
    """float32 rows x (R, C) as codes from to (R,) on, and each row's largest size over 127 behind its WIDTH codes."""
    column = tl.arange(0, x.shape[1])
    peak = tl.max(tl.abs(x), 1)
    inverse = tl.where(peak > 0.0, tl.div_rn(tl.full(peak.shape, 127.0, tl.float32), peak), 0.0)
    # Adding 1.5 · 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
    codes = (x * inverse[:, None] + 12582912.0).to(tl.int32, bitcast=True)
    tl.store(to[:, None] + column[None, :], (codes & 0xFF).to(tl.uint8), mask=is_value)
    bits = tl.div_rn(peak, tl.full(peak.shape, 127.0, tl.float32)).to(tl.uint32, bitcast=True)
    for byte in tl.static_range(4):
        tl.store(to + WIDTH + byte, ((bits >> (8 * byte)) & 0xFF).to(tl.uint8), mask=is_row)

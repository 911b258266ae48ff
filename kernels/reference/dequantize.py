"""Packed GGUF blocks to numbers, in plain torch: one function per block format, each a transcription of its layout.

Every function takes blocks uint8 (N, bytes) and returns float32 (N, elements), computed in the order the format writes
its formula, so that results are equal to the bit wherever they run.
Source: GGUF specification, ggml block types.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch

from vkit.kernels.block_formats import BLOCK_FORMATS, PLANE_FORMATS, PLANE_SUFFIX, format_of
from vkit.kernels.planes import from_planes
from vkit.kernels.reference.iq_grids import grid

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
IQ1_DELTA = 0.125

_PLAIN_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
}


def dequantize(data: torch.Tensor, qtype: str, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values of packed rows. data uint8 (..., row_bytes) -> (..., columns) in `dtype`; computed in float32.

    Raises:
        ValueError: unknown type, or rows that are not whole blocks.
        TypeError: data is not uint8.
    """
    block = format_of(qtype, "dequantize")
    if data.dtype != torch.uint8:
        raise TypeError(f"dequantize: data of {data.dtype}, expected torch.uint8")
    if qtype in PLANE_FORMATS and data.ndim:
        qtype = qtype.removesuffix(PLANE_SUFFIX)
        data, block = from_planes(data, qtype), BLOCK_FORMATS[qtype]
    if data.ndim == 0 or data.shape[-1] % block.num_bytes:
        raise ValueError(
            f"dequantize: data {tuple(data.shape)}, expected rows of a multiple of {block.num_bytes} bytes for {qtype}"
        )
    num_columns = data.shape[-1] // block.num_bytes * block.num_elements
    if qtype in _PLAIN_DTYPES:
        return _aligned_view(data, _PLAIN_DTYPES[qtype]).to(dtype)
    values = _DECODERS[qtype](data.reshape(-1, block.num_bytes))
    return values.reshape(*data.shape[:-1], num_columns).to(dtype)


def _aligned_view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of the last axis read as numbers; copied first where their memory does not allow a view."""
    whole = data.is_contiguous() and data.storage_offset() % dtype.itemsize == 0
    return (data if whole else data.clone(memory_format=torch.contiguous_format)).view(dtype)


def _groups(parts: torch.Tensor, count: int) -> torch.Tensor:
    """The last axis cut into `count` equal groups: (..., n) -> (..., count, n / count)."""
    return parts.reshape(*parts.shape[:-1], count, parts.shape[-1] // count)


def _f16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The half-precision number at byte `at` of every block, float32 (N, 1)."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _u16(parts: torch.Tensor) -> torch.Tensor:
    """Little-endian 16-bit words of the last axis, int32 (..., bytes / 2)."""
    pairs = _groups(parts, parts.shape[-1] // 2).to(torch.int32)
    return pairs[..., 0] | pairs[..., 1] << 8


def _u32(parts: torch.Tensor) -> torch.Tensor:
    """Little-endian 32-bit words of the last axis, int64 (..., bytes / 4)."""
    halves = _groups(_u16(parts), parts.shape[-1] // 4).to(torch.int64)
    return halves[..., 0] | halves[..., 1] << 16


def _bits(parts: torch.Tensor, width: int) -> torch.Tensor:
    """Each byte cut into fields of `width` bits, lowest first: uint8 (..., n) -> (..., n * 8 / width)."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=parts.device)
    return ((parts.unsqueeze(-1) >> shifts) & ((1 << width) - 1)).flatten(-2)


def _planes(parts: torch.Tensor, width: int) -> torch.Tensor:
    """As `_bits`, ordered by field: first the lowest field of every byte of the last axis, then the next, and so on."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=parts.device).unsqueeze(-1)
    return ((parts.unsqueeze(-2) >> shifts) & ((1 << width) - 1)).flatten(-2)


def _lookup(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return table[index.to(torch.int64)]


@cache
def _table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


# 32-element blocks: one scale, sometimes one minimum.


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _planes(blocks[:, 2:], 4).to(torch.float32).sub_(8).mul_(_f16(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _planes(blocks[:, 4:], 4).to(torch.float32).mul_(_f16(blocks, 0)).add_(_f16(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 6:], 4) | _bits(blocks[:, 2:6], 1) << 4
    return q.to(torch.float32).sub_(16).mul_(_f16(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(blocks[:, 8:], 4) | _bits(blocks[:, 4:8], 1) << 4
    return q.to(torch.float32).mul_(_f16(blocks, 0)).add_(_f16(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(_f16(blocks, 0))


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _lookup(_table(IQ4_VALUES, blocks.device), _planes(blocks[:, 2:], 4)).mul_(_f16(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    codes = _planes(blocks[:, 1:], 4)
    # Half the scale times twice the code: the product is the same, and 2^128 need not be represented.
    half_scale = _lookup(_e8m0_halves(blocks.device), blocks[:, :1])
    return _lookup(_table(tuple(2 * value for value in E2M1_VALUES), blocks.device), codes).mul_(half_scale)


def _nvfp4(blocks: torch.Tensor) -> torch.Tensor:
    scales = _lookup(_ue4m3(blocks.device), blocks[:, :4]).unsqueeze(-1)
    codes = _planes(_groups(blocks[:, 4:], 4), 4)
    return _lookup(_table(E2M1_VALUES, blocks.device), codes).mul_(scales).flatten(1)


@cache
def _e8m0_halves(device: torch.device) -> torch.Tensor:
    """2^(e - 128) for every byte e; exact, subnormal for small e."""
    return _table(tuple(math.ldexp(1.0, exponent - 128) for exponent in range(256)), device)


@cache
def _ue4m3(device: torch.device) -> torch.Tensor:
    """Every byte as an unsigned 4-bit exponent (bias 7), 3-bit mantissa number; bit 7 is unused and 0x7F is 0."""

    def value(code: int) -> float:
        exponent, mantissa = code >> 3 & 15, code & 7
        if code & 0x7F == 0x7F:
            return 0.0
        return math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)

    return _table(tuple(value(code) for code in range(256)), device)


# K formats: 256 elements in groups, with scales of their own.


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = blocks[:, :16]
    d, dmin = _f16(blocks, 80), _f16(blocks, 82)
    q = _planes(_groups(blocks[:, 16:80], 2), 2).reshape(-1, 16, 16).to(torch.float32)
    return q.mul_((d * (scales & 15)).unsqueeze(-1)).sub_((dmin * (scales >> 4)).unsqueeze(-1)).flatten(1)


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    scales = _planes(blocks[:, 96:104], 4) | _planes(blocks[:, 104:108], 2) << 4
    dl = _f16(blocks, 108) * scales.to(torch.float32).sub_(32)
    low = _planes(_groups(blocks[:, 32:96], 2), 2).flatten(1)
    q = (low | _planes(blocks[:, :32], 1) << 2).reshape(-1, 16, 16)
    return q.to(torch.float32).sub_(4).mul_(dl.unsqueeze(-1)).flatten(1)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and eight 6-bit minima from 12 bytes: (N, 12) -> (N, 8), (N, 8)."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & 63, third & 15 | (first >> 6) << 4], dim=1)
    minima = torch.cat([second & 63, third >> 4 | (second >> 6) << 4], dim=1)
    return scales, minima


def _scale_and_shift(q: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """d * sc * q - dmin * m for q (N, 8, 32), with d, dmin and the packed scales at the head of the block."""
    scales, minima = _k_scales(blocks[:, 4:16])
    dl, ml = _f16(blocks, 0) * scales, _f16(blocks, 2) * minima
    return q.to(torch.float32).mul_(dl.unsqueeze(-1)).sub_(ml.unsqueeze(-1)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(_groups(blocks[:, 16:], 4), 4).reshape(-1, 8, 32)
    return _scale_and_shift(q, blocks)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _planes(_groups(blocks[:, 48:], 4), 4).reshape(-1, 8, 32)
    high = _planes(blocks[:, 16:48], 1).reshape(-1, 8, 32)
    return _scale_and_shift(low | high << 4, blocks)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _planes(_groups(blocks[:, :128], 2), 4)
    high = _planes(_groups(blocks[:, 128:192], 2), 2)
    dl = _f16(blocks, 208) * blocks[:, 192:208].view(torch.int8)
    q = (low | high << 4).reshape(-1, 16, 16)
    return q.to(torch.float32).sub_(32).mul_(dl.unsqueeze(-1)).flatten(1)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _bits(blocks[:, 4:8], 4) | _bits(blocks[:, 2:4], 2) << 4
    dl = _f16(blocks, 0) * scales.to(torch.float32).sub_(32)
    codes = _planes(_groups(blocks[:, 8:], 8), 4)
    return _lookup(_table(IQ4_VALUES, blocks.device), codes).mul_(dl.unsqueeze(-1)).flatten(1)


# IQ2 and IQ3: indices into a code book, a sign per element, a scale per 16 or 32 elements.


@cache
def _sign_rows(device: torch.device) -> torch.Tensor:
    """Signs of eight elements for each 7-bit index, float32 (128, 8): bit 7 makes the number of ones even."""
    codes = torch.arange(128, dtype=torch.uint8)
    parity = _bits(codes.unsqueeze(-1), 1).sum(-1).to(torch.uint8) & 1
    return _signs((codes | parity << 7).unsqueeze(-1)).to(device)


def _signs(parts: torch.Tensor) -> torch.Tensor:
    """+1 or -1 per bit, a set bit being negative: uint8 (..., n) -> float32 (..., 8 n)."""
    return 1 - 2 * _bits(parts, 1).to(torch.float32)


def _scaled_grid(values: torch.Tensor, signs: torch.Tensor, db: torch.Tensor) -> torch.Tensor:
    """db * grid value * sign over 256 elements, one db per equal share: db (N, groups) -> (N, 256)."""
    groups = (len(db), db.shape[1], 256 // db.shape[1])
    return (db.unsqueeze(-1) * values.reshape(groups) * signs.reshape(groups)).flatten(1)


def _signs_and_scale(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Signs (N, words, 4, 8) and 4-bit scales (N, words) from 32-bit words (N, words)."""
    shifts = torch.arange(0, 28, 7, device=words.device)
    return _lookup(_sign_rows(words.device), words.unsqueeze(-1) >> shifts & 127), (words >> 28).to(torch.float32)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    groups = _groups(blocks[:, 2:], 8)
    signs, scales = _signs_and_scale(_u32(groups[..., 4:]).squeeze(-1))
    db = _f16(blocks, 0) * (0.5 + scales) * 0.25
    return _scaled_grid(_lookup(grid("IQ2_XXS", blocks.device), groups[..., :4]), signs, db)


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    words = _u16(blocks[:, 2:66])
    db = _f16(blocks, 0) * (0.5 + _bits(blocks[:, 66:], 4)) * 0.25
    signs = _lookup(_sign_rows(blocks.device), words >> 9)
    return _scaled_grid(_lookup(grid("IQ2_XS", blocks.device), words & 511), signs, db)


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    index = blocks[:, 2:34].to(torch.int32) | _bits(blocks[:, 66:74], 2).to(torch.int32) << 8
    db = _f16(blocks, 0) * (0.5 + _bits(blocks[:, 74:], 4)) * 0.25
    return _scaled_grid(_lookup(grid("IQ2_S", blocks.device), index), _signs(blocks[:, 34:66]), db)


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    signs, scales = _signs_and_scale(_u32(blocks[:, 66:]))
    db = _f16(blocks, 0) * (0.5 + scales) * 0.5
    return _scaled_grid(_lookup(grid("IQ3_XXS", blocks.device), blocks[:, 2:66]), signs, db)


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    index = blocks[:, 2:66].to(torch.int32) | _bits(blocks[:, 66:74], 1).to(torch.int32) << 8
    db = _f16(blocks, 0) * (1 + 2 * _bits(blocks[:, 106:], 4).to(torch.float32))
    return _scaled_grid(_lookup(grid("IQ3_S", blocks.device), index), _signs(blocks[:, 74:106]), db)


# IQ1: ternary code book entries, shifted by an eighth up or down.


def _iq1(index: torch.Tensor, delta: torch.Tensor, dl: torch.Tensor) -> torch.Tensor:
    """dl * (grid + delta): index (N, 32), delta broadcastable to it, dl (N, groups) -> (N, 256)."""
    values = _lookup(grid("IQ1_S", index.device), index) + delta.unsqueeze(-1)
    return values.reshape(len(dl), dl.shape[1], -1).mul_(dl.unsqueeze(-1)).flatten(1)


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    words = _u16(blocks[:, 34:]).unsqueeze(-1)
    high = words >> torch.arange(0, 12, 3, device=blocks.device) & 7
    index = blocks[:, 2:34].to(torch.int64) | high.flatten(1) << 8
    delta = IQ1_DELTA * (1 - 2 * (words >> 15).to(torch.float32)).expand(-1, 8, 4).flatten(1)
    dl = _f16(blocks, 0) * (2 * (words.squeeze(-1) >> 12 & 7).to(torch.float32) + 1)
    return _iq1(index, delta, dl)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    nibbles = _bits(blocks[:, 32:48], 4)
    index = blocks[:, :32].to(torch.int32) | (nibbles & 7).to(torch.int32) << 8
    delta = IQ1_DELTA * (1 - 2 * (nibbles >> 3).to(torch.float32))
    words = _u16(blocks[:, 48:])
    shifts = torch.arange(4, device=blocks.device)
    d_bits = (words >> 12 << 4 * shifts).sum(-1, keepdim=True).to(torch.int32)
    d = d_bits.to(torch.int16).view(torch.float16).float()
    scales = (words.unsqueeze(-1) >> 3 * shifts & 7).flatten(1).to(torch.float32)
    return _iq1(index, delta, d * (2 * scales + 1))


# Ternary and binary.


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device).unsqueeze(-1)

    def digits(parts: torch.Tensor, count: int) -> torch.Tensor:
        rotated = parts.unsqueeze(-2) * powers[:count]  # uint8 products wrap at 256, as the format wants
        return (rotated.to(torch.int16) * 3 >> 8).flatten(1)

    q = torch.cat([digits(blocks[:, :32], 5), digits(blocks[:, 32:48], 5), digits(blocks[:, 48:52], 4)], dim=1)
    return q.to(torch.float32).sub_(1).mul_(_f16(blocks, 52))


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    q = _planes(_groups(blocks[:, :64], 2), 2).flatten(1)
    return q.to(torch.float32).sub_(1).mul_(_f16(blocks, 64))


def _q1_0(blocks: torch.Tensor) -> torch.Tensor:
    d = _f16(blocks, 0)
    return torch.where(_bits(blocks[:, 2:], 1) == 1, d, -d)


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
}

"""Dense weights to GGUF blocks: the way into the formats that `kernels.dequantize` reads.

The simple formats round by a formula. The K formats keep scales of scales; for each group the scale and minimum are
those of a few candidates that leave the least weighted squared error after a least-squares fit.
Source: GGUF specification, block layouts and quantisers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS

NUM_ELEMENTS_AT_A_TIME = 1 << 17
"""Elements quantised in one piece, so that the candidates' copies stay in the cache.

Two million elements to Q4_K: 1.7 s, and 3.0 s in pieces of 2^20 (two cores, AVX-512, 2026).
"""


def quantize(values: Tensor, qtype: str) -> Tensor:
    """The blocks of float32 `values` (..., columns) as uint8 (..., row_bytes).

    Raises:
        ValueError: no quantiser for the type, or rows that are no whole number of blocks.
    """
    quantizer = QUANTIZERS.get(qtype)
    if quantizer is None:
        raise ValueError(f"quantize: type {qtype!r}, expected one of {', '.join(QUANTIZERS)}")
    block = BLOCK_FORMATS[qtype]
    row_bytes = block.row_bytes(values.shape[-1])
    blocks = values.to(torch.float32).reshape(-1, block.num_elements)
    step = max(1, NUM_ELEMENTS_AT_A_TIME // block.num_elements)
    pieces = [quantizer(piece) for piece in blocks.split(step)]
    return torch.cat(pieces).reshape(*values.shape[:-1], row_bytes)


def _bytes(*parts: Tensor) -> Tensor:
    """Fields side by side as bytes; each (blocks, n)."""
    return torch.cat([part.contiguous().view(torch.uint8).reshape(len(part), -1) for part in parts], dim=1)


def _half(values: Tensor) -> Tensor:
    return values.to(torch.float16).reshape(-1, 1)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1.0 / scale)


def _extreme(blocks: Tensor) -> Tensor:
    """The signed value of largest magnitude of each row (rows, 1)."""
    return blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))


def _round_away(values: Tensor) -> Tensor:
    return values.sign() * (values.abs() + 0.5).floor()


def _nibbles(codes: Tensor) -> Tensor:
    """Codes 0..15 (blocks, n) two to a byte: j beside j + n/2."""
    low, high = codes.chunk(2, dim=-1)
    return low | high << 4


def _fifth_bits(codes: Tensor) -> Tensor:
    """Bit 4 of 32 codes as a 32-bit word (blocks, 4 bytes)."""
    return _packed_bits((codes >> 4).reshape(len(codes), 4, 8))


def _packed_bits(bits: Tensor) -> Tensor:
    """(..., 8) zeros and ones to bytes (...), the first the lowest."""
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32, device=bits.device)
    return (bits.to(torch.int32) * weights).sum(-1).to(torch.uint8)


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = _round_away(blocks * _inverse(scale)).to(torch.int8)
    return _bytes(_half(scale), codes)


def _symmetric(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale and codes 0..levels-1 around levels/2, the extreme value of a block hitting the lowest code."""
    half = levels // 2
    scale = _extreme(blocks) / -half
    codes = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(0, levels - 1).to(torch.uint8)
    return scale, codes


def _affine(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scale, minimum and codes 0..levels-1."""
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / (levels - 1)
    codes = ((blocks - least) * _inverse(scale) + 0.5).trunc().clamp(0, levels - 1).to(torch.uint8)
    return scale, least, codes


def _q4_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 16)
    return _bytes(_half(scale), _nibbles(codes))


def _q4_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _affine(blocks, 16)
    return _bytes(_half(scale), _half(least), _nibbles(codes))


def _q5_0(blocks: Tensor) -> Tensor:
    scale, codes = _symmetric(blocks, 32)
    return _bytes(_half(scale), _fifth_bits(codes), _nibbles(codes & 15))


def _q5_1(blocks: Tensor) -> Tensor:
    scale, least, codes = _affine(blocks, 32)
    return _bytes(_half(scale), _half(least), _fifth_bits(codes), _nibbles(codes & 15))


def _fit_affine(groups: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Scale >= 0 and offset >= 0 (..., 1) with x ~ scale * code - offset, for groups (..., n).

    Candidates stretch the plain range a little; each is refined by weighted least squares.
    """
    weights = groups.square().mean(-1, keepdim=True).sqrt() + groups.abs()
    least = groups.amin(-1, keepdim=True).clamp(max=0)
    span = groups.amax(-1, keepdim=True) - least
    best_scale, best_offset = span / (levels - 1), -least
    best_error = _error(groups, weights, best_scale, best_offset, levels)
    sum_w, sum_x = weights.sum(-1, keepdim=True), (weights * groups).sum(-1, keepdim=True)
    for step in range(-10, 11):
        codes = ((groups - least) * ((levels - 1 + 0.1 * step) * _inverse(span))).round().clamp(0, levels - 1)
        weighted = weights * codes
        sum_l, sum_l2 = weighted.sum(-1, keepdim=True), (weighted * codes).sum(-1, keepdim=True)
        sum_xl = (weighted * groups).sum(-1, keepdim=True)
        determinant = sum_w * sum_l2 - sum_l * sum_l
        scale = (sum_w * sum_xl - sum_x * sum_l) * _inverse(determinant)
        offset = -(sum_l2 * sum_x - sum_l * sum_xl) * _inverse(determinant)
        through_zero = offset < 0
        scale = torch.where(through_zero, sum_xl * _inverse(sum_l2), scale).clamp(min=0)
        offset = offset.clamp(min=0)
        error = _error(groups, weights, scale, offset, levels)
        is_better = (error < best_error) & (determinant > 0)
        best_scale = torch.where(is_better, scale, best_scale)
        best_offset = torch.where(is_better, offset, best_offset)
        best_error = torch.where(is_better, error, best_error)
    return best_scale, best_offset


def _error(groups: Tensor, weights: Tensor, scale: Tensor, offset: Tensor, levels: int) -> Tensor:
    """Weighted squared error (..., 1) of the nearest codes."""
    codes = ((groups + offset) * _inverse(scale)).round().clamp(0, levels - 1)
    return (weights * (scale * codes - offset - groups).square()).sum(-1, keepdim=True)


def _k_affine(blocks: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Block scale, block minimum, the 12 bytes of six-bit scales, and codes (blocks, 8, 32)."""
    groups = blocks.reshape(-1, 8, 32)
    scale, offset = _fit_affine(groups, levels)
    d = (scale.amax(1) / 63).to(torch.float16)
    dmin = (offset.amax(1) / 63).to(torch.float16)
    sc = (scale.squeeze(-1) * _inverse(d.float())).round().clamp(0, 63)
    m = (offset.squeeze(-1) * _inverse(dmin.float())).round().clamp(0, 63)
    step, shift = (d.float() * sc).unsqueeze(-1), (dmin.float() * m).unsqueeze(-1)
    codes = ((groups + shift) * _inverse(step)).round().clamp(0, levels - 1).to(torch.uint8)
    return d, dmin, _six_bit_scales(sc.to(torch.uint8), m.to(torch.uint8)), codes


def _six_bit_scales(sc: Tensor, m: Tensor) -> Tensor:
    """Eight six-bit scales and eight six-bit minima (blocks, 8) as 12 bytes."""
    first = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    second = m[:, :4] | (m[:, 4:] >> 4) << 6
    third = (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return torch.cat([first, second, third], dim=1)


def _paired_nibbles(codes: Tensor) -> Tensor:
    """Codes (blocks, 8, 32): group 2j in the low nibbles and 2j + 1 in the high nibbles of 32 bytes."""
    return (codes[:, 0::2] & 15) | (codes[:, 1::2] & 15) << 4


def _q4_k(blocks: Tensor) -> Tensor:
    d, dmin, scales, codes = _k_affine(blocks, 16)
    return _bytes(d, dmin, scales, _paired_nibbles(codes))


def _q5_k(blocks: Tensor) -> Tensor:
    d, dmin, scales, codes = _k_affine(blocks, 32)
    fifth = _packed_bits((codes >> 4).transpose(1, 2))  # byte l has bit j of group j
    return _bytes(d, dmin, scales, fifth, _paired_nibbles(codes))


def _fit_symmetric(groups: Tensor, half: int) -> Tensor:
    """Scale (..., 1), of either sign, with x ~ scale * code and codes -half..half-1, for groups (..., n)."""
    extreme = _extreme(groups)
    weights = groups.square()
    best_scale = torch.zeros_like(extreme)
    best_gain = torch.zeros_like(extreme)
    for step in range(-9, 10):
        codes = (groups * (-(half + 0.1 * step) * _inverse(extreme))).round().clamp(-half, half - 1)
        product = (weights * groups * codes).sum(-1, keepdim=True)
        square = (weights * codes * codes).sum(-1, keepdim=True)
        gain = product * product * _inverse(square)  # the error is a constant less this
        is_better = gain > best_gain
        best_scale = torch.where(is_better, product * _inverse(square), best_scale)
        best_gain = torch.where(is_better, gain, best_gain)
    return best_scale


def _q6_k(blocks: Tensor) -> Tensor:
    groups = blocks.reshape(-1, 16, 16)
    scale = _fit_symmetric(groups, 32)
    d = (_extreme(scale.squeeze(-1)) / -128).to(torch.float16)
    sc = (scale.squeeze(-1) * _inverse(d.float())).round().clamp(-128, 127)
    step = (d.float() * sc).unsqueeze(-1)
    codes = ((groups * _inverse(step)).round().clamp(-32, 31) + 32).to(torch.uint8).reshape(-1, 2, 4, 32)
    low = codes[:, :, :2] & 15 | (codes[:, :, 2:] & 15) << 4
    high = codes >> 4
    top = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    return _bytes(low, top, sc.to(torch.int8), d)


QUANTIZERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
"""Type -> float32 (blocks, elements) to uint8 (blocks, bytes)."""

"""Random numbers that depend on nothing but (seed, output position, token id).

No generator is stepped, so a draw is the same alone, in any batch, after preemption and on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK_64 = 2**64 - 1


def mix64(value: int) -> int:
    """A 64-bit integer whose every bit depends on every bit of `value`.

    Source: the finaliser of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators").
    """
    value = (value + 0x9E3779B97F4A7C15) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def draw_key(seed: int, position: int) -> int:
    """The 64-bit key of the draw for output token number `position` of a sequence."""
    return mix64(mix64(seed & _MASK_64) ^ position)


def token_bits(keys: list[int], token_ids: Tensor) -> Tensor:
    """32 random bits per row and token, as int32. keys: one 64-bit key per row; token_ids (R, C) or (C,) int32.

    Source: the finaliser of MurmurHash3 (Appleby 2011), once over token and low half of the key, once over its high
    half.
    """
    low = _int32_column(keys, 0, token_ids.device)
    high = _int32_column(keys, 32, token_ids.device)
    bits = (token_ids * _signed(0x9E3779B1)) ^ low
    return _finalise(_finalise(bits).add_(high))


def exponential_noise(keys: list[int], token_ids: Tensor) -> Tensor:
    """Exp(1) noise per row and token, float64 (R, C); shapes as in `token_bits`."""
    bits = token_bits(keys, token_ids).to(torch.float64)
    uniform = bits.add_(2.0**31 + 0.5).mul_(2.0**-32)  # in (0, 1), never 0 or 1
    return uniform.log_().neg_()


def chunk_noise(keys: list[int], num_chunks: int, device: torch.device) -> Tensor:
    """Exp(1) noise per row and chunk of the vocabulary, float64 (R, num_chunks), independent of the tokens' noise."""
    return exponential_noise(keys, -1 - torch.arange(num_chunks, dtype=torch.int32, device=device))


def _finalise(bits: Tensor) -> Tensor:
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits.mul_(_signed(0x85EBCA6B))
    bits ^= (bits >> 13) & 0x7FFFF
    bits.mul_(_signed(0xC2B2AE35))
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _int32_column(keys: list[int], shift: int, device: torch.device) -> Tensor:
    halves = [_signed((key >> shift) & 0xFFFFFFFF) for key in keys]
    return torch.tensor(halves, dtype=torch.int32, device=device).unsqueeze(1)


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value

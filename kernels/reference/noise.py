"""The noise of random draws: numbers that depend on nothing but a key and a token id. See `vkit.kernels.draw`."""

from __future__ import annotations

import torch
from torch import Tensor


def token_bits(keys: Tensor, token_ids: Tensor) -> Tensor:
    """32 random bits per row and token, as int32. keys (R,) int64; token_ids (R, C) or (C,) int32.

    Source: the finaliser of MurmurHash3 (Appleby 2011), once over token and low half of the key, once over its high
    half.
    """
    low = _int32_column(keys << 32)
    high = _int32_column(keys)
    bits = (token_ids * _signed(0x9E3779B1)) ^ low
    return _finalise(_finalise(bits).add_(high))


def exponential_noise(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Exp(1) noise per row and token, float64 (R, C); shapes as in `token_bits`."""
    bits = token_bits(keys, token_ids).to(torch.float64)
    uniform = bits.add_(2.0**31 + 0.5).mul_(2.0**-32)  # in (0, 1), never 0 or 1
    return uniform.log_().neg_()


def chunk_noise(keys: Tensor, num_chunks: int) -> Tensor:
    """Exp(1) noise per row and chunk of the vocabulary, float64 (R, num_chunks), independent of the tokens' noise."""
    return exponential_noise(keys, -1 - torch.arange(num_chunks, dtype=torch.int32, device=keys.device))


def _finalise(bits: Tensor) -> Tensor:
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits.mul_(_signed(0x85EBCA6B))
    bits ^= (bits >> 13) & 0x7FFFF
    bits.mul_(_signed(0xC2B2AE35))
    bits ^= (bits >> 16) & 0xFFFF
    return bits


def _int32_column(keys: Tensor) -> Tensor:
    """The high halves of keys, (R, 1) int32."""
    return (keys >> 32).to(torch.int32).unsqueeze(1)


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value

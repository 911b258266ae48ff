"""Keys of random draws: numbers that depend on nothing but (seed, output position).

No generator is stepped, so a draw is the same alone, in any batch, after preemption and on any device. What noise a key
gives each token is the business of `vkit.kernels.draw`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

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
    return mix64(mixed_seed(seed) ^ position)


def draw_keys(mixed_seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """`draw_key` of many sequences at once; `mixed_seeds` holds `mix64(seed)` of each."""
    values = (mixed_seeds ^ positions) + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def mixed_seed(seed: int) -> int:
    """The part of a key that stays the same for a whole sequence."""
    return mix64(seed & _MASK_64)

"""The noise schedule and its Euler step. No stochastic noise is ever injected again: it ruins the sound.

Source: the released scheduler; sigma runs from 1 (noise) to 0, the model's timestep is 1 − sigma.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vkit.errors import InvalidRequest
from vkit.video.h3.request import MAX_STEPS, MIN_STEPS


def sigmas(num_points: int, shift: float) -> Tensor:
    """The schedule (n,) in float32, shifted towards noise, equal neighbours dropped, ending in 0.

    Raises:
        InvalidRequest: fewer than two points make no step, or the shift is not positive.
    """
    check_schedule(num_points, shift)
    base = torch.linspace(1.0, 0.0, num_points, dtype=torch.float32)
    shifted = shift * base / (1.0 + (shift - 1.0) * base)
    kept = torch.cat([shifted[:1], shifted[1:][shifted[1:] != shifted[:-1]]])
    return kept if kept[-1] == 0 else torch.cat([kept, torch.zeros(1)])


def check_schedule(num_points: int, shift: float, *, name: str = "flow_shift") -> None:
    """Refuse schedules that make no step, and those of absurdly many: their tables grow with the steps."""
    if num_points < MIN_STEPS:
        raise InvalidRequest(f"steps: got {num_points}, expected at least 2 points of the schedule", param="steps")
    if num_points > MAX_STEPS:
        raise InvalidRequest(f"steps: got {num_points}, expected at most {MAX_STEPS}", param="steps")
    if not math.isfinite(shift) or shift <= 0:
        raise InvalidRequest(f"{name}: got {shift}, expected a number above 0", param=name)


def euler_step(x: Tensor, velocity: Tensor, sigma: Tensor, next_sigma: Tensor) -> Tensor:
    """x at `next_sigma`, all float32. The velocity points towards data."""
    time = 1.0 - sigma
    clean = x + (1.0 - time) * velocity.to(torch.float32)
    ratio = next_sigma / sigma
    return ratio * x + (1.0 - ratio) * clean

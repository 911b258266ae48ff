"""Cases of the ops that keep a state per sequence: decoding, prompts of chunks, verification, fresh rows of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit.kernels.cases_sampling import bound
from vkit.kernels.recurrent import ScanConstants, StateBatch

if TYPE_CHECKING:
    from vkit.kernels.cases import Source


@dataclass(frozen=True)
class Step:
    """Tokens of the sequences of a step; the first `num_verified` of them are under verification."""

    counts: tuple[int, ...]
    num_verified: int = 0


DECODE = Step((1, 1, 1))
MIXED = Step((1, 70, 5))
SHORT = Step((1, 21, 3))
VERIFIED = Step((4, 2, 1), 1)


def cases() -> Iterator[tuple[str, str, Callable[[Source], tuple[Any, ...]]]]:
    """Op, label and arguments of each."""
    for step, channels, taps in ((DECODE, 70, 4), (MIXED, 300, 4), (MIXED, 5, 2), (VERIFIED, 33, 3)):
        label = f"{step.counts} tokens, {channels} channels, {taps} taps"
        yield "causal_conv1d", label, bound(_convolution, step, channels, taps)
    for shape in ((5, 7), (3, 4, 20)):
        yield "log_decay", f"{shape}", bound(_log_decay, shape)
    for step, has_channels, is_tiled, widths in (
        (DECODE, False, True, (20, 24)), (DECODE, True, False, (16, 40)), (MIXED, False, False, (20, 24)),
        (SHORT, True, False, (12, 36)), (SHORT, False, True, (72, 8)), (SHORT, True, False, (72, 8)),
        (VERIFIED, False, False, (16, 8)),
    ):  # fmt: skip
        label = f"{step.counts} tokens, {widths}{', a decay per channel' * has_channels}{', tiled' * is_tiled}"
        yield "gated_delta_net", label, bound(_delta, step, widths, has_channels, is_tiled)
    for step, widths in ((DECODE, (20, 40)), (MIXED, (16, 24)), (SHORT, (72, 8)), (VERIFIED, (24, 8))):
        yield "mamba2_scan", f"{step.counts} tokens, {widths}", bound(_scan, step, widths)


def states_of(s: Source, step: Step) -> StateBatch:
    """Three sequences in rows 3, 1 and 4 of nine; the second begins here."""
    cu = [0, *accumulate(step.counts)]
    targets = None
    if step.num_verified:
        free = iter((6, 7, 8, 3, 5, 0))
        targets = [
            next(free) if b < step.num_verified or place == count - 1 else -1
            for b, count in enumerate(step.counts)
            for place in range(count)
        ]
        targets[-1] = 4
        targets[cu[2] - 1] = 1
    is_fresh = torch.tensor([False, True, False], device=s.device)
    return StateBatch(
        s.integers(3, 1, 4), is_fresh, s.integers(*cu, dtype=torch.int32), cu,
        None if targets is None else s.integers(*targets), list(range(step.num_verified)),
    )  # fmt: skip


def _state(s: Source, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Rows of a page each, NaN between them and where a sequence begins."""
    size = math.prod(shape)
    pages = torch.full((9, size + 16), math.nan, dtype=dtype)
    pages[:, :size] = (torch.randn(9, size, generator=s.generator) * 0.5).to(dtype)
    pages[1] = math.nan
    return pages.to(s.device)[:, :size].view(9, *shape)


def _convolution(s: Source, step: Step, channels: int, taps: int) -> tuple[Any, ...]:
    bias = s.normal(channels) if taps % 2 == 0 else None
    state = _state(s, (channels, taps - 1), s.dtype)
    return s.strided(sum(step.counts), channels), s.normal(channels, taps) * 0.5, bias, state, states_of(s, step)


def _log_decay(s: Source, shape: tuple[int, ...]) -> tuple[Any, ...]:
    float32 = torch.float32
    x = s.strided(*shape) if len(shape) == 2 else s.normal(*shape)
    return x, s.normal(shape[1], dtype=float32) * 0.5, s.normal(*shape[1:], dtype=float32)


def _delta(s: Source, step: Step, widths: tuple[int, int], has_channels: bool, is_tiled: bool) -> tuple[Any, ...]:
    num_tokens, heads, (width, value_width) = sum(step.counts), 4, widths
    q, k, v = (
        s.strided(num_tokens, 2, width),
        s.strided(num_tokens, 2, width),
        s.strided(num_tokens, heads, value_width),
    )
    shape = (num_tokens, heads, width) if has_channels else (num_tokens, heads)
    decay = -3.0 * s.normal(*shape, dtype=torch.float32).square()  # some forget at once
    state = _state(s, (heads, width, value_width), torch.float32)
    return q, k, v, decay, s.normal(num_tokens, heads), state, states_of(s, step), is_tiled


def _scan(s: Source, step: Step, widths: tuple[int, int]) -> tuple[Any, ...]:
    num_tokens, heads, (width, value_width) = sum(step.counts), 4, widths
    b, c = (s.strided(num_tokens, 2, width) for _ in range(2))
    numbers = torch.randn(3, heads, generator=s.generator).mul(0.5).to(s.device)
    constants = ScanConstants(numbers[0], numbers[1], numbers[2] - 2.0, 0.01)
    state = _state(s, (heads, width, value_width), torch.float32)
    x, amount = s.strided(num_tokens, heads, value_width), s.strided(num_tokens, heads)
    x.mul_(0.25)  # sums of many tokens should not be large beside the slack
    return x, amount, b, c, constants, state, states_of(s, step)

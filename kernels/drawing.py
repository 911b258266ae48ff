"""Tokens from logits: the largest, or one at random."""

from __future__ import annotations

import torch
from torch import Tensor

from vkit.kernels.dispatch import ops
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.reference import draw as reference


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """Where each row's largest value is, the lowest of equals, and that value; a NaN counts as largest. logits (R, V).

    Raises:
        ValueError: logits are not float32 rows.
    """
    if logits.dtype is not torch.float32 or logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"largest: logits {tuple(logits.shape)} {logits.dtype}, expected (R, V) float32")
    found: tuple[list[int], list[float]] = ops(logits).largest(logits)
    return found


def largest_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As `largest`, left on the device: ids (R,) int64 and values (R,). logits (R, V) float32.

    Raises:
        ValueError: logits are not float32 rows.
    """
    if logits.dtype is not torch.float32 or logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"largest_rows: logits {tuple(logits.shape)} {logits.dtype}, expected (R, V) float32")
    found: tuple[Tensor, Tensor] = ops(logits).largest_rows(logits)
    return found


def draw(logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor]:
    """One token id per row (R,) int64, and the row's largest logit (R,): no finite number where a value is NaN or +inf.

    logits (N, V) float32; rows (R,) int64: which of them; keys (R,) int64 from (seed, position). Stages: over
    temperature; min_p keeps p >= min_p * max(p); top_k keeps what reaches the k-th largest, ties included; top_p drops
    from the small end while what was dropped sums to at most 1 - p, the first stays; then a race, won by the largest of
    p / noise with Exp(1) noise of (key, token id). Without any truncation the race is first run between chunks of 64
    tokens, on their sums. A row's token depends on its own values alone; backends agree to float rounding of p.

    Raises:
        ValueError: logits are not float32 rows, or the others do not fit each other.
    """
    _check("draw", logits, rows, rules, keys)
    drawn: tuple[Tensor, Tensor] = ops(logits).draw(logits, rows, rules, keys)
    return drawn


def draw_with_survivors(logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `draw` gives, and the logits it was drawn from: over temperature, -inf where dropped, (R, V). Plain torch.

    Raises:
        ValueError: as `draw`.
    """
    _check("draw_with_survivors", logits, rows, rules, keys)
    return reference.draw_with_survivors(logits, rows, rules, keys)


def _check(name: str, logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> None:
    if logits.dtype is not torch.float32 or logits.ndim != 2 or not logits.shape[1]:
        raise ValueError(f"{name}: logits {tuple(logits.shape)} {logits.dtype}, expected (N, V) float32")
    for label, value in (("rows", rows), ("keys", keys)):
        if value.shape != rules.temperatures.shape or value.dtype is not torch.int64:
            expected = tuple(rules.temperatures.shape)
            raise ValueError(f"{name}: {label} {tuple(value.shape)} {value.dtype}, expected {expected} int64")

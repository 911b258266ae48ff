"""How tokens are drawn from a set of rows: what the rules say of each row, with the facts the host needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_AT_ONCE = 16
"""Rows that plain torch handles together: their scratch stays in cache."""


@dataclass(frozen=True, slots=True)
class Truncation:
    """min_p, top_k and top_p of a batch of rows, one value per row; values that are off are 0, 0 and 1."""

    min_p: Tensor
    """(R,) float32"""
    top_k: Tensor
    """(R,) int64"""
    top_p: Tensor
    """(R,) float64"""
    max_top_k: int
    has_top_p: bool
    needs_mass: bool
    """Whether some row has top_p without top_k, so that the whole row's sum counts."""


@dataclass(frozen=True, slots=True)
class DrawBlock:
    """Some of the rows, alike enough for plain torch to handle together."""

    index: Tensor
    """(B,) int64: which of the rows."""
    truncation: Truncation | None
    """None where min_p, top_k and top_p are off."""


@dataclass(frozen=True, slots=True)
class DrawRules:
    """temperature, min_p, top_k and top_p of R rows; values that are off are 0, 0 and 1."""

    temperatures: Tensor
    """(R,) float32, positive."""
    min_p: Tensor
    """(R,) float32"""
    top_k: Tensor
    """(R,) int64"""
    top_p: Tensor
    """(R,) float64"""
    blocks: tuple[DrawBlock, ...]

    @classmethod
    def of(
        cls,
        temperatures: Sequence[float],
        min_p: Sequence[float],
        top_k: Sequence[int],
        top_p: Sequence[float],
        device: torch.device | str = "cpu",
    ) -> DrawRules:
        """Rules of rows from one number per row."""
        is_truncated = [bool(k) or p < 1.0 or m > 0.0 for m, k, p in zip(min_p, top_k, top_p, strict=True)]
        blocks = []
        for wanted in (False, True):
            places = [place for place, found in enumerate(is_truncated) if found is wanted]
            for first in range(0, len(places), ROWS_AT_ONCE):
                some = places[first : first + ROWS_AT_ONCE]
                own = _truncation([min_p[i] for i in some], [top_k[i] for i in some], [top_p[i] for i in some], device)
                blocks.append(DrawBlock(torch.tensor(some, device=device), own if wanted else None))
        return cls(
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.tensor(min_p, dtype=torch.float32, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor(top_p, dtype=torch.float64, device=device),
            tuple(blocks),
        )


def _truncation(
    min_p: Sequence[float], top_k: Sequence[int], top_p: Sequence[float], device: torch.device | str
) -> Truncation:
    return Truncation(
        min_p=torch.tensor(min_p, dtype=torch.float32, device=device),
        top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
        top_p=torch.tensor(top_p, dtype=torch.float64, device=device),
        max_top_k=max(top_k),
        has_top_p=any(p < 1.0 for p in top_p),
        needs_mass=any(p < 1.0 and not k for p, k in zip(top_p, top_k, strict=True)),
    )

"""A rank among those that share a model: its share of heads and widths, and sums and gatherings over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from vkit.errors import UsageError

T = TypeVar("T")
VOCAB_MULTIPLE = 64
"""Rows of the vocabulary that every rank has come in multiples of this."""


class CannotShare(UsageError):
    """Something that so many ranks cannot share evenly."""


class Communicator(Protocol):
    """What moves tensors between ranks. Every rank calls the same, in the same order."""

    def sum(self, x: Tensor) -> None:
        """Replace contiguous `x` by its sum over all ranks: the same bits on each."""

    def gather(self, x: Tensor) -> Tensor:
        """Contiguous x (...) of every rank -> (ranks, ...), in their order."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank `rank` of `size`. Without a communicator: enough to shape a model, not to run it."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None

    def each(self, share: Callable[[int], T]) -> list[T]:
        """What every rank has, by rank."""
        return [share(rank) for rank in range(self.size)]

    def split(self, what: str, count: int, rank: int | None = None) -> tuple[int, int]:
        """First and beyond the last of a rank's even share (this rank's by default).

        Raises:
            CannotShare: the ranks do not divide `count`.
        """
        if count % self.size:
            raise CannotShare(f"--tensor-parallel-size: {count} {what} cannot be shared by {self.size} ranks")
        size = count // self.size
        own = self.rank if rank is None else rank
        return own * size, (own + 1) * size

    def split_or_repeat(self, what: str, count: int, rank: int | None = None) -> tuple[int, int]:
        """As `split`; with more ranks than there are things, several ranks have the same one.

        Raises:
            CannotShare: neither number divides the other.
        """
        if count >= self.size:
            return self.split(what, count, rank)
        if self.size % count:
            raise CannotShare(f"--tensor-parallel-size: {count} {what} cannot be shared by {self.size} ranks")
        own = (self.rank if rank is None else rank) * count // self.size
        return own, own + 1

    def split_rows(self, count: int, multiple: int = VOCAB_MULTIPLE) -> tuple[int, int, int]:
        """(first, beyond the last, rows per rank) of a share that may be short, or empty, at the end.

        Rows per rank are a multiple of `multiple`; those past `count` are padding that no table has.
        """
        per_rank = -(-count // (multiple * self.size)) * multiple
        return min(count, self.rank * per_rank), min(count, (self.rank + 1) * per_rank), per_rank

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks. Takes x's memory where it can."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._communicator.sum(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """x (..., C) of every rank -> (..., ranks · C), in their order."""
        if self.size == 1:
            return x
        return torch.cat(self._communicator.gather(x.contiguous()).unbind(0), dim=-1)

    @property
    def _communicator(self) -> Communicator:
        assert self.communicator is not None, "these ranks only shape a model"
        return self.communicator


ALONE = Ranks()
"""A model that nobody shares."""

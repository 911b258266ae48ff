"""Layers whose inputs are spread over ranks: each rank multiplies what it has, and the results are summed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.distributed import Ranks
from vkit.quantization import LinearMethod, Weight, linear_method_for
from vkit.quantization.cutting import Span, can_take_columns, index_of, take_columns, take_rows

logger = logging.getLogger("vkit.layers")


@dataclass(frozen=True, slots=True)
class Reduction:
    """Which inputs each rank has of a layer whose result is the sum over all."""

    ranks: Ranks
    columns: Sequence[Sequence[Span]]
    """By rank."""


@dataclass(frozen=True, slots=True)
class SummedLinear:
    """The product with a rank's columns, summed over the ranks; the bias is added once."""

    part: LinearMethod
    ranks: Ranks

    @property
    def in_features(self) -> int:
        """Columns that this rank has."""
        return self.part.in_features

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.part.out_features

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's columns."""
        return self.part.nbytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., in_features) of this rank -> (..., out_features), the same on every rank."""
        return self.ranks.sum(self.part.apply(x, bias if self.ranks.rank == 0 else None))


@dataclass(frozen=True, slots=True)
class GatheredLinear:
    """The same where columns cannot be cut: inputs are gathered, and each rank multiplies by some of the rows."""

    part: LinearMethod
    ranks: Ranks
    order: Tensor | None
    """The gathered input that each column takes; None: they are in order."""
    num_rows: int
    """Of the whole weight; what ranks have beyond is padding."""
    first_row: int
    rows_per_rank: int

    @property
    def in_features(self) -> int:
        """Columns that this rank has of the input."""
        return self.part.in_features // self.ranks.size

    @property
    def out_features(self) -> int:
        """Rows of the whole weight."""
        return self.num_rows

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's rows."""
        return self.part.nbytes

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (..., in_features) of this rank -> (..., out_features), the same on every rank."""
        whole = self.ranks.gather(x)
        if self.order is not None:
            whole = whole.index_select(-1, self.order)
        count = self.part.out_features
        own = self.part.apply(whole, None if bias is None else bias[self.first_row : self.first_row + count])
        padded = torch.nn.functional.pad(own, (0, self.rows_per_rank - count))
        return self.ranks.gather(padded)[..., : self.num_rows]


def reduction_of(reduction: Reduction, weight: Weight, place: Callable[[Weight], Weight]) -> LinearMethod:
    """How a rank multiplies by its share of `weight` (out, in). All ranks come to the same form."""
    ranks = reduction.ranks
    if all(can_take_columns(weight, spans) for spans in reduction.columns):
        own = take_columns(weight, reduction.columns[ranks.rank])
        return SummedLinear(linear_method_for(place(own)), ranks)
    num_rows = weight.shape[0]
    first, stop, per_rank = ranks.split_rows(num_rows, multiple=1)
    logger.info("%d packed columns cannot be cut for %d ranks: their inputs are gathered", weight.shape[1], ranks.size)
    own = place(take_rows(weight, torch.arange(first, stop)))
    order = torch.argsort(torch.cat([index_of(spans) for spans in reduction.columns]))
    is_ordered = torch.equal(order, torch.arange(len(order)))
    return GatheredLinear(
        linear_method_for(own), ranks, None if is_ordered else order.to(own.device), num_rows, first, per_rank
    )

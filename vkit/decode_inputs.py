"""Fixed memory that captured decoding steps read their inputs from: one token per sequence, padded to a row count.

A padding row writes to no slot (-1), sees no key (length 0), carries token 0, reads the null block through a row of
the block tables that is its own, and its state is the null block's, which is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vkit.staging import packed_bytes, unpacked

NO_SLOT = -1
NULL_BLOCK = 0
ROOM_PER_ROW = 64
"""Bytes beside the fixed inputs for changes of block tables, which travel in the same copy."""


class NotCapturable(Exception):
    """A step does something that a replay would not do again; the message says what."""


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a captured step is made for."""

    num_rows: int
    max_seq_len: int
    """No sequence is longer: the shape of launches may depend on it."""


class NoHostRows(list[int]):
    """In place of the rows of a captured step on the host: they differ from replay to replay."""

    def _refuse(self) -> NoReturn:
        raise NotCapturable("an op reads block table rows on the host")

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse()

    def __iter__(self) -> Iterator[int]:
        self._refuse()

    def __len__(self) -> int:
        self._refuse()


@dataclass(frozen=True, slots=True)
class DecodeFields:
    """The inputs of a captured step, views of the fixed memory."""

    token_ids: Tensor
    positions: Tensor
    slots: list[Tensor]
    states: list[Tensor]
    rows: Tensor
    seq_lens: Tensor
    is_fresh: Tensor
    cu_seqlens: Tensor
    logits_rows: Tensor
    shape: DecodeShape

    def hosts(self) -> tuple[list[int], list[int], list[int]]:
        """What a `PagedBatch` knows on the host: no rows, lengths as bounds, and where queries lie."""
        size = self.shape.num_rows
        return NoHostRows(), [self.shape.max_seq_len] * size, list(range(size + 1))


class DecodeInputs:
    """The memory, and what is written to it per step."""

    def __init__(
        self, capacity: int, num_paged: int, num_states: int, *, padding_row: int, device: torch.device
    ) -> None:
        """`capacity`: most rows of a step. `num_paged`, `num_states`: cache groups of each kind.

        `padding_row`: the row of the block tables whose every block is the null block.
        """
        self.capacity = capacity
        self._num_paged = num_paged
        self._padding_row = padding_row
        wide = [np.zeros(capacity, np.int64) for _ in range(2 + num_paged + num_states)]
        self._arrays: list[NDArray[Any]] = [*wide, *(np.zeros(capacity, kind) for kind in (np.int32, np.int32, bool))]
        fixed = packed_bytes(self._arrays)
        self.memory = torch.zeros(fixed + ROOM_PER_ROW * capacity, dtype=torch.uint8, device=device)
        """uint8; the arrays that `filled` gives belong at its beginning."""
        self._views = unpacked(self.memory[:fixed], self._arrays)
        self._cu_seqlens = torch.arange(capacity + 1, dtype=torch.int32, device=device)
        self._logits_rows = torch.arange(capacity, dtype=torch.int64, device=device)

    @property
    def token_ids(self) -> Tensor:
        """(capacity,) int64 on the device."""
        return self._views[0]

    def filled(
        self,
        size: int,
        token_ids: NDArray[np.int64],
        starts: NDArray[np.int64],
        positions: NDArray[np.int64],
        rows: NDArray[np.int64],
        slots: Sequence[NDArray[np.int64]],
        states: Sequence[NDArray[np.int64]],
    ) -> list[NDArray[Any]]:
        """A step's inputs, one value per sequence, padded to `size` rows; valid until the next call.

        starts: tokens in the cache before the step. Ids below 0 are filled in on the device.
        """
        count = len(token_ids)
        assert count <= size <= self.capacity, "a shape holds the step"
        wide = [np.maximum(token_ids, 0), positions, *slots, *states]
        paddings = [0, 0, *[NO_SLOT] * len(slots), *[NULL_BLOCK] * len(states), self._padding_row, 0, True]
        narrow: list[NDArray[Any]] = [rows, starts + 1, starts == 0]
        for array, values, padding in zip(self._arrays, [*wide, *narrow], paddings, strict=True):
            array[:count] = values
            array[count:size] = padding
        return self._arrays

    def fields(self, shape: DecodeShape) -> DecodeFields:
        """The inputs of a step of this shape."""
        size = shape.num_rows
        views = [view[:size] for view in self._views]
        wide, (rows, seq_lens, is_fresh) = views[2:-3], views[-3:]
        return DecodeFields(
            token_ids=views[0],
            positions=views[1],
            slots=wide[: self._num_paged],
            states=wide[self._num_paged :],
            rows=rows,
            seq_lens=seq_lens,
            is_fresh=is_fresh,
            cu_seqlens=self._cu_seqlens[: size + 1],
            logits_rows=self._logits_rows[:size],
            shape=shape,
        )

"""Block tables: which blocks hold each running sequence's tokens, on the host and on the device. Kept between steps."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Changes: TypeAlias = tuple[NDArray[np.int64], NDArray[np.int32]]
"""Places in the flattened table, and the block ids there."""


class BlockTable:
    """One group's block table on the host, and its twin on the device: the same memory where the device is the host."""

    def __init__(self, num_rows: int, num_columns: int, device: torch.device, *, is_shared: bool) -> None:
        self.host = np.zeros((num_rows, num_columns), np.int32)
        shared = torch.from_numpy(self.host)
        self.device: Tensor = shared if is_shared else shared.to(device, copy=True)
        self._is_shared = is_shared
        self._changes: list[tuple[int, int, int]] = []

    def write(self, row: int, start: int, block_ids: list[int]) -> None:
        """Put block ids at columns start, start + 1, ... of a row of the host's table."""
        self.host[row, start : start + len(block_ids)] = block_ids
        if not self._is_shared:
            self._changes.append((row, start, start + len(block_ids)))

    def take_changes(self) -> Changes | None:
        """What the device's twin lacks, to be given to `apply` once it is there; None: nothing."""
        if not self._changes:
            return None
        width = self.host.shape[1]
        places = np.concatenate(
            [np.arange(row * width + start, row * width + end) for row, start, end in self._changes]
        )
        self._changes.clear()
        # Read from the host's table, so that a place named twice gets one value.
        return places, self.host.reshape(-1)[places]

    def apply(self, places: Tensor, block_ids: Tensor) -> None:
        """Bring the device's twin up to date with what `take_changes` gave."""
        self.device.view(-1).index_copy_(0, places, block_ids)

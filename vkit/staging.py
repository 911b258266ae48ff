"""Small arrays of a step on their way to the device: gathered in one pinned buffer and moved by one copy.

A copy from pinned memory runs while the host goes on, so a buffer is written again only once its copy is done: buffers
take turns, and the oldest is waited for. Where the device is the host nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_BUFFERS = 3
"""One being filled, one under way, one whose step runs."""
ALIGNMENT = 16
"""Bytes: what vector loads of kernels want."""

_TORCH_DTYPES = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32, np.dtype(np.bool_): torch.bool}


class Copier(Protocol):
    """How bytes get to the device."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Host memory that copies may start from, uint8."""

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Start a copy; what is returned waits until `source` may be written again."""


class PinnedCopier:
    """Copies by the device itself, in the order of the current stream."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Page-locked memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Queue the copy."""
        target.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        wait: Callable[[], None] = done.synchronize
        return wait


class HostCopier:
    """Copies at once: the device is the host."""

    def allocate(self, num_bytes: int) -> Tensor:
        """Plain memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """Copy."""
        target.copy_(source)
        return _nothing


def _nothing() -> None:
    """There is nothing to wait for."""


@dataclass(slots=True)
class _Buffer:
    memory: Tensor
    wait: Callable[[], None] = _nothing


def packed_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Bytes that the arrays take side by side."""
    return sum(_padded(array.nbytes) for array in arrays)


class Staging:
    """Pinned buffers that take turns."""

    def __init__(self, device: torch.device, copier: Copier | None = None) -> None:
        """`copier`: how bytes travel; by default what suits the device."""
        self.device = device
        self._is_host = device.type == "cpu" and copier is None
        self._copier = copier or (HostCopier() if device.type == "cpu" else PinnedCopier())
        self._buffers: list[_Buffer] = []
        self._turn = NUM_BUFFERS - 1

    def upload(self, arrays: Sequence[NDArray[Any]], into: Tensor | None = None) -> list[Tensor]:
        """The arrays on the device, in one copy: views of `into` (uint8), or of memory of their own.

        Each begins at a multiple of 16 bytes, in order; so arrays of the same sizes always land at the same places.
        """
        if self._is_host and into is None:
            return [torch.from_numpy(array) for array in arrays]
        num_bytes = packed_bytes(arrays)
        if into is not None and into.shape[0] < num_bytes:
            raise ValueError(f"Staging.upload: {num_bytes} bytes, expected at most {into.shape[0]}")
        target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device) if into is None else into[:num_bytes]
        if num_bytes:
            buffer = self._next(num_bytes)
            source = buffer.memory[:num_bytes]
            _pack(arrays, source.numpy())
            buffer.wait = self._copier.copy(target, source)
        return unpacked(target, arrays)

    def _next(self, num_bytes: int) -> _Buffer:
        """A buffer that nothing is read from any more."""
        if len(self._buffers) < NUM_BUFFERS:
            self._buffers.append(_Buffer(self._copier.allocate(_roomy(num_bytes))))
            return self._buffers[-1]
        self._turn = (self._turn + 1) % NUM_BUFFERS
        buffer = self._buffers[self._turn]
        buffer.wait()
        if buffer.memory.shape[0] < num_bytes:
            buffer.memory = self._copier.allocate(_roomy(num_bytes))
        return buffer


def unpacked(memory: Tensor, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
    """The tensors that lie in `memory` (uint8) after arrays of these sizes and types were packed into it."""
    found = []
    start = 0
    for array in arrays:
        part = memory[start : start + array.nbytes].view(_TORCH_DTYPES[array.dtype])
        found.append(part.view(array.shape))
        start += _padded(array.nbytes)
    return found


def _pack(arrays: Sequence[NDArray[Any]], memory: NDArray[np.uint8]) -> None:
    start = 0
    for array in arrays:
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded(array.nbytes)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _roomy(num_bytes: int) -> int:
    """A power of two, so that growing steps do not allocate pinned memory, which waits for the device, each time."""
    return 1 << max(12, (num_bytes - 1).bit_length())

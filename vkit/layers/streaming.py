"""Routed experts that are read from the file when they are chosen, into a fixed number of places.

Only weights of routed experts come and go. A miss is read by a few threads; who is chosen least often lately gives up
its place. Results are those of resident experts, bit for bit: the same products run on the same bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vkit import kernels
from vkit.device import return_freed_memory
from vkit.layers.linear import Activation

NUM_READERS = 4
HALVING_TOKENS = 16
"""Decoded tokens after which what was chosen counts half."""
TRIM_BYTES = 32 << 20
"""Bytes read after which freed memory is given back to the system."""
SEED_TOKENS = 64
"""Last tokens of a long prompt whose choice decides who stays."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Where one projection of one expert lies."""

    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """One projection of every expert in the file: packed rows of type `qtype`, or plain values of `dtype`."""

    ranges: tuple[ByteRange, ...]
    shape: tuple[int, int]
    dtype: torch.dtype
    qtype: str | None
    scales: Tensor | None

    def of(self, values: Sequence[Tensor], experts: Sequence[int]) -> kernels.ExpertMatrix:
        """The matrix of these experts, whose bytes are `values`."""
        scales = None if self.scales is None else self.scales[torch.tensor(experts)]
        return kernels.ExpertMatrix(tuple(values), self.qtype, scales)


class FileReader:
    """Reads ranges of files with a few threads. Files stay open until `close`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_READERS, "vkit-experts")
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._unreturned = 0
        self.num_bytes = 0
        """Read so far."""

    def read(self, ranges: Sequence[ByteRange]) -> list[Tensor]:
        """The bytes of every range, each in memory of its own.

        Raises:
            OSError: a file cannot be read, or has become shorter.
        """
        self._unreturned += sum(wanted.num_bytes for wanted in ranges)
        if self._unreturned > TRIM_BYTES:
            # What evicted experts held would otherwise stay with the allocator of whichever thread read them.
            self._unreturned = 0
            return_freed_memory()
        return list(self._pool.map(self._read, ranges))

    def close(self) -> None:
        """End the threads and close the files."""
        self._pool.shutdown()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _read(self, wanted: ByteRange) -> Tensor:
        with self._lock:
            descriptor = self._files.get(wanted.path)
            if descriptor is None:
                descriptor = self._files[wanted.path] = os.open(wanted.path, os.O_RDONLY)
            self.num_bytes += wanted.num_bytes
        # Pages of its own: an allocator would keep them for the thread that read, long after the expert has gone.
        pages = mmap.mmap(-1, wanted.num_bytes)
        target, done = memoryview(pages), 0
        while done < wanted.num_bytes:
            count = os.preadv(descriptor, [target[done:]], wanted.offset + done)
            if count == 0:
                raise OSError(f"{wanted.path}: has become shorter since it was opened")
            done += count
        return torch.frombuffer(pages, dtype=torch.uint8)


class ExpertCache:
    """The experts of one layer that are in memory: at most `num_slots`."""

    def __init__(self, matrices: Sequence[StoredMatrix], num_slots: int, reader: FileReader) -> None:
        self.num_slots = num_slots
        self.num_misses = 0
        self._matrices = list(matrices)
        self._reader = reader
        self._held: dict[int, list[Tensor]] = {}
        num_experts = len(matrices[0].ranges)
        self._hotness = [0.0] * num_experts
        self._used = [0] * num_experts
        self._clock = 0
        self._num_decoded = 0

    @property
    def held(self) -> list[int]:
        """Experts in memory."""
        return sorted(self._held)

    def note(self, experts: Sequence[int], num_tokens: int) -> None:
        """Count a choice: one entry per token and expert chosen."""
        for expert in experts:
            self._hotness[expert] += 1
        self._num_decoded += num_tokens
        while self._num_decoded >= HALVING_TOKENS:
            self._num_decoded -= HALVING_TOKENS
            self._hotness = [value / 2 for value in self._hotness]

    def coldest_first(self, experts: Sequence[int]) -> list[int]:
        """The experts in the order of a sweep: those worth keeping come last."""
        return sorted(experts, key=lambda expert: (self._hotness[expert], self._used[expert], expert))

    def take(self, experts: Sequence[int]) -> list[kernels.ExpertMatrix]:
        """Every projection of these experts, read where they are not in memory. At most `num_slots` of them."""
        assert len(experts) <= self.num_slots, "more experts than places"
        self._clock += 1
        for expert in experts:
            self._used[expert] = self._clock
        missing = [expert for expert in experts if expert not in self._held]
        self._make_room(len(missing), set(experts))
        ranges = [matrix.ranges[expert] for expert in missing for matrix in self._matrices]
        values = iter(self._reader.read(ranges))
        for expert in missing:
            self._held[expert] = [next(values).view(matrix.dtype).view(matrix.shape) for matrix in self._matrices]
        self.num_misses += len(missing)
        return [
            matrix.of([self._held[expert][index] for expert in experts], experts)
            for index, matrix in enumerate(self._matrices)
        ]

    def _make_room(self, count: int, wanted: set[int]) -> None:
        others = self.coldest_first([expert for expert in self._held if expert not in wanted])
        for expert in others[: max(0, len(self._held) + count - self.num_slots)]:
            del self._held[expert]


def run_streamed(cache: ExpertCache, x: Tensor, weights: Tensor, ids: Tensor, activation: Activation) -> Tensor:
    """x (T, H), weights and ids (T, k) -> (T, H), as `kernels.run_experts` with every expert at hand."""
    chosen: list[list[int]] = ids.tolist()
    distinct = sorted({expert for row in chosen for expert in row})
    is_sweep = len(distinct) > cache.num_slots
    recent = chosen[-SEED_TOKENS:] if is_sweep else chosen
    cache.note([expert for row in recent for expert in row], 0 if is_sweep else len(chosen))
    if not is_sweep:
        *gate_up, down = cache.take(distinct)
        return kernels.run_experts(x, weights, _renumbered(ids, distinct), gate_up, down, activation)
    return _swept(cache, x, weights, ids, cache.coldest_first(distinct), activation)


def _swept(
    cache: ExpertCache, x: Tensor, weights: Tensor, ids: Tensor, order: list[int], activation: Activation
) -> Tensor:
    """One pass over the experts, as many at a time as there are places; every pair of token and expert runs alone."""
    top_k, flat = ids.shape[1], ids.flatten()
    rows: Tensor | None = None
    for start in range(0, len(order), cache.num_slots):
        group = sorted(order[start : start + cache.num_slots])
        pairs = torch.isin(flat, torch.tensor(group)).nonzero().flatten()
        *gate_up, down = cache.take(group)
        own = _renumbered(flat[pairs].unsqueeze(1), group)
        ones = torch.ones((len(pairs), 1), dtype=torch.float32)
        out = kernels.run_experts(x[pairs // top_k].contiguous(), ones, own, gate_up, down, activation)
        if rows is None:
            rows = out.new_empty((len(flat), out.shape[1]))
        rows[pairs] = out
    assert rows is not None
    return _summed(rows.view(ids.shape[0], top_k, -1), weights, x.dtype)


def _summed(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Σ weights · rows in float32, one after the other: the order of the ops that do it at once."""
    total = torch.zeros((rows.shape[0], rows.shape[2]), dtype=torch.float32)
    for slot in range(rows.shape[1]):
        total += rows[:, slot].float() * weights[:, slot : slot + 1].float()
    return total.to(dtype)


def _renumbered(ids: Tensor, experts: Sequence[int]) -> Tensor:
    """Ids as places in `experts`, which are sorted."""
    return torch.searchsorted(torch.tensor(experts), ids.contiguous())

"""Where ops go when they are called: straight to the library, or onto a tape that is replayed step by step.

An op function lays out its tensors, asks the current tape for output memory and hands over one or more ops with what
they read and write. The eager tape runs them at once. A recording runs nothing: it keeps the ops, and the memory it
hands out is big enough for the largest step, so that only row counts differ between replays.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vkit.kernels.cpu.library import OPCODES, ROWS_LOGITS, ROWS_SEQS, ROWS_TOKENS, Library, Op

_OUT_STRIDE = {"GEMM": 4, "GEMM_PAIRS": 4, "GEMM_EXACT": 4, "DENSE": 7}
"""Where products (whose result is p[3]) keep the distance between its rows."""


class NotRecordable(Exception):
    """The step does something that only plain torch can do; the message names it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Memory an op touches: `row_bytes` from `start` on, again every `stride` bytes, `span` bytes in all."""

    start: int
    stride: int
    row_bytes: int
    span: int

    def overlaps(self, other: Region) -> bool:
        """Whether any byte is in both."""
        if self.start >= other.start + other.span or other.start >= self.start + self.span:
            return False
        if self.stride != other.stride:
            return True
        # Columns of one matrix: rows of both repeat at the same distance.
        offset = (other.start - self.start) % self.stride
        return offset < self.row_bytes or offset + other.row_bytes > self.stride


@dataclass(slots=True)
class Node:
    """An op on a tape."""

    op: Op
    reads: list[Region]
    writes: list[Region]


class Tape(Protocol):
    """Takes ops and provides memory for their results."""

    library: Library

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for an output of this step."""

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Row count and factor of an op over leading dimensions `shape`."""

    def put(self, nodes: Sequence[Node]) -> None:
        """Run the ops, or keep them."""

    def blocks(self, x: Region, kind: int, num_bytes: int) -> tuple[Tensor, bool]:
        """Memory for x in block form, and whether it already holds it."""


class Eager:
    """Runs every op at once."""

    def __init__(self, library: Library) -> None:
        self.library = library

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory."""
        return torch.empty(*shape, dtype=dtype)

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """The product of the dimensions."""
        count = 1
        for size in shape:
            count *= size
        return count, 1

    def put(self, nodes: Sequence[Node]) -> None:
        """Run the ops."""
        self.library.run_now(*[node.op for node in nodes])

    def blocks(self, x: Region, kind: int, num_bytes: int) -> tuple[Tensor, bool]:
        """New memory, never filled yet."""
        return torch.empty(num_bytes, dtype=torch.uint8), False


class Arena:
    """Memory for the outputs of a recording, reused as soon as the recorded step has let go of it.

    Its order of use is the order of the ops, so what the step no longer refers to, no later op reads.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray[tuple[int], np.dtype[np.uint8]]]] = {}
        self._all: list[np.ndarray[tuple[int], np.dtype[np.uint8]]] = []

    def take(self, num_bytes: int) -> Tensor:
        """uint8 memory (num_bytes,), given back when the last tensor over it is gone."""
        size = -(-num_bytes // 64) * 64
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else self._new(size)
        lent = memory.view()  # an object of its own, whose end is the end of the loan
        weakref.finalize(lent, free.append, memory)
        with torch._C.DisableTorchFunction():  # new memory, which a step under recording must not make itself
            return torch.from_numpy(lent)[:num_bytes]

    def take_new(self, num_bytes: int) -> Tensor:
        """uint8 memory (num_bytes,) that was never lent and never will be again."""
        memory = self._new(-(-num_bytes // 64) * 64)
        with torch._C.DisableTorchFunction():
            return torch.from_numpy(memory)[:num_bytes]

    def _new(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        memory = np.empty(size + 64, np.uint8)
        memory = memory[-memory.ctypes.data % 64 :][:size]
        self._all.append(memory)
        return memory

    def holds(self, address: int) -> bool:
        """Whether an address lies in it."""
        return any(memory.ctypes.data <= address < memory.ctypes.data + memory.nbytes for memory in self._all)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(memory.nbytes for memory in self._all)


@dataclass(frozen=True, slots=True)
class StepSizes:
    """Tokens, logits rows and sequences of a step."""

    tokens: int
    logits: int
    seqs: int


@dataclass(slots=True)
class Recording:
    """Keeps ops. Steps of `sizes` are recorded, steps of up to `limits` can be replayed."""

    library: Library
    sizes: StepSizes
    limits: StepSizes
    arena: Arena = field(default_factory=Arena)
    nodes: list[Node] = field(default_factory=list)
    _blocks: list[tuple[Region, int, Tensor]] = field(default_factory=list)
    _loans: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Of every output's memory, by address: its bytes, and the first op that may belong to its present loan."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for the largest step, seen as that of the recorded one."""
        limit, width = self.limit_of(shape[0]), 1
        for size in shape[1:]:
            width *= size
        memory = self.arena.take(limit * width * dtype.itemsize)
        with torch._C.DisableTorchFunction():
            self._loans[memory.data_ptr()] = memory.nbytes, len(self.nodes)
            return memory.view(dtype)[: shape[0] * width].view(*shape)

    def limit_of(self, size: int) -> int:
        """The largest a size of the recorded step can become.

        Raises:
            NotRecordable: it is not one of the step's sizes.
        """
        symbol, times = self.rows((size,))
        limits = {ROWS_TOKENS: self.limits.tokens, ROWS_LOGITS: self.limits.logits, ROWS_SEQS: self.limits.seqs}
        return limits[symbol] * times

    def holds(self, x: Tensor) -> bool:
        """Whether x lies in memory that this recording handed out."""
        return self.arena.holds(x.data_ptr())

    def redirect(self, source: Region, target: Region, address: int, stride: int) -> bool:
        """Make the product that wrote `source` write `target` instead; False if that would change anything else."""
        for index in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[index]
            if any(region.overlaps(source) for region in node.writes):
                break
        else:
            return False
        slot = _OUT_STRIDE.get(OPCODES[node.op.opcode])
        others = self.nodes[index + 1 :]
        is_seen = any(region.overlaps(source) for other in others for region in other.reads)
        is_taken = any(region.overlaps(target) for other in [node, *others] for region in other.reads + other.writes)
        if slot is None or node.writes != [source] or is_seen or is_taken:
            return False
        node.op.p[3], node.op.n[slot], node.writes = address, stride, [target]
        for start, (size, first) in self._loans.items():
            if start <= address < start + size:
                self._loans[start] = size, min(first, index)
        return True

    def set_apart(self, output: Tensor) -> int:
        """Give the step's result memory that no other output of the recording ever had; its new address.

        The caller moves it from step to step, which must move nothing else: an earlier output of the same size may have
        been lent the same memory.
        """
        start = output.data_ptr()
        size, first = self._loans[start]
        shift = self.arena.take_new(size).data_ptr() - start
        for node in self.nodes[first:]:
            for slot, pointer in enumerate(node.op.p):
                if pointer is not None and start <= pointer < start + size:
                    node.op.p[slot] = pointer + shift
            node.reads = [_shifted(region, start, size, shift) for region in node.reads]
            node.writes = [_shifted(region, start, size, shift) for region in node.writes]
        return start + shift

    def rows(self, shape: Sequence[int]) -> tuple[int, int]:
        """Which of the step's sizes the first dimension is (a multiple of), and how many rows each of them has.

        Raises:
            NotRecordable: it is none of them.
        """
        sizes = self.sizes
        symbols = {sizes.tokens: ROWS_TOKENS, sizes.logits: ROWS_LOGITS, sizes.seqs: ROWS_SEQS}
        base = next((size for size in symbols if shape and shape[0] and shape[0] % size == 0), None)
        if base is None:
            raise NotRecordable(f"an operation over rows {tuple(shape)}")
        factor = shape[0] // base
        for size in shape[1:]:
            factor *= size
        return symbols[base], factor

    def put(self, nodes: Sequence[Node]) -> None:
        """Keep the ops."""
        for node in nodes:
            for region in node.writes:
                self._blocks = [entry for entry in self._blocks if not entry[0].overlaps(region)]
            self.nodes.append(node)

    def blocks(self, x: Region, kind: int, num_bytes: int) -> tuple[Tensor, bool]:
        """What an earlier op of the same input filled, or new memory."""
        for region, its_kind, blocks in self._blocks:
            if region == x and its_kind == kind:
                return blocks, True
        blocks = self.arena.take(num_bytes)
        self._blocks.append((x, kind, blocks))
        return blocks, False


def _shifted(region: Region, start: int, size: int, shift: int) -> Region:
    if not start <= region.start < start + size:
        return region
    return replace(region, start=region.start + shift)


current: ContextVar[Recording | None] = ContextVar("vkit_cpu_recording", default=None)
"""The recording under way in this thread, if any."""

"""A forward pass as one native call: recorded once over fixed buffers, then replayed for steps of any size.

The CPU's counterpart of a CUDA graph, except that row counts are read from the step: one recording serves prefill,
decode and every mixture.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from vkit.kernels.cpu.fusion import fuse
from vkit.kernels.cpu.library import Library, Op, Step
from vkit.kernels.cpu.tape import NotRecordable, Recording, StepSizes, current
from vkit.kernels.paged import PagedBatch

logger = logging.getLogger("vkit.kernels")

StepFunction = Callable[[Any], Tensor]

_RECORDED = StepSizes(tokens=31, logits=17, seqs=13)
"""Primes, so that every row count tells which size it comes from."""

_KEPT_LOGITS = 64
"""Rows of logits that have a place of their own; more of them, as all of a prompt's may be, get new memory."""

_TOKEN_FIELDS = ("token_ids", "positions", "slot_mapping")
_LOGITS_FIELDS = ("logits_rows",)
_SEQ_FIELDS = ("seq_lens", "rows", "is_fresh", "state_blocks")
_BATCH_FIELDS = frozenset({*_TOKEN_FIELDS, *_LOGITS_FIELDS, *_SEQ_FIELDS, "cu_seqlens", "paged", "store"})


class StepRunner:
    """Runs steps by replay; by calling the step function itself where it cannot be recorded."""

    def __init__(self, library: Library, step: StepFunction) -> None:
        self._library = library
        self._step = step
        self._program: Program | None = None
        self._refused = False

    def __call__(self, batch: Any) -> Tensor:
        """The step's logits (R, V)."""
        if self._refused or _sizes(batch).tokens == 0:
            return self._step(batch)
        program = self._program
        if program is None or not program.takes(batch):
            self._program = program = self._record(batch)
            if program is None:
                return self._step(batch)
        return program.run(batch)

    def _record(self, batch: Any) -> Program | None:
        before = None if self._program is None else self._program.limits
        self._program = None  # its memory goes before that of the next one comes
        try:
            program = Program(self._library, self._step, batch, _limits(_sizes(batch), before))
        except NotRecordable as reason:
            logger.info("steps run op by op: %s", reason)
            self._refused = True
            return None
        logger.debug("recorded %d native operations", program.num_ops)
        # Our threads and torch's would spin beside each other on the same cores.
        torch.set_num_threads(1)
        return program


class Program:
    """The recorded ops and the buffers that steps are copied into."""

    def __init__(self, library: Library, step: StepFunction, batch: Any, limits: StepSizes) -> None:
        """Record `step`.

        Raises:
            NotRecordable: it does something that only plain torch can do.
        """
        self.limits = limits
        self._library = library
        self._inputs = _Inputs(batch, limits)
        self._tables = [paged.block_table for paged in batch.paged if paged is not None]  # so that no id is used again
        self._table_ids = [id(table) for table in self._tables]
        recording = Recording(library, _RECORDED, limits)
        token = current.set(recording)
        try:
            with _OnlyViews():
                logits = step(self._inputs.recorded(batch))
        finally:
            current.reset(token)
        if logits.shape[0] != _RECORDED.logits or not recording.holds(logits):
            raise NotRecordable("the logits are not the result of a native operation")
        start = recording.set_apart(logits)
        nodes = fuse(recording.nodes, keep=start)
        self.num_ops = len(nodes)
        self._ops = (Op * len(nodes))(*[node.op for node in nodes])
        self._arena = recording.arena  # the ops point into it
        self._sizes = Step(0, 0, 0)
        self._place_logits(start, logits.shape[1])

    def _place_logits(self, start: int, width: int) -> None:
        """Find who writes the logits, so that steps can take turns between two places."""
        size = self.limits.logits * width * 4
        self._width = width
        # Two, since a step's logits are read while the next one runs; new memory would come with new pages each time.
        self._logits = [torch.empty(_KEPT_LOGITS, width) for _ in range(2)]
        self._turn = 0
        self._slots = [
            (index, slot, pointer - start)
            for index, op in enumerate(self._ops)
            for slot, pointer in enumerate(op.p)
            if pointer is not None and start <= pointer < start + size
        ]

    def takes(self, batch: Any) -> bool:
        """Whether the step fits the buffers, and the cache is where it was."""
        sizes, limits = _sizes(batch), self.limits
        if sizes.tokens > limits.tokens or sizes.logits > limits.logits or sizes.seqs > limits.seqs:
            return False
        return [id(paged.block_table) for paged in batch.paged if paged is not None] == self._table_ids

    def run(self, batch: Any) -> Tensor:
        """The step's logits (R, V); the memory is used again by the step after next."""
        sizes = _sizes(batch)
        self._inputs.fill(batch)
        self._turn ^= 1
        many = sizes.logits > _KEPT_LOGITS
        logits = torch.empty(sizes.logits, self._width) if many else self._logits[self._turn][: sizes.logits]
        address = logits.data_ptr()
        for index, slot, offset in self._slots:
            self._ops[index].p[slot] = address + offset
        step = self._sizes
        step.num_tokens, step.num_logits, step.num_seqs = sizes.tokens, sizes.logits, sizes.seqs
        self._library.run(self._ops, step)
        return logits


class _Inputs:
    """Fixed memory for the small tensors of a step."""

    def __init__(self, batch: Any, limits: StepSizes) -> None:
        names = {item.name for item in dataclasses.fields(batch)} - _BATCH_FIELDS
        unknown = sorted(name for name in names if list(_tensors(getattr(batch, name))))
        if unknown:
            raise NotRecordable(f"batches with {', '.join(unknown)}")
        self._limits = limits
        self._fixed: dict[tuple[int, str], np.ndarray[Any, Any]] = {}
        for where, holder in _holders(batch):
            for name in _fields_of(holder):
                value: Tensor = getattr(holder, name)
                self._fixed[where, name] = np.zeros(_limit(name, limits), value.numpy().dtype)
        for where, blocks in _states(batch):
            self._fixed[where, "state_blocks"] = np.zeros(limits.seqs, blocks.numpy().dtype)
        self._addresses = {key: array.ctypes.data for key, array in self._fixed.items()}

    def recorded(self, batch: Any) -> Any:
        """A batch of the recorded sizes over the fixed memory; its values mean nothing."""
        parts = {where: self._replaced(holder, where) for where, holder in _holders(batch)}
        paged = [None if group is None else parts[index] for index, group in enumerate(batch.paged)]
        states: list[Tensor | None] = [None] * len(batch.state_blocks)
        for where, _ in _states(batch):
            states[where] = torch.from_numpy(self._fixed[where, "state_blocks"])[: _RECORDED.seqs]
        return dataclasses.replace(parts[-1], paged=paged, state_blocks=states)

    def _replaced(self, holder: Any, where: int) -> Any:
        names = _fields_of(holder)
        values: dict[str, Any] = {
            name: torch.from_numpy(self._fixed[where, name])[: _limit(name, _RECORDED)] for name in names
        }
        if isinstance(holder, PagedBatch):
            seqs, tokens = _RECORDED.seqs, _RECORDED.tokens
            values["host_rows"], values["host_seq_lens"] = [0] * seqs, [tokens] * seqs
            values["host_cu_seqlens"] = [0] * seqs + [tokens]
            values["memo"] = {}
        return dataclasses.replace(holder, **values)

    def fill(self, batch: Any) -> None:
        """Copy a step in."""
        sizes, holders = _sizes(batch), dict(_holders(batch))
        for (where, name), fixed in self._addresses.items():
            value = batch.state_blocks[where] if name == "state_blocks" else getattr(holders[where], name)
            ctypes.memmove(fixed, value.data_ptr(), _limit(name, sizes) * value.itemsize)


_HOST_READS = frozenset(
    {"item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__", "__array__", "equal"}
)


_HARMLESS = frozenset(
    {
        *(torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.element_size, torch.Tensor.is_contiguous),
        *(torch.Tensor.numel, torch.Tensor.view, torch.Tensor.unflatten, torch.Tensor.unsqueeze),
        *(getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "ndim", "device", "is_cuda")),
    }
)
"""Most of what is called while a step is recorded: facts and views, which need no look at their result."""


class _OnlyViews(TorchFunctionMode):
    """Refuses whatever torch would compute, and values read on the host: only views and facts about tensors pass.

    A mode over functions and not over dispatch: the latter imports the compiler, which takes longer than the recording.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _HARMLESS:
            return result
        with torch._C.DisableTorchFunction():
            known = {x.untyped_storage().data_ptr() for x in _tensors([args, kwargs])}
            is_new = any(x.untyped_storage().data_ptr() not in known for x in _tensors([result]))
        if is_new or getattr(func, "__name__", "") in _HOST_READS:
            raise NotRecordable(resolve_name(func) or str(func))
        return result


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _holders(batch: Any) -> Iterable[tuple[int, Any]]:
    """The batch (-1) and its cache groups."""
    yield -1, batch
    yield from ((index, group) for index, group in enumerate(batch.paged) if group is not None)


def _states(batch: Any) -> Iterable[tuple[int, Tensor]]:
    """The state blocks of the groups that keep states."""
    return ((index, blocks) for index, blocks in enumerate(batch.state_blocks) if blocks is not None)


def _fields_of(holder: Any) -> tuple[str, ...]:
    if isinstance(holder, PagedBatch):
        return ("rows", "slot_mapping", "seq_lens", "cu_seqlens")
    return ("token_ids", "positions", "cu_seqlens", "seq_lens", "rows", "is_fresh", "logits_rows")


def _limit(name: str, sizes: StepSizes) -> int:
    if name in _TOKEN_FIELDS:
        return sizes.tokens
    if name in _LOGITS_FIELDS:
        return sizes.logits
    return sizes.seqs + (name == "cu_seqlens")


def _sizes(batch: Any) -> StepSizes:
    return StepSizes(batch.token_ids.shape[0], batch.logits_rows.shape[0], batch.seq_lens.shape[0])


def _limits(sizes: StepSizes, before: StepSizes | None) -> StepSizes:
    """Powers of two that hold the step, everything seen before and the recorded sizes."""

    def enough(size: int, least: int) -> int:
        return max(least, 1 << (size - 1).bit_length())

    tokens, logits, seqs = enough(sizes.tokens, 64), enough(sizes.logits, 32), enough(sizes.seqs, 16)
    if before is None:
        return StepSizes(tokens, logits, seqs)
    return StepSizes(max(tokens, before.tokens), max(logits, before.logits), max(seqs, before.seqs))

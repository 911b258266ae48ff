"""What is uploaded is what was given, in one copy, although the copy happens later than it was asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from vkit.block_table import BlockTable
from vkit.decode_inputs import DecodeInputs, DecodeShape
from vkit.staging import ALIGNMENT, NUM_BUFFERS, Staging, packed_bytes

CPU = torch.device("cpu")


class LateCopier:
    """Copies when it is waited for, as a device does that is busy with something else."""

    def __init__(self) -> None:
        self.pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_copies = 0
        self.num_waits = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        job = (target, source)
        self.pending.append(job)
        self.num_copies += 1

        def wait() -> None:
            self.num_waits += 1
            while any(found is job for found in self.pending):  # in the order they were asked for
                self._do()

        return wait

    def _do(self) -> None:
        target, source = self.pending.pop(0)
        target.copy_(source)

    def finish(self) -> None:
        while self.pending:
            self._do()


def arrays(rng: np.random.Generator, count: int) -> list[NDArray[Any]]:
    return [
        rng.integers(-(2**60), 2**60, count),
        rng.integers(-9, 9, count + 1).astype(np.int32),
        rng.integers(0, 2, count).astype(bool),
        np.zeros(0, np.int64),
        rng.integers(0, 5, (3, count)),
    ]


def test_buffers_are_not_written_while_a_copy_reads_them() -> None:
    copier, rng = LateCopier(), np.random.default_rng(0)
    staging = Staging(CPU, copier)
    steps = []
    for step in range(12):
        given = arrays(rng, 1 + 700 * (step % 4))
        before = copier.num_copies
        found = staging.upload(given)
        assert copier.num_copies == before + 1, "one copy per step"
        assert all(part.data_ptr() % ALIGNMENT == 0 for part in found if part.numel())
        steps.append(([array.copy() for array in given], found))
        for array in given:
            array.fill(1)  # the caller may use its arrays again at once
        assert len(copier.pending) <= NUM_BUFFERS
    copier.finish()
    for given, found in steps:
        for array, part in zip(given, found, strict=True):
            assert np.array_equal(array, part.numpy())


def test_fixed_memory_gets_the_same_places_each_time() -> None:
    copier, rng = LateCopier(), np.random.default_rng(1)
    staging = Staging(CPU, copier)
    memory = torch.zeros(4096, dtype=torch.uint8)
    first, second = (staging.upload(arrays(rng, 9), memory) for _ in range(2))
    assert [part.data_ptr() for part in first] == [part.data_ptr() for part in second]
    assert first[0].data_ptr() == memory.data_ptr()
    with pytest.raises(ValueError, match="expected at most 4096"):
        staging.upload([np.zeros(513, np.int64)], memory)


def test_a_host_copies_nothing() -> None:
    array = np.arange(5)
    (found,) = Staging(CPU).upload([array])
    array[2] = 77
    assert found.tolist() == [0, 1, 77, 3, 4]


def test_padding_is_written_anew_in_every_step() -> None:
    inputs = DecodeInputs(6, 2, 1, padding_row=9, device=CPU)
    rng = np.random.default_rng(2)
    for count, size in ((5, 6), (2, 6), (0, 4), (3, 3), (1, 4)):
        for array in inputs._arrays:
            array.fill(array.dtype == bool or -7)
        ids, starts, rows = (rng.integers(0, 50, count) for _ in range(3))
        slots, states = [rng.integers(0, 50, count) for _ in range(2)], [rng.integers(1, 50, count)]
        starts[:1] = 0
        staged = inputs.filled(size, ids, starts, starts + 100, rows, slots, states)
        Staging(CPU).upload(staged, inputs.memory)
        fields = inputs.fields(DecodeShape(size, 64))
        pads = size - count
        assert fields.token_ids.tolist() == [*ids, *[0] * pads]
        assert fields.positions.tolist() == [*(starts + 100), *[0] * pads]
        assert [found.tolist() for found in fields.slots] == [[*own, *[-1] * pads] for own in slots]
        assert [found.tolist() for found in fields.states] == [[*own, *[0] * pads] for own in states]
        assert fields.rows.tolist() == [*rows, *[9] * pads]
        assert fields.seq_lens.tolist() == [*(starts + 1), *[0] * pads]
        assert fields.is_fresh.tolist() == [*(starts == 0), *[True] * pads]
        assert fields.cu_seqlens.tolist() == list(range(size + 1))
        assert fields.logits_rows.tolist() == list(range(size))


def test_changes_of_tables_may_be_more_than_the_fixed_memory_holds() -> None:
    """They then travel in a copy of their own."""
    from tests.fakes import FULL
    from vkit.batch import BatchBuilder
    from vkit.sequence import Plan, ScheduledSequence, Sequence
    from vkit.types import SamplingParams

    class Store:
        groups = FULL

    builder = BatchBuilder(FULL, Store(), block_size=1, max_num_seqs=2, max_model_len=500, device=CPU)  # type: ignore[arg-type]
    builder._tables = [BlockTable(3, 500, CPU, is_shared=False)]
    builder.reserve_decode_inputs(2)
    blocks = list(range(1, 301))
    sequence = Sequence("a", [5] * 300, 1, SamplingParams(), 0.0, block_ids=[blocks])
    builder.fill_decode_inputs(Plan(1, [ScheduledSequence(sequence, 299, 1, 1, True)]), 2)
    table = builder._tables[0]
    assert packed_bytes([np.zeros(300, np.int64)]) > builder._inputs.memory.shape[0] // 2  # type: ignore[union-attr]
    assert table.device[:, :300].tolist() == table.host[:, :300].tolist()
    fields = builder._inputs.fields(DecodeShape(2, 500))  # type: ignore[union-attr]
    assert fields.slots[0].tolist() == [300, -1]
    assert fields.rows.tolist() == [0, 2]
    assert not table.device[2].any()

"""From plans to tensors: ids, positions, slots, rows of the block tables, whatever happens to the sequences."""

from __future__ import annotations

import random

import pytest
import torch

from vkit.batch import Batch, BatchBuilder
from vkit.block_table import BlockTable
from vkit.cache.groups import CacheKind, LayerCacheSpec, TensorSpec
from vkit.cache.store import TensorStore
from vkit.sequence import Plan, ScheduledSequence, Sequence, SequenceStatus
from vkit.types import SamplingParams

BLOCK_SIZE = 4
HEADS = TensorSpec("k", (1, 2), "float32", 4), TensorSpec("v", (1, 2), "float32", 4)
FULL = LayerCacheSpec(CacheKind.FULL, HEADS)
SLIDING = LayerCacheSpec(CacheKind.SLIDING, HEADS, window=5)
STATE = LayerCacheSpec(CacheKind.STATE, (TensorSpec("conv", (3, 2), "float32", 4),))


def make_builder(specs: list[LayerCacheSpec | None], max_num_seqs: int = 3, max_model_len: int = 64) -> BatchBuilder:
    store = TensorStore(specs, num_blocks=100, block_size=BLOCK_SIZE, device=torch.device("cpu"))
    return BatchBuilder(
        store.groups,
        store,
        block_size=BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        device=torch.device("cpu"),
    )


def make_sequence(name: str, num_tokens: int, *block_ids: list[int]) -> Sequence:
    tokens = [100 * (ord(name[0]) - 96) + i for i in range(num_tokens)]
    return Sequence(name, tokens, num_tokens, SamplingParams(), 0.0, block_ids=list(block_ids))


def share(sequence: Sequence, start: int, count: int, num_logits: int = 1, num_drafts: int = 0) -> ScheduledSequence:
    return ScheduledSequence(sequence, start, count, num_logits, num_logits > 0, num_drafts)


def table_row(batch: Batch, group: int, b: int, count: int) -> list[int]:
    paged = batch.paged[group]
    assert paged is not None
    return paged.block_table[int(paged.rows[b]), :count].tolist()


def test_mixed_plan() -> None:
    builder = make_builder([FULL])
    a, b, c = make_sequence("a", 9, [7, 3, 9]), make_sequence("b", 6, [5, 2]), make_sequence("c", 3, [4])
    c.draft_token_ids = [77, 78]
    plan = Plan(0, [share(a, 8, 1), share(b, 1, 4, num_logits=0), share(c, 2, 3, num_logits=3, num_drafts=2)])
    c.block_ids[0].append(11)
    batch = builder.build(plan)
    assert batch.token_ids.tolist() == [108, 201, 202, 203, 204, 302, 77, 78]
    assert batch.positions.tolist() == [8, 1, 2, 3, 4, 2, 3, 4]
    assert batch.cu_seqlens.tolist() == [0, 1, 5, 8]
    assert batch.seq_lens.tolist() == [9, 5, 5]
    assert batch.logits_rows.tolist() == [0, 5, 6, 7]
    assert batch.is_fresh.tolist() == [False, False, False]
    paged = batch.paged[0]
    assert paged is not None
    assert paged.slot_mapping.tolist() == [36, 21, 22, 23, 8, 18, 19, 44]
    assert [table_row(batch, 0, row, 2) for row in range(3)] == [[7, 3], [5, 2], [4, 11]]
    assert (paged.host_rows, paged.host_seq_lens, paged.host_cu_seqlens) == (
        paged.rows.tolist(),
        batch.seq_lens.tolist(),
        batch.cu_seqlens.tolist(),
    )


def test_empty_plan() -> None:
    batch = make_builder([FULL]).build(Plan(0, []))
    assert batch.token_ids.shape == batch.logits_rows.shape == (0,)
    assert batch.cu_seqlens.tolist() == [0]


def test_groups_and_states() -> None:
    builder = make_builder([FULL, SLIDING, STATE, None, FULL, SLIDING])
    sequence = make_sequence("a", 8, [1, 2], [0, 3], [9])
    batch = builder.build(Plan(0, [share(sequence, 0, 5)]))
    assert batch.is_fresh.tolist() == [True]
    assert [paged is None for paged in batch.paged] == [False, False, True]
    tensors, states = batch.states(2)
    assert states.blocks.tolist() == [9]
    assert states.host_cu_seqlens == [0, 5]
    assert tensors["conv"].shape == (100, 3, 2)
    assert table_row(batch, 1, 0, 2) == [0, 3]
    assert batch.kv(4)[2] is batch.kv(0)[2]
    assert batch.kv(0)[0].data_ptr() != batch.kv(4)[0].data_ptr()


def test_rows_are_kept_and_given_back() -> None:
    builder = make_builder([FULL], max_num_seqs=2)
    a, b, c = (make_sequence(name, 4, [ord(name) - 96]) for name in "abc")
    first = builder.build(Plan(0, [share(a, 0, 4), share(b, 0, 4)]))
    a.token_ids.append(1)
    a.block_ids[0].append(8)
    second = builder.build(Plan(1, [share(a, 4, 1)]))
    assert second.rows.tolist() == first.rows.tolist()[:1]
    assert table_row(second, 0, 0, 2) == [1, 8]
    third = builder.build(Plan(2, [share(c, 0, 4)], finished_ids=["b"]))
    assert third.rows.tolist() == first.rows.tolist()[1:]
    assert table_row(third, 0, 0, 1) == [3]
    a.status = c.status = SequenceStatus.RUNNING
    with pytest.raises(RuntimeError, match="more running sequences than the 2 rows"):
        builder.build(Plan(3, [share(make_sequence("d", 4, [4]), 0, 4)]))


def test_a_preempted_sequence_gets_its_new_blocks() -> None:
    builder = make_builder([FULL], max_num_seqs=1)
    a, b = make_sequence("a", 8, [1, 2]), make_sequence("b", 4, [2])
    builder.build(Plan(0, [share(a, 0, 8)]))
    a.status, a.num_preemptions, a.block_ids = SequenceStatus.PREEMPTED, 1, []
    b.status = SequenceStatus.RUNNING
    assert table_row(builder.build(Plan(1, [share(b, 0, 4)])), 0, 0, 1) == [2]
    a.status, a.block_ids = SequenceStatus.RUNNING, [[5, 6]]
    assert table_row(builder.build(Plan(2, [share(a, 0, 8)], finished_ids=["b"])), 0, 0, 2) == [5, 6]


def test_a_reused_id_is_another_sequence() -> None:
    builder = make_builder([FULL])
    builder.build(Plan(0, [share(make_sequence("a", 8, [1, 2]), 0, 8)]))
    batch = builder.build(Plan(1, [share(make_sequence("a", 8, [4, 2]), 0, 8)]))
    assert table_row(batch, 0, 0, 2) == [4, 2]


def test_random_lives() -> None:
    """Growth, nulling, preemption and endings in random order: a table always equals the sequence's list."""
    rng = random.Random(4)
    builder = make_builder([FULL, SLIDING], max_num_seqs=5)
    live: dict[str, Sequence] = {}
    finished: list[str] = []
    for step in range(400):
        if len(live) < 5 and rng.random() < 0.4:
            sequence = make_sequence(f"{chr(97 + step % 26)}{step}", 1, [], [])
            sequence.status = SequenceStatus.RUNNING
            live[sequence.id] = sequence
        shares = []
        for sequence in rng.sample(list(live.values()), k=len(live)):
            if rng.random() < 0.1:
                sequence.block_ids, sequence.num_computed_tokens = [[], []], 0
                sequence.num_preemptions += 1
            start = sequence.num_computed_tokens
            count = rng.randint(1, 6)
            if start + count > 64 or rng.random() < 0.05:
                finished.append(sequence.id)
                del live[sequence.id]
                continue
            sequence.token_ids.extend(range(start + count - sequence.num_tokens))
            for table in sequence.block_ids:
                table.extend(rng.randint(1, 99) for _ in range(-(-(start + count) // BLOCK_SIZE) - len(table)))
            for index in range(max(0, start - 4) // BLOCK_SIZE):
                sequence.block_ids[1][index] = 0
            sequence.num_computed_tokens += count
            shares.append(share(sequence, start, count))
        batch = builder.build(Plan(step, shares, finished))
        finished = []
        assert len(set(batch.rows.tolist())) == len(shares)
        at = 0
        for b, item in enumerate(shares):
            for group, table in enumerate(item.sequence.block_ids):
                first = 0 if group == 0 else max(0, item.start - 4) // BLOCK_SIZE
                assert table_row(batch, group, b, len(table))[first:] == table[first:]
                paged = batch.paged[group]
                assert paged is not None
                for position in range(item.start, item.start + item.num_tokens):
                    slot = int(paged.slot_mapping[at + position - item.start])
                    assert slot == table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
            at += item.num_tokens


def test_a_table_that_is_not_shared_is_brought_up_to_date() -> None:
    table = BlockTable(3, 8, torch.device("cpu"), is_shared=False)
    assert table.take_changes() is None
    table.write(1, 2, [5, 6])
    table.write(1, 3, [7, 6])  # the same place twice, and not with the same id
    table.write(1, 3, [6, 0])
    table.write(2, 0, [9])
    assert not table.device.any()
    changes = table.take_changes()
    assert changes is not None
    table.apply(*map(torch.from_numpy, changes))
    assert table.take_changes() is None
    assert table.device.tolist() == table.host.tolist()
    assert table.device[1].tolist() == [0, 0, 5, 6, 0, 0, 0, 0]

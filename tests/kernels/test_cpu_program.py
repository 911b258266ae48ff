"""A recorded step gives the bits of the eager one, whatever its size; what cannot be recorded still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.library import OPCODES, Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.program import Program, StepRunner
from vkit.kernels.paged import PagedBatch

HIDDEN, FFN, HEADS, KV_HEADS, DIM, VOCAB, BLOCK = 64, 96, 4, 2, 16, 50, 8


@dataclass
class Batch:
    """Shaped like the engine's."""

    token_ids: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    seq_lens: Tensor
    rows: Tensor
    is_fresh: Tensor
    logits_rows: Tensor
    paged: list[PagedBatch | None]
    state_blocks: list[Tensor | None] = field(default_factory=lambda: [None])
    store: object = None


class TinyModel:
    """Two layers of a decoder over Q8_0 and plain weights, written in ops only."""

    def __init__(self, ops: Operations, golden: dict[str, Tensor], vocab: int = VOCAB) -> None:
        torch.manual_seed(1)
        self.ops = ops
        self.golden = golden
        self.tables = [torch.zeros(6, 40, dtype=torch.int32)]
        self.embed = torch.randn(vocab, HIDDEN)
        self.qkv = [self.packed(width) for width in (HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM)]
        self.out, self.gate, self.up = self.packed(HIDDEN), self.packed(FFN), self.packed(FFN)
        self.down, self.head = self.packed(HIDDEN, FFN), torch.randn(vocab, HIDDEN).bfloat16()
        self.norm = torch.randn(HIDDEN)
        self.cos_sin = torch.randn(400, DIM)
        self.caches = [[torch.zeros(60, BLOCK, KV_HEADS, DIM) for _ in range(2)] for _ in range(2)]

    def packed(self, rows: int, columns: int = HIDDEN) -> Tensor:
        raw = self.golden["Q8_0.raw"]
        return raw[torch.randint(0, len(raw), (rows, columns // 32))].flatten(1)

    def step(self, batch: Batch) -> Tensor:
        ops, paged = self.ops, batch.paged[0]
        assert paged is not None
        residual = ops.embedding(batch.token_ids, self.embed, torch.float32)
        x = ops.rms_norm(residual, self.norm, 1e-6)
        for k_cache, v_cache in self.caches:
            qkv = ops.concat([ops.quantized_linear(x, weight, "Q8_0") for weight in self.qkv])
            q, k, v = (
                part.view(len(x), -1, DIM) for part in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
            )
            ops.rope(q, k, batch.positions, self.cos_sin)
            ops.write_kv(k, v, k_cache, v_cache, paged.slot_mapping)
            attended = ops.paged_attention(q, k_cache, v_cache, paged, DIM**-0.5)
            x = ops.quantized_linear(attended.flatten(1), self.out, "Q8_0")
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-6)
            gates = ops.concat([ops.quantized_linear(x, weight, "Q8_0") for weight in (self.gate, self.up)])
            x = ops.quantized_linear(ops.silu_and_mul(gates), self.down, "Q8_0")
            x, residual = ops.add_rms_norm(x, residual, self.norm, 1e-6)
        return ops.linear(ops.embedding(batch.logits_rows, x, torch.float32), self.head)

    def batch(self, queries: list[int], lengths: list[int]) -> Batch:
        count = len(queries)
        rows = torch.arange(count, dtype=torch.int32)
        for b in range(count):
            self.tables[0][b] = torch.arange(1 + b, 41 + b).roll(b)  # overlapping blocks: only bits are compared
        cu = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=torch.int32)
        lens = torch.tensor(lengths, dtype=torch.int32)
        spans = [(b, length - n, length) for b, (n, length) in enumerate(zip(queries, lengths, strict=True))]
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans])
        slots = torch.cat(
            [
                self.tables[0][b, torch.arange(s, e) // BLOCK].long() * BLOCK + torch.arange(s, e) % BLOCK
                for b, s, e in spans
            ]
        )
        paged = PagedBatch(self.tables[0], rows, slots, lens, cu, rows.tolist(), lengths, cu.tolist())
        ids = torch.randint(0, VOCAB, (sum(queries),))
        return Batch(ids, positions, cu, lens, rows, lens == torch.tensor(queries), cu[1:].long() - 1, [paged])


@pytest.fixture
def model(operations: Operations, golden_blocks: dict[str, Tensor]) -> TinyModel:
    return TinyModel(operations, golden_blocks)


STEPS = [
    ([5], [5]),
    ([1], [6]),
    ([20, 1, 3], [20, 7, 3]),
    ([90], [110]),
    ([1, 1, 1, 1], [200, 8, 111, 2]),
    ([300], [300]),
]


@pytest.mark.parametrize("num_threads", [1, 3], indirect=True)
def test_replay_equals_eager(model: TinyModel, library: Library, level: str, num_threads: int) -> None:
    runner = StepRunner(library, model.step)
    for queries, lengths in STEPS:
        batch = model.batch(queries, lengths)
        caches = [cache for pair in model.caches for cache in pair]
        before = [cache.clone() for cache in caches]
        expected = model.step(batch)
        after = [cache.clone() for cache in caches]
        for cache, old in zip(caches, before, strict=True):
            cache.copy_(old)
        assert torch.equal(runner(batch), expected)
        assert all(torch.equal(cache, new) for cache, new in zip(caches, after, strict=True))
    assert runner._program is not None


def test_what_is_fused(model: TinyModel, library: Library) -> None:
    runner = StepRunner(library, model.step)
    runner(model.batch([3], [3]))
    assert runner._program is not None
    names = [OPCODES[op.opcode] for op in runner._program._ops]
    layer = [
        *("GEMM", "GEMM", "GEMM", "ROPE", "WRITE_KV", "ATTENTION", "ATTENTION_JOIN", "QUANTIZE", "GEMM"),
        *("RMS_NORM", "GEMM", "QUANTIZE", "GEMM", "RMS_NORM"),
    ]
    assert names == ["EMBED", "RMS_NORM", *layer, *layer, "EMBED", "QUANTIZE", "GEMM_PAIRS"]
    flags = [op.flags for op in runner._program._ops]
    assert flags[2:5] == [0, 1, 1]
    assert runner._program._ops[1].p[3] is None  # nobody wants the first norm's plain result


def test_logits_hold_until_the_step_after_next(model: TinyModel, library: Library) -> None:
    runner = StepRunner(library, model.step)
    first = runner(model.batch([4], [4]))
    kept = first.clone()
    second = runner(model.batch([4], [9]))
    assert torch.equal(first, kept)
    assert not torch.equal(second, kept)
    many = model.batch([70], [70])
    many.logits_rows = torch.arange(70)
    assert torch.equal(runner(many), model.step(many))


@pytest.mark.parametrize("vocab", [2 * HIDDEN, 2 * FFN, 4 * FFN])
def test_logits_share_no_memory_with_earlier_results(
    operations: Operations, golden_blocks: dict[str, Tensor], library: Library, vocab: int
) -> None:
    # 32 rows of logits take as many bytes as 64 tokens of the hidden state, of the gated product, of gate and up.
    model = TinyModel(operations, golden_blocks, vocab)
    runner = StepRunner(library, model.step)
    batch = model.batch([4], [4])
    assert torch.equal(runner(batch), model.step(batch))
    assert runner._program is not None
    assert {index for index, _, _ in runner._program._slots} == {runner._program.num_ops - 1}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda logits: logits + 1, id="torch arithmetic"),
        pytest.param(lambda logits: logits if float(logits[0, 0]) < 1e9 else logits[:1], id="a value read on the host"),
        pytest.param(lambda logits: logits.t().contiguous().t(), id="a copy"),
    ],
)
def test_torch_in_between_is_run_op_by_op(
    model: TinyModel, library: Library, spoil: Callable[[Tensor], Tensor]
) -> None:
    def step(batch: Any) -> Tensor:
        return spoil(model.step(batch))

    runner = StepRunner(library, step)
    batch = model.batch([4, 1], [4, 9])
    assert torch.equal(runner(batch), step(batch))
    assert runner._program is None
    assert torch.equal(runner(batch), step(batch))


def test_growing_steps_record_again(model: TinyModel, library: Library) -> None:
    runner = StepRunner(library, model.step)
    runner(model.batch([4], [4]))
    small = runner._program
    assert small is not None
    runner(model.batch([64], [64]))
    assert runner._program is small
    runner(model.batch([65], [65]))
    large = runner._program
    assert isinstance(large, Program)
    assert large is not small
    runner(model.batch([1], [4]))
    assert runner._program is large


def test_a_moved_block_table_records_again(model: TinyModel, library: Library) -> None:
    runner = StepRunner(library, model.step)
    runner(model.batch([4], [4]))
    model.tables[0] = torch.zeros(6, 40, dtype=torch.int32)
    batch = model.batch([2], [60])
    assert torch.equal(runner(batch), model.step(batch))

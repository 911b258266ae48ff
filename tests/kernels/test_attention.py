"""Paged attention against a loop over queries in float64, in blocks of random order among recycled garbage."""

from __future__ import annotations

import math

import pytest
import torch

from vkit import kernels
from vkit.kernels import PagedBatch
from vkit.kernels.reference import attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case:
    """Sequences of (query_len, seq_len) in a paged cache whose unused slots hold NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        window: int | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.lengths, self.window = lengths, window
        counts = [-(-seq_len // block_size) for _, seq_len in lengths]
        order = (torch.randperm(sum(counts) + 3, generator=generator) + 1).tolist()
        num_blocks = len(order) + 1
        shape = (num_blocks, block_size, kv_heads, head_dim)
        pages = torch.empty(num_blocks, 2 * block_size * kv_heads * head_dim * dtype.itemsize, dtype=torch.uint8)
        self.k_cache, self.v_cache = kernels.kv_layout(pages, block_size, kv_heads, (head_dim, head_dim), dtype)
        if self.k_cache.shape == shape:
            self.k_cache.fill_(math.nan)
            self.v_cache.fill_(math.nan)
        self.keys = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for _, n in lengths]
        self.values = [torch.randn(n, kv_heads, head_dim, generator=generator).to(dtype) for _, n in lengths]
        num_tokens = sum(q for q, _ in lengths)
        self.q = torch.randn(num_tokens, 2 * heads, head_dim, generator=generator).to(dtype)[:, ::2]  # strided
        table = torch.full((len(lengths) + 2, max(counts, default=1) + 1), 10**6, dtype=torch.int32)
        rows = list(range(len(lengths), 0, -1))
        slots: list[torch.Tensor] = []
        for row, count, (query_len, seq_len), k, v in zip(rows, counts, lengths, self.keys, self.values, strict=True):
            blocks = [order.pop() for _ in range(count)]
            table[row, :count] = torch.tensor(blocks)
            first_seen = 0 if window is None else max(0, seq_len - query_len - window + 1)
            first_seen -= first_seen % block_size  # a block with a visible token is whole
            if window is not None:
                table[row, : first_seen // block_size] = 0
            position = torch.arange(first_seen, seq_len)
            slot = torch.tensor(blocks)[position // block_size] * block_size + position % block_size
            new = seq_len - query_len - first_seen
            kernels.write_kv(k[first_seen : seq_len - query_len], v[first_seen : seq_len - query_len],
                             self.k_cache, self.v_cache, slot[:new])  # fmt: skip
            slots.append(slot[new:])
        cu = [0]
        for query_len, _ in lengths:
            cu.append(cu[-1] + query_len)
        seq_lens = [seq_len for _, seq_len in lengths]
        slot_mapping = torch.cat([torch.empty(0, dtype=torch.int64), *slots])
        int32 = torch.int32
        self.batch = PagedBatch(
            table, torch.tensor(rows, dtype=int32), slot_mapping, torch.tensor(seq_lens, dtype=int32),
            torch.tensor(cu, dtype=int32), rows, seq_lens, cu,
        )  # fmt: skip
        new_k = [k[n - q :] for k, (q, n) in zip(self.keys, lengths, strict=True)]
        new_v = [v[n - q :] for v, (q, n) in zip(self.values, lengths, strict=True)]
        if num_tokens:
            kernels.write_kv(torch.cat(new_k), torch.cat(new_v), self.k_cache, self.v_cache, slot_mapping)

    def run(self, scale: float, soft_cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return kernels.paged_attention(
            self.q, self.k_cache, self.v_cache, self.batch, scale, self.window, soft_cap, sinks
        )

    def expected(self, scale: float, soft_cap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Query by query, head by head."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        at = 0
        for (query_len, seq_len), keys, values in zip(self.lengths, self.keys, self.values, strict=True):
            for position in range(seq_len - query_len, seq_len):
                first = 0 if self.window is None else max(0, position - self.window + 1)
                for head in range(self.q.shape[1]):
                    kv_head = head // (self.q.shape[1] // keys.shape[1])
                    scores = keys[first : position + 1, kv_head].double() @ self.q[at, head].double() * scale
                    if soft_cap is not None:
                        scores = soft_cap * torch.tanh(scores / soft_cap)
                    weights = scores.exp()
                    total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                    out[at, head] = (weights / total) @ values[first : position + 1, kv_head].double()
                at += 1
        return out


LENGTHS = {
    "one token": [(1, 1)],
    "decode": [(1, 3), (1, 40), (1, 17), (1, 200)],
    "prefill": [(9, 9), (17, 17)],
    "mixed": [(1, 33), (6, 20), (1, 4), (3, 3), (2, 50)],
    "nothing": [],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "block_size"), [(4, 4, 8, 4), (6, 2, 20, 16), (3, 1, 64, 5)])
@pytest.mark.parametrize("window", [None, 1, 16])
@pytest.mark.usefixtures("backend")
def test_float32(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None
) -> None:
    case = Case(
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        window=window,
    )
    scale = head_dim**-0.5
    torch.testing.assert_close(case.run(scale).double(), case.expected(scale), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (2.0, False), (None, True), (5.0, True)])
@pytest.mark.usefixtures("backend")
def test_caps_and_sinks(dtype: torch.dtype, window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    lengths = LENGTHS["mixed"]
    case = Case(lengths, heads=4, kv_heads=2, head_dim=16, block_size=4, dtype=dtype, window=window)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 5.0]) if has_sinks else None
    out = case.run(0.3, soft_cap, sinks)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), case.expected(0.3, soft_cap, sinks), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_long_prefill_runs_in_chunks(soft_cap: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_QUERY_CHUNK", 8)
    monkeypatch.setattr(attention, "_MAX_SCORES", 4 * 3 * 40)
    calls: list[int] = []
    attend = attention._attend

    def counted(q: torch.Tensor, *rest: object) -> torch.Tensor:
        calls.append(q.shape[2])
        return attend(q, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(attention, "_attend", counted)
    with kernels.using_backend("cpu", "reference"):
        case = Case([(30, 40)], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32, window=9)
        out = case.run(0.4, soft_cap)
    assert calls == [8, 8, 8, 6]
    torch.testing.assert_close(out.double(), case.expected(0.4, soft_cap), atol=1e-5, rtol=1e-5)


def test_decodes_of_unlike_length_are_not_padded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_MAX_GATHERED_TOKENS", 600)
    with kernels.using_backend("cpu", "reference"):
        case = Case(
            [(1, 300), (1, 5), (1, 310), (1, 7)], heads=2, kv_heads=1, head_dim=8, block_size=16, dtype=torch.float32
        )
        out = case.run(0.3)
        work = attention._work(case.batch, 16, None)
    assert [sorted(group.queries.tolist()) for group in work.decodes] == [[1, 3], [0], [2]]
    torch.testing.assert_close(out.double(), case.expected(0.3), atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("backend")
def test_slot_minus_one_writes_nothing() -> None:
    pages = torch.zeros(3, 2 * 4 * 2 * 8 * 4, dtype=torch.uint8)
    k_cache, v_cache = kernels.kv_layout(pages, 4, 2, (8, 8), torch.float32)
    kernels.write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k_cache, v_cache, torch.tensor([-1, -1]))
    assert not pages.any()
    kernels.write_kv(torch.ones(2, 2, 8), torch.ones(2, 2, 8), k_cache, v_cache, torch.tensor([-1, 5]))
    assert int((pages.view(torch.float32) == 1).sum()) == 2 * 2 * 8
    assert not pages[0].any()
    assert not pages[2].any()


def test_a_padding_row_gives_zeros_and_changes_nothing_else() -> None:
    """A sequence of length zero with one query, as a captured step has in its unused rows."""
    case = Case([(1, 40), (1, 7)], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
    with kernels.using_backend("cpu", "reference"):
        expected = case.run(0.5)
        case.batch.seq_lens[1] = case.batch.host_seq_lens[1] = 0
        case.batch.block_table[case.batch.host_rows[1]] = 10**6
        case.batch.memo.clear()
        found = case.run(0.5)
    assert not found[1].any()
    assert torch.equal(found[0], expected[0])


def test_errors_name_op_argument_got_and_wanted() -> None:
    case = Case([(2, 5)], heads=4, kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
    arguments = (case.k_cache, case.v_cache, case.batch, 1.0)
    with pytest.raises(ValueError, match=r"paged_attention: q \(1, 4, 8\), expected \(2, heads, width\)"):
        kernels.paged_attention(case.q[:1], *arguments)
    with pytest.raises(ValueError, match=r"paged_attention: window 0, expected at least 1"):
        kernels.paged_attention(case.q, *arguments, window=0)
    with pytest.raises(ValueError, match=r"paged_attention: soft_cap -1.0, expected a positive number"):
        kernels.paged_attention(case.q, *arguments, soft_cap=-1.0)
    with pytest.raises(ValueError, match=r"paged_attention: sinks \(3,\), expected \(4,\)"):
        kernels.paged_attention(case.q, *arguments, sinks=torch.zeros(3))
    k = torch.randn(2, 2, 8)
    with pytest.raises(TypeError, match=r"write_kv: slot_mapping of torch.int32, expected torch.int64"):
        kernels.write_kv(k, k, case.k_cache, case.v_cache, torch.tensor([1, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"write_kv: slot_mapping \(1,\), expected \(2,\)"):
        kernels.write_kv(k, k, case.k_cache, case.v_cache, torch.tensor([1]))
    with pytest.raises(ValueError, match=r"write_kv: v \(2, 1, 8\), expected \(2, 2\) and a width"):
        kernels.write_kv(k, k[:, :1], case.k_cache, case.v_cache, torch.tensor([1, 2]))

"""What attention promises beyond agreeing with the reference; chunks are small, so that few keys are many parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from vkit.kernels.cases import CASES, NARROW, Shape, Source, attention_arguments, judge, latent_arguments
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference import OPS as REFERENCE

SPLIT = Shape(((1, 60), (3, 33), (1, 16)), 6, 2, 20, 20, 4)


def arguments(shape: Shape, dtype: torch.dtype = torch.float32) -> tuple[object, ...]:
    return attention_arguments(Source(torch.device("cpu"), dtype, torch.Generator().manual_seed(3)), shape)


def alone(batch: PagedBatch, index: int) -> PagedBatch:
    """The batch of one of its sequences."""
    start, stop = batch.host_cu_seqlens[index : index + 2]
    return replace(
        batch,
        rows=batch.rows[index : index + 1],
        seq_lens=batch.seq_lens[index : index + 1],
        cu_seqlens=torch.tensor([0, stop - start], dtype=torch.int32),
        host_rows=[batch.host_rows[index]],
        host_seq_lens=[batch.host_seq_lens[index]],
        host_cu_seqlens=[0, stop - start],
        memo={},
    )


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (2.0, True)])
def test_parts_are_merged(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    from vkit.kernels.triton.paged import paged_attention

    given = arguments(replace(SPLIT, window=window, soft_cap=soft_cap, has_sinks=has_sinks))
    expected = REFERENCE["paged_attention"](*given)
    torch.testing.assert_close(paged_attention(*given, chunk=16), expected, atol=1e-5, rtol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_result_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    from vkit.kernels.triton.paged import paged_attention

    shape = replace(SPLIT, lengths=((1, 60), (3, 16), (20, 40)), has_sinks=True)
    q, k_cache, v_cache, batch, *settings = arguments(shape, dtype)
    assert isinstance(batch, PagedBatch)
    assert isinstance(q, torch.Tensor)
    together = paged_attention(q, k_cache, v_cache, batch, *settings, chunk=16)  # type: ignore[arg-type]
    for index in range(len(shape.lengths)):
        start, stop = batch.host_cu_seqlens[index : index + 2]
        own = paged_attention(q[start:stop], k_cache, v_cache, alone(batch, index), *settings, chunk=16)  # type: ignore[arg-type]
        assert torch.equal(own, together[start:stop])


@pytest.mark.parametrize("length", [33, 47, 48, 63])
def test_lengths_on_the_host_are_bounds(length: int) -> None:
    """As in a captured step: with a window, a shorter sequence may lie across more chunks than the longest."""
    from vkit.kernels.triton.paged import paged_attention

    given = arguments(replace(SPLIT, lengths=((1, length), (1, 5)), window=16))
    expected = REFERENCE["paged_attention"](*given)
    batch = given[3]
    assert isinstance(batch, PagedBatch)
    batch.memo.clear()
    batch.host_seq_lens[:] = [64, 64]
    found = paged_attention(*given, chunk=16)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [16, 512])
def test_a_padding_row_gives_zeros_and_reads_nothing(chunk: int) -> None:
    """A sequence of length zero with one query: what a captured graph has in its unused rows."""
    from vkit.kernels.triton.paged import paged_attention

    q, k_cache, v_cache, batch, *settings = arguments(replace(SPLIT, lengths=((1, 40), (1, 7))))
    assert isinstance(batch, PagedBatch)
    batch.seq_lens[1] = 0
    batch.block_table[batch.host_rows[1]] = 10**6
    out = paged_attention(q, k_cache, v_cache, batch, *settings, chunk=chunk)  # type: ignore[arg-type]
    assert not out[1].any()
    assert out[0].isfinite().all()
    assert out[0].any()


@pytest.mark.parametrize("dtype", NARROW)
def test_a_narrow_cache_is_written_and_read(dtype: torch.dtype) -> None:
    from vkit.kernels.triton.ops import OPS

    cpu = torch.device("cpu")
    for case in CASES:
        is_small = "(3, 20, 4)" in case.label or "((1, 3), (1, 17), (1, 200))" in case.label
        if f"in {dtype}" in case.label and is_small:
            assert judge(case, torch.bfloat16, OPS[case.op], REFERENCE[case.op], cpu).is_good


@pytest.mark.parametrize("dtype", NARROW[:2])
def test_every_number_of_fp8_is_read_and_written_as_it_is(dtype: torch.dtype) -> None:
    from vkit.kernels.triton.cache import write_kv

    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    between = torch.cat([codes.float(), codes.float() * 1.03125, codes.float() * 0.96875]).nan_to_num(0.0, 6e4, -6e4)
    rows = between.view(-1, 1, 32)
    cache, expected = (torch.zeros(6, 4, 1, 32, dtype=torch.uint8).view(dtype) for _ in range(2))
    slots = torch.arange(len(rows))
    write_kv(rows, rows, cache, cache, slots)
    REFERENCE["write_kv"](rows, rows, expected, expected, slots)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("window", [None, 5])
def test_a_vector_that_is_key_and_value_is_read_once(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention has a kernel of its own, which a window or a cache of its own for the values is not for."""
    from vkit.kernels.triton import paged

    taken: list[int] = []
    latent = paged._latent
    monkeypatch.setattr(paged, "_latent", lambda *given: (taken.append(1), latent(*given)))
    q, cache, values, *rest = latent_arguments(
        Source(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3)), ((1, 40), (11, 20)), 5, 24, 8
    )
    rest[2] = window
    expected = REFERENCE["paged_attention"](q, cache, values, *rest)
    for own in (values, values.clone()):
        out = paged.paged_attention(q, cache, own, *rest, chunk=16)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert len(taken) == (window is None)


@pytest.mark.parametrize(("lengths", "width"), [((1, 70), 20), ((33,), 72)])
def test_runs_of_tokens_see_themselves(lengths: tuple[int, ...], width: int) -> None:
    from vkit.kernels.triton.segments import segment_attention

    q, k, v = torch.randn(3, 2, sum(lengths), width).transpose(1, 2)
    expected = torch.cat(
        [
            torch.softmax(torch.einsum("qhd,khd->hqk", *parts[:2]) * 0.3, -1).matmul(parts[2].transpose(0, 1))
            for parts in zip(*(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        ],
        dim=1,
    ).transpose(0, 1)
    torch.testing.assert_close(segment_attention(q, k, v, lengths, 0.3), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunk", [16, 512])
def test_a_padding_row_of_latent_attention_gives_zeros(chunk: int) -> None:
    from vkit.kernels.triton.paged import paged_attention

    source = Source(torch.device("cpu"), torch.float32, torch.Generator().manual_seed(3))
    q, cache, values, batch, *settings = latent_arguments(source, ((1, 40), (1, 7)), 5, 24, 8)
    batch.seq_lens[1] = 0
    batch.block_table[batch.host_rows[1]] = 10**6
    out = paged_attention(q, cache, values, batch, *settings, chunk=chunk)
    assert not out[1].any()
    assert out[0].isfinite().all()
    assert out[0].any()

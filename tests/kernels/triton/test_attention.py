"""What attention promises beyond agreeing with the reference; chunks are small, so that few keys are many parts."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from vkit.kernels.cases import Shape, Source, attention_arguments
from vkit.kernels.dispatch import default_kv_layout
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


def test_a_narrow_cache_is_left_to_the_reference_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from vkit.kernels.triton import paged

    paged._reported.clear()
    pages = torch.zeros(3, 2 * 4 * 2 * 12, dtype=torch.uint8)
    k_cache, v_cache = default_kv_layout(pages, 4, 2, (12, 12), torch.int8)
    k, v = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    expected = k_cache.clone(), v_cache.clone()
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            paged.write_kv(k, v, k_cache, v_cache, torch.tensor([1, 9]))
    REFERENCE["write_kv"](k, v, *expected, torch.tensor([1, 9]))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])
    assert [record.message for record in caplog.records] == [
        "attention: no triton kernel for a cache of torch.int8; plain torch runs it"
    ]

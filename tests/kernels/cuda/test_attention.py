"""What attention promises beyond agreeing with the reference; chunks are small, so that few keys are many parts."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from vkit.kernels.cases import Shape, Source, attention_arguments
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference import OPS as REFERENCE
from vkit.kernels.triton import fallback
from vkit.kernels.triton import paged as triton_paged

SPLIT = Shape(((1, 60), (3, 33), (1, 16)), 6, 2, 24, 24, 4)


def arguments(shape: Shape, dtype: torch.dtype = torch.float16) -> list[Any]:
    return list(attention_arguments(Source(torch.device("cpu"), dtype, torch.Generator().manual_seed(3)), shape))


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


@pytest.fixture
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with few queries never reach Triton's kernel."""

    def refuse(*_: object) -> None:
        raise AssertionError("Triton decodes")

    monkeypatch.setattr(triton_paged, "decode_by_triton", refuse)


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize(("soft_cap", "has_sinks"), [(None, False), (2.0, True)])
def test_parts_are_merged(window: int | None, soft_cap: float | None, has_sinks: bool) -> None:
    from vkit.kernels.cuda.attention import paged_attention

    given = arguments(replace(SPLIT, window=window, soft_cap=soft_cap, has_sinks=has_sinks))
    expected = REFERENCE["paged_attention"](*given)
    torch.testing.assert_close(paged_attention(*given, chunk=16), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_result_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    from vkit.kernels.cuda.attention import paged_attention

    q, k_cache, v_cache, batch, *settings = arguments(replace(SPLIT, has_sinks=True), dtype)
    together = paged_attention(q, k_cache, v_cache, batch, *settings, chunk=16)
    for index in range(len(SPLIT.lengths)):
        start, stop = batch.host_cu_seqlens[index : index + 2]
        own = paged_attention(q[start:stop], k_cache, v_cache, alone(batch, index), *settings, chunk=16)
        assert torch.equal(own, together[start:stop])


def test_a_step_of_both_kinds_is_shared_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    from vkit.kernels.cuda import attention

    done: list[str] = []
    for module, name in ((attention, "_decode"), (triton_paged, "_prefill")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, real=real, name=name: (done.append(name), real(*given)))
    given = arguments(replace(SPLIT, lengths=((1, 60), (20, 40), (2, 9))), torch.bfloat16)
    found = attention.paged_attention(*given)
    assert done == ["_decode", "_prefill"]
    torch.testing.assert_close(found, REFERENCE["paged_attention"](*given), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("length", [33, 47, 48, 63])
def test_lengths_on_the_host_are_bounds(length: int) -> None:
    """As in a captured step: with a window, a shorter sequence may lie across more chunks than the longest."""
    from vkit.kernels.cuda.attention import paged_attention

    given = arguments(replace(SPLIT, lengths=((1, length), (1, 5)), window=16))
    expected = REFERENCE["paged_attention"](*given)
    batch = given[3]
    assert isinstance(batch, PagedBatch)
    batch.memo.clear()
    batch.host_seq_lens[:] = [64, 64]
    found = paged_attention(*given, chunk=16)
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


@pytest.mark.usefixtures("_no_triton")
@pytest.mark.parametrize("chunk", [16, 512])
def test_a_padding_row_gives_zeros_and_reads_nothing(chunk: int) -> None:
    """A sequence of length zero with one query: what a captured graph has in its unused rows."""
    from vkit.kernels.cuda.attention import paged_attention

    q, k_cache, v_cache, batch, *settings = arguments(replace(SPLIT, lengths=((1, 40), (1, 7))))
    batch.seq_lens[1] = 0
    batch.block_table[batch.host_rows[1]] = 10**6
    out = paged_attention(q, k_cache, v_cache, batch, *settings, chunk=chunk)
    assert not out[1].any()
    assert out[0].isfinite().all()
    assert out[0].any()


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (replace(SPLIT, width=20, value_width=20), "rows of 20/20 that do not begin at multiples of 16 bytes"),
        (Shape(((1, 5),), 1, 1, 288, 64, 16), "heads of 288/64, more than 256 wide"),
    ],
)
def test_what_cannot_be_loaded_wide_is_left_to_triton(
    shape: Shape, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from vkit.kernels.cuda import attention

    fallback.forget()
    given = arguments(shape)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        attention.paged_attention(*given)
        found = attention.paged_attention(*given)
    torch.testing.assert_close(found, REFERENCE["paged_attention"](*given), atol=2e-3, rtol=2e-3)
    assert [record.message for record in caplog.records] == [f"attention: no cuda kernel for {said}; triton runs it"]


def test_counters_that_become_too_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from vkit.kernels.cuda import attention

    monkeypatch.setattr(attention, "_counters", {})
    monkeypatch.setattr(attention, "NUM_COUNTERS", 4)
    device = torch.device("cpu")
    first = attention._counters_of(device, 3)
    assert attention._counters_of(device, 4) is first
    assert attention._counters_of(device, 9).numel() == 9
    assert attention._counters[device][0] is first

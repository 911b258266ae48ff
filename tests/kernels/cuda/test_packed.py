"""What the packed product promises beyond agreeing with the reference."""

from __future__ import annotations

import logging

import pytest
import torch

from vkit.kernels.block_formats import BLOCK_FORMATS, PLANES
from vkit.kernels.cases_packed import packed_rows
from vkit.kernels.cuda import packed
from vkit.kernels.cuda.packed import FORMATS, quantized_linear
from vkit.kernels.reference import OPS as REFERENCE
from vkit.kernels.reference.dequantize import dequantize
from vkit.kernels.triton import fallback

PARTS = {
    "Q4_0": ((2, 16), (0, 2)),
    "Q4_1": ((4, 16), (0, 4)),
    "Q5_0": ((6, 16), (2, 4), (0, 2)),
    "Q5_1": ((8, 16), (4, 4), (0, 4)),
    "Q8_0": ((2, 32), (0, 2)),
    "Q4_K": ((16, 128), (4, 12), (0, 4)),
    "Q5_K": ((48, 128), (16, 32), (4, 12), (0, 4)),
    "Q6_K": ((0, 128), (128, 64), (192, 16), (208, 2)),
    "IQ4_NL": ((2, 16), (0, 2)),
    "IQ4_XS": ((8, 128), (4, 4), (2, 2), (0, 2)),
    "MXFP4": ((1, 16), (0, 1)),
}
"""(first byte, bytes) of each part of a block, in the order of a row's planes."""


def in_planes(data: torch.Tensor, qtype: str) -> torch.Tensor:
    """The rows with the first parts of all blocks first, filled up to a multiple of 16 bytes."""
    blocks = data.unflatten(-1, (-1, BLOCK_FORMATS[qtype].num_bytes))
    row = torch.cat([blocks[..., at : at + size].flatten(-2) for at, size in PARTS[qtype]], dim=-1)
    return torch.nn.functional.pad(row, (0, -row.shape[-1] % 16), value=0xFF)


def given(qtype: str, tokens: int = 3, rows: int = 21, columns: int = 768) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, columns, generator=generator)
    return x, packed_rows(qtype, rows, columns, generator)


def test_planes_are_those_that_weights_are_laid_out_in() -> None:
    assert {qtype: PLANES[qtype] for qtype in FORMATS} == PARTS


@pytest.mark.parametrize("qtype", FORMATS)
def test_planes_give_what_blocks_give(qtype: str) -> None:
    x, data = given(qtype)
    planes = quantized_linear(x, in_planes(data, qtype), qtype + "_PLANES")
    assert torch.equal(planes, quantized_linear(x, data, qtype))
    assert planes.any()


@pytest.mark.parametrize("qtype", FORMATS)
def test_every_value_is_exact(qtype: str) -> None:
    """A row of the identity reads one column of the weight: its codes and scales, without any sum."""
    columns = 256
    _, data = given(qtype, columns=columns)
    values = dequantize(data, qtype)
    for start in range(0, columns, 8):
        unit = torch.eye(columns)[start : start + 8]
        found = quantized_linear(unit, data, qtype)
        torch.testing.assert_close(found, values[:, start : start + 8].T, rtol=3e-7, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_result_does_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    x, data = given("Q4_K", tokens=8)
    x = x.to(dtype)
    together = quantized_linear(x, data, "Q4_K")
    assert all(torch.equal(quantized_linear(x[i : i + 1], data, "Q4_K"), together[i : i + 1]) for i in range(8))


def test_large_activations_do_not_overflow() -> None:
    x, data = given("Q8_0")
    x = (x * 1e4).half()
    expected = REFERENCE["quantized_linear"](x.float(), data, "Q8_0", None)
    torch.testing.assert_close(quantized_linear(x, data, "Q8_0").float(), expected, rtol=1e-3, atol=0.1)


@pytest.mark.parametrize(("tokens", "qtype"), [(9, "Q4_0"), (2, "Q3_K")])
def test_more_rows_and_other_formats_are_left_to_the_next_backend(
    tokens: int, qtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[tuple[str, str]] = []

    def next_best(op: str, x: torch.Tensor, after: str) -> object:
        asked.append((op, after))
        return REFERENCE[op]

    monkeypatch.setattr(packed, "next_best", next_best)
    fallback.forget()
    x = torch.randn(tokens, 256)
    data = torch.zeros(3, BLOCK_FORMATS[qtype].row_bytes(256), dtype=torch.uint8)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            assert quantized_linear(x, data, qtype, torch.ones(3)).tolist() == [[1.0] * 3] * tokens
    assert asked == [("quantized_linear", "cuda")] * 2
    said = [] if tokens > 8 else ["quantized_linear: no cuda kernel for Q3_K; the next backend runs it"]
    assert [record.message for record in caplog.records] == said


def test_rows_at_odd_addresses_are_left_to_the_next_backend(caplog: pytest.LogCaptureFixture) -> None:
    x, data = given("Q4_K")
    wide = torch.zeros(data.shape[0], data.shape[1] + 1, dtype=torch.uint8)
    wide[:, 1:] = data
    fallback.forget()
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        found = quantized_linear(x, wide[:, 1:], "Q4_K")
    assert torch.equal(found, REFERENCE["quantized_linear"](x, data, "Q4_K", None))
    assert [record.message for record in caplog.records] == [
        "quantized_linear: no cuda kernel for rows of Q4_K that do not begin at multiples of 8 bytes;"
        " the next backend runs it"
    ]


def test_empty() -> None:
    _, data = given("Q4_K")
    assert quantized_linear(torch.zeros(2, 0, 768), data, "Q4_K").shape == (2, 0, 21)
    assert quantized_linear(torch.zeros(2, 768), data[:0], "Q4_K").shape == (2, 0)

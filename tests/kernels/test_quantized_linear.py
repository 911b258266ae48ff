"""The tiled product with a packed weight equals the plain product with the dequantised one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vkit import kernels
from vkit.kernels import dispatch
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.reference import quantized_linear as reference


@pytest.fixture(autouse=True)
def _reference() -> Iterator[None]:
    with dispatch.using_backend("cpu", dispatch.REFERENCE):
        yield


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def packed_weight(qtype: str, rows: int, columns: int) -> torch.Tensor:
    """Random blocks with small finite scales, whatever the format puts where."""
    data = torch.randint(0, 256, (rows, BLOCK_FORMATS[qtype].row_bytes(columns)), dtype=torch.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q8_0": [0], "Q6_K": [208], "Q4_K": [0, 2]}[qtype]
    blocks = data.view(rows, -1, BLOCK_FORMATS[qtype].num_bytes)
    for at in halves:
        blocks[..., at : at + 2] = (torch.rand(*blocks.shape[:2], 1) / 8).half().view(torch.uint8)
    return data


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "Q4_K"])
@pytest.mark.parametrize(("lead", "rows"), [((0,), 5), ((1,), 1), ((2, 3), 37)])
def test_equals_the_dense_product(
    dtype: torch.dtype, qtype: str, lead: tuple[int, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "TILE_ELEMENTS", 8 * 512)  # 37 rows: four full tiles and a partial one
    torch.manual_seed(0)
    data = packed_weight(qtype, rows, 512)
    x, bias = torch.randn(*lead, 512).to(dtype), torch.randn(rows).to(dtype)
    expected = x.double() @ kernels.dequantize(data, qtype).double().T + bias.double()
    y = kernels.quantized_linear(x, data, qtype, bias)
    assert y.dtype == dtype
    assert y.shape == (*lead, rows)
    scale = expected.abs().max() if expected.numel() else 1.0
    torch.testing.assert_close(y.double() / scale, expected / scale, atol=TOLERANCE[dtype], rtol=0)


def test_tiles_bound_the_dense_part(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = reference.dequantize

    def watched(data: torch.Tensor, qtype: str) -> torch.Tensor:
        seen.append(data.shape[0])
        return plain(data, qtype)

    monkeypatch.setattr(reference, "dequantize", watched)
    monkeypatch.setattr(reference, "TILE_ELEMENTS", 3 * 32)
    with kernels.using_backend("cpu", "reference"):
        kernels.quantized_linear(torch.randn(1, 32), packed_weight("Q8_0", 8, 32), "Q8_0", None)
    assert seen == [3, 3, 2]


@pytest.mark.usefixtures("backend")
def test_strided_input_and_weight() -> None:
    data = packed_weight("Q8_0", 12, 64)
    x = torch.randn(64, 4).T
    torch.testing.assert_close(
        kernels.quantized_linear(x, data[::2], "Q8_0", None), x @ kernels.dequantize(data[::2], "Q8_0").T
    )


@pytest.mark.usefixtures("backend")
def test_embedding_dequantises_only_the_rows_asked_for() -> None:
    data = packed_weight("Q4_1", 9, 64)
    ids = torch.tensor([[8, 0], [3, 3]])
    rows = kernels.quantized_embedding(ids, data, "Q4_1")
    assert torch.equal(rows, kernels.dequantize(data, "Q4_1")[ids])
    assert kernels.quantized_embedding(ids, data, "Q4_1", dtype=torch.bfloat16).dtype == torch.bfloat16
    assert kernels.quantized_embedding(torch.empty(0, dtype=torch.int64), data, "Q4_1").shape == (0, 64)
    with pytest.raises(IndexError):
        kernels.quantized_embedding(torch.tensor([9]), data, "Q4_1")


def test_refusals() -> None:
    data = packed_weight("Q8_0", 3, 64)
    with pytest.raises(ValueError, match="quantized_linear: qtype 'Q9'"):
        kernels.quantized_linear(torch.randn(1, 64), data, "Q9", None)
    with pytest.raises(ValueError, match="quantized_linear: data"):
        kernels.quantized_linear(torch.randn(1, 32), data, "Q8_0", None)
    with pytest.raises(ValueError, match="quantized_linear: bias"):
        kernels.quantized_linear(torch.randn(1, 64), data, "Q8_0", torch.randn(4))
    with pytest.raises(ValueError, match="multiple of 32"):
        kernels.quantized_linear(torch.randn(1, 33), data, "Q8_0", None)
    with pytest.raises(ValueError, match="quantized_embedding: data"):
        kernels.quantized_embedding(torch.tensor([0]), data[0], "Q8_0")

"""Rows in planes hold what their blocks held, in every format that has planes."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels
from vkit.kernels import dispatch
from vkit.kernels.block_formats import BLOCK_FORMATS, PLANE_FORMATS, PLANE_SUFFIX, PLANES, format_of
from vkit.kernels.dispatch import Backend
from vkit.kernels.planes import from_planes, to_planes
from vkit.quantization import QuantizedTensor, concat_rows, placed

EVERY = pytest.mark.parametrize("qtype", PLANES)


def rows(golden_blocks: dict[str, torch.Tensor], qtype: str, count: int = 5, blocks: int = 3) -> torch.Tensor:
    """Rows of recorded blocks, random bytes among them."""
    raw = golden_blocks[f"{qtype}.raw"]
    return raw[torch.randint(0, len(raw), (count * blocks,))].view(count, -1)


@EVERY
def test_the_planes_cover_a_block_once(qtype: str) -> None:
    covered = [at + byte for at, size in PLANES[qtype] for byte in range(size)]
    assert sorted(covered) == list(range(BLOCK_FORMATS[qtype].num_bytes))


@EVERY
def test_there_and_back(golden_blocks: dict[str, torch.Tensor], qtype: str) -> None:
    data = rows(golden_blocks, qtype)
    packed = to_planes(data, qtype)
    assert packed.shape[1] % 16 == 0
    assert 0 <= packed.shape[1] - data.shape[1] < 16
    assert packed.shape[1] == format_of(qtype + PLANE_SUFFIX, "").row_bytes(3 * BLOCK_FORMATS[qtype].num_elements)
    assert torch.equal(from_planes(packed, qtype), data)
    stacked = data.unflatten(1, (1, -1)).expand(-1, 2, -1)
    assert torch.equal(to_planes(stacked, qtype)[:, 1], packed)


@EVERY
def test_the_reference_reads_them_to_the_bit(golden_blocks: dict[str, torch.Tensor], qtype: str) -> None:
    data = rows(golden_blocks, qtype)
    packed, name = to_planes(data, qtype), qtype + PLANE_SUFFIX
    values = kernels.dequantize(data, qtype)
    assert torch.equal(kernels.dequantize(packed, name), values)
    x = torch.randn(2, values.shape[1])
    with kernels.using_backend("cpu", "reference"):
        assert torch.equal(kernels.quantized_linear(x, packed, name), kernels.quantized_linear(x, data, qtype))
        ids = torch.tensor([4, 0, 4])
        assert torch.equal(kernels.quantized_embedding(ids, packed, name), values[ids])


def test_the_first_plane_is_the_codes_of_all_blocks() -> None:
    blocks = torch.arange(36, dtype=torch.uint8).view(1, 36)
    expected = [*range(2, 18), *range(20, 36), 0, 1, 18, 19, *[0] * 12]
    assert to_planes(blocks, "Q4_0").tolist() == [expected]


def test_weights_are_laid_out_when_they_are_placed(
    golden_blocks: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def pack(data: torch.Tensor, qtype: str) -> tuple[torch.Tensor, str]:
        return to_planes(data, qtype), qtype + PLANE_SUFFIX

    weight = QuantizedTensor(rows(golden_blocks, "Q6_K"), "Q6_K", (5, 768))
    values = weight.dequantize()
    plain = placed(weight, "cpu")
    assert isinstance(plain, QuantizedTensor)
    assert plain.qtype == "Q6_K"
    own = Backend("planes", "cpu", lambda op, dtype: None, pack=pack)
    monkeypatch.setitem(dispatch._backends, "cpu", [*dispatch.backends("cpu"), own])
    with kernels.using_backend("cpu", "planes"):
        laid_out = placed(weight, "cpu")
        dense = placed(torch.ones(2), "cpu")
    assert isinstance(dense, torch.Tensor)
    assert isinstance(laid_out, QuantizedTensor)
    assert laid_out.qtype in PLANE_FORMATS
    assert laid_out.shape == weight.shape
    assert not laid_out.can_join(weight)
    assert torch.equal(laid_out.dequantize(), values)
    joined = concat_rows([laid_out.rows(torch.tensor([3, 1])), laid_out.narrow(0, 1)])
    assert torch.equal(joined.dequantize(), values[[3, 1, 0]])


def test_the_bytes_of_a_row_must_fit() -> None:
    with pytest.raises(ValueError, match="Q4_0: row of 40 bytes, expected a multiple of 18"):
        BLOCK_FORMATS["Q4_0"].num_columns(40)
    with pytest.raises(ValueError, match="dequantize: qtype 'Q4_0_PLANED'"):
        kernels.dequantize(torch.zeros(1, 48, dtype=torch.uint8), "Q4_0_PLANED")
    with pytest.raises(ValueError, match="QuantizedTensor: data"):
        QuantizedTensor(torch.zeros(1, 36, dtype=torch.uint8), "Q4_0_PLANES", (1, 64))

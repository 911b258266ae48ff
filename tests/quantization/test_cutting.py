"""Parts of weights hold the values that the whole has there, however they are packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vkit.kernels import ScaledMatrix
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.loaders import open_checkpoint
from vkit.quantization import QuantizedTensor, Weight
from vkit.quantization.cutting import can_take_columns, index_of, num_in, take_columns, take_rows, widened
from vkit.quantization.quantize import QUANTIZERS, quantize

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models" / "quant"
NAMES = sorted(path.name for path in GOLDENS.iterdir()) if GOLDENS.is_dir() else []
WHOLE = {"ct_fp8_dynamic", "ct_int8_w8a8", "fp8_block", "gptq_act_order"}
"""Activations are rounded by the range of a row, or of 128 columns where there are fewer; columns name their scales."""


def values(weight: Weight) -> torch.Tensor:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize()


def check_columns(weight: Weight, spans: list[tuple[int, int]]) -> None:
    part = take_columns(weight, spans)
    assert tuple(part.shape) == (*weight.shape[:-1], num_in(spans))
    assert torch.equal(values(part), values(weight)[..., index_of(spans)])


def test_spans() -> None:
    spans = [(1, 3), (0, 1)]
    assert num_in(spans) == 3
    assert index_of(spans).tolist() == [1, 2, 0]
    assert widened(spans, 2, 10) == [(12, 16), (10, 12)]


@pytest.mark.parametrize("qtype", sorted(QUANTIZERS))
@pytest.mark.parametrize("shape", [(6, 768), (3, 4, 768)])
def test_blocks(qtype: str, shape: tuple[int, ...]) -> None:
    dense = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = QuantizedTensor(quantize(dense, qtype), qtype, shape, torch.tensor(0.5))
    size = BLOCK_FORMATS[qtype].num_elements
    assert can_take_columns(weight, [(size, 2 * size)])
    check_columns(weight, [(2 * size, 3 * size), (0, size)])
    if size > 1:
        assert not can_take_columns(weight, [(size // 2, size)])
    index = torch.tensor([2, 0])
    assert torch.equal(values(take_rows(weight, index)), values(weight)[..., index, :])


@pytest.mark.parametrize("name", NAMES)
def test_codes_with_scales(name: str) -> None:
    """Every quantised layer of every golden, cut in two, four and eight where it can be."""
    checkpoint = open_checkpoint(GOLDENS / name)
    layers = [checkpoint.load(layer) for layer in sorted(checkpoint.tensor_names())]
    scaled = [weight for weight in layers if isinstance(weight, ScaledMatrix)]
    assert scaled
    num_cut = 0
    for weight in scaled:
        rows, columns = weight.shape
        index = torch.randperm(rows, generator=torch.Generator().manual_seed(2))[: rows // 2]
        assert torch.equal(values(take_rows(weight, index)), values(weight)[index])
        for size in (2, 4, 8):
            width = columns // size
            spans = [[(part * width, (part + 1) * width)] for part in range(size)]
            if all(can_take_columns(weight, own) for own in spans):
                num_cut += 1
                for own in spans:
                    check_columns(weight, own)
    assert (num_cut == 0) == (name in WHOLE)


def test_dense_parts_are_copies() -> None:
    weight = torch.arange(24.0).view(4, 6)
    for part in (take_columns(weight, [(1, 3)]), take_rows(weight, torch.tensor([1, 2]))):
        assert isinstance(part, torch.Tensor)
        assert part.untyped_storage().nbytes() == part.nbytes
    check_columns(weight, [(4, 6), (0, 1)])

"""Every block format equals the reference decoder to the bit, on recorded blocks and on random bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from vkit import kernels
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.reference.extract_iq_grids import extract_grids
from vkit.kernels.reference.iq_grids import GRID_NAMES, grid

SHARED = Path(__file__).resolve().parents[3] / "shared"
PLAIN = {"F32", "F16", "F64", "I8", "I16", "I32", "I64"}
RECORDED = sorted(BLOCK_FORMATS.keys() - PLAIN - {"Q1_0"})


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, any NaN being equal to any other."""
    both_nan = one.isnan() & other.isnan()
    return one.shape == other.shape and bool(((one.view(torch.int32) == other.view(torch.int32)) | both_nan).all())


@pytest.fixture(scope="module")
def blocks() -> dict[str, torch.Tensor]:
    return load_file(SHARED / "goldens/models/gguf_blocks/blocks.safetensors")


def test_all_recorded_types_are_tested(blocks: dict[str, torch.Tensor]) -> None:
    assert {name.removesuffix(".raw") for name in blocks if name.endswith(".raw")} == set(RECORDED)
    assert len(RECORDED) == 24


@pytest.mark.parametrize("qtype", RECORDED)
def test_recorded_blocks(blocks: dict[str, torch.Tensor], qtype: str) -> None:
    assert same_bits(kernels.dequantize(blocks[f"{qtype}.raw"], qtype), blocks[f"{qtype}.values"])


@pytest.mark.parametrize("qtype", RECORDED)
def test_random_bytes_against_the_gguf_package(qtype: str) -> None:
    from gguf import GGMLQuantizationType, quants

    block = BLOCK_FORMATS[qtype]
    data = np.random.default_rng(block.type_id).integers(0, 256, (7, 5 * block.num_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = quants.dequantize(data, GGMLQuantizationType[qtype]).astype(np.float32)
    assert same_bits(kernels.dequantize(torch.from_numpy(data), qtype), torch.from_numpy(expected))


def test_table_agrees_with_the_gguf_package() -> None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    for block in BLOCK_FORMATS.values():
        assert GGML_QUANT_SIZES[GGMLQuantizationType[block.name]] == (block.num_elements, block.num_bytes)
        assert GGMLQuantizationType[block.name] == block.type_id
    activation_formats = {"Q8_1", "Q8_K"}
    assert {kind.name for kind in GGMLQuantizationType} - set(BLOCK_FORMATS) == activation_formats


def test_q1_0_by_its_definition() -> None:
    scale = np.frombuffer(np.float16(1.5).tobytes(), np.uint8)
    signs = np.random.default_rng(0).integers(0, 256, 16, dtype=np.uint8)
    expected = [1.5 if signs[e // 8] >> e % 8 & 1 else -1.5 for e in range(128)]
    values = kernels.dequantize(torch.from_numpy(np.concatenate([scale, signs])), "Q1_0")
    assert values.tolist() == expected


@pytest.mark.parametrize(
    ("qtype", "dtype"),
    [
        ("F32", torch.float32),
        ("F16", torch.float16),
        ("BF16", torch.bfloat16),
        ("F64", torch.float64),
        ("I8", torch.int8),
        ("I16", torch.int16),
        ("I32", torch.int32),
        ("I64", torch.int64),
    ],
)
def test_plain_types_at_any_address(qtype: str, dtype: torch.dtype) -> None:
    values = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    raw = values.view(torch.uint8)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), raw.flatten()])[1:].view(raw.shape)
    assert torch.equal(kernels.dequantize(shifted, qtype), values.to(torch.float32))


@pytest.mark.parametrize("qtype", ["Q4_1", "Q3_K", "IQ2_S", "BF16"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_leading_dimensions_and_strides(qtype: str, shape: tuple[int, ...]) -> None:
    block = BLOCK_FORMATS[qtype]
    data = torch.randint(0, 256, (*shape, 4 * block.num_bytes), dtype=torch.uint8)
    whole = kernels.dequantize(data, qtype)
    assert whole.shape == (*shape, 4 * block.num_elements)
    part = kernels.dequantize(data[..., block.num_bytes : 3 * block.num_bytes], qtype)
    assert same_bits(part, whole[..., block.num_elements : 3 * block.num_elements].contiguous())


def test_output_dtype() -> None:
    data = torch.randint(0, 256, (2, 34), dtype=torch.uint8)
    whole = kernels.dequantize(data, "Q8_0")
    assert torch.equal(kernels.dequantize(data, "Q8_0", dtype=torch.float16).isnan(), whole.half().isnan())
    assert kernels.dequantize(data, "Q8_0", dtype=torch.bfloat16).dtype == torch.bfloat16


def test_grids_are_those_of_the_gguf_package() -> None:
    grids = extract_grids()
    for name in GRID_NAMES:
        assert np.array_equal(grid(name, torch.device("cpu")).numpy(), grids[name])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"dequantize: qtype 'Q9'"):
        kernels.dequantize(torch.zeros(18, dtype=torch.uint8), "Q9")
    with pytest.raises(ValueError, match="multiple of 18 bytes for Q4_0"):
        kernels.dequantize(torch.zeros(19, dtype=torch.uint8), "Q4_0")
    with pytest.raises(TypeError, match=r"expected torch\.uint8"):
        kernels.dequantize(torch.zeros(18), "Q4_0")

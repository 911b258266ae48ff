"""Products with packed weights, interpreted: recorded blocks to the bit, odd sizes, and what is left to plain torch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vkit.kernels.block_formats import BLOCK_FORMATS, PLANE_SUFFIX, PLANES
from vkit.kernels.cases_packed import packed_rows
from vkit.kernels.planes import to_planes
from vkit.kernels.reference import OPS as REFERENCE

BLOCKS = Path(__file__).resolve().parents[4] / "shared" / "goldens" / "models" / "gguf_blocks" / "blocks.safetensors"


FEW = ("Q4_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize(
    "qtype", [*FEW, *(pytest.param(qtype, marks=pytest.mark.slow) for qtype in PLANES if qtype not in FEW)]
)
def test_recorded_blocks_are_decoded_to_the_bit(qtype: str) -> None:
    """A product with a unit vector is a column of the weight, a look-up is a row of it."""
    from vkit.kernels.triton import packed

    recorded = load_file(BLOCKS)
    size = BLOCK_FORMATS[qtype].num_elements
    count = 3 * (256 // size)
    values = recorded[f"{qtype}.values"][:count].view(3, 256)
    data = to_planes(recorded[f"{qtype}.raw"][:count].view(3, -1), qtype)
    name = qtype + PLANE_SUFFIX
    ids = torch.tensor([2, 0, 1, 2])
    assert torch.equal(packed.quantized_embedding(ids, data, name), values[ids])
    unit = torch.zeros(1, 256)
    for column in (0, 37, 255):
        one = unit.clone()
        one[0, column] = 1.0
        assert torch.equal(packed.quantized_linear(one, data, name, None)[0], values[:, column])
    several = torch.eye(256)[[5, 100, 254]]
    assert torch.equal(packed.quantized_linear(several, data, name, None), values[:, [5, 100, 254]].T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 9, 352), (3, 5, 96), (17, 66, 64)])
def test_odd_sizes(dtype: torch.dtype, tokens: int, rows: int, columns: int) -> None:
    from vkit.kernels.triton import packed

    data = to_planes(packed_rows("Q4_1", rows, columns, torch.Generator().manual_seed(1)), "Q4_1")
    x, bias = torch.randn(tokens, columns).to(dtype), torch.randn(rows).to(dtype)
    found = packed.quantized_linear(x, data, "Q4_1_PLANES", bias)
    exact = REFERENCE["quantized_linear"](x.float(), data, "Q4_1_PLANES", bias.float())
    assert found.dtype is dtype
    is_narrow = dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), exact, rtol=1e-2 if is_narrow else 1e-5, atol=2e-2 if is_narrow else 1e-5)


def test_an_id_outside_the_table_gives_nan_and_reads_nothing() -> None:
    from vkit.kernels.triton import packed

    data = to_planes(packed_rows("Q8_0", 3, 64, torch.Generator().manual_seed(1)), "Q8_0")
    out = packed.quantized_embedding(torch.tensor([[2, 3], [-1, 10**9]]), data, "Q8_0_PLANES", dtype=torch.bfloat16)
    assert out.shape == (2, 2, 64)
    assert out.isnan().all(-1).tolist() == [[False, True], [True, True]]


def test_formats_without_planes_are_left_to_the_reference_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    from vkit.kernels.triton import fallback, packed

    fallback.forget()
    data, x = torch.zeros(2, 66, dtype=torch.uint8), torch.randn(1, 256)
    with caplog.at_level(logging.WARNING, logger="vkit.kernels"):
        for _ in range(2):
            assert not packed.quantized_linear(x, data, "IQ2_XXS", None).any()
            assert not packed.quantized_embedding(torch.tensor([0]), data, "IQ2_XXS").any()
    assert [record.message for record in caplog.records] == [
        "quantized_linear: no triton kernel for IQ2_XXS; plain torch runs it",
        "quantized_embedding: no triton kernel for IQ2_XXS; plain torch runs it",
    ]

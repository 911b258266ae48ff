"""Quantisers against the `gguf` package: bytes where it has a quantiser, values read by its dequantiser everywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.quantization.quantize import NUM_ELEMENTS_AT_A_TIME, QUANTIZERS, quantize

RELATIVE_ERROR = {
    # Root mean square, of the standard deviation, for Gaussian weights. Each bit halves it, near enough.
    "Q4_0": 0.095, "Q4_1": 0.085, "Q5_0": 0.048, "Q5_1": 0.042, "Q8_0": 0.006,
    "Q4_K": 0.075, "Q5_K": 0.037, "Q6_K": 0.021,
}  # fmt: skip


def dequantized(data: torch.Tensor, qtype: str) -> np.ndarray:
    return quants.dequantize(data.numpy(), GGMLQuantizationType[qtype])


@pytest.mark.parametrize("qtype", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("seed", [0, 1])
def test_bytes_equal_the_package(qtype: str, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((37, 96)).astype(np.float32)
    values[3] = 0.0
    values[4, :32] = -values[4, 0]
    values[5] *= 1e-6
    ours = quantize(torch.from_numpy(values), qtype)
    assert np.array_equal(ours.numpy(), quants.quantize(values, GGMLQuantizationType[qtype]))


@pytest.mark.parametrize("qtype", sorted(QUANTIZERS))
def test_values_come_back_near(qtype: str) -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    error = dequantized(quantize(values, qtype), qtype) - values.numpy()
    assert np.sqrt(np.mean(error**2)) < RELATIVE_ERROR[qtype]


@pytest.mark.parametrize("qtype", sorted(QUANTIZERS))
def test_odd_blocks(qtype: str) -> None:
    """Zeros stay zeros; constants, one sign, single outliers and tiny numbers come back as they can."""
    size = BLOCK_FORMATS[qtype].num_elements
    rows = torch.zeros(6, size)
    rows[1] = 0.5
    rows[2] = torch.linspace(1, 2, size)
    rows[3] = -torch.linspace(1, 2, size)
    rows[4, 7] = -3.0
    rows[5] = torch.linspace(-1e-3, 1e-3, size)
    back = dequantized(quantize(rows, qtype), qtype)
    assert np.isfinite(back).all()
    assert not back[0].any()
    bits = int(qtype[1])
    for row in (1, 2, 3, 4, 5):
        limit = float(rows[row].abs().max()) * 2.0 / 2**bits
        assert np.abs(back[row] - rows[row].numpy()).max() <= limit, row


def test_pieces_join_and_shapes_are_kept() -> None:
    rows = NUM_ELEMENTS_AT_A_TIME // 256 + 3
    values = torch.randn(rows, 256, generator=torch.Generator().manual_seed(0))
    whole = quantize(values, "Q8_0")
    assert torch.equal(whole[-5:], quantize(values[-5:], "Q8_0"))
    assert quantize(torch.zeros(2, 3, 64), "Q4_0").shape == (2, 3, 36)


def test_errors() -> None:
    with pytest.raises(ValueError, match="'IQ1_S', expected one of Q4_0"):
        quantize(torch.zeros(1, 256), "IQ1_S")
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize(torch.zeros(1, 64), "Q6_K")

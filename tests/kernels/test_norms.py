"""Norms against float64 arithmetic written out."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
SHAPES = [(0, 64), (1, 1), (3, 1023), (7, 2048), (2, 3, 16)]


def expected_rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float, offset: float) -> torch.Tensor:
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else normed * (weight.double() + offset)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("backend")
def test_rms_norm(shape: tuple[int, ...], offset: float, dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for w in (weight, None):
        out = kernels.rms_norm(x, w, 1e-5, offset)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected_rms(x, w, 1e-5, offset), atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("backend")
def test_rms_norm_of_strided_rows(dtype: torch.dtype) -> None:
    wide = torch.randn(5, 4 * 48).to(dtype)
    x, weight = wide[:, 48:144].view(5, 2, 48), torch.randn(48).to(dtype)
    out = kernels.rms_norm(x, weight, 1e-6)
    torch.testing.assert_close(out.double(), expected_rms(x, weight, 1e-6, 0.0), atol=TOLERANCE[dtype], rtol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("backend")
def test_add_rms_norm_equals_its_parts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(
        normed.double(), expected_rms(total, weight, 1e-5, 0.0), atol=TOLERANCE[dtype], rtol=1e-2
    )
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.usefixtures("backend")
def test_layer_norm(per_head: bool, dtype: torch.dtype) -> None:
    x = torch.randn(6, 3, 40).to(dtype)
    shape = (3, 40) if per_head else (40,)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    wide = x.double()
    normed = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    for b in (bias, None):
        expected = normed * weight.double() + (0 if b is None else b.double())
        out = kernels.layer_norm(x, weight, b, 1e-5)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=1e-2)
    assert kernels.layer_norm(x[:0], weight, bias, 1e-5).shape == (0, 3, 40)


def test_errors_name_op_argument_got_and_wanted() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"rms_norm: weight \(7,\), expected \(8,\)"):
        kernels.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"add_rms_norm: residual \(2, 7\), expected \(2, 8\)"):
        kernels.add_rms_norm(x, torch.ones(2, 7), torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match=r"add_rms_norm: weight \(7,\), expected \(8,\)"):
        kernels.add_rms_norm(x, x, torch.ones(7), 1e-6)
    with pytest.raises(ValueError, match=r"layer_norm: bias \(3,\), expected a suffix of \(2, 8\)"):
        kernels.layer_norm(x, torch.ones(8), torch.ones(3), 1e-6)

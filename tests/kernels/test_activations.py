"""Elementwise ops against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from vkit import kernels

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}

FORMULAS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "sigmoid": lambda x: 1 / (1 + torch.exp(-x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "softplus": lambda x: torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0),
    "tanh": torch.tanh,
}


def close(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.usefixtures("backend")
def test_unary(kind: str, dtype: torch.dtype) -> None:
    for x in (torch.randn(3, 37).to(dtype), torch.randn(6, 8).to(dtype)[:, ::2], torch.empty(0, 4, dtype=dtype)):
        close(kernels.unary(x, kind), FORMULAS[kind](x.double()), dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(0, 8), (1, 2), (5, 74)])
@pytest.mark.usefixtures("backend")
def test_gated(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for x in (torch.randn(shape).to(dtype), torch.randn(shape[0], shape[1] + 3).to(dtype)[:, 3:]):
        gate, up = x.double().chunk(2, dim=-1)
        close(kernels.silu_and_mul(x), FORMULAS["silu"](gate) * up, dtype)
        close(kernels.gelu_and_mul(x), FORMULAS["gelu_tanh"](gate) * up, dtype)
        close(kernels.gelu_and_mul(x, "none"), FORMULAS["gelu"](gate) * up, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("backend")
def test_arithmetic(dtype: torch.dtype) -> None:
    x, y, row = torch.randn(3, 5).to(dtype), torch.randn(5, 3).to(dtype).t(), torch.randn(5).to(dtype)
    close(kernels.add(x, y), x.double() + y.double(), dtype)
    close(kernels.add(x, row), x.double() + row.double(), dtype)
    close(kernels.multiply(x, y), x.double() * y.double(), dtype)
    close(kernels.multiply(x, torch.tensor(3.0)), x.double() * 3, dtype)
    close(kernels.scale(x, 0.5), x.double() * 0.5, dtype)
    close(kernels.soft_cap(x * 30, 10.0), 10 * torch.tanh((x * 30).double() / 10), dtype)


def test_errors_name_op_argument_got_and_wanted() -> None:
    x = torch.randn(2, 7)
    with pytest.raises(ValueError, match=r"unary: kind 'swoosh', expected one of gelu"):
        kernels.unary(x, "swoosh")
    with pytest.raises(ValueError, match=r"silu_and_mul: width 7, expected an even number"):
        kernels.silu_and_mul(x)
    with pytest.raises(ValueError, match=r"gelu_and_mul: width 7, expected an even number"):
        kernels.gelu_and_mul(x)
    with pytest.raises(ValueError, match=r"gelu_and_mul: approximate 'erf'"):
        kernels.gelu_and_mul(torch.randn(2, 8), "erf")
    with pytest.raises(ValueError, match=r"add: y \(2,\), expected \(2, 7\) or a suffix"):
        kernels.add(x, torch.ones(2))
    with pytest.raises(ValueError, match=r"multiply: y \(2, 1\), expected \(2, 7\) or a suffix"):
        kernels.multiply(x, torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"soft_cap: cap 0.0, expected a positive number"):
        kernels.soft_cap(x, 0.0)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.usefixtures("backend")
def test_scale_rows(dtype: torch.dtype) -> None:
    x, factors = torch.randn(5, 3, 7).to(dtype), torch.randn(5, 3).to(dtype)
    close(kernels.scale_rows(x, factors), x.double() * factors.double()[..., None], dtype)
    with pytest.raises(ValueError, match=r"scale_rows: factors \(3,\), expected \(5, 3\)"):
        kernels.scale_rows(x, factors[0])

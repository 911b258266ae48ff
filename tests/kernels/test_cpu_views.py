"""Native ops on strided views, and the small ops that models use beside products, at every level."""

from __future__ import annotations

import pytest
import torch

from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.reference import OPS


@pytest.fixture
def native(library: Library) -> Operations:
    """Without a reference to fall back on."""
    return Operations(library, {})


@pytest.mark.parametrize("width", [5, 32])
def test_heads_inside_a_wider_row(width: int, level: str, native: Operations) -> None:
    heads = torch.randn(7, 3 * width + 9)[:, 4 : 4 + 3 * width].unflatten(1, (3, width))
    weight, bias = torch.randn(3, width), torch.randn(3, width)
    close = torch.testing.assert_close
    close(native.layer_norm(heads, weight, bias, 1e-5), OPS["layer_norm"](heads, weight, bias, 1e-5))
    close(native.rms_norm(heads, weight[0], 1e-6), OPS["rms_norm"](heads, weight[0], 1e-6))
    for kind in ("sigmoid", "softplus"):
        close(native.unary(9 * heads, kind), OPS["unary"](9 * heads, kind))
    close(native.soft_cap(heads, 2.0), 2 * torch.tanh(heads / 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transposed_weights(dtype: torch.dtype, level: str, native: Operations) -> None:
    native.is_exact = True
    weight, x = torch.randn(32, 24).to(dtype).t(), torch.randn(5, 32)
    torch.testing.assert_close(native.linear(x, weight), x @ weight.float().t(), atol=1e-4, rtol=1e-4)
    assert len(native._copies) == 1
    native.linear(x, weight)
    assert len(native._copies) == 1
    del weight
    assert not native._copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 4, 9])
def test_a_matrix_for_every_head(
    tokens: int, dtype: torch.dtype, level: str, num_threads: int, native: Operations
) -> None:
    stacked = torch.randn(3, 24 + 17, 40).to(dtype)
    keys, values = stacked.split([24, 17], dim=1)
    x = torch.randn(tokens, 3, 24 + 8)
    for part, weight in ((x[..., :24], keys.transpose(1, 2)), (torch.randn(tokens, 3, 40), values)):
        expected = torch.einsum("thi,hoi->tho", part.double(), weight.double())
        torch.testing.assert_close(native.head_linear(part, weight).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("old", [(), (3,), (1, 2, 9)])
def test_replaced_ids(old: tuple[int, ...], level: str, native: Operations) -> None:
    ids = torch.arange(11)
    assert torch.equal(native.replace_ids(ids, old, 7), OPS["replace_ids"](ids, old, 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_factor_for_every_row(dtype: torch.dtype, level: str, native: Operations) -> None:
    x, factors = torch.randn(6, 37).to(dtype), torch.randn(6, 3)[:, 1]
    assert torch.equal(native.scale_rows(x, factors), OPS["scale_rows"](x, factors))

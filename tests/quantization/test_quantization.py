"""Packed weights behave as the dense weights they stand for."""

from __future__ import annotations

import pytest
import torch

from vkit.quantization import (
    DenseLinear,
    GGUFLinear,
    QuantizedTensor,
    StackedLinear,
    concat,
    concat_rows,
    linear_method_for,
)


def q8(
    rows: int, columns: int = 64, *, experts: int | None = None, scale: torch.Tensor | None = None
) -> QuantizedTensor:
    """A random Q8_0 weight with finite scales."""
    lead = (rows,) if experts is None else (experts, rows)
    blocks = torch.randint(0, 256, (*lead, columns // 32, 34), dtype=torch.uint8)
    blocks[..., :2] = (torch.rand(*lead, columns // 32, 1) / 8).half().view(torch.uint8)
    return QuantizedTensor(blocks.flatten(-2), "Q8_0", (*lead, columns), scale)


def q4(rows: int, columns: int = 64) -> QuantizedTensor:
    """A random Q4_0 weight with finite scales."""
    blocks = torch.randint(0, 256, (rows, columns // 32, 18), dtype=torch.uint8)
    blocks[..., :2] = (torch.rand(rows, columns // 32, 1) / 8).half().view(torch.uint8)
    return QuantizedTensor(blocks.flatten(-2), "Q4_0", (rows, columns))


def test_rows_narrow_and_concat_commute_with_dequantize() -> None:
    weight = q8(10)
    dense = weight.dequantize()
    order = torch.tensor([3, 1, 9])
    assert torch.equal(weight.rows(order).dequantize(), dense[order])
    part = weight.narrow(2, 5)
    assert torch.equal(part.dequantize(), dense[2:7])
    assert part.data.data_ptr() == weight.data.data_ptr() + 2 * weight.data.stride(0)
    both = concat_rows([part, weight])
    assert both.shape == (15, 64)
    assert torch.equal(both.dequantize(), torch.cat([dense[2:7], dense]))
    assert weight.nbytes == 10 * 68


def test_experts() -> None:
    weight = q8(4, experts=3, scale=torch.tensor([1.0, 2.0, 4.0]))
    dense = weight.dequantize(torch.float64)
    assert dense.shape == (3, 4, 64)
    assert torch.equal(weight.expert(2).dequantize(torch.float64), dense[2])
    assert torch.equal(weight.narrow(1, 2).dequantize(torch.float64), dense[:, 1:3])
    assert torch.equal(weight.expert(1).dequantize(), 2 * QuantizedTensor(weight.data[1], "Q8_0", (4, 64)).dequantize())


def test_transposed() -> None:
    weight = q8(4)
    turned = weight.t()
    assert turned.shape == (64, 4)
    assert torch.equal(turned.dequantize(), weight.dequantize().T)
    assert torch.equal(turned.t().dequantize(), weight.dequantize())
    with pytest.raises(ValueError, match=r"call t\(\) first"):
        turned.rows(slice(0, 1))
    with pytest.raises(ValueError, match="GGUFLinear"):
        linear_method_for(turned)


@pytest.mark.parametrize(
    ("weight", "kind"),
    [(torch.randn(5, 64), DenseLinear), (q8(5), GGUFLinear), (q8(5, scale=torch.tensor(0.5)), GGUFLinear)],
)
def test_linear_method_multiplies(weight: torch.Tensor | QuantizedTensor, kind: type) -> None:
    method = linear_method_for(weight)
    dense = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    assert isinstance(method, kind)
    assert (method.out_features, method.in_features, method.nbytes) == (5, 64, weight.nbytes)
    x, bias = torch.randn(2, 3, 64), torch.randn(5)
    torch.testing.assert_close(method.apply(x), x @ dense.T)
    torch.testing.assert_close(method.apply(x, bias), x @ dense.T + bias)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float64])
def test_dense_weight_of_another_type_than_x(stored: torch.dtype) -> None:
    weight = torch.randn(5, 64).to(stored)
    x = torch.randn(3, 64)
    y = DenseLinear(weight).apply(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, x @ weight.float().T)


def test_concat_joins_neighbours_of_a_kind() -> None:
    parts = [q4(3), q4(2), q8(4), torch.randn(2, 64), torch.randn(1, 64)]
    method = concat(parts)
    assert isinstance(method, StackedLinear)
    assert [type(part) for part in method.parts] == [GGUFLinear, GGUFLinear, DenseLinear]
    assert [part.out_features for part in method.parts] == [5, 4, 3]
    assert method.nbytes == sum(part.nbytes for part in parts)
    dense = torch.cat([part.dequantize() if isinstance(part, QuantizedTensor) else part for part in parts])
    x, bias = torch.randn(2, 64), torch.randn(12)
    torch.testing.assert_close(method.apply(x, bias), x @ dense.T + bias)
    torch.testing.assert_close(method.apply(x), x @ dense.T)


def test_concat_of_one_kind_is_one_product() -> None:
    method = concat([q4(3), q4(2)])
    assert isinstance(method, GGUFLinear)
    assert method.out_features == 5
    dense = concat([torch.ones(1, 4), torch.zeros(2, 4)])
    assert isinstance(dense, DenseLinear)
    assert dense.weight.shape == (3, 4)


def test_different_scales_stay_apart() -> None:
    one, two = q8(3, scale=torch.tensor(2.0)), q8(3)
    method = concat([one, two])
    assert isinstance(method, StackedLinear)
    with pytest.raises(ValueError, match="concat_rows"):
        concat_rows([one, two])


def test_refusals() -> None:
    data = torch.zeros(2, 34, dtype=torch.uint8)
    with pytest.raises(ValueError, match="qtype 'Q9'"):
        QuantizedTensor(data, "Q9", (2, 32))
    with pytest.raises(ValueError, match="data"):
        QuantizedTensor(data, "Q8_0", (2, 64))
    with pytest.raises(TypeError, match="uint8"):
        QuantizedTensor(data.float(), "Q8_0", (2, 32))
    with pytest.raises(ValueError, match="multiple of 32"):
        QuantizedTensor(data, "Q8_0", (2, 31))
    with pytest.raises(ValueError, match="dimensions"):
        QuantizedTensor(data[0], "Q8_0", (32,))
    with pytest.raises(ValueError, match="narrow"):
        QuantizedTensor(data, "Q8_0", (2, 32)).narrow(1, 2)
    with pytest.raises(ValueError, match="expert"):
        QuantizedTensor(data, "Q8_0", (2, 32)).expert(0)
    with pytest.raises(ValueError, match="one width"):
        concat([torch.zeros(1, 4), torch.zeros(1, 5)])
    with pytest.raises(ValueError, match="linear_method_for"):
        linear_method_for(torch.zeros(4))

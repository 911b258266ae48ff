"""Dense products and look-ups."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels

NARROW = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("weight_dtype", [torch.float32, *NARROW])
@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3)])
@pytest.mark.usefixtures("backend")
def test_linear(shape: tuple[int, ...], weight_dtype: torch.dtype) -> None:
    """Narrow weights under float32 activations lose nothing beyond their own rounding."""
    x, weight, bias = torch.randn(*shape, 33), torch.randn(1030, 33).to(weight_dtype), torch.randn(1030)
    for b in (bias, None):
        out = kernels.linear(x, weight, b)
        expected = x.double() @ weight.double().T + (0 if b is None else b.double())
        assert out.dtype == torch.float32
        torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.usefixtures("backend")
def test_linear_narrow_and_strided(dtype: torch.dtype) -> None:
    x = torch.randn(4, 80).to(dtype)[:, ::2]
    weight = torch.randn(40, 24).to(dtype).t()
    out = kernels.linear(x, weight, None)
    torch.testing.assert_close(out.double(), x.double() @ weight.double().T, atol=0.1, rtol=2e-2)


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("backend")
def test_embedding(ids_dtype: torch.dtype) -> None:
    weight = torch.randn(9, 5).to(torch.bfloat16)
    ids = torch.tensor([8, 0, 0, 3], dtype=ids_dtype)
    assert torch.equal(kernels.embedding(ids, weight), weight[ids.long()])
    assert torch.equal(kernels.embedding(ids, weight, torch.float32), weight.float()[ids.long()])
    assert kernels.embedding(ids[:0], weight).shape == (0, 5)


@pytest.mark.usefixtures("backend")
def test_concat() -> None:
    wide = torch.randn(3, 10)
    parts = [wide[:, 2:4], wide[:, 7:8], wide[:, :0]]
    assert torch.equal(kernels.concat(parts), torch.cat(parts, dim=-1))


def test_errors_name_op_argument_got_and_wanted() -> None:
    x = torch.randn(2, 8)
    with pytest.raises(ValueError, match=r"linear: weight \(4, 7\), expected \(out, 8\)"):
        kernels.linear(x, torch.ones(4, 7))
    with pytest.raises(TypeError, match=r"linear: weight of torch.int8, expected a floating type"):
        kernels.linear(x, torch.ones(4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match=r"linear: bias \(3,\), expected \(4,\)"):
        kernels.linear(x, torch.ones(4, 8), torch.ones(3))
    with pytest.raises(TypeError, match=r"embedding: ids of torch.float32"):
        kernels.embedding(torch.ones(2), x)
    with pytest.raises(ValueError, match=r"embedding: weight \(8,\), expected \(rows, width\)"):
        kernels.embedding(torch.tensor([0]), torch.ones(8))
    with pytest.raises(ValueError, match=r"concat: no parts"):
        kernels.concat([])
    with pytest.raises(ValueError, match=r"concat: part \(3, 8\), expected \(2,\) and a width"):
        kernels.concat([x, torch.ones(3, 8)])


@pytest.mark.usefixtures("backend")
def test_head_linear() -> None:
    x, weight = torch.randn(5, 3, 8)[..., :6], torch.randn(3, 4, 6)
    out = kernels.head_linear(x, weight)
    for head in range(3):
        torch.testing.assert_close(out[:, head], x[:, head] @ weight[head].T, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"head_linear: x \(5, 3, 6\) and weight \(2, 4, 6\)"):
        kernels.head_linear(x, weight[:2])


@pytest.mark.usefixtures("backend")
def test_replace_ids() -> None:
    ids = torch.tensor([7, 250, 3, 251, 0])
    assert kernels.replace_ids(ids, (250, 251), 0).tolist() == [7, 0, 3, 0, 0]
    assert kernels.replace_ids(ids, (), 0).tolist() == ids.tolist()
    assert ids.tolist() == [7, 250, 3, 251, 0]

"""The ops that towers and their rows need, against the formula."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers import MultiAxisRotary, Placement, RopeSpec

BACKENDS = ["reference", *(item.name for item in kernels.backends("cpu") if not item.unavailable)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_rows(dtype: torch.dtype, count: int) -> None:
    x, values = torch.randn(7, 6).to(dtype), torch.randn(count, 6)
    rows = torch.tensor([6, 0, 3, 1, 5][:count], dtype=torch.int64)
    put, added = x.clone(), x.clone()
    for index, row in enumerate(rows.tolist()):
        put[row] = values[index].to(dtype)
        added[row] += values[index].to(dtype)
    before = x.clone()
    torch.testing.assert_close(kernels.put_rows(x, rows, values), put, atol=0, rtol=0)
    torch.testing.assert_close(kernels.add_rows(x, rows, values), added)
    torch.testing.assert_close(x, before, atol=0, rtol=0)


@pytest.mark.parametrize("op", [kernels.put_rows, kernels.add_rows])
def test_rows_that_do_not_fit(op: object) -> None:
    with pytest.raises(ValueError, match=r"_rows: x \(3, 4\), rows \(2,\) and values \(2, 5\)"):
        op(torch.zeros(3, 4), torch.tensor([0, 1]), torch.zeros(2, 5))  # type: ignore[operator]


def test_clamp() -> None:
    x = torch.tensor([-3.0, 0.5, 9.0])
    assert kernels.clamp(x, -1.0, 2.0).tolist() == [-1.0, 0.5, 2.0]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lengths", [[5], [1, 1, 7], [4, 4, 4, 2, 4], [9, 3]])
def test_segments(name: str, lengths: list[int]) -> None:
    total = sum(lengths)
    wide = torch.randn(total, 3, 4, 8)
    q, k, v = wide.unbind(1)
    parts = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        weights = torch.einsum("qhd,khd->hqk", a, b).mul(0.4).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", weights, c))
    with kernels.using_backend("cpu", name):
        found = kernels.segment_attention(q, k, v, lengths, 0.4)
    torch.testing.assert_close(found, torch.cat(parts), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [[2], [3, 2], [5, 0], [6, -1]])
def test_segments_that_do_not_fit(lengths: list[int]) -> None:
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="segment_attention: lengths"):
        kernels.segment_attention(x, x, x, lengths, 1.0)
    with pytest.raises(ValueError, match="must be equal"):
        kernels.segment_attention(x, x[:, :1], x, [4], 1.0)


@pytest.mark.parametrize(
    ("is_interleaved", "axes"),
    [
        (True, [0, 1, 2, 0, 1, 2, 0, 1, 0, 0]),  # every third pair, as far as a section goes
        (False, [0, 0, 0, 0, 0, 1, 1, 1, 2, 2]),  # one section after the other
    ],
)
def test_positions_in_three_axes(is_interleaved: bool, axes: list[int]) -> None:
    spec = RopeSpec(head_dim=24, width=20, base=100.0, max_position_embeddings=64, max_model_len=64)
    rotary = MultiAxisRotary(spec, [5, 3, 2], is_interleaved=is_interleaved)
    rotary.set_tensors({}, Placement(torch.device("cpu"), torch.float32))
    positions = torch.tensor([[3, 0, 9], [4, 0, 2], [60, 0, 7]])
    table = kernels.axis_table(rotary.cos_sin, positions, torch.tensor(axes))
    assert rotary._pair_axes == axes
    for token in range(3):
        for pair, axis in enumerate(axes):
            angle = torch.tensor(100.0 ** (-pair / 10) * positions[axis, token].item())
            torch.testing.assert_close(table[token, pair], angle.cos(), atol=1e-5, rtol=0)
            torch.testing.assert_close(table[token, 10 + pair], angle.sin(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("sections", [[5, 5], [5, 3, 3], [12, -1, -1], [5.0, 3, 2]])
def test_sections_that_do_not_fit(sections: list[int]) -> None:
    spec = RopeSpec(head_dim=24, width=20, base=100.0, max_position_embeddings=64, max_model_len=64)
    with pytest.raises(ModelLoadError, match="mrope_section must list three parts of 10"):
        MultiAxisRotary(spec, sections, is_interleaved=True)


def test_axis_table_shapes() -> None:
    with pytest.raises(ValueError, match="axis_table"):
        kernels.axis_table(torch.zeros(4, 6), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))

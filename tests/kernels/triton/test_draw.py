"""Draws of the GPU's kernels: the tokens of plain torch for the same keys, and what rows without numbers do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from vkit.kernels.cases_sampling import RULES
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.reference import OPS as REFERENCE

FEW = RULES[:4]
"""Nothing, top_p, top_k, both."""


def rules(wanted: Sequence[tuple[float, int, float]], vocab_size: int = 300) -> DrawRules:
    min_p, top_k, top_p = (list(column) for column in zip(*wanted, strict=True))
    return DrawRules.of([0.8] * len(wanted), min_p, [k if k < vocab_size else 0 for k in top_k], top_p)


def random_keys(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,))


@pytest.mark.parametrize(
    ("wanted", "width", "spread"), [(RULES[5:8], 300, 1.0), pytest.param(RULES, 2200, 0.3, marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_the_reference(
    wanted: Sequence[tuple[float, int, float]], width: int, spread: float
) -> None:
    from vkit.kernels.triton.draw import draw, largest

    torch.manual_seed(width)
    logits = torch.randn(len(wanted), width) * spread
    logits[::3] = (logits[::3] * 4).round() / 4  # ties
    rows, own, keys = torch.randperm(len(wanted)), rules(wanted, width), random_keys(len(wanted))
    for found, expected in zip(draw(logits, rows, own, keys), REFERENCE["draw"](logits, rows, own, keys), strict=True):
        assert torch.equal(found, expected)
    assert largest(logits) == tuple(REFERENCE["largest"](logits))


def test_rows_without_numbers_are_reported_and_harm_no_other() -> None:
    from vkit.kernels.triton.draw import draw, largest

    logits = torch.randn(5, 300)
    logits[1, 7], logits[2, 299], logits[3] = math.nan, math.inf, -math.inf
    own, keys, rows = rules(RULES[:5]), random_keys(5), torch.arange(5)
    ids, found = draw(logits, rows, own, keys)
    assert found[1].isnan()
    assert found[2:4].tolist() == [math.inf, -math.inf]
    assert ids[1:4].tolist() == [0, 0, 0]
    clean = torch.tensor([0, 4])
    expected, _ = REFERENCE["draw"](logits.nan_to_num(0.0), rows, own, keys)
    assert torch.equal(ids[clean], expected[clean])
    places, values = largest(logits[:4])
    assert places[1:3] == [7, 299]
    assert math.isnan(values[1])
    assert values[2:] == [math.inf, -math.inf]


def test_strided_rows_and_no_rows() -> None:
    from vkit.kernels.triton.draw import draw, largest

    wide = torch.randn(70, len(FEW)).T
    own, keys, rows = rules(FEW, 70), random_keys(len(FEW)), torch.arange(len(FEW))
    assert torch.equal(draw(wide, rows, own, keys)[0], REFERENCE["draw"](wide, rows, own, keys)[0])
    none = torch.zeros(0, dtype=torch.int64)
    ids, found = draw(wide.contiguous(), none, DrawRules.of([], [], [], []), none)
    assert (ids.shape, found.shape) == ((0,), (0,))
    assert largest(torch.zeros(0, 5)) == ([], [])


def test_a_row_is_drawn_alike_alone_and_in_company() -> None:
    from vkit.kernels.triton.draw import draw

    logits, keys = torch.randn(len(FEW), 200) * 2, random_keys(len(FEW))
    together, _ = draw(logits, torch.arange(len(FEW)), rules(FEW, 200), keys)
    for place in (0, 3):
        own = rules(FEW[place : place + 1], 200)
        assert draw(logits, torch.tensor([place]), own, keys[place : place + 1])[0].tolist() == [together[place]]

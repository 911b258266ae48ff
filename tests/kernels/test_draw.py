"""Draws of every level against plain torch, which tests/engine/test_drawing.py judges by the written rules."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vkit import kernels
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.reference.draw import draw, draw_with_survivors

SETTINGS = [
    (0.0, 0, 1.0), (0.0, 0, 0.9), (0.0, 5, 1.0), (0.0, 50, 0.95), (0.1, 0, 1.0), (0.3, 3, 0.7), (0.0, 0, 1e-9),
    (0.0, 4000, 0.999), (0.9, 0, 0.99), (0.0, 1, 1.0), (0.05, 0, 0.95), (0.0, 0, 0.5), (1.0, 0, 1.0), (0.02, 200, 1.0),
]  # fmt: skip


def rules(settings: list[tuple[float, int, float]], temperatures: list[float], vocab_size: int) -> DrawRules:
    min_p, top_k, top_p = (list(column) for column in zip(*settings, strict=True))
    return DrawRules.of(temperatures, min_p, [k if k < vocab_size else 0 for k in top_k], top_p)


def random_keys(count: int) -> Tensor:
    return torch.randint(-(2**63), 2**63 - 1, (count,))


def many(row: Tensor, setting: tuple[float, int, float], temperature: float, draws: int) -> tuple[Tensor, DrawRules]:
    """A row to draw from many times: (draws,) places of it, and the rules."""
    return torch.zeros(draws, dtype=torch.int64), rules([setting] * draws, [temperature] * draws, row.shape[1])


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 100, 640, 5000])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])
def test_draws_are_those_of_plain_torch(
    vocab_size: int, spread: float, level: str, num_threads: int, operations: Operations
) -> None:
    repeats = 6
    settings = SETTINGS * repeats
    logits = torch.randn(len(settings), vocab_size + 5)[:, :vocab_size] * spread
    logits[::5] = (logits[::5] * 4).round() / 4  # ties everywhere
    logits[::7, ::3] = -math.inf
    logits[::7, -1] = 0.5
    temperatures = (torch.rand(len(settings)) * 1.5 + 0.3).tolist()
    own, rows, keys = rules(settings, temperatures, vocab_size), torch.randperm(len(settings)), random_keys(84)
    ids, largest = operations.draw(logits, rows, own, keys)
    expected, expected_largest = draw(logits, rows, own, keys)
    assert torch.equal(largest, expected_largest)
    # Two scores may be as near as rounding, but not in more than one of many draws.
    assert int((ids != expected).sum()) <= (0 if spread > 0.1 else 1)


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s != (0.0, 0, 1.0)])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_only_and_all_survivors_are_drawn(
    setting: tuple[float, int, float], spread: float, level: str, operations: Operations
) -> None:
    row = (torch.randn(1, 1000) * spread * 8).round() / 8
    draws = 3_000 if level == "scalar" else 10_000
    places, own = many(row, setting, 0.9, draws)
    keys = random_keys(draws)
    ids, _ = operations.draw(row, places, own, keys)
    _, _, survivors = draw_with_survivors(row, places[:1], rules([setting], [0.9], 1000), keys[:1])
    p = survivors[0].double().softmax(0)
    counts = ids.bincount(minlength=1000)
    assert not counts[p == 0].any()
    expected = p * draws
    assert counts[expected > 25].all()
    enough = expected >= 5
    if int(enough.sum()) > 1:
        freedom = int(enough.sum())
        statistic = float(((counts - expected)[enough].square() / expected[enough]).sum())
        assert statistic < freedom + 6 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab_size", [20, 200, 3000])
def test_plain_draws_follow_the_distribution(vocab_size: int, level: str, operations: Operations) -> None:
    draws = 20_000
    row = torch.randn(1, vocab_size)
    places, own = many(row, (0.0, 0, 1.0), 0.8, draws)
    counts = operations.draw(row, places, own, random_keys(draws))[0].bincount(minlength=vocab_size)
    expected = torch.softmax(row[0].double() / 0.8, 0) * draws
    statistic = float(((counts - expected).square() / expected).sum())
    assert statistic < vocab_size + 6 * math.sqrt(2 * vocab_size)


def test_rare_tokens_are_as_rare_as_they_should_be(level: str, operations: Operations) -> None:
    """What wins rarely wins by small noise: its relative error would show here."""
    draws = 100_000
    row = torch.full((1, 65), -8.0)
    row[0, 3] = 0.0
    places, own = many(row, (0.0, 64, 1.0), 1.0, draws)
    ids, _ = operations.draw(row, places, own, random_keys(draws))
    expected = draws * 64 * math.exp(-8.0) / (1 + 64 * math.exp(-8.0))
    assert abs(int((ids != 3).sum()) - expected) < 5 * math.sqrt(expected)


def test_a_row_is_drawn_alike_alone_and_in_company(level: str, operations: Operations) -> None:
    logits, keys = torch.randn(14, 3000) * 2, random_keys(14)
    together, _ = operations.draw(logits, torch.arange(14), rules(SETTINGS, [0.7] * 14, 3000), keys)
    for place, setting in enumerate(SETTINGS):
        own, row = rules([setting], [0.7], 3000), torch.tensor([place])
        assert operations.draw(logits, row, own, keys[row])[0].tolist() == [together[place]]


def test_rows_without_numbers_are_reported_and_harm_no_other(level: str, operations: Operations) -> None:
    for setting in SETTINGS:
        logits = torch.randn(6, 300)
        logits[1, 7], logits[2, 299], logits[3], logits[4] = math.nan, math.inf, -math.inf, -math.inf
        logits[4, 298] = torch.finfo(torch.float32).min
        own, keys = rules([setting] * 6, [1.0] * 6, 300), random_keys(6)
        ids, largest = operations.draw(logits, torch.arange(6), own, keys)
        assert not largest[1:3].isfinite().any()
        assert largest[3] == -math.inf
        assert ids[4] == 298
        clean = torch.tensor([0, 5])
        expected = draw(logits, clean, rules([setting] * 2, [1.0] * 2, 300), keys[clean])
        assert torch.equal(ids[clean], expected[0])
        assert torch.equal(largest[clean], expected[1])


def test_all_equal_logits(level: str, operations: Operations) -> None:
    logits, keys = torch.zeros(14, 5000), random_keys(14)
    own = rules(SETTINGS, [1.0] * 14, 5000)
    ids, _ = operations.draw(logits, torch.arange(14), own, keys)
    assert ids[6] == 0  # of equal tokens top_p keeps the lowest ids
    assert ids[11] <= 2500
    assert int((ids != draw(logits, torch.arange(14), own, keys)[0]).sum()) <= 1


def test_strided_rows_and_no_rows(level: str, operations: Operations) -> None:
    wide = torch.randn(200, 14).T
    own, keys = rules(SETTINGS, [1.0] * 14, 200), random_keys(14)
    expected, _ = draw(wide, torch.arange(14), own, keys)
    assert torch.equal(operations.draw(wide, torch.arange(14), own, keys)[0], expected)
    none = torch.zeros(0, dtype=torch.int64)
    ids, largest = operations.draw(wide.contiguous(), none, DrawRules.of([], [], [], []), none)
    assert (ids.shape, largest.shape) == ((0,), (0,))


def test_arguments_are_checked() -> None:
    own, keys = rules(SETTINGS[:2], [1.0] * 2, 10), random_keys(2)
    with pytest.raises(ValueError, match=r"draw: logits \(2, 10\) torch.float16, expected \(N, V\) float32"):
        kernels.draw(torch.zeros(2, 10, dtype=torch.float16), torch.arange(2), own, keys)
    with pytest.raises(ValueError, match=r"draw: rows \(3,\) torch.int64, expected \(2,\) int64"):
        kernels.draw(torch.zeros(3, 10), torch.arange(3), own, keys)
    with pytest.raises(ValueError, match=r"draw_with_survivors: keys \(1,\) torch.int64, expected \(2,\) int64"):
        kernels.draw_with_survivors(torch.zeros(3, 10), torch.arange(2), own, keys[:1])


def test_the_public_op_is_the_same_on_every_backend(backend: str) -> None:
    logits, keys = torch.randn(14, 2000), random_keys(14)
    own = rules(SETTINGS, [0.8] * 14, 2000)
    assert torch.equal(
        kernels.draw(logits, torch.arange(14), own, keys)[0], draw(logits, torch.arange(14), own, keys)[0]
    )


def test_largest_on_the_device_are_those_on_the_host(backend: str) -> None:
    logits = (torch.randn(40, 300) * 3).round()  # ties everywhere: the lowest id wins
    logits[3, 7] = math.nan
    logits[4] = -math.inf
    logits[5, 299] = math.inf
    ids, values = kernels.largest_rows(logits)
    expected_ids, expected_values = kernels.largest(logits)
    assert ids.dtype is torch.int64
    assert ids.tolist() == expected_ids
    assert [str(value) for value in values.tolist()] == [str(value) for value in expected_values]
    with pytest.raises(ValueError, match=r"largest_rows: logits \(3,\)"):
        kernels.largest_rows(torch.zeros(3))

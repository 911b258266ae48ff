"""Truncation against the rules as written, and draws against the distribution they claim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from vkit.kernels.draw_rules import Truncation
from vkit.kernels.reference.draw import Survivors, draw_plain, race, spread, truncate
from vkit.kernels.reference.noise import exponential_noise, token_bits
from vkit.randomness import draw_key, draw_keys, mix64, mixed_seed


def as_keys(*values: int) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))


def rules(min_p: list[float], top_k: list[int], top_p: list[float]) -> Truncation:
    return Truncation(
        torch.tensor(min_p),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        max(top_k),
        any(p < 1 for p in top_p),
        any(p < 1 and not k for p, k in zip(top_p, top_k, strict=True)),
    )


def written_rules(row: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float) -> np.ndarray:
    """Kept ids by engine rules, whole vocabulary, float64."""
    x = row.astype(np.float64) / temperature
    p = np.exp(x - x.max())
    x[p < min_p * p.max()] = -np.inf
    if top_k:
        x[x < np.sort(x)[-min(top_k, len(x))]] = -np.inf
    if top_p < 1:
        p = np.exp(x - x.max())
        p /= p.sum()
        order = np.argsort(p, kind="stable")
        dropped = order[np.cumsum(p[order]) <= 1 - top_p]
        x[[i for i in dropped if i != order[-1]]] = -np.inf
    return np.flatnonzero(np.isfinite(x))


@pytest.mark.parametrize("vocab_size", [1, 7, 64, 100, 640, 5000])
@pytest.mark.parametrize("spread_of_logits", [0.01, 1.0, 6.0])
def test_truncate_keeps_what_the_rules_keep(vocab_size: int, spread_of_logits: float) -> None:
    generator = np.random.default_rng(vocab_size)
    settings = [
        (0.0, 0, 0.9), (0.0, 5, 1.0), (0.0, 50, 0.5), (0.1, 0, 1.0), (0.3, 3, 0.7), (0.0, 0, 1e-9), (0.0, 4000, 0.999),
        (0.9, 0, 0.99), (0.0, 1, 1.0), (0.05, 0, 0.95),
    ]  # fmt: skip
    logits = generator.normal(size=(len(settings), vocab_size)).astype(np.float32) * spread_of_logits
    temperatures = generator.uniform(0.3, 1.8, size=len(settings)).astype(np.float32)
    columns = [list(column) for column in zip(*settings, strict=True)]
    found = truncate(torch.from_numpy(logits), torch.from_numpy(temperatures), rules(*columns))
    full = spread(found, vocab_size)
    for row, (min_p, top_k, top_p) in enumerate(settings):
        kept = torch.nonzero(full[row] > -math.inf).flatten().tolist()
        expected = written_rules(logits[row], float(temperatures[row]), min_p, top_k, top_p).tolist()
        assert kept == expected, settings[row]
        torch.testing.assert_close(full[row][kept], torch.from_numpy(logits[row][kept] / temperatures[row]))


def test_ties_at_the_top_k_border_are_all_kept() -> None:
    logits = torch.zeros(1, 200)
    logits[0, 5] = 2.0
    logits[0, [10, 150, 199]] = 1.0
    found = truncate(logits, torch.ones(1), rules([0.0], [2], [1.0]))
    assert sorted(found.token_ids[found.values > -math.inf].tolist()) == [5, 10, 150, 199]


def test_rows_with_impossible_tokens_only_draw_possible_ones() -> None:
    logits = torch.full((2, 300), -math.inf)
    logits[0, 17] = 0.0
    logits[1, 299] = -5.0
    assert draw_plain(logits, torch.ones(2), as_keys(3, 4)).tolist() == [17, 299]
    found = truncate(logits, torch.ones(2), rules([0.0, 0.0], [5, 0], [0.9, 0.9]))
    assert race(found, as_keys(3, 4)).tolist() == [17, 299]


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("vocab_size", [20, 200])
def test_plain_draws_follow_the_distribution(vocab_size: int) -> None:
    draws = 40_000
    row = torch.from_numpy(np.random.default_rng(1).normal(size=vocab_size).astype(np.float32))
    keys = as_keys(*[draw_key(seed, 3) for seed in range(draws)])
    chosen = draw_plain(row.expand(draws, -1).contiguous(), torch.full((draws,), 0.8), keys)
    counts = np.bincount(chosen.numpy(), minlength=vocab_size)
    probabilities = torch.softmax(row.double() / 0.8, 0).numpy()
    # Mean of chi-square is the degrees of freedom; five standard deviations above it never happens by chance.
    freedom = vocab_size - 1
    assert chi_square(counts, probabilities) < freedom + 5 * math.sqrt(2 * freedom)


def test_races_follow_the_distribution_over_positions_of_one_seed() -> None:
    draws = 40_000
    values = torch.tensor([0.0, 1.0, -1.0, 0.5, -math.inf])
    found = Survivors(values.expand(draws, -1), torch.arange(5, dtype=torch.int32).expand(draws, -1))
    chosen = race(found, as_keys(*[draw_key(12, position) for position in range(draws)]))
    counts = np.bincount(chosen.numpy(), minlength=5)
    assert counts[4] == 0
    assert chi_square(counts[:4], torch.softmax(values[:4].double(), 0).numpy()) < 3 + 5 * math.sqrt(6)


def test_a_choice_does_not_depend_on_what_else_was_left_in() -> None:
    values = torch.tensor([[0.3, 0.2, 0.9, 0.1]])
    ids = torch.tensor([[4, 7, 9, 11]], dtype=torch.int32)
    wide = torch.full((1, 7), -math.inf)
    wide[0, [1, 2, 4, 6]] = values[0]
    wide_ids = torch.tensor([[0, 4, 7, 0, 9, 0, 11]], dtype=torch.int32)
    for seed in range(50):
        key = as_keys(draw_key(seed, 0))
        assert race(Survivors(values, ids), key).tolist() == race(Survivors(wide, wide_ids), key).tolist()


def test_keys_differ_by_seed_and_position() -> None:
    keys = {draw_key(seed, position) for seed in (*range(100), 2**63, -5) for position in range(100)}
    assert len(keys) == 102 * 100
    assert mix64(0) == 0xE220A8397B1DCDAF  # first output of SplitMix64 seeded with 0


def test_keys_of_many_sequences_are_those_of_each() -> None:
    seeds, positions = [0, 1, -5, 2**63, 2**64 - 1], [0, 7, 1, 2**20, 3]
    mixed = np.array([mixed_seed(seed) for seed in seeds], dtype=np.uint64)
    found = draw_keys(mixed, np.array(positions, dtype=np.uint64))
    assert found.tolist() == [draw_key(seed, position) for seed, position in zip(seeds, positions, strict=True)]


def test_noise_bits_are_balanced_and_independent() -> None:
    ids = torch.arange(20_000, dtype=torch.int32)
    bits = token_bits(as_keys(draw_key(1, 0), draw_key(1, 1)), ids).numpy().astype(np.int64) & 0xFFFFFFFF
    for bit in range(32):
        ones = ((bits >> bit) & 1).mean(axis=1)
        assert abs(ones - 0.5).max() < 0.02
    assert abs(np.corrcoef(bits[0], bits[1])[0, 1]) < 0.03
    assert abs(np.corrcoef(bits[0][:-1], bits[0][1:])[0, 1]) < 0.03
    noise = exponential_noise(as_keys(draw_key(2, 0)), ids).numpy()[0]
    assert noise.min() > 0
    assert abs(noise.mean() - 1) < 0.03
    assert abs((noise > 1).mean() - math.exp(-1)) < 0.015

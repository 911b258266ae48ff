"""Gaps of the open loop have the distribution they claim."""

from __future__ import annotations

import math
from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from vkit.benchmark.arrivals import OpenLoop, send_times


def gaps(rate: float, burstiness: float, num: int = 20_000, seed: int = 1) -> list[float]:
    return [after - before for before, after in pairwise(send_times(OpenLoop(rate, burstiness), num, seed))]


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("rate", [0.5, 20.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_gamma(rate: float, burstiness: float) -> None:
    found = gaps(rate, burstiness)
    assert fmean(found) == pytest.approx(1 / rate, rel=0.05)
    assert pstdev(found) / fmean(found) == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    found = sorted(gaps(10.0, 1.0))
    distance = max(abs((i + 1) / len(found) - (1 - math.exp(-10.0 * gap))) for i, gap in enumerate(found))
    assert distance < 1.95 / math.sqrt(len(found))  # Kolmogorov-Smirnov, 0.1 % level; the seed is fixed


def test_burstiness_is_seen_in_the_share_of_tiny_gaps() -> None:
    def share(burstiness: float) -> float:
        return fmean(gap < 0.01 for gap in gaps(10.0, burstiness))

    assert share(0.25) > share(1.0) > share(4.0)


def test_times_start_at_once_rise_and_repeat_by_seed() -> None:
    times = send_times(OpenLoop(5.0), 50, 7)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert len(times) == 50
    assert times == send_times(OpenLoop(5.0), 50, 7)
    assert times != send_times(OpenLoop(5.0), 50, 8)


def test_no_requests_no_times() -> None:
    assert send_times(OpenLoop(1.0), 0, 0) == []

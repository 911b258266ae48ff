"""Figures against numpy and against cases worked by hand."""

from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkit.benchmark.statistics import Arrival, Distribution, RequestRecord, Slo, apportion, percentile, summarize
from vkit.errors import UsageError


def record(
    index: int, sent: float, arrivals: list[tuple[float, int]], *, inputs: int = 10, **extra: object
) -> RequestRecord:
    made = RequestRecord(index, sent, sent, input_tokens=inputs, output_tokens=sum(count for _, count in arrivals))
    made.arrivals = [Arrival(time, count) for time, count in arrivals]
    made.end_s = arrivals[-1][0] if arrivals else sent
    for name, value in extra.items():
        setattr(made, name, value)
    return made


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_interpolate_linearly_as_numpy_does(values: list[float], percent: float) -> None:
    expected = float(np.percentile(values, percent, method="linear"))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_distribution_equals_numpy() -> None:
    values = np.random.default_rng(1).gamma(2.0, 5.0, 1000)
    found = Distribution.of(values.tolist())
    assert found is not None
    expected = [values.mean(), np.median(values), np.percentile(values, 90), np.percentile(values, 99)]
    assert [found.mean, found.median, found.p90, found.p99] == pytest.approx(expected)


def test_distribution_of_nothing_is_none() -> None:
    assert Distribution.of([]) is None


def test_latencies_of_one_request_by_hand() -> None:
    one = record(0, 1.0, [(1.5, 4), (2.0, 1), (3.5, 3)])
    assert one.ttft_s == 0.5
    assert one.e2e_s == 2.5
    assert one.tpot_s == pytest.approx((2.5 - 0.5) / 7)
    assert one.itl_s == pytest.approx([0, 0, 0, 0.5, 0.5, 0.5, 0.5])
    assert fmean(one.itl_s) == pytest.approx(one.tpot_s)


def test_one_token_has_no_tpot_and_no_gap() -> None:
    one = record(0, 0.0, [(0.25, 1)])
    assert (one.ttft_s, one.tpot_s, one.itl_s) == (0.25, None, [])


def test_an_empty_answer_has_no_ttft_and_lasts_to_its_end() -> None:
    empty = record(0, 1.0, [], end_s=1.75)
    assert (empty.ttft_s, empty.tpot_s, empty.itl_s, empty.e2e_s) == (None, None, [], 0.75)


@given(st.integers(1, 400), st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_apportion_keeps_the_sum_and_gives_the_first_event_a_token(total: int, weights: list[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total
    assert len(parts) == len(weights)
    assert min(parts) >= 0
    assert parts[0] >= 1
    if total >= len(weights):
        assert min(parts) >= 1


@pytest.mark.parametrize(
    ("total", "weights", "expected"),
    [
        (8, [4, 1, 3], [4, 1, 3]),
        (3, [9, 1, 5], [1, 1, 1]),
        (16, [8, 2, 6], [8, 2, 6]),
        (0, [1, 2], [0, 0]),
        (2, [1, 1, 10], [1, 0, 1]),
        (4, [0, 0], [2, 2]),
        (5, [], []),
    ],
)
def test_apportion_by_hand(total: int, weights: list[int], expected: list[int]) -> None:
    assert apportion(total, weights) == expected


def test_summary_by_hand() -> None:
    records = [
        record(0, 0.0, [(0.2, 1), (0.4, 1), (0.8, 2)], inputs=100),
        record(1, 0.5, [(1.0, 2), (2.0, 1)], inputs=50),
    ]
    found = summarize(records)
    assert (found.completed, found.failed, found.duration_s) == (2, 0, 2.0)
    assert (found.total_input_tokens, found.total_output_tokens) == (150, 7)
    assert (found.requests_per_s, found.output_tokens_per_s) == (1.0, 3.5)
    assert (found.input_tokens_per_s, found.total_tokens_per_s) == (75.0, 78.5)
    assert found.stream_output_tokens_per_s == pytest.approx((3 / 0.6 + 2 / 1.0) / 2)
    assert found.ttft_ms is not None
    assert found.ttft_ms.mean == pytest.approx(350)
    assert found.ttft_ms.p90 == pytest.approx(200 + 0.9 * 300)
    assert found.tpot_ms is not None
    assert found.tpot_ms.mean == pytest.approx((200 + 500) / 2)
    assert found.itl_ms is not None
    assert found.itl_ms.mean == pytest.approx(1e3 * fmean([0.2, 0.2, 0.2, 0.0, 1.0]))
    assert found.e2e_ms is not None
    assert found.e2e_ms.median == pytest.approx((800 + 1500) / 2)
    assert found.goodput is None


def test_a_failed_request_enters_no_latency_and_no_token_count() -> None:
    good = record(0, 0.0, [(1.0, 1), (2.0, 1)])
    bad = RequestRecord(1, 0.0, 0.0, end_s=4.0, error="HTTP 500")
    found = summarize([good, bad])
    alone = summarize([good])
    assert (found.completed, found.failed, found.total_output_tokens) == (1, 1, 2)
    assert (found.ttft_ms, found.tpot_ms, found.itl_ms, found.e2e_ms) == (
        alone.ttft_ms,
        alone.tpot_ms,
        alone.itl_ms,
        alone.e2e_ms,
    )
    assert found.duration_s == 4.0


def test_all_failed_has_no_latencies_and_no_rates() -> None:
    found = summarize([RequestRecord(0, 0.0, 0.0, end_s=0.0, error="x")], Slo.parse("ttft:1"))
    assert (found.completed, found.failed, found.requests_per_s) == (0, 1, 0.0)
    assert (found.ttft_ms, found.e2e_ms, found.stream_output_tokens_per_s) == (None, None, None)
    assert found.goodput is not None
    assert found.goodput.share == 0.0


def test_goodput_counts_requests_within_every_limit() -> None:
    records = [
        record(0, 0.0, [(0.1, 1), (0.14, 1)]),  # ttft 100, tpot 40: good
        record(1, 0.0, [(0.1, 1), (0.16, 1)]),  # tpot 60: too slow
        record(2, 0.0, [(0.3, 1)]),  # ttft 300: too late
        record(3, 0.0, [(0.2, 1)]),  # ttft 200, on the limit, no tpot: good
        RequestRecord(4, 0.0, 0.0, end_s=0.4, error="no"),
    ]
    found = summarize(records, Slo.parse("ttft:200, tpot:50"))
    assert found.goodput is not None
    assert found.goodput.requests_per_s == pytest.approx(2 / 0.4)
    assert found.goodput.share == pytest.approx(2 / 5)


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:3", "ttft:1,ttft:2", "ttft:1,"],
)
def test_a_bad_slo_is_refused_by_name(text: str) -> None:
    with pytest.raises(UsageError, match="--slo"):
        Slo.parse(text)


def test_itl_of_a_long_stream_sums_to_its_decode_time() -> None:
    rng = random.Random(3)
    times = sorted(rng.random() for _ in range(200))
    one = record(0, 0.0, [(time, rng.randrange(1, 6)) for time in times])
    assert len(one.itl_s) == one.output_tokens - 1
    assert math.fsum(one.itl_s) == pytest.approx(times[-1] - times[0])

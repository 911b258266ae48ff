"""Curves hold the right points; the libraries draw them into files and text."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from vkit.benchmark import plots
from vkit.benchmark.plots import (
    check_plot_path,
    check_terminal_plot,
    comparison_panels,
    distribution_curve,
    in_flight_curve,
    rate_curve,
    run_panels,
    save_plot,
    sweep_panels,
    terminal_plot,
)
from vkit.benchmark.report import ResultFile, Run
from vkit.benchmark.session import MeasuredRun, result_file
from vkit.benchmark.statistics import Arrival, RequestRecord, Summary, summarize
from vkit.errors import MissingExtra, UsageError

needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="extra `plots`")
needs_plotext = pytest.mark.skipif(importlib.util.find_spec("plotext") is None, reason="extra `bench`")


def records() -> list[RequestRecord]:
    made = []
    for i in range(6):
        one = RequestRecord(i, 0.0, 0.1 * i, end_s=1.0 + 0.1 * i, input_tokens=5, output_tokens=4)
        one.arrivals = [Arrival(0.3 + 0.1 * (i + k), 1) for k in range(4)]
        made.append(one)
    return made


def summary() -> Summary:
    return summarize(records())


def test_a_distribution_rises_to_all_of_the_sample() -> None:
    curve = distribution_curve("x", [3.0, 1.0, 2.0, 2.0])
    assert (curve.x, curve.y) == ([1.0, 1.0, 2.0, 2.0, 3.0], [0.0, 25.0, 50.0, 75.0, 100.0])


def test_rates_integrate_to_the_tokens() -> None:
    arrivals = [Arrival(0.0, 4), (Arrival(0.95, 1)), Arrival(9.7, 3)]
    curve = rate_curve("x", arrivals, 9.75)
    width = curve.x[1] - curve.x[0]
    assert width == pytest.approx(0.2)
    widths = [min(width, 9.75 - start) for start in curve.x]
    assert sum(rate * w for rate, w in zip(curve.y, widths, strict=True)) == pytest.approx(8)
    assert curve.y[0] == pytest.approx(4 / 0.2)
    assert curve.y[-1] == pytest.approx(3 / 0.15)


def test_requests_in_flight_rise_and_end_at_zero() -> None:
    curve = in_flight_curve("x", records())
    assert max(curve.y) == 6
    assert curve.y[-1] == 0
    assert curve.x == sorted(curve.x)


def test_a_run_of_failures_has_only_what_it_has() -> None:
    failed = [RequestRecord(0, 0.0, 0.0, end_s=1.0, error="no")]
    assert [panel.title for panel in run_panels(failed)] == ["Output", "In flight"]


def test_a_sweep_shows_a_point_for_each_size() -> None:
    throughput, latency = sweep_panels([(1, summary()), (4, summary())])
    assert throughput.curves[0].x == [1.0, 4.0]
    assert [curve.label for curve in latency.curves] == ["TTFT", "TPOT", "ITL", "E2E"]


def test_a_comparison_shows_both_results() -> None:
    result = result_file([MeasuredRun(records(), summary())], {})
    panels = comparison_panels([("a", result), ("b", result)])
    assert [panel.title for panel in panels] == ["TTFT", "TPOT", "E2E"]
    assert all([curve.label for curve in panel.curves] == ["a", "b"] for panel in panels)
    sweep = ResultFile(settings={}, runs=[Run(summary(), [], 2), Run(summary(), [], 4)])
    rates, latencies = comparison_panels([("a", sweep), ("b", sweep)])
    assert [curve.x for curve in rates.curves + latencies.curves] == [[2.0, 4.0]] * 4


@needs_matplotlib
@pytest.mark.parametrize(("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_plot_is_a_file_of_its_format(tmp_path: Path, suffix: str, magic: bytes) -> None:
    path = tmp_path / f"out{suffix}"
    check_plot_path(path)
    save_plot(run_panels(records()), path, "title")
    assert path.read_bytes().startswith(magic)
    assert path.stat().st_size > 5000


@needs_matplotlib
def test_a_plot_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "folder.png"
    path.mkdir()
    with pytest.raises(UsageError, match=r"--plot: .*folder\.png"):
        save_plot(run_panels(records()), path, "title")


@pytest.mark.parametrize("name", ["out", "out.jpeg", "none/out.png"])
def test_a_bad_plot_path_is_refused_before_anything_runs(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="--plot"):
        check_plot_path(tmp_path / name)


def test_missing_libraries_are_named_by_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match="'vkit\\[plots\\]'"):
        check_plot_path(tmp_path / "out.png")
    with pytest.raises(MissingExtra, match="'vkit\\[bench\\]'"):
        check_terminal_plot()


@needs_plotext
def test_terminal_plots_are_plain_text_of_the_asked_width() -> None:
    check_terminal_plot()
    text = terminal_plot(run_panels(records()), 60, has_colour=False)
    assert "\x1b" not in text
    assert {len(line) for line in text.splitlines()} == {60, 0}
    for title in ("Request latency", "Time between tokens", "Output", "In flight", "TTFT", "E2E"):
        assert title in text
    assert {"o TTFT", "x E2E"} <= {part.strip() for line in text.splitlines() for part in line.split("│")}
    assert "\x1b" in terminal_plot(run_panels(records()), 60, has_colour=True)

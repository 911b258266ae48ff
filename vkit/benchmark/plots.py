"""Plots of results: figures for a report (extra `plots`) and quick looks in a terminal (extra `bench`).

Both show the same curves; the curves are made here once, the libraries only draw.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkit.benchmark.report import RequestRow, ResultFile
from vkit.benchmark.statistics import LATENCIES, Arrival, RequestRecord, Summary
from vkit.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_FORMATS = (".png", ".svg", ".pdf")
MAX_RATE_BINS = 60
TERMINAL_HEIGHT = 14
PLAIN_MARKERS = "ox+*"


@dataclass(frozen=True, slots=True)
class Curve:
    """Points to join by a line."""

    label: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot: curves over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    curves: list[Curve]
    is_stepped: bool = False


def distribution_curve(label: str, values: Iterable[float]) -> Curve:
    """The share of `values` (in %) that are at most x: the empirical distribution, from 0 one step up at each value."""
    ordered = sorted(values)
    return Curve(label, ordered[:1] + ordered, [100 * i / len(ordered) for i in range(len(ordered) + 1)])


def rate_curve(label: str, arrivals: Sequence[Arrival], duration_s: float) -> Curve:
    """Tokens per second over time, counted in bins of a whole number of 0.1 s; a point at the start of each bin."""
    width = max(0.1, math.ceil(duration_s / MAX_RATE_BINS * 10) / 10)
    bins = [0] * max(1, math.ceil(duration_s / width))
    for arrival in arrivals:
        bins[min(int(arrival.time_s / width), len(bins) - 1)] += arrival.num_tokens
    # The last bin is cut short by the run's end.
    widths = [min(width, duration_s - i * width) or width for i in range(len(bins))]
    return Curve(label, [i * width for i in range(len(bins))], [n / w for n, w in zip(bins, widths, strict=True)])


def in_flight_curve(label: str, records: Sequence[RequestRecord]) -> Curve:
    """Number of requests in flight over time: a point at every sending and every end."""
    changes = sorted([(r.sent_s, 1) for r in records] + [(r.end_s, -1) for r in records])
    levels, level = [], 0
    for _, change in changes:
        level += change
        levels.append(float(level))
    return Curve(label, [time for time, _ in changes], levels)


def run_panels(records: Sequence[RequestRecord]) -> list[Panel]:
    """How long requests took, how long tokens took, and what went through over time."""
    done = [record for record in records if record.error is None]
    end = max((record.end_s for record in records), default=0.0)
    arrivals = [arrival for record in done for arrival in record.arrivals]
    panels = [
        _distribution_panel(
            "Request latency",
            ("TTFT", [record.ttft_s * 1e3 for record in done if record.ttft_s is not None]),
            ("E2E", [record.e2e_s * 1e3 for record in done]),
        ),
        _distribution_panel(
            "Time between tokens",
            ("TPOT", [record.tpot_s * 1e3 for record in done if record.tpot_s is not None]),
            ("ITL", [gap * 1e3 for record in done for gap in record.itl_s]),
        ),
        Panel("Output", "time (s)", "tok/s", [rate_curve("output", arrivals, end)], is_stepped=True),
        Panel("In flight", "time (s)", "requests", [in_flight_curve("in flight", records)], is_stepped=True),
    ]
    return [panel for panel in panels if any(curve.x for curve in panel.curves)]


def sweep_panels(points: Sequence[tuple[int, Summary]]) -> list[Panel]:
    """Throughput and latency against batch size."""
    sizes = [float(size) for size, _ in points]
    rates = [summary.output_tokens_per_s for _, summary in points]
    latencies = [
        Curve(name.upper(), [size for size, _ in found], [value for _, value in found])
        for name in LATENCIES
        if (found := [(float(s), d.median) for s, summary in points if (d := getattr(summary, f"{name}_ms"))])
    ]
    return [
        Panel("Throughput", "batch size", "tok/s", [Curve("output", sizes, rates)]),
        Panel("Median latency", "batch size", "ms", latencies),
    ]


def comparison_panels(results: Sequence[tuple[str, ResultFile]]) -> list[Panel]:
    """The request latencies of several results, one curve each."""
    if any(run.batch_size is not None for _, result in results for run in result.runs):
        return _sweep_comparison(results)
    rows: list[tuple[str, list[RequestRow]]] = [(name, result.runs[0].requests) for name, result in results]
    panels = [
        _distribution_panel("TTFT", *((name, _found(row.ttft_ms for row in found)) for name, found in rows)),
        _distribution_panel("TPOT", *((name, _found(row.tpot_ms for row in found)) for name, found in rows)),
        _distribution_panel("E2E", *((name, _found(row.e2e_ms for row in found)) for name, found in rows)),
    ]
    return [panel for panel in panels if panel.curves]


def _sweep_comparison(results: Sequence[tuple[str, ResultFile]]) -> list[Panel]:
    rates, latencies = [], []
    for name, result in results:
        points = [(float(run.batch_size or 0), run.summary) for run in result.runs]
        rates.append(Curve(name, [size for size, _ in points], [summary.output_tokens_per_s for _, summary in points]))
        medians = [(size, summary.e2e_ms.median) for size, summary in points if summary.e2e_ms is not None]
        latencies.append(Curve(name, [size for size, _ in medians], [median for _, median in medians]))
    return [
        Panel("Throughput", "batch size", "tok/s", rates),
        Panel("Median E2E", "batch size", "ms", latencies),
    ]


def _found(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _distribution_panel(title: str, *samples: tuple[str, list[float]]) -> Panel:
    curves = [distribution_curve(label, values) for label, values in samples if values]
    return Panel(title, "ms", "% of sample", curves, is_stepped=True)


def check_plot_path(path: Path) -> None:
    """Refuse a plot that could not be written, before anything is measured.

    Raises:
        UsageError: an unknown format or no such folder. MissingExtra: matplotlib is not installed.
    """
    if path.suffix.lower() not in PLOT_FORMATS:
        raise UsageError(f"--plot: {path}: expected a name that ends in {', '.join(PLOT_FORMATS)}")
    if not path.parent.is_dir():
        raise UsageError(f"--plot: {path}: no such folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtra("--plot", "plots")


def check_terminal_plot() -> None:
    """Refuse terminal plots without their library.

    Raises:
        MissingExtra: plotext is not installed.
    """
    if importlib.util.find_spec("plotext") is None:
        raise MissingExtra("--plot-terminal", "bench")


def save_plot(panels: Sequence[Panel], path: Path, title: str) -> None:
    """Draw `panels` into a file; its suffix is the format.

    Raises:
        UsageError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_columns = min(2, len(panels))
    num_rows = math.ceil(len(panels) / num_columns)
    figure = Figure(figsize=(5.5 * num_columns, 3.6 * num_rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    for index, panel in enumerate(panels, start=1):
        _draw(figure.add_subplot(num_rows, num_columns, index), panel)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"--plot: {path}: {error.strerror or error}") from error


def _draw(axes: Axes, panel: Panel) -> None:
    for curve in panel.curves:
        if panel.is_stepped:
            axes.step(curve.x, curve.y, where="post", label=curve.label)
        else:
            axes.plot(curve.x, curve.y, marker="o", label=curve.label)
    axes.set_title(panel.title)
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(panel.curves) > 1:
        axes.legend()


def _steps(curve: Curve) -> tuple[list[float], list[float]]:
    """The points of a line that keeps each value until the next."""
    x, y = curve.x[:1], curve.y[:1]
    for next_x, next_y in zip(curve.x[1:], curve.y[1:], strict=True):
        x += [next_x, next_x]
        y += [y[-1], next_y]
    return x, y


def terminal_plot(panels: Sequence[Panel], width: int, *, has_colour: bool) -> str:
    """`panels` below each other as text of `width` columns."""
    plotext: Any = importlib.import_module("plotext")
    figure = plotext.figure
    texts = []
    for panel in panels:
        figure.clear()
        figure.plot_size(width, TERMINAL_HEIGHT)
        figure.theme("simple" if has_colour else "colorless")
        for curve, letter in zip(panel.curves, cycle(PLAIN_MARKERS), strict=False):
            x, y = _steps(curve) if panel.is_stepped else (curve.x, curve.y)
            # Without colour, only its marker tells one curve from another.
            marker = None if has_colour or len(panel.curves) == 1 else letter
            signal = figure.signal(x, y, marker=marker).lines()
            figure.draw(signal.label(curve.label) if len(panel.curves) > 1 else signal)
        figure.title(panel.title)
        figure.label(panel.x_label, "x")
        figure.label(panel.y_label, "y")
        built = figure.build()
        texts.append(str(built) if has_colour else plotext.uncolorize(built))
    figure.clear()
    return "\n".join(texts)

"""Results as tables for a terminal. Every figure shown stands in the result file too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.table import Table

from vkit.benchmark.report import Comparison, RunComparison, Setting
from vkit.benchmark.statistics import LATENCIES, Distribution, Summary

MISSING = "-"


def number(value: float | None) -> str:
    """A figure with three decimals below 10, fewer above; whole numbers as they are."""
    if value is None:
        return MISSING
    if isinstance(value, int):
        return f"{value}"
    decimals = 3 if abs(value) < 10 else 2 if abs(value) < 1000 else 1
    return f"{value:.{decimals}f}"


def summary_tables(summary: Summary) -> list[Table]:
    """The throughput table and the latency table of one run."""
    rates = _table("", right=1)
    for name, value in _rate_rows(summary):
        rates.add_row(name, value)
    latencies = _table("latency (ms)", "mean", "median", "p90", "p99")
    for name in LATENCIES:
        found: Distribution | None = getattr(summary, f"{name}_ms")
        values = (found.mean, found.median, found.p90, found.p99) if found else (None,) * 4
        latencies.add_row(name.upper(), *map(number, values))
    return [rates, latencies]


def _rate_rows(summary: Summary) -> Iterator[tuple[str, str]]:
    yield "completed requests", number(summary.completed)
    yield "failed requests", number(summary.failed)
    yield "duration (s)", number(summary.duration_s)
    yield "input tokens", number(summary.total_input_tokens)
    yield "output tokens", number(summary.total_output_tokens)
    yield "requests (1/s)", number(summary.requests_per_s)
    yield "output, decode (tok/s)", number(summary.output_tokens_per_s)
    yield "input, prefill (tok/s)", number(summary.input_tokens_per_s)
    yield "total (tok/s)", number(summary.total_tokens_per_s)
    yield "decode of one stream, mean (tok/s)", number(summary.stream_output_tokens_per_s)
    if summary.goodput is not None:
        yield "goodput (1/s)", number(summary.goodput.requests_per_s)
        yield "goodput (% of requests)", f"{100 * summary.goodput.share:.1f}"
    if summary.mean_acceptance_length is not None and summary.draft_acceptance_rate is not None:
        yield "acceptance length, mean (tok)", number(summary.mean_acceptance_length)
        yield "drafts accepted (%)", f"{100 * summary.draft_acceptance_rate:.1f}"


def sweep_table(points: Sequence[tuple[int, Summary]]) -> Table:
    """One row for each batch size."""
    table = _table("batch size", "E2E median", "E2E p99", "TTFT median", "TPOT median", "decode tok/s", "prefill tok/s")
    for batch_size, summary in points:
        e2e, ttft, tpot = summary.e2e_ms, summary.ttft_ms, summary.tpot_ms
        table.add_row(
            f"{batch_size}",
            number(e2e.median if e2e else None),
            number(e2e.p99 if e2e else None),
            number(ttft.median if ttft else None),
            number(tpot.median if tpot else None),
            number(summary.output_tokens_per_s),
            number(summary.input_tokens_per_s),
        )
    table.caption = "latencies in ms"
    return table


def comparison_tables(comparison: Comparison) -> list[Table]:
    """The settings that differ, then one table of figures for each run."""
    tables = [_settings_table(comparison.settings)] if comparison.settings else []
    return tables + [_figures_table(run) for run in comparison.runs]


def _settings_table(settings: dict[str, tuple[Setting, Setting]]) -> Table:
    table = _table("settings that differ", "A", "B")
    for name, (a, b) in settings.items():
        table.add_row(name, *(MISSING if value is None else str(value) for value in (a, b)))
    return table


def _figures_table(run: RunComparison) -> Table:
    title = "figure" if run.batch_size is None else f"figure, batch size {run.batch_size}"
    table = _table(title, "A", "B", "B - A", "B / A")
    for row in run.figures:
        table.add_row(row.figure, number(row.a), number(row.b), _signed(row.difference), number(row.ratio))
    return table


def _signed(value: float | None) -> str:
    text = number(value)
    return f"+{text}" if value is not None and value > 0 else text


def _table(first: str, *columns: str, right: int = 0) -> Table:
    """A table whose first column is names and whose others are figures; `right` adds that many without a head."""
    table = Table(box=box.SIMPLE_HEAD if first else box.SIMPLE, show_header=bool(first), caption_justify="left")
    table.add_column(first, no_wrap=True)
    for name in columns or ("",) * right:
        table.add_column(name, justify="right", overflow="fold")
    return table

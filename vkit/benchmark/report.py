"""Result files: what a run writes, and what two of them say about each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec

from vkit import __version__
from vkit.benchmark.statistics import Distribution, Goodput, RequestRecord, Summary
from vkit.errors import UsageError

Setting = str | int | float | bool | None


@dataclass(frozen=True, slots=True)
class RequestRow:
    """One request in a result file. Latencies are None for a failed request."""

    index: int
    sent_s: float
    send_delay_ms: float
    """How late an open loop was in sending it."""
    input_tokens: int
    output_tokens: int
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float | None
    error: str | None

    @classmethod
    def of(cls, record: RequestRecord) -> RequestRow:
        """The row of one record."""
        is_failed = record.error is not None
        return cls(
            index=record.index,
            sent_s=record.sent_s,
            send_delay_ms=(record.sent_s - record.scheduled_s) * 1e3,
            input_tokens=record.input_tokens,
            output_tokens=record.output_tokens,
            ttft_ms=None if is_failed or record.ttft_s is None else record.ttft_s * 1e3,
            tpot_ms=None if is_failed or record.tpot_s is None else record.tpot_s * 1e3,
            e2e_ms=None if is_failed else record.e2e_s * 1e3,
            error=record.error,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """The figures of one load. `batch_size` is set in a sweep only."""

    summary: Summary
    requests: list[RequestRow]
    batch_size: int | None = None


class ResultFile(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` writes: one run, or one for each batch size of a sweep."""

    format: Literal["vkit-bench"] = "vkit-bench"
    version: Literal[1] = 1
    vkit_version: str = __version__
    created: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    settings: dict[str, Setting]
    runs: list[Run]


def encode(value: Any) -> str:
    """A result as indented JSON with a final newline."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


def read_result(path: Path) -> ResultFile:
    """The result that `path` holds.

    Raises:
        UsageError: it cannot be read, or is no result file of this format.
    """
    try:
        result = msgspec.json.decode(path.read_bytes(), type=ResultFile)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a result file of vkit bench: {error}") from error
    if not result.runs:
        raise UsageError(f"{path}: holds no run")
    return result


def figures(summary: Summary) -> Iterator[tuple[str, float | None]]:
    """Every figure of a summary under a flat name such as `ttft_ms.p99`; None for one it does not have."""
    for field in dataclasses.fields(summary):
        value = getattr(summary, field.name)
        parts: type[Distribution] | type[Goodput] | None = None
        if field.name.endswith("_ms"):
            parts = Distribution
        elif field.name == "goodput":
            parts = Goodput
        if parts is None:
            yield field.name, value
            continue
        for part in dataclasses.fields(parts):
            yield f"{field.name}.{part.name}", getattr(value, part.name) if value is not None else None


@dataclass(frozen=True, slots=True)
class Difference:
    """One figure of two results. `difference` is b - a and `ratio` b / a; None where they do not exist."""

    figure: str
    a: float | None
    b: float | None
    difference: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All figures of one run in two results."""

    batch_size: int | None
    figures: list[Difference]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """What two result files say about each other. `settings` holds the pairs (a, b) that differ."""

    format: Literal["vkit-bench-comparison"] = "vkit-bench-comparison"
    version: Literal[1] = 1
    a: str
    b: str
    settings: dict[str, tuple[Setting, Setting]]
    runs: list[RunComparison]


def compare(a: ResultFile, b: ResultFile, *, names: tuple[str, str]) -> Comparison:
    """The differences from `a` to `b`, run by run.

    Raises:
        UsageError: they do not hold the same batch sizes, or one is a sweep and the other is not.
    """
    sizes_a, sizes_b = ([run.batch_size for run in result.runs] for result in (a, b))
    if sizes_a != sizes_b:
        raise UsageError(
            f"{names[0]} holds {_sizes(sizes_a)}, {names[1]} {_sizes(sizes_b)}", remedy="compare runs of the same kind"
        )
    return Comparison(
        a=names[0],
        b=names[1],
        settings=_differing(a.settings, b.settings),
        runs=[
            RunComparison(run_a.batch_size, list(_differences(run_a.summary, run_b.summary)))
            for run_a, run_b in zip(a.runs, b.runs, strict=True)
        ],
    )


def _differing(a: Mapping[str, Setting], b: Mapping[str, Setting]) -> dict[str, tuple[Setting, Setting]]:
    return {name: (a.get(name), b.get(name)) for name in sorted({*a, *b}) if a.get(name) != b.get(name)}


def _differences(a: Summary, b: Summary) -> Iterator[Difference]:
    for (name, value_a), (_, value_b) in zip(figures(a), figures(b), strict=True):
        if value_a is None and value_b is None:
            continue
        if value_a is None or value_b is None:
            yield Difference(name, value_a, value_b, None, None)
        else:
            yield Difference(name, value_a, value_b, value_b - value_a, value_b / value_a if value_a else None)


def _sizes(sizes: Sequence[int | None]) -> str:
    return "a single run" if sizes == [None] else f"batch sizes {', '.join(map(str, sizes))}"

"""A live line about a run, for a person at a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from vkit.benchmark.statistics import RequestRecord


class ProgressLine:
    """Shows requests done, in flight and failed, and output tokens a second; nothing where `console` is no terminal."""

    def __init__(self, console: Console, num_requests: int) -> None:
        self._bar = Progress(
            TextColumn("requests"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[in_flight]} in flight"),
            TextColumn("{task.fields[failed]} failed"),
            TextColumn("{task.fields[rate]:.1f} tok/s"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=num_requests, in_flight=0, failed=0, rate=0.0)
        self._in_flight = self._failed = self._num_tokens = 0

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        self._bar.reset(self._task)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def sent(self) -> None:
        """A request went out."""
        self._in_flight += 1
        self._show(0)

    def ended(self, record: RequestRecord) -> None:
        """A request completed or failed."""
        self._in_flight -= 1
        self._failed += record.error is not None
        self._num_tokens += record.output_tokens
        self._show(1)

    def _show(self, advance: int) -> None:
        elapsed = self._bar.tasks[0].elapsed or 0.0
        rate = self._num_tokens / elapsed if elapsed > 0 else 0.0
        self._bar.update(self._task, advance=advance, in_flight=self._in_flight, failed=self._failed, rate=rate)

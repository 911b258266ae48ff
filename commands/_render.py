"""What commands show: results on stdout, everything for the person watching on stderr. Rich is imported on demand."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 4000
"""A pipe has no width; lines are not cut or folded for it."""

LoadProgress = Callable[[int, int], None]
"""(bytes done, bytes in all)"""
SecondsProgress = Callable[[float], None]
"""(seconds of a recording done)"""


def note(message: str) -> None:
    """Write one line about what is going on to stderr."""
    from vkit.cli import say

    say(message)


def write_text(text: str) -> None:
    """Write text to stdout as it is, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write one JSON value and a newline to stdout."""
    write_text(json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n")


def write_stream(pieces: Iterable[str]) -> str:
    """Write pieces to stdout as they come, then one newline; returns them joined."""
    written = []
    for piece in pieces:
        write_text(piece)
        written.append(piece)
    write_text("\n")
    return "".join(written)


def is_plain(stream: Any) -> bool:
    """Whether a stream must get no colour codes: redirected, or colour is unwanted (NO_COLOR)."""
    return not stream.isatty() or bool(os.environ.get("NO_COLOR"))


def console(*, stderr: bool = False) -> Console:
    """A rich console for stdout or stderr that keeps escape codes out of redirected output."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    plain = is_plain(stream)
    return Console(
        file=stream,
        color_system=None if plain else "auto",
        force_terminal=False if plain else None,
        width=None if stream.isatty() else PIPE_WIDTH,
        highlight=False,
    )


def table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]], *, stderr: bool = False) -> None:
    """Print a table; text in it is shown as it is, never as markup."""
    from rich.table import Table
    from rich.text import Text

    shown = Table(
        title=title, box=None, pad_edge=False, title_justify="left", header_style="bold", show_header=any(columns)
    )
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(Text(cell) for cell in row))
    console(stderr=stderr).print(shown)


@contextmanager
def load_progress(name: str) -> Iterator[LoadProgress | None]:
    """A progress bar on stderr while weights load; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"loading {name}".replace("[", r"\["), total=None)

        def show(done_bytes: int, total_bytes: int) -> None:
            bar.update(task, completed=done_bytes, total=total_bytes)

        yield show


@contextmanager
def seconds_progress(name: str) -> Iterator[SecondsProgress | None]:
    """How far a recording has been read, on stderr; None where the text itself shows it, or nobody watches."""
    if not sys.stderr.isatty() or sys.stdout.isatty():
        yield None
        return
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TextColumn("{task.completed:.0f} s of sound"))
    with Progress(*columns, TimeElapsedColumn(), console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(f"transcribing {name}".replace("[", r"\["), total=None)
        yield lambda seconds: bar.update(task, completed=seconds)


def size(num_bytes: int) -> str:
    """A byte count for people: 93.1 MB."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def duration(seconds: float) -> str:
    """A length of time for people: 0.42 s, 12 s, 3 min 20 s, 1 h 02 min, 2 d 3 h."""
    if seconds < 0.01:
        return "under 0.01 s"
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"

"""`vkit convert`: a model in another format, or in fewer bits."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from vkit.commands import _options, _render

Progress = Callable[[str, int, int], None]


def convert(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="Checkpoint directory, .gguf file, or hub repository id.")
    ],
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A name ending in .gguf for a GGUF file; else a new folder.")
    ],
    type: Annotated[
        str | None,
        typer.Option(
            "--type",
            metavar="TYPE",
            help="F32, F16, BF16; for GGUF also Q8_0, Q6_K, Q5_K, Q5_K_M, Q4_K, Q4_K_M, Q5_1, Q5_0, Q4_1, Q4_0.",
            show_default="as stored; blocks become BF16",
        ),
    ] = None,
    json: _options.JsonFlag = False,
) -> None:
    """Convert a model between safetensors and GGUF, quantising if asked.

    The result is read back and compared with the source before it gets its name. A run that was stopped goes on where
    it was when the same command is given again.
    """
    from vkit import resolve_model

    path = resolve_model(source, say=_render.note)

    from vkit.conversion import convert as run

    with _progress(target.name) as progress:
        report = run(path, target, type=type.upper() if type else None, progress=progress).to_dict()
    for note in report["notes"]:
        _render.note(note)
    if json:
        _render.write_json(report)
        return
    _render.table(None, ["", ""], list(_rows(report)))
    _render.table(
        None,
        ["type", "tensors", "size", "mean error", "largest error", "in"],
        [
            [
                name,
                str(entry["num_tensors"]),
                _render.size(entry["num_bytes"]),
                f"{100 * entry['mean_error']:.3f} %",
                f"{100 * entry['max_error']:.3f} %",
                entry.get("max_error_tensor", ""),
            ]
            for name, entry in report["types"].items()
        ],
    )


def _rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "written", report["target"]
    yield "type", report["type"]
    before, after = report["num_source_bytes"], report["num_bytes"]
    yield "size", f"{_render.size(after)}, from {_render.size(before)}"
    resumed = f", {report['num_resumed']} of them by an earlier run" if report["num_resumed"] else ""
    yield "tensors", f"{report['num_tensors']}, all read back and compared{resumed}"
    yield "time", f"{report['seconds']:.1f} s"


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """Bars on stderr for writing and checking; nothing where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield lambda what, done_bytes, total_bytes: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=_render.console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(what: str, done_bytes: int, total_bytes: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(f"{what} {name}".replace("[", r"\["), total=total_bytes)
            bar.update(tasks[what], completed=done_bytes)

        yield show

"""What `vkit h3-gen` shows: the plan, the stages as they run, previews, the result."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkit.commands import _render

if TYPE_CHECKING:
    from rich.text import Text

    from vkit.video.h3.pipeline import Progress, VideoResult
    from vkit.video.h3.plan import VideoPlan

STAGE_NAMES = {
    "encode": "prompt",
    "condition": "conditions",
    "denoise": "denoising",
    "decode_video": "pictures",
    "decode_audio": "sound",
    "mux": "file",
}
LINE_EVERY_S = 30.0
"""How often a stage is heard of where no bars can be drawn."""
PREVIEW_COLUMNS = 64


def plan_line(plan: VideoPlan) -> str:
    """The request as it was understood."""
    return (
        f"{plan.task}, {plan.width}x{plan.height}, {plan.num_frames} frames ({plan.duration:.2f} s), "
        f"{plan.num_forwards} steps, seed {plan.seed}, on {plan.device}"
    )


def write_plan(plan: VideoPlan) -> None:
    """The plan on stdout: what will be made, and a line for every stage."""
    rows = plan.rows
    conditions = rows.condition_video + rows.condition_audio
    _render.write_text(plan_line(plan) + "\n")
    _render.write_text(
        f"{rows.total} rows: {rows.text} of text, {conditions} of conditions, {rows.audio} of sound, "
        f"{rows.video} of pictures; {plan.dtype}, offload {plan.offload}\n\n"
    )
    lines = [
        [
            STAGE_NAMES[stage.name],
            _work(stage.num_flops),
            _render.duration(stage.seconds),
            _render.size(stage.weight_bytes),
            _render.size(stage.peak_bytes),
        ]
        for stage in plan.stages
    ]
    total = sum(stage.num_flops for stage in plan.stages)
    lines.append(["in all", _work(total), _render.duration(plan.seconds), "", _render.size(plan.peak_bytes)])
    _render.table(None, ["stage", "work", "time", "weights", "memory"], lines)
    _render.write_text(
        f"\nestimates for this machine; one stage is in memory at a time; {_render.size(plan.disk_bytes)} on disk\n"
    )


def _work(flops: float) -> str:
    for unit in ("M", "G", "T", "P"):
        if flops < 1e9 or unit == "P":
            break
        flops /= 1000
    return f"{flops / 1e6:.3g} {unit}FLOP"


def result_json(result: VideoResult) -> dict[str, Any]:
    """The result for programs."""
    plan = result.plan
    return {
        "status": "succeeded",
        "output": None if result.output is None else str(result.output),
        "workdir": str(result.workdir),
        "audio": None if result.audio is None else str(result.audio),
        "task": plan.task,
        "partition": plan.partition,
        "width": plan.width,
        "height": plan.height,
        "fps": plan.fps,
        "num_frames": result.num_frames,
        "duration": result.num_frames / plan.fps,
        "steps": plan.steps,
        "seed": plan.seed,
        "num_forwards": plan.num_forwards,
        "num_forwards_run": result.num_forwards_run,
        "seconds_per_forward": result.seconds_per_forward,
        "stage_seconds": {str(name): seconds for name, seconds in result.stage_seconds.items()},
        "latent_checksum": result.latent_checksum,
        "warnings": list(result.warnings),
        "plan": plan.as_dict(),
    }


def write_loop(result: VideoResult) -> None:
    """What --denoise-only measured, and what it computed."""
    plan, total = result.plan, result.stage_seconds.get("denoise", 0.0)
    _render.write_text(
        f"denoise-only: seq={plan.rows.total} steps={plan.steps} forwards={plan.num_forwards} total={total:.3f} s  "
        f"per_forward={result.seconds_per_forward:.3f} s\nchecksum: {result.latent_checksum}\n"
    )


@contextmanager
def progress() -> Iterator[Callable[[Progress], None]]:
    """Shows reports on stderr: bars on a terminal, now and then a line elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description:<10}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    told = TextColumn("{task.fields[left]}"), TextColumn("{task.fields[detail]}")
    with Bars(*columns, *told, console=_render.console(stderr=True)) as bars:
        yield _Bars(bars)


class _Bars:
    """A bar for every stage, which stays when the next begins; previews stand above them."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}

    def __call__(self, report: Progress) -> None:
        if report.stage not in self._tasks:
            self._tasks[report.stage] = self._bars.add_task(STAGE_NAMES[report.stage], left="", detail="")
        is_over = report.done >= report.total
        left = "" if is_over or report.eta_s is None else f"{_render.duration(report.eta_s)} left"
        self._bars.update(
            self._tasks[report.stage],
            completed=report.done,
            total=report.total,
            left=left,
            detail="" if is_over else report.detail,
        )
        if report.preview is not None:
            self._show(report.preview)

    def _show(self, preview: Path) -> None:
        console = self._bars.console
        console.print(str(preview), markup=False)
        if console.color_system in ("256", "truecolor"):
            console.print(picture(preview, min(PREVIEW_COLUMNS, console.width)))


def picture(path: Path, columns: int) -> Text:
    """A picture as coloured half blocks, two pixels to a character."""
    from rich.text import Text

    from vkit.video.frames import read_picture

    pixels = read_picture(path)
    height, width = pixels.shape[:2]
    columns = min(columns, width)
    rows = max(1, round(columns * height / width / 2))
    small = (
        pixels[[2 * y * height // (2 * rows) for y in range(rows)]],
        pixels[[(2 * y + 1) * height // (2 * rows) for y in range(rows)]],
    )
    text = Text()
    for upper, lower in zip(*small, strict=True):
        for x in (column * width // columns for column in range(columns)):
            text.append("▀", style=f"rgb({','.join(map(str, upper[x]))}) on rgb({','.join(map(str, lower[x]))})")
        text.append("\n")
    return text


class _Lines:
    """A line when a stage ends, when a preview was written, and every half minute between."""

    def __init__(self) -> None:
        self._begun: dict[str, float] = {}
        self._told = time.monotonic()

    def __call__(self, report: Progress) -> None:
        name, now = STAGE_NAMES[report.stage], time.monotonic()
        self._begun.setdefault(report.stage, now)
        if report.preview is not None:
            _render.note(f"{name}: {report.detail}: {report.preview}")
        elif report.done >= report.total:
            _render.note(f"{name}: done in {_render.duration(now - self._begun[report.stage])}")
        elif now - self._told >= LINE_EVERY_S and report.eta_s is not None:
            detail = f"{report.detail}, " if report.detail else ""
            percent = 100 * report.done // max(1, report.total)
            _render.note(f"{name}: {detail}{percent} %, {_render.duration(report.eta_s)} left")
        else:
            return
        self._told = now

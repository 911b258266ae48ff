"""`vkit h3-gen`: a video with sound, from text, keyframes or references."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import typer

from vkit.commands import _h3_show, _options, _render
from vkit.commands._h3_options import ConditionFlags, OutputFlags, RequestFlags, RunFlags, WeightFlags
from vkit.errors import ExitStatus, InvalidRequest, UsageError
from vkit.video.errors import VideoCancelled
from vkit.video.space import lack_of_space

if TYPE_CHECKING:
    from vkit.video.h3.pipeline import VideoPipeline, VideoResult
    from vkit.video.h3.plan import VideoPlan
    from vkit.video.h3.request import VideoRequest
    from vkit.video.mux import Muxer

FLAGS = {
    "num_frames": "--frames",
    "references": "a reference",
    "output": "--out",
    "task": "--dit",
}
"""What the library calls otherwise than the command line."""
PARAMETER_FLAGS = {"dit", "dump_params", "json"}
"""The flags that --dump-params goes with."""


@_options.expands_flags
def h3_gen(
    *,
    ctx: typer.Context,
    weights: WeightFlags,
    asked: RequestFlags,
    condition: ConditionFlags,
    run: RunFlags,
    output: OutputFlags,
) -> None:
    """Make a video with stereo sound with MiniMax-H3.

    From text alone; from a first or last frame; or from pictures, clips and sounds to refer to. Stages run one after
    the other, each freeing its memory. A run that was stopped goes on with --resume.
    """
    given = {param.name for param in ctx.command.params if _on_line(ctx, param.name)}
    if output.dump_params:
        _dump_params(weights, output, given)
        return
    _check_flags(given, weights, asked, condition, run, output)
    request = _request(ctx, asked, condition)
    muxer = _muxer(output)
    from vkit.video.h3.pipeline import VideoPipeline

    with _flags_named(), VideoPipeline.open(weights.paths(), run.options(weights, condition)) as pipeline:
        plan = pipeline.plan(request, denoise_only=output.denoise_only)
        if output.plan:
            plan = _with_disk_warning(plan, output)
        for line in plan.warnings:
            _render.note(line)
        if output.plan:
            if output.json:
                _render.write_json(plan.as_dict())
            else:
                _h3_show.write_plan(plan)
            return
        _render.note(_h3_show.plan_line(plan))
        if output.dry_run:
            _rehearse(pipeline, request, output)
            return
        result = _make(pipeline, request, run, output, muxer)
    _tell(result, output)


def _on_line(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _dump_params(weights: WeightFlags, output: OutputFlags, given: set[str]) -> None:
    others = sorted(given - PARAMETER_FLAGS)
    if others:
        raise UsageError(
            f"--{others[0].replace('_', '-')}: says nothing to --dump-params, which reads the header of --dit alone"
        )
    from vkit.video.h3.pipeline import VideoPipeline
    from vkit.video.h3.request import VideoModelPaths, VideoOptions

    assert weights.dit is not None
    with VideoPipeline.open(VideoModelPaths(dit=weights.dit), VideoOptions(device="cpu")) as pipeline:
        params = pipeline.parameters()
    if output.json:
        _render.write_json(params)
    else:
        _render.write_text("".join(f"{name}={value}\n" for name, value in params.items()))


def _check_flags(
    given: set[str],
    weights: WeightFlags,
    asked: RequestFlags,
    condition: ConditionFlags,
    run: RunFlags,
    output: OutputFlags,
) -> None:
    """Refuse flags that contradict each other or would do nothing, and a missing part of the model.

    Raises:
        UsageError: names the flag.
    """
    instead = [name for name in ("plan", "dry_run") if getattr(output, name)]
    if len(instead) == 2:
        raise UsageError("--plan and --dry-run: give one of them", remedy="--dry-run plans too")
    if instead and run.resume:
        raise UsageError(f"--resume: --{instead[0].replace('_', '-')} makes nothing that could go on")
    if output.denoise_only:
        for name in ("out", "ffmpeg", "preview_every"):
            if name in given:
                raise UsageError(f"--{name.replace('_', '-')}: --denoise-only ends before there are pictures")
    elif output.out is None and not instead:
        raise UsageError("--out: needed to make a video", remedy="--out FILE.mp4")
    if run.resume and output.workdir is None:
        raise UsageError("--resume: needs the --workdir of the run that is to go on")
    if asked.prompt is None and asked.prompt_embeds is None:
        raise UsageError("--prompt: needed, or --prompt-embeds")
    if asked.prompt is not None and weights.encoder is None:
        raise UsageError("--prompt: needs the text encoder", remedy="--encoder PATH, or --prompt-embeds FILE instead")
    if asked.prompt_embeds is not None and output.save_embeds is not None:
        raise UsageError("--save-embeds: with --prompt-embeds nothing is encoded")
    if condition.no_vision_conditioning and (condition.sees is None or asked.prompt is None):
        why = "there are no pictures" if condition.sees is None else "with --prompt-embeds nothing is encoded"
        raise UsageError(f"--no-vision-conditioning: {why}")
    if "fit" in given and not condition.has_keyframes:
        raise UsageError("--fit: fits --first-frame and --last-frame, and there is none")
    if "noise_aug" in given and condition.sees is None:
        raise UsageError("--noise-aug: there are no pictures to hold to")
    _check_parts(weights, condition, needs_all=not output.denoise_only)


def _check_parts(weights: WeightFlags, condition: ConditionFlags, *, needs_all: bool) -> None:
    if weights.video_vae is None and (needs_all or condition.sees is not None):
        raise UsageError("--video-vae: needed" + ("" if condition.sees is None else f" by {condition.sees}"))
    if weights.audio_vae is None and (needs_all or condition.ref_audio):
        raise UsageError("--audio-vae: needed" + (" by --ref-audio" if condition.ref_audio else ""))


def _request(ctx: typer.Context, asked: RequestFlags, condition: ConditionFlags) -> VideoRequest:
    from vkit.video.h3.request import VideoRequest

    width, height = asked.canvas()
    return VideoRequest(
        prompt=asked.prompt,
        prompt_embeds=asked.prompt_embeds,
        num_frames=asked.frames,
        duration=asked.duration,
        width=width,
        height=height,
        steps=asked.steps,
        seed=asked.seed,
        flow_shift=asked.flow_shift,
        audio_flow_shift=asked.audio_flow_shift,
        fit=condition.fit,
        noise_aug=condition.noise_aug,
        first_frame=condition.first_frame,
        last_frame=condition.last_frame,
        references=condition.references(ctx),
    )


def _muxer(output: OutputFlags) -> Muxer | None:
    """What will write the file; asked for before anything is opened."""
    from vkit.errors import MissingExtra
    from vkit.video.mux import in_process_muxer, program_muxer

    if output.ffmpeg is not None:
        return program_muxer(output.ffmpeg)
    if output.out is None:
        return None
    try:
        return in_process_muxer()
    except MissingExtra as error:
        raise UsageError(f"--out: {error.message}", remedy=f"{error.remedy}, or --ffmpeg PATH") from None


@contextmanager
def _flags_named() -> Iterator[None]:
    """The library's complaints about a field, as complaints about its flag."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise
        name = FLAGS.get(error.param, f"--{error.param.replace('_', '-')}")
        text = error.message.removeprefix(f"{error.param}: ").removeprefix(f"{error.param} ")
        remedy = None if error.remedy is None else error.remedy.replace("resume it", "--resume it")
        message = error.message if name in error.message else f"{name}: {text}"
        raise InvalidRequest(message, param=error.param, remedy=remedy) from None


def _with_disk_warning(plan: VideoPlan, output: OutputFlags) -> VideoPlan:
    """The plan, which says so where its files would not fit: a run would be refused."""
    place = output.workdir or Path(tempfile.gettempdir())
    lack = lack_of_space(place, plan.disk_bytes)
    return plan if lack is None else replace(plan, warnings=(*plan.warnings, f"{place}: {lack}"))


def _rehearse(pipeline: VideoPipeline, request: VideoRequest, output: OutputFlags) -> None:
    """Everything a run does before it computes, and every weight read once."""
    with tempfile.TemporaryDirectory(prefix="vkit-h3-") as fresh:
        workdir = output.workdir or Path(fresh)
        plan = pipeline.check_run(request, workdir, output=output.out, denoise_only=output.denoise_only)
    with _render.load_progress("all weights") as show:
        num_bytes = pipeline.read_weights(show)
    _render.note(f"{_render.size(num_bytes)} of weights read, nothing made (--dry-run)")
    if output.json:
        _render.write_json({"status": "planned", "weight_bytes": num_bytes, "plan": plan.as_dict()})


def _make(
    pipeline: VideoPipeline, request: VideoRequest, run: RunFlags, output: OutputFlags, muxer: Muxer | None
) -> VideoResult:
    workdir = output.workdir or Path(tempfile.mkdtemp(prefix="vkit-h3-"))
    _render.note(f"working directory {workdir}")
    stop = _Stop()
    try:
        with stop, _h3_show.progress() as show:
            result = pipeline.generate(
                request,
                workdir,
                output=output.out,
                muxer=None if output.denoise_only else muxer,
                progress=show,
                preview_every=run.preview_every,
                checkpoint_every=run.checkpoint_every,
                resume=run.resume,
                cancelled=lambda: stop.is_asked,
                denoise_only=output.denoise_only,
                save_embeds=output.save_embeds,
            )
    except (VideoCancelled, KeyboardInterrupt):
        where = "" if output.workdir else f" --workdir {workdir}"
        again = "" if run.resume else " --resume"
        _render.note(f"stopped; the same command{' with' if where or again else ''}{where}{again} goes on from here")
        raise typer.Exit(ExitStatus.INTERRUPTED) from None
    except BaseException:
        if output.workdir is None and not any(workdir.iterdir()):
            workdir.rmdir()
        raise
    if output.denoise_only and output.workdir is None:
        shutil.rmtree(workdir, ignore_errors=True)
    return result


class _Stop:
    """Ctrl-C and SIGTERM end the run at its next layer or tile; a second one ends it at once."""

    def __init__(self) -> None:
        self.is_asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.is_asked:
            raise KeyboardInterrupt
        self.is_asked = True
        os.write(2, b"vkit: stopping at the next layer; once more stops at once\n")


def _tell(result: VideoResult, output: OutputFlags) -> None:
    if output.json:
        _render.write_json(_h3_show.result_json(result))
    elif output.denoise_only:
        _h3_show.write_loop(result)
    else:
        total = _render.duration(sum(result.stage_seconds.values()))
        _render.note(f"{result.num_frames} frames in {total}; latents {result.latent_checksum[:16]}")
        _render.write_text(f"{result.output}\n")

"""The flags of `vkit h3-gen`, and what they say before anything of the model is opened."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from vkit.errors import UsageError
from vkit.video.h3.request import (
    DEFAULT_AUDIO_FLOW_SHIFT,
    DEFAULT_FLOW_SHIFT,
    DEFAULT_NOISE_AUG,
    DEFAULT_SEED,
    DEFAULT_STEPS,
    Reference,
    VideoModelPaths,
    VideoOptions,
    attach_sound,
)
from vkit.video.space import write_fault

if TYPE_CHECKING:
    from vkit.command import Command

FPS = 24
WEIGHTS_PANEL = "Weights"
REQUEST_PANEL = "What to make"
CONDITION_PANEL = "Pictures, clips and sounds to go by"
RUN_PANEL = "How it runs"
OUTPUT_PANEL = "Output"
INSTEAD_PANEL = "Instead of a video"
REFERENCE_KINDS: dict[str, Literal["image", "video", "audio"]] = {
    "ref_image": "image",
    "ref_video": "video",
    "ref_audio": "audio",
}


def _option(panel: str, *flags: str, help: str, **settings: Any) -> Any:
    return typer.Option(*flags, help=help, rich_help_panel=panel, **settings)


def _path(panel: str, flag: str, help: str, metavar: str = "PATH", **settings: Any) -> Any:
    return _option(panel, flag, metavar=metavar, help=help, **settings)


def flag(name: str) -> str:
    """The flag of a parameter."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class WeightFlags:
    """Where the parts of the model are."""

    dit: Annotated[
        Path | None, _path(WEIGHTS_PANEL, "--dit", "Diffusion transformer: .gguf, .safetensors, or a folder. Required.")
    ] = None
    partition: Annotated[
        Literal["fl2va", "ref2va"] | None,
        _option(
            WEIGHTS_PANEL,
            "--partition",
            help="What these weights were trained for.",
            show_default="from model_index.json or the file name",
        ),
    ] = None
    encoder: Annotated[
        Path | None, _path(WEIGHTS_PANEL, "--encoder", "Text encoder: .gguf or a folder; needed with --prompt.")
    ] = None
    tokenizer: Annotated[
        Path | None,
        _path(
            WEIGHTS_PANEL, "--tokenizer", "Its tokenizer.json.", metavar="FILE", show_default="beside the text encoder"
        ),
    ] = None
    video_vae: Annotated[Path | None, _path(WEIGHTS_PANEL, "--video-vae", "Autoencoder of pictures.")] = None
    video_vae_config: Annotated[
        Path | None,
        _path(WEIGHTS_PANEL, "--video-vae-config", "Its config.json.", metavar="FILE", show_default="beside it"),
    ] = None
    audio_vae: Annotated[Path | None, _path(WEIGHTS_PANEL, "--audio-vae", "Autoencoder of sound.")] = None
    audio_vae_config: Annotated[
        Path | None,
        _path(WEIGHTS_PANEL, "--audio-vae-config", "Its config.json.", metavar="FILE", show_default="beside it"),
    ] = None
    qkv_layout: Annotated[
        Literal["grouped", "contiguous"] | None,
        _option(
            WEIGHTS_PANEL,
            "--qkv-layout",
            help="Row order of the transformer's fused projections.",
            show_default="by the kind of file",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.dit is None:
            raise UsageError("--dit: this option is required")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Path) and not value.exists():
                raise UsageError(f"{flag(field.name)}: {value}: no such file or folder")
        for part, companion in (
            ("encoder", "tokenizer"),
            ("video_vae", "video_vae_config"),
            ("audio_vae", "audio_vae_config"),
        ):
            if getattr(self, companion) is not None and getattr(self, part) is None:
                raise UsageError(f"{flag(companion)}: needs {flag(part)}")

    def paths(self) -> VideoModelPaths:
        """The same for the pipeline."""
        assert self.dit is not None
        return VideoModelPaths(
            dit=self.dit,
            partition=self.partition,
            encoder=self.encoder,
            tokenizer=self.tokenizer,
            video_vae=self.video_vae,
            video_vae_config=self.video_vae_config,
            audio_vae=self.audio_vae,
            audio_vae_config=self.audio_vae_config,
        )


@dataclass(frozen=True)
class RequestFlags:
    """The video asked for."""

    prompt: Annotated[
        str | None, _option(REQUEST_PANEL, "--prompt", metavar="TEXT", help="What is to be seen and heard.")
    ] = None
    prompt_embeds: Annotated[
        Path | None,
        _path(REQUEST_PANEL, "--prompt-embeds", "The encoded prompt, as --save-embeds wrote it.", metavar="FILE"),
    ] = None
    frames: Annotated[
        int | None,
        _option(
            REQUEST_PANEL,
            "--frames",
            help="Frames; rounded up to 17 n + 5, at least 22.",
            show_default="209; with references 124",
        ),
    ] = None
    duration: Annotated[
        float | None, _option(REQUEST_PANEL, "--duration", metavar="SECONDS", help="The length, instead of --frames.")
    ] = None
    size: Annotated[
        str | None,
        _option(
            REQUEST_PANEL,
            "--size",
            metavar="WxH",
            help="Width and height; cut to multiples of 32.",
            show_default="1344x768, or by the first keyframe",
        ),
    ] = None
    width: Annotated[int | None, _option(REQUEST_PANEL, "--width", help="With --height, instead of --size.")] = None
    height: Annotated[int | None, _option(REQUEST_PANEL, "--height", help="With --width, instead of --size.")] = None
    fps: Annotated[
        float, _option(REQUEST_PANEL, "--fps", help="Frames a second: 24, the only rate the model makes.")
    ] = FPS
    steps: Annotated[
        int, _option(REQUEST_PANEL, "--steps", help="Points of the noise schedule, 2 to 1000; one pass less.")
    ] = DEFAULT_STEPS
    seed: Annotated[int, _option(REQUEST_PANEL, "--seed", help="Seed of the noise.")] = DEFAULT_SEED
    flow_shift: Annotated[
        float, _option(REQUEST_PANEL, "--flow-shift", help="Shift of the schedule of pictures, above 0.")
    ] = DEFAULT_FLOW_SHIFT
    audio_flow_shift: Annotated[
        float, _option(REQUEST_PANEL, "--audio-flow-shift", help="Shift of the schedule of sound, above 0.")
    ] = DEFAULT_AUDIO_FLOW_SHIFT

    def __post_init__(self) -> None:
        if self.fps != FPS:
            raise UsageError(
                f"--fps {self.fps:g}: the model makes 24 frames a second and knows no other rate",
                remedy="leave it out, and convert the finished file",
            )
        if self.frames is not None and self.duration is not None:
            raise UsageError("--frames and --duration: both say how long, give one of them")
        if self.size is not None and (self.width is not None or self.height is not None):
            other = "--width" if self.width is not None else "--height"
            raise UsageError(f"--size and {other}: both say how large, give one of them")
        if (self.width is None) != (self.height is None):
            given, missing = ("--width", "--height") if self.height is None else ("--height", "--width")
            raise UsageError(f"{given}: needs {missing} too")
        if self.prompt is not None and self.prompt_embeds is not None:
            raise UsageError("--prompt and --prompt-embeds: give one of them")
        if self.prompt_embeds is not None and not self.prompt_embeds.is_file():
            raise UsageError(f"--prompt-embeds: {self.prompt_embeds}: no such file")

    def canvas(self) -> tuple[int | None, int | None]:
        """Width and height, None where the task decides.

        Raises:
            UsageError: --size is no size.
        """
        if self.size is None:
            return self.width, self.height
        found = re.fullmatch(r"(\d{1,6})[xX](\d{1,6})", self.size)
        if found is None or 0 in (sides := (int(found[1]), int(found[2]))):
            raise UsageError(f"--size: got {self.size!r}, expected WIDTHxHEIGHT such as 1280x720")
        return sides


@dataclass(frozen=True)
class ConditionFlags:
    """What the video starts from, ends with, or refers to."""

    first_frame: Annotated[Path | None, _path(CONDITION_PANEL, "--first-frame", "The picture it begins with.")] = None
    last_frame: Annotated[Path | None, _path(CONDITION_PANEL, "--last-frame", "The picture it ends with.")] = None
    fit: Annotated[
        Literal["auto", "exact", "stretch", "crop"],
        _option(
            CONDITION_PANEL,
            "--fit",
            help="How keyframes of another size are fitted; auto stretches the first and crops the second.",
        ),
    ] = "auto"
    ref_image: Annotated[
        list[Path] | None,
        _path(CONDITION_PANEL, "--ref-image", "A picture to refer to; may be given several times."),
    ] = None
    ref_video: Annotated[
        list[Path] | None,
        _path(
            CONDITION_PANEL,
            "--ref-video",
            "A clip to refer to, a file or a folder of frame_000000.ppm and so on; may be given several times.",
        ),
    ] = None
    ref_audio: Annotated[
        list[Path] | None,
        _path(
            CONDITION_PANEL,
            "--ref-audio",
            "A sound to refer to; beside a single clip it becomes that clip's sound; may be given several times.",
        ),
    ] = None
    noise_aug: Annotated[
        float,
        _option(CONDITION_PANEL, "--noise-aug", help="How firmly pictures are held to, from 0 to 1; 1 is exactly."),
    ] = DEFAULT_NOISE_AUG
    no_vision_conditioning: Annotated[
        bool,
        _option(CONDITION_PANEL, "--no-vision-conditioning", help="Do not show the pictures to the text encoder too."),
    ] = False

    def __post_init__(self) -> None:
        keyframes = [name for name in ("first_frame", "last_frame") if getattr(self, name) is not None]
        references = [name for name in REFERENCE_KINDS if getattr(self, name)]
        if keyframes and references:
            raise UsageError(
                f"{flag(keyframes[0])} and {flag(references[0])} exclude each other: it is keyframes or references"
            )
        for name, path in self._files():
            if not path.exists():
                raise UsageError(f"{flag(name)}: {path}: no such file" + (" or folder" if name == "ref_video" else ""))

    @property
    def sees(self) -> str | None:
        """A flag that brings pictures, if one was given."""
        names = ("first_frame", "last_frame", "ref_image", "ref_video")
        return next((flag(name) for name in names if getattr(self, name)), None)

    @property
    def has_keyframes(self) -> bool:
        """Whether a first or last frame was given."""
        return self.first_frame is not None or self.last_frame is not None

    def references(self, ctx: typer.Context) -> tuple[Reference, ...]:
        """The references in the order of the command line; those from elsewhere follow."""
        command: Command = ctx.command  # type: ignore[assignment]
        on_line = [(name, Path(text or "")) for name, text in command.given_on_line(ctx) if name in REFERENCE_KINDS]
        seen = {name for name, _ in on_line}
        rest = [(name, path) for name in REFERENCE_KINDS if name not in seen for path in getattr(self, name) or ()]
        return attach_sound(tuple(Reference(REFERENCE_KINDS[name], path) for name, path in (*on_line, *rest)))

    def _files(self) -> Iterator[tuple[str, Path]]:
        for name in ("first_frame", "last_frame"):
            if getattr(self, name) is not None:
                yield name, getattr(self, name)
        for name in REFERENCE_KINDS:
            for path in getattr(self, name) or ():
                yield name, path


@dataclass(frozen=True)
class RunFlags:
    """Device, memory, and what a long run leaves behind."""

    device: Annotated[
        Literal["auto", "cpu", "cuda"], _option(RUN_PANEL, "--device", help="Where to compute; auto takes the best.")
    ] = "auto"
    dequant_bf16: Annotated[
        bool,
        _option(RUN_PANEL, "--dequant-bf16", help="Expand packed weights of the transformer to bfloat16 on loading."),
    ] = False
    offload: Annotated[
        Literal["none", "host", "disk"],
        _option(RUN_PANEL, "--offload", help="Stream layers from host memory or disk instead of keeping them."),
    ] = "none"
    preview_every: Annotated[
        int, _option(RUN_PANEL, "--preview-every", min=0, metavar="N", help="A picture every N steps; 0: none.")
    ] = 0
    checkpoint_every: Annotated[
        int,
        _option(RUN_PANEL, "--checkpoint-every", min=1, metavar="N", help="Store the latents every N steps."),
    ] = 1
    resume: Annotated[
        bool, _option(RUN_PANEL, "--resume", help="Go on with the interrupted run in --workdir, to the same result.")
    ] = False

    def options(self, weights: WeightFlags, condition: ConditionFlags) -> VideoOptions:
        """The same for the pipeline."""
        return VideoOptions(
            qkv_layout=weights.qkv_layout,
            dequant_bf16=self.dequant_bf16,
            offload=self.offload,
            device=self.device,
            vision_conditioning=not condition.no_vision_conditioning,
        )


@dataclass(frozen=True)
class OutputFlags:
    """Where results go, and what else can be asked for."""

    out: Annotated[Path | None, _path(OUTPUT_PANEL, "--out", "The .mp4 file to write. Required.", metavar="FILE")] = (
        None
    )
    workdir: Annotated[
        Path | None,
        _path(
            OUTPUT_PANEL,
            "--workdir",
            "Folder of frames, sound, job.json and the state of the run; can be a --ref-video later.",
            metavar="DIR",
            show_default="a new temporary one",
        ),
    ] = None
    ffmpeg: Annotated[
        Path | None, _path(OUTPUT_PANEL, "--ffmpeg", "Program that writes the file.", show_default="in-process")
    ] = None
    save_embeds: Annotated[
        Path | None, _path(OUTPUT_PANEL, "--save-embeds", "Store the encoded prompt here.", metavar="FILE")
    ] = None
    json: Annotated[bool, _option(OUTPUT_PANEL, "--json", help="Print one JSON object instead of text.")] = False
    plan: Annotated[
        bool, _option(INSTEAD_PANEL, "--plan", help="Show stages with time and memory, from headers only.")
    ] = False
    dry_run: Annotated[
        bool, _option(INSTEAD_PANEL, "--dry-run", help="Read all weights once and plan, but make nothing.")
    ] = False
    denoise_only: Annotated[
        bool, _option(INSTEAD_PANEL, "--denoise-only", help="Run and time the denoising loop, make no video.")
    ] = False
    dump_params: Annotated[
        bool, _option(INSTEAD_PANEL, "--dump-params", help="Print the sizes of the transformer; needs --dit alone.")
    ] = False

    def __post_init__(self) -> None:
        if self.out is not None:
            if self.out.suffix.lower() != ".mp4":
                raise UsageError(f"--out: {self.out}: expected a name that ends in .mp4")
            if self.out.is_dir():
                raise UsageError(f"--out: {self.out}: is a folder")
        for name in ("out", "save_embeds"):
            path: Path | None = getattr(self, name)
            if path is not None and not path.absolute().parent.is_dir():
                raise UsageError(f"{flag(name)}: {path}: no such folder: {path.absolute().parent}")
            fault = None if path is None or self.plan else write_fault(path)
            if fault is not None:
                raise UsageError(f"{flag(name)}: {path}: cannot be written to: {fault}")
        if self.workdir is not None:
            place = self.workdir.absolute()
            while not place.exists():
                place = place.parent
            if not place.is_dir():
                raise UsageError(f"--workdir: {self.workdir}: {place} is not a folder")

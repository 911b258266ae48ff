"""A request for a video, read: which spelling wins, which files it names, what it was silent or contradictory about."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import msgspec

from vkit.errors import InvalidRequest
from vkit.media.sources import decode_data_url
from vkit.server.bodies import convert
from vkit.server.forms import Form
from vkit.server.problems import Problem, bad_request, clip
from vkit.server.video.schemas import Number, VideoBody, VideoKnobs
from vkit.video.h3.request import (
    DEFAULT_AUDIO_FLOW_SHIFT,
    DEFAULT_FLOW_SHIFT,
    DEFAULT_NOISE_AUG,
    DEFAULT_SEED,
    DEFAULT_STEPS,
    MAX_STEPS,
    MIN_STEPS,
    TASKS,
    Fit,
    Reference,
    Task,
    VideoRequest,
)

FIELDS = tuple(name.encode_name for name in msgspec.structs.fields(VideoBody))
FPS = 24
VIDEO_KEY, AUDIO_KEY = "input_reference_video", "input_reference_audio"
MAX_REFERENCE_BYTES = 1 << 28
_SIZE = re.compile(r"(\d{1,6})[xX](\d{1,6})", re.ASCII)


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file of the request: where it is, or what is in it."""

    field: str
    path: Path | None = None
    content: bytes | None = None


@dataclass(slots=True)
class AskedVideo:
    """A request as its client meant it, before its files are looked at."""

    prompt: str
    model: str | None = None
    task: Task | None = None
    width: int | None = None
    height: int | None = None
    duration: float | None = None
    num_frames: int | None = None
    steps: int = DEFAULT_STEPS
    seed: int = DEFAULT_SEED
    flow_shift: float = DEFAULT_FLOW_SHIFT
    audio_flow_shift: float = DEFAULT_AUDIO_FLOW_SHIFT
    noise_aug: float = DEFAULT_NOISE_AUG
    fit: Fit = "auto"
    first_frame: GivenFile | None = None
    clip: GivenFile | None = None
    sound: GivenFile | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def files(self) -> list[GivenFile]:
        """The files it brings or names."""
        return [file for file in (self.first_frame, self.clip, self.sound) if file is not None]

    def request(self, paths: Mapping[str, Path], *, prompt_embeds: Path | None) -> VideoRequest:
        """The request for the model; `paths`: where the files are by now, by field."""
        references: tuple[Reference, ...] = ()
        sound = None if self.sound is None else paths[self.sound.field]
        if self.clip is not None:
            references = (Reference("video", paths[self.clip.field], sound),)
        elif sound is not None:
            references = (Reference("audio", sound),)
        return VideoRequest(
            prompt=None if prompt_embeds is not None else self.prompt,
            prompt_embeds=prompt_embeds,
            task=self.task,
            num_frames=self.num_frames,
            duration=self.duration,
            width=self.width,
            height=self.height,
            steps=self.steps,
            seed=self.seed,
            flow_shift=self.flow_shift,
            audio_flow_shift=self.audio_flow_shift,
            noise_aug=self.noise_aug,
            fit=self.fit,
            first_frame=None if self.first_frame is None else paths[self.first_frame.field],
            references=references,
        )


def body_of_form(form: Form) -> tuple[VideoBody, GivenFile | None]:
    """A multipart body as the JSON it stands for, and its file.

    Raises:
        Problem: 400 naming the field.
    """
    values: dict[str, Any] = {}
    for name in FIELDS:
        text = form.text(name)
        if text is not None:
            values[name] = _from_text(name, text)
    reference = None
    if any(name == "input_reference" for name, _ in form.files):
        if "input_reference" in values:
            raise bad_request("input_reference: given as text and as a file", "input_reference")
        reference = GivenFile("input_reference", content=form.file("input_reference").content)
        if not reference.content:
            raise bad_request("input_reference: the file is empty", "input_reference")
    for name, _ in form.files:
        if name != "input_reference":
            raise bad_request(f"{clip(name)}: no file is taken here", clip(name))
    if "prompt" not in values:
        raise bad_request("prompt: this field is required", "prompt")
    try:
        return msgspec.convert(values, VideoBody, strict=True), reference
    except msgspec.ValidationError:
        return cast("VideoBody", convert(values, VideoBody, "body")), reference


_TEXT_FIELDS = frozenset({"prompt", "model", "size", "seconds", "task", "fit"})


def _from_text(name: str, text: str) -> Any:
    if name in _TEXT_FIELDS or (name == "input_reference" and not text.lstrip().startswith("{")):
        return text
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        kind = "JSON" if name in ("metadata", "extra_params", "input_reference") else "a number"
        raise bad_request(f"{name}: expected {kind}, got {clip(text)!r}", name) from None


def parsed(body: VideoBody, uploaded: GivenFile | None = None) -> AskedVideo:
    """What is asked for. Every field is checked, also one that another beats.

    Raises:
        Problem: 400 naming field and value.
    """
    if body.model is not None and not body.model:
        raise bad_request("model: expected a name, got ''", "model")
    asked = AskedVideo(body.prompt, body.model)
    inner = VideoKnobs() if body.extra_params is None else convert(body.extra_params, VideoKnobs, "extra_params")
    knobs = _merged(body, inner, asked.warnings)
    _read_size(body, asked)
    _read_length(knobs, asked)
    asked.steps = _steps(knobs.num_inference_steps)
    asked.seed = DEFAULT_SEED if knobs.seed is None else knobs.seed
    if not 0 <= asked.seed < 2**63:
        raise bad_request(f"seed: expected an integer of 0 to 2^63 - 1, got {asked.seed}", "seed")
    asked.flow_shift = _positive("flow_shift", knobs.flow_shift) or DEFAULT_FLOW_SHIFT
    asked.audio_flow_shift = _positive("audio_flow_shift", knobs.audio_flow_shift) or DEFAULT_AUDIO_FLOW_SHIFT
    if knobs.fps is not None and knobs.fps != FPS:
        raise bad_request(f"fps: the model makes {FPS} frames a second, got {knobs.fps}", "fps")
    asked.fit = _one_of("fit", knobs.fit, get_args(Fit)) or "auto"
    asked.task = _one_of("task", body.task, TASKS)
    _read_files(body, asked, uploaded)
    _read_noise_aug(knobs.noise_aug, asked)
    return asked


def _merged(body: VideoBody, inner: VideoKnobs, warnings: list[str]) -> VideoKnobs:
    """The knobs, the top level's before those of extra_params; differences become warnings."""
    made = VideoKnobs()
    for name in VideoKnobs.__struct_fields__:
        outer, other = getattr(body, name), getattr(inner, name)
        if outer is not None and other is not None and outer != other:
            warnings.append(f"extra_params.{name}: {other} is not used, {name} says {outer}")
        setattr(made, name, other if outer is None else outer)
    return made


def _read_size(body: VideoBody, asked: AskedVideo) -> None:
    width = height = None
    if body.size is not None:
        found = _SIZE.fullmatch(body.size)
        if found is None or not int(found[1]) or not int(found[2]):
            raise bad_request(f"size: expected <width>x<height> in pixels, got {clip(body.size)!r}", "size")
        width, height = int(found[1]), int(found[2])
    for name in ("width", "height"):
        value = getattr(body, name)
        if value is not None and value <= 0:
            raise bad_request(f"{name}: expected a positive number of pixels, got {value}", name)
    asked.width = width if body.width is None else body.width
    asked.height = height if body.height is None else body.height
    if (asked.width is None) != (asked.height is None):
        missing = "height" if asked.height is None else "width"
        raise bad_request(f"{missing}: width and height are needed together", missing)


def _read_length(knobs: VideoKnobs, asked: AskedVideo) -> None:
    seconds: Number | None = None
    if isinstance(knobs.seconds, str):
        try:
            seconds = float(knobs.seconds)
        except ValueError:
            raise bad_request(f"seconds: expected a number, got {clip(knobs.seconds)!r}", "seconds") from None
    else:
        seconds = knobs.seconds
    seconds = _positive("seconds", seconds)
    duration = _positive("duration", knobs.duration)
    asked.duration = seconds if duration is None else duration
    asked.num_frames = knobs.num_frames
    if knobs.num_frames is not None and knobs.num_frames < 1:
        raise bad_request(f"num_frames: expected a positive number, got {knobs.num_frames}", "num_frames")
    if asked.duration is not None and asked.num_frames is not None:
        named = "duration" if duration is not None else "seconds"
        if round(asked.duration * FPS) != asked.num_frames:
            asked.warnings.append(f"num_frames: {asked.num_frames} is not used, {named} says {asked.duration:g} s")
        asked.num_frames = None


def _read_noise_aug(value: Number | None, asked: AskedVideo) -> None:
    if value is None:
        return
    if not 0 <= value <= 1:
        raise bad_request(f"noise_aug: expected 0 to 1 (1: exact), got {value}", "noise_aug")
    if asked.first_frame is None and asked.clip is None:
        raise bad_request("noise_aug: there are no pictures to hold to", "noise_aug")
    asked.noise_aug = float(value)


def _positive(name: str, value: Number | None) -> float | None:
    if value is None:
        return None
    if not math.isfinite(value) or value <= 0:
        raise bad_request(f"{name}: expected a positive number, got {value}", name)
    return float(value)


def _steps(value: int | None) -> int:
    name = "num_inference_steps"
    if value is None:
        return DEFAULT_STEPS
    if value < MIN_STEPS:
        raise bad_request(f"{name}: expected at least {MIN_STEPS}, got {value}", name)
    if value > MAX_STEPS:
        raise bad_request(f"{name}: expected at most {MAX_STEPS}, got {clip(value)}", name)
    return value


def _one_of(name: str, value: str | None, known: tuple[Any, ...]) -> Any:
    if value is not None and value not in known:
        raise bad_request(f"{name}: expected one of {', '.join(known)}, got {clip(value)!r}", name)
    return value


def _read_files(body: VideoBody, asked: AskedVideo, uploaded: GivenFile | None) -> None:
    for key, value in (body.metadata or {}).items():
        if not isinstance(value, str):
            raise bad_request(f"metadata.{clip(key)}: expected a string, got {clip(value)}", "metadata")
        if key not in (VIDEO_KEY, AUDIO_KEY):
            asked.metadata[key] = value
    asked.first_frame = uploaded
    if body.input_reference is not None:
        asked.first_frame = _given("input_reference", _reference_url(body.input_reference), takes_data=True)
    metadata = body.metadata or {}
    if VIDEO_KEY in metadata:
        asked.clip = _given(f"metadata.{VIDEO_KEY}", metadata[VIDEO_KEY], takes_data=False)
    if AUDIO_KEY in metadata:
        asked.sound = _given(f"metadata.{AUDIO_KEY}", metadata[AUDIO_KEY], takes_data=True)
    other = asked.clip or asked.sound
    if asked.first_frame is not None and other is not None:
        raise bad_request(
            f"input_reference and {other.field} exclude each other: a keyframe and references cannot be mixed",
            "input_reference",
        )


def _reference_url(value: str | dict[str, Any]) -> str:
    if isinstance(value, str):
        return value
    url = value.get("image_url")
    if isinstance(url, dict):
        url = url.get("url")
    if not isinstance(url, str):
        raise bad_request(
            "input_reference: expected a path, a data: URL, or an object with image_url", "input_reference"
        )
    return url


def _given(name: str, value: str, *, takes_data: bool) -> GivenFile:
    if not value:
        raise bad_request(f"{name}: expected a path, got ''", name)
    scheme = value.partition(":")[0].lower()
    if scheme in ("http", "https"):
        raise bad_request(f"{name}: {scheme} references are not fetched; send the data or a path", name)
    if scheme == "data":
        if not takes_data:
            raise bad_request(f"{name}: expected a path, got a data: URL", name)
        try:
            content = decode_data_url(value, "image", MAX_REFERENCE_BYTES)
        except InvalidRequest as error:
            raise bad_request(f"{name}: {error.message.partition(': ')[2]}", name) from None
        if not content:
            raise bad_request(f"{name}: the data: URL is empty", name)
        return GivenFile(name, content=content)
    return GivenFile(name, path=Path(value.removeprefix("file://")))


def allowed_path(file: GivenFile, folders: tuple[Path, ...]) -> Path:
    """Where a named file really is.

    Raises:
        Problem: 403 outside the folders, 400 for nothing there.
    """
    assert file.path is not None, "a named file"
    try:
        real = file.path.resolve()
        is_inside = any(real.is_relative_to(folder.resolve()) for folder in folders)
        exists = is_inside and real.exists()
    except (OSError, RuntimeError, ValueError):
        is_inside = exists = False
    if not is_inside:
        raise Problem(
            403,
            f"{file.field}: {clip(str(file.path))} is outside the folders this server may read "
            "(--video-workdir, --allowed-local-media-path)",
            file.field,
        )
    if not exists:
        raise bad_request(f"{file.field}: {clip(str(file.path))}: no such file", file.field)
    return real

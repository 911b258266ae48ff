"""A request's pictures, clips and sounds: what they will become, and their pixels and samples when it is time.

`resolve_inputs` looks at headers (and at sound, which is small); `load` methods read pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vkit.errors import InvalidRequest
from vkit.video.clips import clip_info, read_clip
from vkit.video.errors import MediaError
from vkit.video.frames import Pixels, read_picture, scale_and_crop
from vkit.video.h3 import geometry
from vkit.video.h3.geometry import FPS, Fitting, FramePair, Size
from vkit.video.h3.layout import LatentSize
from vkit.video.h3.request import (
    MAX_CLIPS,
    MAX_IMAGES,
    MAX_REFERENCES,
    MAX_SOUNDS,
    Reference,
    Task,
    VideoRequest,
)
from vkit.video.sound import SAMPLE_RATE, Wave, read_sound

REFERENCE_SECONDS = (2.0, 15.0)
MAX_REFERENCE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Keyframe:
    """A first or last frame."""

    anchor: Literal["first", "last"]
    path: Path
    fitting: Fitting

    def load(self) -> Pixels:
        """The picture (1, H, W, 3) at the output's size."""
        fit = self.fitting
        target = (fit.target.width, fit.target.height)
        pixels = read_picture(self.path)[None]
        return scale_and_crop(pixels, fit.resized.width, fit.resized.height, fit.left, fit.top, target)


@dataclass(frozen=True, slots=True)
class ResolvedReference:
    """One reference block."""

    kind: Literal["image", "video", "audio"]
    path: Path
    size: Size | None
    """Pixels at which it is encoded; None for a sound."""
    num_frames: int
    """At 24 frames a second, cut to the output's length; 1 for a picture, 0 for a sound."""
    wave: Wave | None

    @property
    def frame_pairs(self) -> list[FramePair]:
        """What the conditioner sees of a clip."""
        return geometry.encoder_frame_pairs(self.num_frames)

    def latent(self, ratio: int) -> LatentSize | None:
        """Latents of its pictures."""
        if self.size is None:
            return None
        frames = 1 if self.kind == "image" else geometry.encoded_latent_frames(geometry.trim_frames(self.num_frames))
        return LatentSize(frames, self.size.height // ratio, self.size.width // ratio)

    def load(self) -> Pixels:
        """Its frames (N, H, W, 3) at the size they are encoded at."""
        size = self.size
        assert size is not None, "a sound has no pictures"
        convert = _scaler(size)
        if self.kind == "image":
            return convert(read_picture(self.path)[None])
        frames = read_clip(self.path, self.num_frames, convert)
        if len(frames) != self.num_frames:
            raise MediaError(f"{self.path}: {len(frames)} frames could be read, its header promises {self.num_frames}")
        return frames


@dataclass(frozen=True, slots=True)
class ResolvedInputs:
    """Everything about a request that its own files decide."""

    task: Task
    size: Size
    asked_frames: int
    num_frames: int
    keyframes: tuple[Keyframe, ...]
    references: tuple[ResolvedReference, ...]
    warnings: tuple[str, ...]

    @property
    def duration(self) -> float:
        """Seconds."""
        return self.num_frames / FPS


def resolve_inputs(request: VideoRequest) -> ResolvedInputs:
    """Sizes, counts and fits of a request, with a line for everything that differs from what was asked for.

    Raises:
        InvalidRequest, MediaError: what cannot be done, or cannot be read.
    """
    task = request.resolved_task
    warnings: list[str] = []
    asked, num_frames = geometry.resolve_frames(task, request.num_frames, request.duration)
    if request.duration is not None and request.num_frames is not None:
        warnings.append(f"duration {request.duration:g} s is used, num_frames {request.num_frames} is not")
    if asked != num_frames:
        warnings.append(f"{asked} frames become {num_frames}: lengths are 17 n + 5")
    seconds = num_frames / FPS
    if not geometry.TRAINED_SECONDS[0] <= seconds <= geometry.TRAINED_SECONDS[1]:
        warnings.append(f"{seconds:.2f} s are outside the 4 to 15 s the model was trained on")
    paths: list[tuple[Literal["first", "last"], Path]] = []
    if request.first_frame is not None:
        paths.append(("first", request.first_frame))
    if request.last_frame is not None:
        paths.append(("last", request.last_frame))
    sizes = [_picture_size(path) for _, path in paths]
    size = geometry.resolve_size(task, request.width, request.height, sizes[0] if sizes else None)
    if request.width is not None and (request.width, request.height) != (size.width, size.height):
        warnings.append(f"{request.width}x{request.height} becomes {size}: sides are multiples of 32")
    keyframes = tuple(
        Keyframe(anchor, path, geometry.keyframe_fitting(source, size, request.fit, is_first=index == 0))
        for index, ((anchor, path), source) in enumerate(zip(paths, sizes, strict=True))
    )
    for frame, source in zip(keyframes, sizes, strict=True):
        if source != size:
            how = "scaled and cropped" if frame.fitting.crops else "stretched"
            warnings.append(f"{frame.anchor} frame of {source} is {how} to {size}")
    references = _references(request.references, num_frames, warnings)
    return ResolvedInputs(task, size, asked, num_frames, keyframes, references, tuple(warnings))


def _references(asked: tuple[Reference, ...], num_frames: int, warnings: list[str]) -> tuple[ResolvedReference, ...]:
    counts = {
        "pictures": (sum(item.kind == "image" for item in asked), MAX_IMAGES),
        "clips": (sum(item.kind == "video" for item in asked), MAX_CLIPS),
        "sounds": (sum(item.kind == "audio" or item.sound is not None for item in asked), MAX_SOUNDS),
        "references": (len(asked), MAX_REFERENCES),
    }
    for what, (count, most) in counts.items():
        if count > most:
            raise InvalidRequest(f"{count} {what} as references, expected at most {most}", param="references")
    if asked and all(item.kind == "audio" for item in asked):
        warnings.append("sound alone as reference: the model was trained with a picture or clip beside it")
    resolved = tuple(_resolved(item, num_frames, warnings) for item in asked)
    total = sum(item.num_frames for item in resolved if item.kind == "video") / FPS
    if total > MAX_REFERENCE_SECONDS:
        warnings.append(f"reference clips of {total:.1f} s together, the model was trained on at most 15 s")
    return resolved


def _resolved(item: Reference, num_frames: int, warnings: list[str]) -> ResolvedReference:
    seconds = num_frames / FPS
    if item.kind != "video" and item.sound is not None:
        raise InvalidRequest(f"a reference {item.kind} cannot carry a sound of its own", param="references")
    sound = item.path if item.kind == "audio" else item.sound
    wave = None if sound is None else read_sound(sound, seconds)
    if wave is not None and sound is not None:
        _warn_of_length(f"reference sound {sound.name}", wave.shape[1] / SAMPLE_RATE, warnings)
    if item.kind == "audio":
        return ResolvedReference("audio", item.path, None, 0, wave)
    if item.kind == "image":
        size = geometry.reference_image_size(_picture_size(item.path))
        return ResolvedReference("image", item.path, size, 1, None)
    info = clip_info(item.path)
    count = min(info.num_frames, num_frames)
    if count < 2:
        raise MediaError(f"{item.path}: {count} frames at 24 a second, a reference clip has at least 2")
    if info.has_sound and item.sound is None:
        warnings.append(f"reference clip {item.path.name}: its own sound is not used, give a sound reference for that")
    _warn_of_length(f"reference clip {item.path.name}", count / FPS, warnings)
    return ResolvedReference("video", item.path, geometry.canvas(Size(info.width, info.height)), count, wave)


def _warn_of_length(what: str, seconds: float, warnings: list[str]) -> None:
    if not REFERENCE_SECONDS[0] <= seconds <= REFERENCE_SECONDS[1]:
        warnings.append(f"{what} of {seconds:.2f} s is outside the 2 to 15 s the model was trained on")


def _picture_size(path: Path) -> Size:
    height, width, _ = read_picture(path).shape
    return Size(width, height)


def _scaler(size: Size) -> Callable[[Pixels], Pixels]:
    def scale(frames: Pixels) -> Pixels:
        if frames.shape[1:3] == (size.height, size.width):
            return np.ascontiguousarray(frames)
        return scale_and_crop(frames, size.width, size.height, 0, 0, (size.width, size.height))

    return scale

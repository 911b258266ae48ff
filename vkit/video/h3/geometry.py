"""Sizes and counts: canvas, frame grid, latents, how inputs are fitted. Exact arithmetic, no tensors.

All rounding is half to even, as `round` does. Source: the released pipeline's geometry; the numbers are checked
against its tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from vkit.errors import InvalidRequest
from vkit.video.h3.request import Fit, Task

FPS = 24
SAMPLE_RATE = 32_000
LATENTS_PER_SECOND = 40
CLIP_FRAMES, CLIP_LATENTS = 17, 5
MIN_FRAMES = 22
"""Shorter clips have two latent frames, of which the decoder makes no picture."""
CANVAS_STEP = 32
SHORT_EDGE = 768
MAX_CANVAS_PIXELS = 768 * 1344
REFERENCE_SHORT_EDGE = 2048
MAX_ASPECT = 4.0
DEFAULT_FRAMES: dict[Task, int] = {"t2va": 209, "fl2va": 209, "ref2va": 124}
TRAINED_SECONDS = (4.0, 15.0)
MIN_ENCODER_FRAMES = 13
"""A clip needs two sampled frames for the encoder."""
MAX_FRAMES = 24 * 60 * 10
"""Ten minutes: beyond, the request is a slip of the finger."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pixels."""

    width: int
    height: int

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def align_frames(num_frames: int) -> int:
    """The next count on the grid 17 n + 5, rounding up."""
    return num_frames + (CLIP_LATENTS - num_frames) % CLIP_FRAMES


def trim_frames(num_frames: int) -> int:
    """The last count on the grid 17 n + 5 within a reference clip; clips under 22 frames keep all."""
    if num_frames < MIN_FRAMES:
        return num_frames
    return (num_frames - CLIP_LATENTS) // CLIP_FRAMES * CLIP_FRAMES + CLIP_LATENTS


def latent_frames(num_frames: int) -> int:
    """Latent frames of a clip of 17 n + 5 frames."""
    return (num_frames - CLIP_LATENTS) // CLIP_FRAMES * CLIP_LATENTS + 2


def encoded_latent_frames(num_frames: int) -> int:
    """Latent frames that the encoder makes of any number of frames."""
    if num_frames == 1:
        return 1
    return -(-num_frames // CLIP_FRAMES) * CLIP_LATENTS - 3


def audio_latents(num_frames: int) -> int:
    """Latent steps of each sound channel for that many frames."""
    return round(num_frames / FPS * LATENTS_PER_SECOND)


def resolve_frames(task: Task, num_frames: int | None, duration: float | None) -> tuple[int, int]:
    """(frames asked for, frames on the grid). A duration beats a number of frames.

    Raises:
        InvalidRequest: a count that is no positive number, or too short to be decoded.
    """
    if duration is not None:
        if not math.isfinite(duration) or duration <= 0:
            raise InvalidRequest(f"duration: got {duration}, expected seconds above 0", param="duration")
        if duration * FPS > MAX_FRAMES:
            most = MAX_FRAMES // FPS
            raise InvalidRequest(
                f"duration: got {duration:g} s, expected at most {most} (ten minutes)", param="duration"
            )
        asked, param = round(duration * FPS), "duration"
    elif num_frames is not None:
        if num_frames < 1:
            raise InvalidRequest(f"frames: got {num_frames}, expected a positive number", param="num_frames")
        asked, param = num_frames, "num_frames"
        if num_frames == 1:  # the reference reads 1 as "not given"; a picture cannot be made
            raise InvalidRequest("frames: got 1, the shortest clip has 22 frames", param=param)
    else:
        asked, param = DEFAULT_FRAMES[task], "num_frames"
    aligned = align_frames(max(1, asked))
    if aligned < MIN_FRAMES:
        raise InvalidRequest(f"{asked} frames make {aligned}, the shortest clip has {MIN_FRAMES} frames", param=param)
    if aligned > MAX_FRAMES:
        made = f"{asked} frames" if asked > MAX_FRAMES else f"{asked} frames make {aligned}"
        raise InvalidRequest(f"{made}, expected at most {MAX_FRAMES} (ten minutes)", param=param)
    return asked, aligned


def canvas(
    aspect: Size, *, short: int = SHORT_EDGE, max_pixels: int = MAX_CANVAS_PIXELS, step: int = CANVAS_STEP
) -> Size:
    """The size with the aspect of `aspect`, `short` pixels on its short edge, capped in area, on multiples of `step`.

    The cap is not looked at again after rounding.

    Raises:
        InvalidRequest: the aspect is beyond 1:4 or 4:1.
    """
    check_aspect(aspect)
    ratio = aspect.width / aspect.height
    width, height = (short * ratio, float(short)) if ratio >= 1 else (float(short), short / ratio)
    if width * height > max_pixels:
        scale = math.sqrt(max_pixels / (width * height))
        width, height = width * scale, height * scale
    return Size(max(step, round(width / step) * step), max(step, round(height / step) * step))


def check_aspect(size: Size, what: str = "size") -> None:
    """Refuse sides below 1 and aspects beyond 1:4..4:1."""
    if size.width < 1 or size.height < 1:
        raise InvalidRequest(f"{what}: got {size}, expected positive sides", param="size")
    if not 1 / MAX_ASPECT <= size.width / size.height <= MAX_ASPECT:
        raise InvalidRequest(f"{what}: aspect of {size}, expected between 1:4 and 4:1", param="size")


def resolve_size(task: Task, width: int | None, height: int | None, keyframe: Size | None) -> Size:
    """The output size: each side given, down to a multiple of 32; else by the first keyframe; else 1344x768.

    Raises:
        InvalidRequest: one side without the other, a side below 32, or an aspect beyond 1:4..4:1.
    """
    if (width is None) != (height is None):
        missing = "height" if height is None else "width"
        raise InvalidRequest(f"{missing}: missing, width and height must come together", param=missing)
    if width is None or height is None:
        return canvas(keyframe) if task == "fl2va" and keyframe is not None else Size(1344, 768)
    size = Size(width // CANVAS_STEP * CANVAS_STEP, height // CANVAS_STEP * CANVAS_STEP)
    if size.width < CANVAS_STEP or size.height < CANVAS_STEP:
        raise InvalidRequest(f"size: got {width}x{height}, expected sides of at least {CANVAS_STEP}", param="size")
    check_aspect(size)
    return size


def reference_image_size(size: Size) -> Size:
    """A reference picture: short edge 2048, each side to the nearest multiple of 32."""
    check_aspect(size, "reference picture")
    scale = REFERENCE_SHORT_EDGE / min(size.width, size.height)
    return Size(*(round(side * scale / CANVAS_STEP) * CANVAS_STEP for side in (size.width, size.height)))


@dataclass(frozen=True, slots=True)
class Fitting:
    """Resize to `resized`, then cut `target` out of it at (left, top)."""

    resized: Size
    left: int
    top: int
    target: Size

    @property
    def crops(self) -> bool:
        """Whether anything is cut off."""
        return self.resized != self.target


def keyframe_fitting(source: Size, target: Size, fit: Fit, *, is_first: bool) -> Fitting:
    """How a keyframe is brought to the output size. `is_first`: the first one supplied, which "auto" stretches.

    Raises:
        InvalidRequest: `fit` is "exact" and the sizes differ.
    """
    if source == target:
        return Fitting(target, 0, 0, target)
    if fit == "exact":
        raise InvalidRequest(
            f"keyframe of {source} with fit exact, expected the output size {target}",
            param="fit",
            remedy="give a picture of that size, or use fit auto, stretch or crop",
        )
    if fit == "stretch" or (fit == "auto" and is_first):
        return Fitting(target, 0, 0, target)
    scale = max(target.width / source.width, target.height / source.height)
    width = max(target.width, round(source.width * scale))
    height = max(target.height, round(source.height * scale))
    return Fitting(Size(width, height), (width - target.width) // 2, (height - target.height) // 2, target)


@dataclass(frozen=True, slots=True)
class FramePair:
    """Two frames of a clip that the encoder sees as one block, and the label before it."""

    first: int
    second: int
    label: str


def encoder_frame_pairs(num_frames: int) -> list[FramePair]:
    """The pairs the encoder sees of a clip of `num_frames` at 24 frames a second: two frames every second.

    Raises:
        InvalidRequest: the clip is too short.
    """
    if num_frames < MIN_ENCODER_FRAMES:
        raise InvalidRequest(f"reference clip of {num_frames} frames, expected at least {MIN_ENCODER_FRAMES}")
    picks = list(range(0, num_frames, FPS // 2))
    if len(picks) % 2:
        picks.append(picks[-1])
    return [
        FramePair(first, second, f"<{(first / FPS + second / FPS) / 2:.1f} seconds>")
        for first, second in zip(picks[::2], picks[1::2], strict=True)
    ]


def encoder_size(size: Size, num_frames: int, *, min_pixels: int, max_pixels: int, step: int = CANVAS_STEP) -> Size:
    """The size at which the encoder sees a picture (`num_frames` 1) or clip: pixel counts are over all frames."""
    height, width = (max(step, round(side / step) * step) for side in (size.height, size.width))
    area = num_frames * size.height * size.width
    if num_frames * height * width > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        height, width = (max(step, math.floor(side / shrink / step) * step) for side in (size.height, size.width))
    elif num_frames * height * width < min_pixels:
        grow = math.sqrt(min_pixels / area)
        height, width = (math.ceil(side * grow / step) * step for side in (size.height, size.width))
    return Size(width, height)


@dataclass(frozen=True, slots=True)
class Tile:
    """A stretch of one axis; `overlap` is shared with the next tile (0 for the last)."""

    start: int
    length: int
    overlap: int


def tiles(length: int, tile: int, min_overlap: int, ratio: int) -> list[Tile]:
    """Tiles that cover `length` pixels, overlaps growing in steps of `ratio` until the last ends exactly there."""
    if tile >= length:
        return [Tile(0, length, 0)]
    count = -(-length // tile)
    while tile * count - min_overlap * (count - 1) < length:
        count += 1
    overlaps = [min_overlap] * (count - 1)
    slack = tile * count - sum(overlaps) - length
    for index in range(slack // ratio):
        overlaps[index % len(overlaps)] += ratio
    return list(_placed(tile, overlaps))


def _placed(tile: int, overlaps: list[int]) -> Iterator[Tile]:
    start = 0
    for overlap in [*overlaps, 0]:
        yield Tile(start, tile, overlap)
        start += tile - overlap

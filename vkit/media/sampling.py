"""How many frames and pixels of an item a Qwen-VL tower gets to see.

Source: Qwen Team 2025, Qwen3-VL (published preprocessing).
"""

from __future__ import annotations

import math

import numpy as np

from vkit.errors import InvalidRequest
from vkit.media.items import MediaKind

MAX_RATIO = 200
"""Longest side over shortest, above which an image is refused."""


def fitted_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, num_frames: int | None = None
) -> tuple[int, int]:
    """Height and width, multiples of `factor`, with the pixel count between the limits and about the same proportions.

    `num_frames`: a video of so many frames; the limits then count the pixels of all of them, and a side below `factor`
    first grows to it.

    Raises:
        InvalidRequest: one side is more than 200 times the other.
    """
    kind: MediaKind = "image" if num_frames is None else "video"
    if num_frames is not None and min(height, width) < factor:
        growth = max(factor / height, factor / width)
        height, width = int(height * growth), int(width * growth)
    if max(height, width) > MAX_RATIO * min(height, width):
        raise InvalidRequest(
            f"{kind}: {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other", param=kind
        )
    frames = num_frames or 1
    counted = 1 if num_frames is None else round(num_frames / 2) * 2
    rows, columns = round(height / factor) * factor, round(width / factor) * factor
    if counted * rows * columns > max_pixels:
        shrink = math.sqrt(frames * height * width / max_pixels)
        rows = max(factor, math.floor(height / shrink / factor) * factor)
        columns = max(factor, math.floor(width / shrink / factor) * factor)
    elif counted * rows * columns < min_pixels:
        growth = math.sqrt(min_pixels / (frames * height * width))
        rows = math.ceil(height * growth / factor) * factor
        columns = math.ceil(width * growth / factor) * factor
    return rows, columns


def chosen_frames(
    total: int,
    fps: float,
    *,
    wanted_fps: float = 2.0,
    min_frames: int = 4,
    max_frames: int = 768,
    num_frames: int | None = None,
) -> list[int]:
    """The frames of a clip of `total` that a model sees: `wanted_fps` per second, evenly spread, first and last in.

    `num_frames`: so many instead, as far as there are.
    """
    wanted = int(total / fps * wanted_fps)
    count = min(max(wanted, min_frames) if num_frames is None else num_frames, max_frames, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]

"""Images and videos for Muse Glimmer: patches in raster order, their number capped by tokens.

Source: published preprocessing of Muse Glimmer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from vkit.media.frames import fps_of, no_pixel_limits, not_taken, padded_frames, prepared_digest, shown_frames
from vkit.media.inputs import MediaInput, PlacedPrompt
from vkit.media.items import AudioMedia, ImageMedia, Media, MediaKind, VideoMedia
from vkit.media.placing import place_media
from vkit.media.resize import LANCZOS, resize


def capped_grid(height: int, width: int, unit: int, max_tokens: int) -> tuple[int, int]:
    """Rows and columns of units: at most `max_tokens`, and of the four neighbours of the ideal the truest to shape."""
    rows, columns = height / unit, width / unit
    if rows * columns > max_tokens:
        ratio = columns / rows
        rows = math.sqrt(max_tokens / ratio)
        columns = rows * ratio
    pairs = itertools.product({math.floor(rows), math.ceil(rows)}, {math.floor(columns), math.ceil(columns)})
    fitting = sorted(pair for pair in pairs if min(pair) >= 1 and pair[0] * pair[1] <= max_tokens)
    if not fitting:
        return min(max(1, round(rows)), max_tokens), min(max(1, round(columns)), max_tokens)
    return min(fitting, key=lambda pair: abs(pair[0] / pair[1] - height / width))


@dataclass(frozen=True, slots=True)
class MuseMarks:
    """The ids that media need in a prompt; marks that a vocabulary lacks are left out."""

    image: int
    video: int
    around_image: tuple[int | None, int | None] = (None, None)
    around_video: tuple[int | None, int | None] = (None, None)
    between_frames: int | None = None


@dataclass(frozen=True, slots=True)
class MuseMedia:
    """The MediaProcessor of this family."""

    marks: MuseMarks
    token_text: Callable[[int], str]
    encode: Callable[[str], list[int]]
    patch_size: int = 14
    merge_size: int = 2
    temporal_patch_size: int = 2
    max_image_tokens: int = 4096
    max_frame_tokens: int = 144
    fps: float = 2.0
    max_frames: int = 96

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Images and videos."""
        return ("image", "video")

    def placeholder(self, kind: MediaKind) -> str:
        """The pad of a kind; its marks come with its replacement."""
        if kind == "audio":
            raise not_taken(kind, self.kinds)
        return self.token_text(self.marks.image if kind == "image" else self.marks.video)

    def with_pixel_limits(self, least: int | None, most: int | None) -> NoReturn:
        """There are none: sizes follow from the model."""
        raise no_pixel_limits()

    def prepare(self, media: Media) -> MediaInput:
        """Patches of the resized frames, spread over -1..1, and the tokens that take their rows."""
        if isinstance(media, ImageMedia):
            return self._image(media)
        if isinstance(media, AudioMedia):
            raise not_taken("audio", self.kinds)
        return self._video(media)

    def place(self, token_ids: Sequence[int], items: Sequence[MediaInput]) -> PlacedPrompt:
        """The prompt with every placeholder replaced; positions just count."""
        return PlacedPrompt(*place_media(token_ids, items, {"image": self.marks.image, "video": self.marks.video}))

    def _image(self, media: ImageMedia) -> MediaInput:
        frames = np.repeat(media.pixels[None], self.temporal_patch_size, axis=0)
        features, grid = self._patches(frames, self.max_image_tokens)
        num_rows = grid[1] * grid[2] // self.merge_size**2
        first, last = self.marks.around_image
        tokens = (*_given(first), *[self.marks.image] * num_rows, *_given(last))
        return MediaInput("image", prepared_digest(media, self), features, grid, num_rows, tokens, self.marks.image)

    def _video(self, media: VideoMedia) -> MediaInput:
        fps = fps_of(media)
        frames, indices = shown_frames(media, lambda total: self.chosen_frames(total, fps))
        frames = padded_frames(frames, self.temporal_patch_size)
        features, grid = self._patches(frames, self.max_frame_tokens)
        frame_len = grid[1] * grid[2] // self.merge_size**2
        marks = self.marks
        first, last = marks.around_video
        tokens = _given(first)
        for number in range(grid[0]):
            seconds = indices[number * self.temporal_patch_size] / fps
            tokens += [*self.encode(f"Time: {seconds:.1f}s"), *[marks.video] * frame_len]
            tokens += _given(marks.between_frames if number < grid[0] - 1 else last)
        digest = prepared_digest(media, self)
        return MediaInput("video", digest, features, grid, grid[0] * frame_len, tuple(tokens), marks.video)

    def chosen_frames(self, total: int, fps: float) -> list[int]:
        """The frames of a clip of `total` that the model sees: a whole number of temporal patches where there are."""
        t = self.temporal_patch_size
        count = min(int(total * self.fps / fps), self.max_frames, total)
        count = min(max(t, count // t * t), total)
        return [int(index) for index in np.linspace(0, total - 1, count, dtype=np.float32)]

    def _patches(self, frames: NDArray[np.uint8], max_tokens: int) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """(n, t · channels · y · x) in raster order, frame by frame, and the grid."""
        t, p, unit = self.temporal_patch_size, self.patch_size, self.patch_size * self.merge_size
        height, width = frames.shape[1:3]
        rows, columns = capped_grid(height, width, unit, max_tokens)
        resized = resize(frames, rows * unit, columns * unit, LANCZOS)
        spread = resized.astype(np.float32) / 127.5 - 1.0
        grid = (len(frames) // t, rows * self.merge_size, columns * self.merge_size)
        cut = spread.reshape(grid[0], t, grid[1], p, grid[2], p, 3).transpose(0, 2, 4, 1, 6, 3, 5)
        return np.ascontiguousarray(cut).reshape(grid[0] * grid[1] * grid[2], t * 3 * p * p), grid


def _given(token_id: int | None) -> list[int]:
    return [] if token_id is None else [token_id]

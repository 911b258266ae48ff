"""Images and videos for Qwen3.5 and Qwen3-VL: patches of resized frames, one run of pads per frame.

Source: Qwen Team 2025, Qwen3-VL (published preprocessing).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest, ModelLoadError
from vkit.media.frames import fps_of, not_taken, padded_frames, prepared_digest, shown_frames
from vkit.media.inputs import MediaInput, PlacedPrompt
from vkit.media.items import AudioMedia, ImageMedia, Media, MediaKind, VideoMedia
from vkit.media.placing import grid_positions, place_media
from vkit.media.resize import resize
from vkit.media.sampling import chosen_frames, fitted_size


@dataclass(frozen=True, slots=True)
class PixelRules:
    """How large frames are, and how their values are spread."""

    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def limited(self, least: int | None, most: int | None) -> PixelRules:
        """These rules with other limits; None leaves one as it is.

        Raises:
            InvalidRequest: the least is above the most.
        """
        made = replace(self, min_pixels=least or self.min_pixels, max_pixels=most or self.max_pixels)
        if made.min_pixels > made.max_pixels:
            raise InvalidRequest(
                f"mm_processor_kwargs: min_pixels {made.min_pixels} is above max_pixels {made.max_pixels}",
                param="mm_processor_kwargs",
            )
        return made

    def updated(self, config: Mapping[str, Any], where: str) -> PixelRules:
        """These rules with what a preprocessor configuration says otherwise.

        Raises:
            ModelLoadError: a value of another form.
        """
        size = config.get("size")
        limits = dict(size) if isinstance(size, Mapping) else {}
        low = limits.get("shortest_edge", config.get("min_pixels") or self.min_pixels)
        high = limits.get("longest_edge", config.get("max_pixels") or self.max_pixels)
        if not all(type(value) is int and value > 0 for value in (low, high)) or low > high:
            raise ModelLoadError(f"{where}: size: expected shortest_edge and longest_edge in pixels, got {size!r}")
        colours = [
            config.get(key) or getattr(self, name) for key, name in (("image_mean", "mean"), ("image_std", "std"))
        ]
        for key, value in zip(("image_mean", "image_std"), colours, strict=True):
            is_listed = isinstance(value, list | tuple) and len(value) == 3
            if not is_listed or not all(isinstance(part, int | float) for part in value):
                raise ModelLoadError(f"{where}: {key}: expected three numbers, got {value!r}")
        mean, std = (tuple(float(part) for part in value) for value in colours)
        return replace(self, min_pixels=low, max_pixels=high, mean=mean, std=std)


IMAGE_RULES = PixelRules(65536, 16777216)
VIDEO_RULES = PixelRules(4096, 25165824)
"""What the published files say, where a checkpoint brings none."""


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Which frames of a video are shown."""

    fps: float = 2.0
    min_frames: int = 4
    max_frames: int = 768


@dataclass(frozen=True, slots=True)
class QwenMarks:
    """The ids that media need in a prompt."""

    image: int
    video: int
    vision_start: int
    vision_end: int


@dataclass(frozen=True, slots=True)
class QwenMedia:
    """The MediaProcessor of this family."""

    marks: QwenMarks
    token_text: Callable[[int], str]
    encode: Callable[[str], list[int]]
    """Token ids of plain text, nothing added."""
    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    image_rules: PixelRules = IMAGE_RULES
    video_rules: PixelRules = VIDEO_RULES
    frame_rules: FrameRules = FrameRules()

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Images and videos."""
        return ("image", "video")

    def placeholder(self, kind: MediaKind) -> str:
        """The pad of a kind between the marks of vision."""
        pad = {"image": self.marks.image, "video": self.marks.video}.get(kind)
        if pad is None:
            raise not_taken(kind, self.kinds)
        return "".join(map(self.token_text, (self.marks.vision_start, pad, self.marks.vision_end)))

    def with_pixel_limits(self, least: int | None, most: int | None) -> QwenMedia:
        """The same with other limits on the pixels of an image, and of all frames of a video."""
        return replace(
            self, image_rules=self.image_rules.limited(least, most), video_rules=self.video_rules.limited(least, most)
        )

    def prepare(self, media: Media) -> MediaInput:
        """Patches of the resized frames, normalised, and the tokens that take their rows."""
        if isinstance(media, ImageMedia):
            return self._image(media)
        if isinstance(media, AudioMedia):
            raise not_taken("audio", self.kinds)
        return self._video(media)

    def place(self, token_ids: Sequence[int], items: Sequence[MediaInput]) -> PlacedPrompt:
        """The prompt with every placeholder replaced, and positions in time, row and column."""
        marks = self.marks
        pads: dict[MediaKind, int] = {"image": marks.image, "video": marks.video}
        ids, placed = place_media(token_ids, items, pads, (marks.vision_start, marks.vision_end))
        if not placed:
            return PlacedPrompt(ids)
        positions, delta = grid_positions(len(ids), placed, self.merge_size)
        return PlacedPrompt(ids, placed, positions, delta)

    def _image(self, media: ImageMedia) -> MediaInput:
        rules, factor = self.image_rules, self.patch_size * self.merge_size
        height, width = fitted_size(
            *media.pixels.shape[:2], factor=factor, min_pixels=rules.min_pixels, max_pixels=rules.max_pixels
        )
        picture = resize(media.pixels[None], height, width)
        features, grid = self._patches(np.repeat(picture, self.temporal_patch_size, axis=0), rules)
        num_rows = features.shape[0] // self.merge_size**2
        pads = (self.marks.image,) * num_rows
        digest = prepared_digest(media, self.image_rules, self.video_rules, self.frame_rules, grid)
        return MediaInput("image", digest, features, grid, num_rows, pads, self.marks.image)

    def _video(self, media: VideoMedia) -> MediaInput:
        rules, factor = self.video_rules, self.patch_size * self.merge_size
        fps, chosen = fps_of(media), self.frame_rules
        frames, indices = shown_frames(
            media,
            lambda total: chosen_frames(
                total, fps, wanted_fps=chosen.fps, min_frames=chosen.min_frames, max_frames=chosen.max_frames
            ),
        )
        height, width = fitted_size(
            *frames.shape[1:3],
            factor=factor,
            min_pixels=rules.min_pixels,
            max_pixels=rules.max_pixels,
            num_frames=len(frames),
        )
        frames = padded_frames(resize(frames, height, width), self.temporal_patch_size)
        features, grid = self._patches(frames, rules)
        num_rows = features.shape[0] // self.merge_size**2
        replacement = self._frame_tokens(self.timestamps(indices, fps), num_rows // grid[0])
        digest = prepared_digest(media, self.image_rules, self.video_rules, self.frame_rules, grid)
        return MediaInput("video", digest, features, grid, num_rows, replacement, self.marks.video)

    def timestamps(self, indices: Sequence[int], fps: float) -> list[float]:
        """Seconds of each temporal patch: the mean of its first and its last frame's."""
        size = self.temporal_patch_size
        padded = [*indices, *[indices[-1]] * (-len(indices) % size)]
        return [(padded[i] / fps + padded[i + size - 1] / fps) / 2 for i in range(0, len(padded), size)]

    def _frame_tokens(self, timestamps: Sequence[float], frame_len: int) -> tuple[int, ...]:
        marks = self.marks
        tokens: list[int] = []
        for seconds in timestamps:
            tokens += self.encode(f"<{seconds:.1f} seconds>")
            tokens += [marks.vision_start, *[marks.video] * frame_len, marks.vision_end]
        return tuple(tokens)

    def _patches(
        self, frames: NDArray[np.uint8], rules: PixelRules
    ) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """(n, channels · t · y · x), blocks of merged patches side by side, and the grid."""
        t, m, p = self.temporal_patch_size, self.merge_size, self.patch_size
        count, height, width, _ = frames.shape
        grid = (count // t, height // p, width // p)
        mean, std = np.array(rules.mean, np.float32), np.array(rules.std, np.float32)
        spread: NDArray[np.float32] = ((frames.astype(np.float32) / 255.0 - mean) / std).astype(np.float32)
        cut = spread.reshape(grid[0], t, grid[1] // m, m, p, grid[2] // m, m, p, 3)
        ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
        return np.ascontiguousarray(ordered).reshape(grid[0] * grid[1] * grid[2], 3 * t * p * p), grid

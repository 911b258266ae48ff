"""Images for Gemma 4, and sound for its unified export: pixels 0..1, as many soft tokens as fit.

Source: Gemma Team 2026 (published preprocessing of Gemma 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest
from vkit.media.frames import no_pixel_limits, not_taken, prepared_digest
from vkit.media.inputs import MediaInput, PlacedPrompt
from vkit.media.items import AudioMedia, ImageMedia, Media, MediaKind
from vkit.media.placing import place_media
from vkit.media.resize import resize

SAMPLE_RATE = 16_000


def largest_size(height: int, width: int, unit: int, max_tokens: int) -> tuple[int, int]:
    """Height and width in units: the largest of about the same shape within `max_tokens`."""
    factor = math.sqrt(max_tokens * unit * unit / (height * width))
    rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
    if not rows:
        return 1, min(max(1, width // height), max_tokens)
    if not columns:
        return min(max(1, height // width), max_tokens), 1
    return rows, columns


@dataclass(frozen=True, slots=True)
class GemmaMarks:
    """The ids that media need in a prompt; marks that a vocabulary lacks are left out."""

    image: int
    audio: int | None = None
    around_image: tuple[int | None, int | None] = (None, None)
    around_audio: tuple[int | None, int | None] = (None, None)


@dataclass(frozen=True, slots=True)
class GemmaMedia:
    """The MediaProcessor of this family."""

    marks: GemmaMarks
    token_text: Callable[[int], str]
    patch_size: int
    pooling_size: int
    max_soft_tokens: int = 280
    max_side: int = 1 << 30
    """Most rows, and most columns, of the grid whose places the model has learned."""
    merges_pixels: bool = False
    """Whether a row holds the pixels of a whole soft token rather than those of one patch."""
    samples_per_token: int | None = None
    """Samples of sound in one row; None: no sound."""
    sees_itself: bool = False
    """Whether the tokens of an image see each other in both directions."""

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """Images, and sound where the export takes it."""
        return ("image",) if self.samples_per_token is None else ("image", "audio")

    def placeholder(self, kind: MediaKind) -> str:
        """The pad of a kind; its marks come with its replacement."""
        pad = {"image": self.marks.image, "audio": self.marks.audio}.get(kind)
        if kind not in self.kinds or pad is None:
            raise not_taken(kind, self.kinds)
        return self.token_text(pad)

    def with_pixel_limits(self, least: int | None, most: int | None) -> NoReturn:
        """There are none: sizes follow from the model."""
        raise no_pixel_limits()

    def prepare(self, media: Media) -> MediaInput:
        """Patches of the resized image, or frames of samples, and the tokens that take their rows."""
        if isinstance(media, ImageMedia):
            return self._image(media)
        if isinstance(media, AudioMedia) and self.samples_per_token is not None:
            return self._audio(media, self.samples_per_token)
        raise not_taken(media.kind, self.kinds)

    def place(self, token_ids: Sequence[int], items: Sequence[MediaInput]) -> PlacedPrompt:
        """The prompt with every placeholder replaced; positions just count."""
        pads: dict[MediaKind, int] = {"image": self.marks.image}
        if self.marks.audio is not None:
            pads["audio"] = self.marks.audio
        return PlacedPrompt(*place_media(token_ids, items, pads))

    def _image(self, media: ImageMedia) -> MediaInput:
        unit = self.patch_size * self.pooling_size
        height, width = media.pixels.shape[:2]
        rows, columns = largest_size(height, width, unit, self.max_soft_tokens)
        picture = resize(media.pixels[None], rows * unit, columns * unit)[0]
        features, grid = self._rows(picture)
        if max(grid) > self.max_side:
            raise InvalidRequest(
                f"image: {width} x {height} pixels become a grid of {grid[2]} x {grid[1]}; this model has learned"
                f" {self.max_side} places a side",
                param="image",
                remedy="send a picture that is less elongated",
            )
        num_rows = rows * columns
        tokens = self._marked(self.marks.image, num_rows, self.marks.around_image)
        digest = prepared_digest(media, self)
        return MediaInput("image", digest, features, grid, num_rows, tokens, self.marks.image, self.sees_itself)

    def _rows(self, picture: NDArray[np.uint8]) -> tuple[NDArray[np.float32], tuple[int, int, int]]:
        """(n, y · x · channels) in raster order, values 0..1, and the grid."""
        side = self.patch_size * (self.pooling_size if self.merges_pixels else 1)
        rows, columns = picture.shape[0] // side, picture.shape[1] // side
        cut = picture.reshape(rows, side, columns, side, 3).transpose(0, 2, 1, 3, 4).reshape(rows * columns, -1)
        return cut.astype(np.float32) / 255.0, (1, rows, columns)

    def _audio(self, media: AudioMedia, frame_len: int) -> MediaInput:
        if media.sample_rate != SAMPLE_RATE:
            raise InvalidRequest(
                f"audio: {media.sample_rate} samples per second; this model listens at {SAMPLE_RATE}", param="audio"
            )
        samples = media.samples if media.samples.ndim == 1 else media.samples.mean(axis=1, dtype=np.float32)
        padded = np.pad(samples, (0, -len(samples) % frame_len)).reshape(-1, frame_len)
        pad_id = self.marks.audio
        assert pad_id is not None, "a model that listens has an id for sound"
        tokens = self._marked(pad_id, len(padded), self.marks.around_audio)
        digest = prepared_digest(media, self)
        return MediaInput("audio", digest, padded, (len(padded), 1, 1), len(padded), tokens, pad_id)

    @staticmethod
    def _marked(pad_id: int, count: int, marks: tuple[int | None, int | None]) -> tuple[int, ...]:
        first, last = ([] if mark is None else [mark] for mark in marks)
        return (*first, *[pad_id] * count, *last)

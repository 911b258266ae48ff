"""What a tower reads, where in the prompt its rows go, and who turns media into that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vkit.media.items import Media, MediaKind


@dataclass(frozen=True, slots=True, eq=False)
class MediaInput:
    """One item ready for the tower."""

    kind: MediaKind
    digest: bytes
    """Names everything that determines the rows: content, and how it was prepared. Equal digests share one encoding."""
    features: NDArray[np.float32]
    """(n, C): what the tower reads, such as one row per patch."""
    grid: tuple[int, int, int]
    """Frames, rows and columns that `features` counts; (n, 1, 1) for sound."""
    num_rows: int
    """Rows the tower makes: as many prompt tokens take them."""
    replacement: tuple[int, ...]
    """Token ids that take the place of the item's placeholder: `num_rows` pads, and ordinary tokens between them."""
    pad_id: int
    """The id of the pads."""
    sees_itself: bool = False
    """Whether its tokens see each other in the language model too, in both directions; a run is then computed whole."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedMedia:
    """An item and the prompt positions that take its rows, in order."""

    item: MediaInput
    spans: tuple[tuple[int, int], ...]
    """(first, beyond) of each run of pads; a video has one per frame."""

    @property
    def start(self) -> int:
        """Its first position."""
        return self.spans[0][0]

    @property
    def stop(self) -> int:
        """The position beyond its last."""
        return self.spans[-1][1]


@dataclass(frozen=True, slots=True, eq=False)
class PlacedPrompt:
    """A prompt whose placeholders have grown to the length of what they stand for."""

    token_ids: list[int]
    media: tuple[PlacedMedia, ...] = ()
    """In order of position; spans never overlap."""
    rope_positions: NDArray[np.int64] | None = None
    """(3, T): position in time, row and column of every token, for models that tell them apart."""
    position_delta: int = 0
    """What the position of a token after the prompt is more than its index (at most 0)."""


class MediaProcessor(Protocol):
    """One model's way with media. Used from any thread; keeps no state between calls."""

    @property
    def kinds(self) -> tuple[MediaKind, ...]:
        """The kinds the model takes."""

    def placeholder(self, kind: MediaKind) -> str:
        """The text that stands for one item of `kind` in a prompt, as the chat template writes it."""

    def prepare(self, media: Media) -> MediaInput:
        """What the tower reads of one item.

        Raises:
            InvalidRequest: it cannot be shown to this model (proportions, rate).
        """

    def with_pixel_limits(self, least: int | None, most: int | None) -> MediaProcessor:
        """The same with other limits on the pixels of an item; None leaves a limit as it is.

        Raises:
            InvalidRequest: this model has none, or the least is above the most.
        """

    def place(self, token_ids: Sequence[int], items: Sequence[MediaInput]) -> PlacedPrompt:
        """The prompt with every placeholder replaced; items of one kind belong to its placeholders in order.

        Raises:
            InvalidRequest: placeholders and items of a kind do not match in number.
        """

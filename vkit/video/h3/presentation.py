"""What the conditioner reads: prompt, labels and vision blocks as token ids, with tags and positions for every token.

Pieces are tokenised one by one and joined: no chat template, no special tokens of the tokenizer's own.
Source: the released pipeline's presentation of its three tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vkit.video.h3.layout import TEXT, VIDEO


@dataclass(frozen=True, slots=True)
class VisionBlock:
    """A run of pads that stand for one picture or one pair of frames, of `rows` x `columns` merged patches."""

    kind: Literal["image", "video"]
    rows: int
    columns: int

    @property
    def num_pads(self) -> int:
        """Pad tokens."""
        return self.rows * self.columns


Piece = str | VisionBlock


@dataclass(frozen=True, slots=True)
class ShownReference:
    """What is said of one reference: a label for its sound, and blocks for what can be seen."""

    kind: Literal["image", "video", "audio"]
    has_sound: bool
    blocks: tuple[VisionBlock, ...] = ()
    labels: tuple[str, ...] = ()
    """For a clip, the time before each block."""


@dataclass(frozen=True, slots=True)
class VisionTokens:
    """Ids of the tokens around and inside vision blocks."""

    image_pad: int
    video_pad: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Presentation:
    """Token ids with, for each, its tag and its position in time, rows and columns (3, L)."""

    token_ids: tuple[int, ...]
    tags: tuple[int, ...]
    positions: npt.NDArray[np.int64]
    pads: npt.NDArray[np.int64]
    """Indices of all pads, in order."""


def keyframe_pieces(prompt: str, blocks: Sequence[VisionBlock]) -> list[Piece]:
    """Task fl2va: a numbered picture for every keyframe, then the prompt."""
    pieces: list[Piece] = []
    for number, block in enumerate(blocks, start=1):
        pieces += [f"<Picture {number}>: ", block]
    return [*pieces, prompt]


def reference_pieces(prompt: str, references: Sequence[ShownReference]) -> list[Piece]:
    """Task ref2va: every reference under its number among its kind, sound before pictures, then the prompt."""
    counts = {"image": 0, "video": 0, "audio": 0}
    pieces: list[Piece] = []
    for reference in references:
        if reference.has_sound:
            counts["audio"] += 1
            pieces.append(f"<Audio {counts['audio']}>: ")
        if reference.kind == "audio":
            continue
        counts[reference.kind] += 1
        word = "Picture" if reference.kind == "image" else "Video"
        pieces.append(f"<{word} {counts[reference.kind]}>: ")
        for index, block in enumerate(reference.blocks):
            pieces += [reference.labels[index], block] if reference.labels else [block]
    return [*pieces, prompt]


def without_vision(pieces: Sequence[Piece]) -> list[Piece]:
    """The prompt alone, as a conditioner without a vision tower takes it."""
    return [pieces[-1]]


def present(pieces: Sequence[Piece], encode: Callable[[str], list[int]], tokens: VisionTokens) -> Presentation:
    """The tokens of all pieces. A vision block's rows and columns count from its first position."""
    ids: list[int] = []
    tags: list[int] = []
    columns: list[npt.NDArray[np.int64]] = []
    pads: list[int] = []
    clock = 0

    def run(count: int) -> None:
        nonlocal clock
        columns.append(np.tile(np.arange(clock, clock + count), (3, 1)))
        clock += count

    for piece in pieces:
        if isinstance(piece, str):
            encoded = encode(piece)
            ids += encoded
            tags += [TEXT] * len(encoded)
            run(len(encoded))
            continue
        ids.append(tokens.start)
        run(1)
        pads += range(len(ids), len(ids) + piece.num_pads)
        ids += [tokens.image_pad if piece.kind == "image" else tokens.video_pad] * piece.num_pads
        cells = np.arange(piece.num_pads)
        columns.append(clock + np.stack([cells * 0, cells // piece.columns, cells % piece.columns]))
        clock += max(piece.rows, piece.columns)
        ids.append(tokens.end)
        run(1)
        tags += [VIDEO] * (piece.num_pads + 2)
    positions = np.concatenate(columns, axis=1) if columns else np.zeros((3, 0), np.int64)
    return Presentation(tuple(ids), tuple(tags), positions, np.asarray(pads, np.int64))

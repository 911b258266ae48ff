"""The packed sequence: which row is what, where it stands in time and space, and at which timestep it is.

Row order: text, conditioning, sound of the target (left, then right), pictures of the target. All positions are
float64 and exact. Source: the released model's packing; positions are rotary coordinates (t, h, w).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

PATCH = 2
"""Latent pixels per side of a row's patch."""
SPAN = 5 / 3
"""Sound steps (and text positions) per frame of video at 24 frames a second."""
FRAMES_PER_LATENT = (1, 4, 4, 4, 4)
GRID_SCALE = 32
VIDEO, TEXT, AUDIO = 0, 1, 2
"""Modality tags."""


class RowKind(IntEnum):
    """What decides a row's timestep."""

    NOISY_VIDEO = 0
    """Pictures of the target, and all text."""
    NOISY_AUDIO = 1
    CONDITION_VIDEO = 2
    CONDITION_AUDIO = 3


@dataclass(frozen=True, slots=True)
class LatentSize:
    """Latent frames and latent pixels, before the 2x2 patch."""

    t: int
    h: int
    w: int

    @property
    def rows_per_frame(self) -> int:
        """Rows of the sequence per latent frame."""
        return (self.h // PATCH) * (self.w // PATCH)

    @property
    def rows(self) -> int:
        """Rows of all frames."""
        return self.t * self.rows_per_frame


@dataclass(frozen=True, slots=True)
class ReferenceBlock:
    """Latents of one reference. A picture has one frame and no sound, a sound no `video`."""

    kind: Literal["image", "video", "audio"]
    video: LatentSize | None = None
    audio_t: int = 0


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every row of S stands. The index lists of video and audio have conditioning rows first."""

    positions: Floats
    """(S, 3): t, h, w."""
    tags: Ints
    """(S,): VIDEO, TEXT or AUDIO. Text rows of a vision block are tagged VIDEO."""
    kinds: Ints
    """(S,): RowKind."""
    video_indices: Ints
    audio_indices: Ints
    text_indices: Ints
    num_condition_video_rows: int
    num_condition_audio_rows: int

    @property
    def num_rows(self) -> int:
        """S."""
        return len(self.tags)

    def segments(self) -> list[tuple[int, int, RowKind, int]]:
        """Runs of rows that share kind and tag, in order: (start, stop, kind, tag)."""
        code = self.kinds * 4 + self.tags
        starts = np.flatnonzero(np.diff(code, prepend=-1)).tolist()
        stops = [*starts[1:], self.num_rows]
        return [
            (start, stop, RowKind(int(self.kinds[start])), int(self.tags[start]))
            for start, stop in zip(starts, stops, strict=True)
        ]


def timestep_of_kind(t_video: float, t_audio: float, noise_aug: float) -> dict[RowKind, float]:
    """The timestep (0 noise, 1 clean) of every kind of row, in float32 precision."""
    single = [float(np.float32(value)) for value in (t_video, t_audio, noise_aug)]
    return {
        RowKind.NOISY_VIDEO: single[0],
        RowKind.NOISY_AUDIO: single[1],
        RowKind.CONDITION_VIDEO: max(single[0], single[2]),
        RowKind.CONDITION_AUDIO: 1.0,
    }


def pack(
    text_tags: Sequence[int],
    target: LatentSize,
    audio_t: int,
    *,
    keyframes: Sequence[Literal["first", "last"]] = (),
    references: Sequence[ReferenceBlock] = (),
) -> Layout:
    """The layout of one request: keyframes (task fl2va) or references (ref2va), not both."""
    assert not (keyframes and references)
    packing = _Packing(len(text_tags))
    packing.text(text_tags)
    clock = float(len(text_tags))
    for anchor in keyframes:
        packing.frames(LatentSize(1, target.h, target.w), _anchor(clock, anchor, target.t), is_condition=True)
    for block in references:
        clock = packing.reference(block, clock, target)
    packing.sound(audio_t, clock, target, is_condition=False)
    packing.frames(target, clock, is_condition=False)
    return packing.finish()


class _Packing:
    """Rows gathered block by block."""

    def __init__(self, num_text: int) -> None:
        self._positions: list[Floats] = []
        self._tags: list[Ints] = []
        self._kinds: list[Ints] = []
        self._num_text = num_text

    def text(self, tags: Sequence[int]) -> None:
        positions = np.zeros((len(tags), 3))
        positions[:, 0] = np.arange(len(tags))
        self._append(positions, np.asarray(tags, np.int64), RowKind.NOISY_VIDEO)

    def reference(self, block: ReferenceBlock, clock: float, target: LatentSize) -> float:
        """Append one reference; returns the clock after it."""
        if block.video is None:
            self.sound(block.audio_t, clock, target, is_condition=True)
            return clock + block.audio_t
        if block.audio_t:
            self.sound(block.audio_t, clock, block.video, is_condition=True)
        self.frames(block.video, clock, is_condition=True)
        if block.kind == "image":
            return clock + 1
        return clock + max(float(block.audio_t), _running_sum(block.video.t))

    def frames(self, size: LatentSize, origin: float, *, is_condition: bool) -> None:
        grid_h, grid_w = _axis(size.h, size), _axis(size.w, size)
        starts = np.concatenate([[0.0], np.cumsum(_spans(size.t))[:-1]])
        times = origin + starts
        shape = (size.t, len(grid_h), len(grid_w))
        positions = np.stack(
            [
                np.broadcast_to(times[:, None, None], shape),
                np.broadcast_to(grid_h[None, :, None], shape),
                np.broadcast_to(grid_w[None, None, :], shape),
            ],
            axis=-1,
        ).reshape(-1, 3)
        kind = RowKind.CONDITION_VIDEO if is_condition else RowKind.NOISY_VIDEO
        self._append(positions, np.full(len(positions), VIDEO, np.int64), kind)

    def sound(self, audio_t: int, origin: float, pins: LatentSize, *, is_condition: bool) -> None:
        """All steps of the left channel, then of the right, pinned to the edges of the width grid of `pins`."""
        grid_w = _axis(pins.w, pins)
        positions = np.zeros((2 * audio_t, 3))
        positions[:, 0] = origin + np.tile(np.arange(audio_t, dtype=np.float64), 2)
        positions[:audio_t, 2] = grid_w[0]
        positions[audio_t:, 2] = grid_w[-1]
        kind = RowKind.CONDITION_AUDIO if is_condition else RowKind.NOISY_AUDIO
        self._append(positions, np.full(len(positions), AUDIO, np.int64), kind)

    def finish(self) -> Layout:
        positions, tags, kinds = (
            np.concatenate(self._positions),
            np.concatenate(self._tags),
            np.concatenate(self._kinds),
        )
        body = np.arange(len(tags)) >= self._num_text
        video, audio = (np.flatnonzero(body & (tags == tag)) for tag in (VIDEO, AUDIO))
        return Layout(
            positions,
            tags,
            kinds,
            video,
            audio,
            np.arange(self._num_text),
            int(np.count_nonzero(kinds == RowKind.CONDITION_VIDEO)),
            int(np.count_nonzero(kinds == RowKind.CONDITION_AUDIO)),
        )

    def _append(self, positions: Floats, tags: Ints, kind: RowKind) -> None:
        self._positions.append(positions)
        self._tags.append(tags)
        self._kinds.append(np.full(len(tags), kind, np.int64))


def _spans(num_frames: int) -> Floats:
    phases = np.resize(np.asarray(FRAMES_PER_LATENT, np.float64), num_frames)
    return SPAN * phases


def _running_sum(num_frames: int) -> float:
    return float(sum(_spans(num_frames).tolist()))


def _anchor(origin: float, anchor: Literal["first", "last"], num_frames: int) -> float:
    """Time of a keyframe. The sum for the last one is numpy's pairwise one, as the released model has it."""
    return origin if anchor == "first" else origin + float(np.sum(_spans(num_frames))) - SPAN


def _axis(dim: int, size: LatentSize) -> Floats:
    """Coordinates of the patches along one side: centred, scaled by the area, the right end left out."""
    area = np.sqrt(float(size.h * size.w))
    ratio = dim / area
    low = (1 - ratio) / 2
    count = dim // PATCH
    step = ((low + ratio) - low) / count
    grid: Floats = (np.arange(count) * step + low) * GRID_SCALE
    return grid

"""Decoded media, checked on construction, each with a digest of its content."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest

MediaKind = Literal["image", "video", "audio"]
KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


@dataclass(frozen=True, eq=False)
class ImageMedia:
    """One picture. Transparency is gone already: whoever decodes puts it over white.

    Raises:
        InvalidRequest: no uint8 array (H, W, 3), or an empty one.
    """

    pixels: NDArray[np.uint8]
    """(H, W, 3), red green blue. Not to be written to afterwards."""
    digest: bytes = field(init=False)
    """SHA-256 of kind, shape and pixels."""

    kind: Literal["image"] = field(default="image", init=False)

    def __post_init__(self) -> None:
        pixels = _checked(self.pixels, np.uint8, "image", "pixels", "(height, width, 3)", ndim=3)
        object.__setattr__(self, "pixels", pixels)
        object.__setattr__(self, "digest", _digest("image", pixels))


@dataclass(frozen=True, eq=False)
class VideoMedia:
    """Frames of one clip: all of them, or those chosen while decoding (`indices`).

    Raises:
        InvalidRequest: no uint8 array (N, H, W, 3), an empty one, or numbers that cannot be.
    """

    frames: NDArray[np.uint8]
    """(N, H, W, 3), red green blue. Not to be written to afterwards."""
    fps: float | None = None
    """Frames per second of the source; None: unknown."""
    indices: tuple[int, ...] | None = None
    """Which frames of the source these are, ascending. None: every one of them, and the model chooses among them."""
    num_source_frames: int | None = None
    """Frames of the source; None: as many as are here."""
    digest: bytes = field(init=False)
    """SHA-256 of kind, shape, rate, indices and pixels."""

    kind: Literal["video"] = field(default="video", init=False)

    def __post_init__(self) -> None:
        frames = _checked(self.frames, np.uint8, "video", "frames", "(frames, height, width, 3)", ndim=4)
        if self.fps is not None and not (_is_number(self.fps) and math.isfinite(self.fps) and self.fps > 0):
            raise _refused("video", f"fps: expected a positive number, got {self.fps!r}")
        indices = self.indices
        if indices is not None:
            indices = tuple(indices)
            rises = all(one < other for one, other in itertools.pairwise(indices))
            if len(indices) != len(frames) or not rises or indices[0] < 0:
                raise _refused("video", f"indices: expected {len(frames)} ascending frame numbers, got {indices[:9]!r}")
            object.__setattr__(self, "indices", indices)
        least = len(frames) if indices is None else indices[-1] + 1
        total = self.num_source_frames
        if total is not None and (type(total) is not int or total < least):
            raise _refused("video", f"num_source_frames: expected at least {least}, got {total!r}")
        object.__setattr__(self, "frames", frames)
        object.__setattr__(self, "digest", _digest("video", frames, self.fps, indices))

    @property
    def duration_s(self) -> float | None:
        """Length of the whole clip in seconds, if the rate is known."""
        total = self.num_source_frames or (len(self.frames) if self.indices is None else self.indices[-1] + 1)
        return None if self.fps is None else total / self.fps


@dataclass(frozen=True, eq=False)
class AudioMedia:
    """Sound as samples, -1..1.

    Raises:
        InvalidRequest: no float32 array (N,) or (N, 2), an empty one, a value that is not finite, or a rate below 1.
    """

    samples: NDArray[np.float32]
    """(N,) mono or (N, 2) stereo. Not to be written to afterwards."""
    sample_rate: int
    """Samples per second."""
    digest: bytes = field(init=False)
    """SHA-256 of kind, shape, rate and samples."""

    kind: Literal["audio"] = field(default="audio", init=False)

    def __post_init__(self) -> None:
        samples: Any = self.samples
        is_array = isinstance(samples, np.ndarray) and samples.dtype == np.float32
        if not is_array or not (samples.ndim == 1 or (samples.ndim == 2 and samples.shape[1] == 2)):
            raise _refused("audio", f"samples: expected a float32 array (N,) or (N, 2), got {_told(samples)}")
        if not len(samples):
            raise _refused("audio", "samples: there are none")
        if not np.isfinite(samples).all():
            raise _refused("audio", "samples: expected finite numbers")
        if type(self.sample_rate) is not int or self.sample_rate < 1:
            raise _refused("audio", f"sample_rate: expected samples per second, got {self.sample_rate!r}")
        samples = np.ascontiguousarray(samples)
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "digest", _digest("audio", samples, self.sample_rate))

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return len(self.samples) / self.sample_rate


Media = ImageMedia | VideoMedia | AudioMedia


def _checked(
    value: Any, dtype: type[np.uint8], kind: MediaKind, name: str, shape: str, *, ndim: int
) -> NDArray[np.uint8]:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != ndim or value.shape[-1] != 3:
        raise _refused(kind, f"{name}: expected a uint8 array {shape}, got {_told(value)}")
    if not value.size:
        raise _refused(kind, f"{name}: an empty array of shape {value.shape}")
    return np.ascontiguousarray(value)


def _told(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(kind: MediaKind, message: str) -> InvalidRequest:
    return InvalidRequest(f"{kind}: {message}", param=kind)


def _digest(kind: MediaKind, array: NDArray[Any], *facts: object) -> bytes:
    digest = hashlib.sha256(repr((kind, array.shape, *facts)).encode())
    digest.update(array.data)
    return digest.digest()

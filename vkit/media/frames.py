"""What preparing pictures has in common across families: choosing frames, cutting patches, naming results."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest
from vkit.media.items import Media, MediaKind, VideoMedia

logger = logging.getLogger("vkit.media")

DEFAULT_FPS = 24.0
"""Assumed of a video that does not say."""


def fps_of(media: VideoMedia) -> float:
    """Frames per second of the source."""
    if media.fps is None:
        logger.warning("a video of unknown rate is taken for one of %g frames per second", DEFAULT_FPS)
        return DEFAULT_FPS
    return media.fps


def shown_frames(media: VideoMedia, choose: Callable[[int], list[int]]) -> tuple[NDArray[np.uint8], list[int]]:
    """The frames a model sees and their places in the source: those that came, or `choose(total)` of all."""
    if media.indices is not None:
        return media.frames, list(media.indices)
    indices = choose(len(media.frames))
    return media.frames[indices], indices


def padded_frames(frames: NDArray[np.uint8], multiple: int) -> NDArray[np.uint8]:
    """The frames with the last repeated until their number is a multiple."""
    missing = -len(frames) % multiple
    return np.concatenate([frames, np.repeat(frames[-1:], missing, axis=0)]) if missing else frames


def prepared_digest(media: Media, *rules: object) -> bytes:
    """A digest of the content and of how it was prepared."""
    return hashlib.sha256(media.digest + repr(rules).encode()).digest()


def no_pixel_limits() -> InvalidRequest:
    """The error of models whose pictures have one size."""
    return InvalidRequest(
        "mm_processor_kwargs: min_pixels and max_pixels change nothing for this model", param="mm_processor_kwargs"
    )


def not_taken(kind: MediaKind, kinds: Sequence[MediaKind]) -> InvalidRequest:
    """The error that says which kinds a model takes."""
    return InvalidRequest(f"{kind}: this model takes text and {', '.join(kinds)}", param=kind)

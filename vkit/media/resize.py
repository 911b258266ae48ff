"""Resampling of pictures, with the filter widened when they shrink (antialiasing).

Source: the separable two-pass scheme of the Python Imaging Library: columns, rounded to 8 bits, then rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Filter = tuple[Callable[[NDArray[np.float64]], NDArray[np.float64]], float]
"""Weight by distance in source pixels (of an unshrunk picture), and the distance from which on it is zero."""


def _cubic(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Keys' cubic with a = -0.5."""
    x = np.abs(x)
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


def _lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """A sinc under a sinc three lobes wide."""
    return np.where(np.abs(x) < 3.0, np.sinc(x) * np.sinc(x / 3.0), 0.0)


BICUBIC: Filter = (_cubic, 2.0)
LANCZOS: Filter = (_lanczos, 3.0)


def resize(frames: NDArray[np.uint8], height: int, width: int, kind: Filter = BICUBIC) -> NDArray[np.uint8]:
    """frames (N, H, W, C) -> (N, height, width, C)."""
    out = np.empty((frames.shape[0], height, width, frames.shape[3]), np.uint8)
    columns, rows = _taps(frames.shape[2], width, kind), _taps(frames.shape[1], height, kind)
    for index, frame in enumerate(frames):
        if columns is not None:
            frame = _resample(frame.swapaxes(0, 1), *columns).swapaxes(0, 1)
        out[index] = frame if rows is None else _resample(frame, *rows)
    return out


def _taps(size: int, new_size: int, kind: Filter) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """For each new pixel the source pixels (new_size, k) it takes, and their weights; None where nothing changes."""
    if size == new_size:
        return None
    weigh, support = kind
    scale = size / new_size
    stretch = max(scale, 1.0)
    centres = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centres - support * stretch + 0.5).astype(np.int64), 0)
    beyond = np.minimum((centres + support * stretch + 0.5).astype(np.int64), size)
    sources = first[:, None] + np.arange(int((beyond - first).max()))
    weights = weigh((sources - centres[:, None] + 0.5) / stretch)
    weights[sources >= beyond[:, None]] = 0.0
    weights /= weights.sum(axis=1, keepdims=True)
    return np.minimum(sources, size - 1), weights.astype(np.float32)


def _resample(
    picture: NDArray[np.uint8], sources: NDArray[np.int64], weights: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Weighted sums of the first axis' rows, rounded to 8 bits."""
    total = np.zeros((len(sources), *picture.shape[1:]), np.float32)
    for tap in range(sources.shape[1]):
        total += weights[:, tap, None, None] * picture[sources[:, tap]]
    return np.clip(np.floor(total + 0.5), 0.0, 255.0).astype(np.uint8)

"""Pictures of any common kind as pixels, and the plain PPM files that frames are kept in."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkit.errors import InvalidRequest
from vkit.media.pictures import decode_image
from vkit.media.resize import LANCZOS, resize
from vkit.video.errors import MediaError

Pixels = npt.NDArray[np.uint8]
"""(H, W, 3), or with a leading axis of frames."""

FRAME_NAME = "frame_{:06d}.ppm"
MAX_SIDE = 1 << 15
_HEADER = re.compile(rb"P6(?:\s|#[^\n]*\n)+?(\d+)(?:\s|#[^\n]*\n)+?(\d+)(?:\s|#[^\n]*\n)+?(\d+)\s")


def read_picture(path: Path) -> Pixels:
    """The picture (H, W, 3), upright: PPM, and with the extra `video` PNG, JPEG, WebP and more.

    Raises:
        MediaError: the file is missing, damaged, or no picture.
        MissingExtra: Pillow is needed and not installed.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise MediaError(f"{path}: cannot be read: {error.strerror or error}") from None
    if data[:2] == b"P6":
        return parse_ppm(data, str(path))
    if re.match(rb"P[1-57]\s", data):
        raise MediaError(f"{path}: a {data[:2].decode()} file, expected P6 (binary RGB)")
    try:
        return decode_image(data).pixels
    except InvalidRequest as error:
        raise MediaError(f"{path}: {error.message}") from None


def parse_ppm(data: bytes, name: str) -> Pixels:
    """The pixels of a P6 file.

    Raises:
        MediaError: wrong magic, header or length.
    """
    if data[:2] != b"P6":
        raise MediaError(f"{name}: not a P6 file")
    header = _HEADER.match(data[:4096])
    if header is None:
        raise MediaError(f"{name}: the PPM header is damaged")
    width, height, top = (int(group) for group in header.groups())
    if not (0 < width <= MAX_SIDE and 0 < height <= MAX_SIDE):
        raise MediaError(f"{name}: {width}x{height} pixels, expected sides of 1 to {MAX_SIDE}")
    if not 0 < top <= 255:
        raise MediaError(f"{name}: maxval {top}, expected 1 to 255")
    payload = data[header.end() :]
    if len(payload) < 3 * width * height:
        raise MediaError(f"{name}: {len(payload)} bytes of pixels, expected {3 * width * height}: cut short")
    pixels = np.frombuffer(payload, np.uint8, 3 * width * height).reshape(height, width, 3)
    if top == 255:
        return pixels
    scaled: Pixels = np.clip(np.rint(pixels.astype(np.float32) * (255 / top)), 0, 255).astype(np.uint8)
    return scaled


def write_ppm(path: Path, pixels: Pixels) -> None:
    """Write pixels (H, W, 3) as P6; a file of that name is complete or not there."""
    height, width, _ = pixels.shape
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(b"P6\n%d %d\n255\n" % (width, height))
        file.write(np.ascontiguousarray(pixels).tobytes())
    os.replace(partial, path)


def scale_and_crop(frames: Pixels, width: int, height: int, left: int, top: int, size: tuple[int, int]) -> Pixels:
    """frames (N, H, W, 3) resampled to `width` x `height`, of which `size` (width, height) from (left, top) is kept."""
    scaled = resize(frames, height, width, LANCZOS)
    return scaled[:, top : top + size[1], left : left + size[0]]


def frame_path(folder: Path, index: int) -> Path:
    """Where frame `index` lies in a working directory."""
    return folder / FRAME_NAME.format(index)

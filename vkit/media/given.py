"""Media as Python callers have them: decoded items, pictures of Pillow, arrays, paths and bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np

from vkit.errors import InvalidRequest
from vkit.media.decoding import decode_media
from vkit.media.items import AudioMedia, ImageMedia, Media, MediaKind, VideoMedia
from vkit.media.sources import MediaAccess
from vkit.media.unusable import UnusableMedia

_TYPES: dict[MediaKind, type[Media]] = {"image": ImageMedia, "video": VideoMedia, "audio": AudioMedia}
_FORMS: dict[MediaKind, str] = {
    "image": "ImageMedia, a Pillow image, a uint8 array (H, W, 3), a path, a URL or the bytes of a file",
    "video": "VideoMedia, a uint8 array (N, H, W, 3), a path, a URL or the bytes of a file",
    "audio": "AudioMedia, (samples, sample_rate), a path, a URL or the bytes of a file",
}


def as_media(kind: MediaKind, item: Any) -> Media:
    """The decoded item.

    Raises:
        InvalidRequest: another form, or a file that cannot be read or decoded.
    """
    if isinstance(item, _TYPES[kind]):
        return item
    if isinstance(item, bytes):
        return decode_media(kind, item)
    if isinstance(item, str | Path):
        return decode_media(kind, read_source(kind, item))
    if kind == "image" and callable(getattr(item, "convert", None)):  # a picture of Pillow, without importing it
        from vkit.media.pictures import rgb_pixels

        return ImageMedia(rgb_pixels(item))
    if kind == "audio" and isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], np.ndarray):
        return AudioMedia(np.asarray(item[0], np.float32), item[1])
    if isinstance(item, np.ndarray) and kind != "audio":
        return ImageMedia(item) if kind == "image" else VideoMedia(item)
    raise InvalidRequest(f"{kind}: expected {_FORMS[kind]}; got {type(item).__name__}", param=kind)


def read_source(kind: MediaKind, source: str | Path, access: MediaAccess = MediaAccess()) -> bytes:
    """The bytes of a file on this machine, or of what an http(s) or data URL names.

    Raises:
        InvalidRequest: there is nothing to read.
    """
    text = str(source)
    if text[:5].lower() == "data:" or text[:7].lower() == "http://" or text[:8].lower() == "https://":
        return _run(access.read(text, kind))
    path = Path(text[7:] if text.startswith("file://") else text)
    try:
        if path.is_file() and path.stat().st_size > access.max_bytes:
            raise UnusableMedia(kind, f"{path}: larger than {access.max_bytes} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise UnusableMedia(kind, f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _run(work: Coroutine[Any, Any, bytes]) -> bytes:
    """The result of a coroutine, whether or not this thread runs an event loop."""
    outcome: list[bytes | BaseException] = []

    def run() -> None:
        try:
            outcome.append(asyncio.run(work))
        except BaseException as error:  # raised again by the caller's thread
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = outcome
    if isinstance(result, BaseException):
        raise result
    return result

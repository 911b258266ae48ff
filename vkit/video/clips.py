"""Clips as frames at 24 a second: a directory of numbered PPM files, or any video file through PyAV."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vkit.errors import MissingExtra
from vkit.media.clips import CONTAINERS
from vkit.video.errors import MediaError
from vkit.video.frames import Pixels, frame_path, parse_ppm, read_picture

TARGET_FPS = 24
MAX_FPS = 1000
MAX_FRAME_PIXELS = 1 << 25
"""8K."""


@dataclass(frozen=True, slots=True)
class ClipInfo:
    """What a clip is, without decoding it."""

    width: int
    height: int
    num_frames: int
    """At 24 frames a second."""
    has_sound: bool


def clip_info(path: Path) -> ClipInfo:
    """Size and length of the clip at `path`.

    Raises:
        MediaError: there is no clip, or it cannot be read.
        MissingExtra: PyAV is needed and not installed.
    """
    if path.is_dir():
        first = _first_frame(path)
        count = 0
        while frame_path(path, count).is_file():
            count += 1
        return ClipInfo(first.shape[1], first.shape[0], count, has_sound=False)
    with _opened(path) as container:
        stream = container.streams.video[0]
        count, fps = 0, _rate(stream, path)
        for packet in container.demux(stream):
            count += packet.size > 0
        shown = next(iter(_upright(container, stream, path, rewind=True)), None)
        if shown is None:
            raise MediaError(f"{path}: it has no picture")
        height, width = shown.shape[:2]
        return ClipInfo(width, height, first_slot(count, fps), bool(container.streams.audio))


def read_clip(path: Path, max_frames: int, convert: Callable[[Pixels], Pixels]) -> Pixels:
    """The first `max_frames` frames at 24 a second (N, H, W, 3), each passed through `convert` (N = 1 at a time).

    Source frames are held or dropped whole.

    Raises:
        MediaError: there is no clip, it cannot be read, or its frames differ in size.
        MissingExtra: PyAV is needed and not installed.
    """
    kept: list[Pixels] = []
    for frame, count in _held(path):
        if count and len(kept) < max_frames:
            shown = convert(frame[None])
            kept.extend([shown] * min(count, max_frames - len(kept)))
        if len(kept) >= max_frames:
            break
    if not kept:
        raise MediaError(f"{path}: it has no picture")
    return np.concatenate(kept)


def first_slot(index: int, fps: float) -> int:
    """The slot of 1/24 s from which on source frame `index` is shown: frames are held or dropped, never mixed."""
    return math.floor(index * TARGET_FPS / fps + 0.5)


def _held(path: Path) -> Iterator[tuple[Pixels, int]]:
    """Source frames, and in how many slots of 1/24 s each is shown."""
    if path.is_dir():
        yield from ((frame, 1) for frame in _folder_frames(path))
        return
    with _opened(path) as container:
        stream = container.streams.video[0]
        fps = _rate(stream, path)
        before: Pixels | None = None
        start = index = 0
        for frame in _upright(container, stream, path):
            slot = first_slot(index, fps)
            if before is not None:
                if frame.shape != before.shape:
                    raise MediaError(f"{path}: its frames change their size")
                yield before, slot - start
            before, start = frame, slot
            index += 1
        if before is not None:
            yield before, first_slot(index, fps) - start


def _first_frame(path: Path) -> Pixels:
    first = frame_path(path, 0)
    if not first.is_file():
        raise MediaError(f"{path}: no {first.name} here", remedy="a clip is a folder of frame_000000.ppm and so on")
    return read_picture(first)


def _folder_frames(path: Path) -> Iterator[Pixels]:
    first = _first_frame(path)
    index = 0
    while frame_path(path, index).is_file():
        file = frame_path(path, index)
        try:
            frame = parse_ppm(file.read_bytes(), str(file))
        except OSError as error:
            raise MediaError(f"{file}: cannot be read: {error.strerror or error}") from None
        if frame.shape != first.shape:
            raise MediaError(
                f"{file}: {frame.shape[1]}x{frame.shape[0]} pixels, the first frame has "
                f"{first.shape[1]}x{first.shape[0]}"
            )
        yield frame
        index += 1


def _opened(path: Path) -> Any:
    try:
        import av
    except ImportError:
        raise MissingExtra("reading video files", "video") from None
    if not path.is_file():
        raise MediaError(f"{path}: no such file or directory")
    try:
        container = av.open(str(path), options={"format_whitelist": CONTAINERS})
    except (av.FFmpegError, ValueError, OSError):
        raise MediaError(f"{path}: no known video format") from None
    if not container.streams.video:
        container.close()
        raise MediaError(f"{path}: it has no picture")
    context = container.streams.video[0].codec_context
    if context is None:
        container.close()
        raise MediaError(f"{path}: its pictures are in a format that nothing here decodes")
    if context.width * context.height > MAX_FRAME_PIXELS:
        container.close()
        raise MediaError(f"{path}: {context.width}x{context.height} pixels, at most {MAX_FRAME_PIXELS} are taken")
    return container


def _rate(stream: Any, path: Path) -> float:
    rate = stream.average_rate or stream.guessed_rate
    fps = float(rate) if rate else 0.0
    if not 0 < fps <= MAX_FPS:
        raise MediaError(f"{path}: its frame rate is {fps:g}")
    return fps


def _upright(container: Any, stream: Any, path: Path, *, rewind: bool = False) -> Iterator[Pixels]:
    """All frames as RGB, turned as the container says."""
    import av

    stream.thread_type = "AUTO"
    try:
        if rewind:
            container.seek(0)
        for frame in container.decode(stream):
            pixels: Pixels = frame.to_ndarray(format="rgb24")
            turns = round(getattr(frame, "rotation", 0) / 90) % 4
            yield np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels
    except (av.FFmpegError, ValueError) as error:
        raise MediaError(f"{path}: it is damaged ({error})") from None

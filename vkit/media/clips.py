"""Any video file as a `VideoMedia` of the frames a model sees. PyAV decodes; memory holds the chosen frames alone."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vkit.errors import MissingExtra
from vkit.media.items import VideoMedia
from vkit.media.sampling import chosen_frames
from vkit.media.unusable import UnusableMedia

CONTAINERS = "avi,flv,gif,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mpeg,mpegts,ogg,asf"
"""Containers handed to PyAV. Playlists and the like are left out: they name further files and addresses."""


@dataclass(frozen=True, slots=True)
class VideoLimits:
    """What a clip may cost."""

    max_bytes: int = 1 << 30
    """Size of the file."""
    max_seconds: float = 3600.0
    max_source_frames: int = 1 << 18
    max_frame_pixels: int = 1 << 25
    """Width times height of one frame: 8K is 2 ** 25."""
    max_kept_pixels: int = 1 << 27
    """All frames kept, together; larger frames are made smaller as they are decoded, with their proportions.

    Far above what any tower looks at, so nothing a model could see is lost.
    """


DEFAULT_LIMITS = VideoLimits()


def decode_video(
    data: bytes, limits: VideoLimits = DEFAULT_LIMITS, *, wanted_fps: float = 2.0, num_frames: int | None = None
) -> VideoMedia:
    """The clip's frames at about `wanted_fps` a second, first and last among them, and which frames they are.

    `num_frames`: so many frames instead, as far as there are.

    Raises:
        UnusableMedia: no video, a damaged one, one without a frame, or one above a limit.
        MissingExtra: PyAV is not installed.
    """
    try:
        import av
    except ImportError:
        raise MissingExtra("video input", "video") from None
    if not data:
        raise UnusableMedia("video", "it is empty")
    if len(data) > limits.max_bytes:
        raise UnusableMedia("video", f"it has {len(data)} bytes, at most {limits.max_bytes} are taken")
    try:
        return _decode(av, data, limits, wanted_fps, num_frames)
    except av.FFmpegError as error:
        raise UnusableMedia("video", f"it is damaged ({error.strerror or error})") from None
    except (ValueError, OSError) as error:
        raise UnusableMedia("video", f"it cannot be read ({error})") from None


def _decode(av: Any, data: bytes, limits: VideoLimits, wanted_fps: float, num_frames: int | None) -> VideoMedia:
    num_source, fps = _measure(av, data, limits)
    chosen = chosen_frames(num_source, fps, wanted_fps=wanted_fps, num_frames=num_frames)
    frames: list[NDArray[np.uint8]] = []
    wanted = iter(chosen)
    next_index = next(wanted)
    size: tuple[int, int] | None = None
    for index, frame in enumerate(_frames(av, data)):
        if index != next_index:
            continue
        if size is None:
            size = _kept_size(frame.width, frame.height, len(chosen), limits)
        frames.append(frame.to_ndarray(width=size[0], height=size[1], format="rgb24"))
        following = next(wanted, None)
        if following is None:
            break
        next_index = following
    if not frames:
        raise UnusableMedia("video", "it has no picture")
    return VideoMedia(np.stack(frames), fps, tuple(chosen[: len(frames)]), num_source)


def _measure(av: Any, data: bytes, limits: VideoLimits) -> tuple[int, float]:
    """Number of frames, counted rather than believed, and frames per second."""
    with _opened(av, data) as container:
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_frame_pixels:
            raise UnusableMedia("video", f"{width} x {height} pixels, at most {limits.max_frame_pixels} are taken")
        rate = stream.average_rate or stream.guessed_rate
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > limits.max_source_frames:
                raise UnusableMedia("video", f"more than {limits.max_source_frames} frames")
    fps = float(rate) if rate else 0.0
    if not count:
        raise UnusableMedia("video", "it has no picture")
    if not (math.isfinite(fps) and 0 < fps <= 1000):
        raise UnusableMedia("video", f"its frame rate is {fps:g}")
    if count / fps > limits.max_seconds:
        raise UnusableMedia("video", f"it is longer than {limits.max_seconds:g} s")
    return count, fps


def _frames(av: Any, data: bytes) -> Iterator[Any]:
    with _opened(av, data) as container:
        stream = container.streams.video[0]
        stream.thread_type = "AUTO"
        yield from container.decode(stream)


def _opened(av: Any, data: bytes) -> Any:
    try:
        container = av.open(io.BytesIO(data), options={"format_whitelist": CONTAINERS})
    except (av.FFmpegError, ValueError, OSError):
        raise UnusableMedia("video", "no known video format") from None
    if not container.streams.video:
        container.close()
        raise UnusableMedia("video", "it has no picture")
    if container.streams.video[0].codec_context is None:
        container.close()
        raise UnusableMedia("video", "its pictures are in a format that nothing here decodes")
    return container


def _kept_size(width: int, height: int, num_frames: int, limits: VideoLimits) -> tuple[int, int]:
    shrink = math.sqrt(limits.max_kept_pixels / (width * height * num_frames))
    if shrink >= 1:
        return width, height
    return max(1, round(width * shrink)), max(1, round(height * shrink))

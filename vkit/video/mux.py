"""Frames and sound as one MP4 file: in this process with PyAV, or by an ffmpeg program that the caller names.

H.264 (CRF 18, yuv420p, BT.709) at 24 frames a second and AAC stereo at 192 kbit/s. All frames are kept; sound that is
longer is cut where they end. The pipeline calls what it is given: it never starts a program by itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from vkit.errors import MissingExtra, UsageError
from vkit.video.errors import MuxError
from vkit.video.frames import frame_path, read_picture

FPS = 24
CRF, SOUND_BITS = "18", 192_000
FRAME_PATTERN = "frame_%06d.ppm"
BT709 = 1
"""Number of the colour matrix, primaries and transfer in the stream."""
SOUND_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class MuxJob:
    """`num_frames` files `frame_%06d.ppm` in `frames`, and `audio` (a WAV file), to become `output`."""

    frames: Path
    num_frames: int
    audio: Path | None
    output: Path


Muxer = Callable[[MuxJob], None]
"""Writes `output`, complete or not at all. Raises MuxError."""


def in_process_muxer() -> Muxer:
    """A muxer over PyAV.

    Raises:
        MissingExtra: PyAV is not installed.
    """
    try:
        import av  # noqa: F401
    except ImportError:
        raise MissingExtra("writing MP4 files in this process", "video") from None
    return _mux_in_process


def program_muxer(program: str | Path) -> Muxer:
    """A muxer that runs `program` (ffmpeg, or one that takes its arguments), without a shell.

    Raises:
        UsageError: there is no such program.
    """
    found = shutil.which(str(program))
    if found is None:
        raise UsageError(f"--ffmpeg {program}: no such program, or it may not be run")
    return lambda job: _mux_by_program(os.path.abspath(found), job)


def _mux_by_program(program: str, job: MuxJob) -> None:
    partial = _partial(job.output)
    command = [program, "-y", "-loglevel", "error", "-nostdin", "-framerate", f"{FPS}/1", "-start_number", "0"]
    # The pattern is relative: a percent sign in the folder's own name would be taken for one of the pattern's.
    # Each input is cut by itself: a limit on the output ends both streams at once, whatever is still to be encoded.
    command += ["-t", f"{(job.num_frames - 0.25) / FPS:.6f}", "-i", FRAME_PATTERN]
    if job.audio is not None:
        command += ["-t", f"{job.num_frames / FPS:.6f}", "-i", str(job.audio.absolute())]
        command += ["-c:a", "aac", "-b:a", str(SOUND_BITS)]
    command += ["-c:v", "libx264", "-crf", CRF, "-pix_fmt", "yuv420p", "-vf", "scale=out_color_matrix=bt709"]
    command += ["-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709"]
    command += ["-movflags", "+faststart", "-f", "mp4", str(partial.absolute())]
    try:
        done = subprocess.run(command, cwd=job.frames, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise MuxError(f"{program}: cannot be run: {error.strerror or error}") from None
    if done.returncode != 0 or not partial.is_file() or partial.stat().st_size == 0:
        partial.unlink(missing_ok=True)
        words = done.stderr.decode("utf-8", "replace").strip().splitlines()
        last = words[-1][:300] if words else "it wrote no file and said nothing"
        raise MuxError(f"{program} ended with code {done.returncode}: {last}")
    os.replace(partial, job.output)


def _mux_in_process(job: MuxJob) -> None:
    import av

    partial = _partial(job.output)
    try:
        with av.open(str(partial), "w", format="mp4", options={"movflags": "+faststart"}) as container:
            _write(container, job)
    except (av.FFmpegError, OSError, ValueError) as error:
        partial.unlink(missing_ok=True)
        raise MuxError(f"{job.output}: cannot be written: {error}") from None
    os.replace(partial, job.output)


def _write(container: Any, job: MuxJob) -> None:
    import av

    first = read_picture(frame_path(job.frames, 0))
    video = container.add_stream("libx264", rate=FPS, options={"crf": CRF})
    video.width, video.height, video.pix_fmt = first.shape[1], first.shape[0], "yuv420p"
    video.time_base = Fraction(1, FPS)
    context = video.codec_context
    context.colorspace = context.color_primaries = context.color_trc = BT709
    sound = None
    if job.audio is not None:
        source = av.open(str(job.audio))
        rate = source.streams.audio[0].sample_rate
        sound = container.add_stream("aac", rate=rate, options={"b": str(SOUND_BITS)}, layout="stereo")
        samples = _cut_sound(source, job.num_frames, rate)
        source.close()
    # Sound runs a little ahead of the pictures, so that a player finds both close together.
    position = 0
    for index in range(job.num_frames):
        if sound is not None:
            position = _encode_sound(container, sound, samples, position, (index + 1) / FPS)
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(read_picture(frame_path(job.frames, index))), "rgb24")
        frame = frame.reformat(format="yuv420p", dst_colorspace="ITU709")
        frame.pts, frame.time_base = index, Fraction(1, FPS)
        container.mux(video.encode(frame))
    if sound is not None:
        _encode_sound(container, sound, samples, position, float("inf"))
        container.mux(sound.encode(None))
    container.mux(video.encode(None))


def _cut_sound(source: Any, num_frames: int, rate: int) -> Any:
    """All samples as int16 (1, 2 n), no longer than the frames."""
    packed = [frame.to_ndarray() for frame in source.decode(audio=0)]
    samples = np.concatenate(packed, axis=1)
    return samples[:, : 2 * round(num_frames / FPS * rate)]


def _encode_sound(container: Any, stream: Any, samples: Any, position: int, until_s: float) -> int:
    """Encode from sample `position` up to the time `until_s`; returns the position reached."""
    import av

    total = samples.shape[1] // 2
    while position < total and position / stream.rate < until_s:
        count = min(SOUND_CHUNK, total - position)
        piece = np.ascontiguousarray(samples[:, 2 * position : 2 * (position + count)])
        frame = av.AudioFrame.from_ndarray(piece, format="s16", layout="stereo")
        frame.sample_rate, frame.pts, frame.time_base = stream.rate, position, Fraction(1, stream.rate)
        container.mux(stream.encode(frame))
        position += count
    return position


def _partial(output: Path) -> Path:
    return output.with_name(f".{output.name}.partial")

"""Stereo sound at 32 kHz: WAV files written and read without help, everything else through soundfile and PyAV."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vkit.errors import InvalidRequest, MissingExtra
from vkit.media.audio import decode_channels
from vkit.video.errors import MediaError

Wave = npt.NDArray[np.float32]
"""(2, samples)."""

SAMPLE_RATE = 32_000
PCM, PCM_SCALE = 1, 32767


def pcm16(wave: Wave) -> npt.NDArray[np.int16]:
    """Samples as 16-bit integers, halves rounded away from zero."""
    scaled = np.clip(wave.astype(np.float64), -1.0, 1.0) * PCM_SCALE
    rounded: npt.NDArray[np.int16] = np.trunc(scaled + np.copysign(0.5, scaled)).astype(np.int16)
    return rounded


def write_wav(path: Path, wave: Wave, sample_rate: int = SAMPLE_RATE) -> None:
    """Write (2, samples) as 16-bit stereo PCM; a file of that name is complete or not there."""
    data = np.ascontiguousarray(pcm16(wave).T).astype("<i2").tobytes()
    channels, width = wave.shape[0], 2
    form = struct.pack("<HHIIHH", PCM, channels, sample_rate, sample_rate * channels * width, channels * width, 16)
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(b"RIFF" + struct.pack("<I", 36 + len(data)) + b"WAVE")
        file.write(b"fmt " + struct.pack("<I", len(form)) + form)
        file.write(b"data" + struct.pack("<I", len(data)) + data)
    os.replace(partial, path)


def read_sound(path: Path, max_seconds: float) -> Wave:
    """The first `max_seconds` of a recording as (2, samples) at 32 kHz; mono on both sides, further channels dropped.

    Raises:
        MediaError: the file is missing, damaged or empty.
        MissingExtra: it is no 16-bit WAV file of 32 kHz, and the libraries that read others are not installed.
    """
    rate, samples = _decoded(path, max_seconds)
    samples = samples[: round(max_seconds * rate)]
    if not len(samples):
        raise MediaError(f"{path}: it holds no sound")
    stereo = np.repeat(samples, 2, axis=1) if samples.shape[1] == 1 else samples[:, :2]
    if rate != SAMPLE_RATE:
        stereo = _resampled(stereo, rate)
    return np.ascontiguousarray(stereo.T, dtype=np.float32)


def _decoded(path: Path, max_seconds: float | None) -> tuple[int, Wave]:
    """(sample rate, samples (N, C))."""
    try:
        with path.open("rb") as file:
            head = file.read(12)
            plain = _plain_wav(head + file.read(), str(path)) if head[:4] == b"RIFF" and head[8:] == b"WAVE" else None
    except OSError as error:
        raise MediaError(f"{path}: cannot be read: {error.strerror or error}") from None
    if plain is not None:
        return plain
    try:
        return decode_channels(path, max_seconds=max_seconds)
    except InvalidRequest as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"{path}: {error.message}") from None


def _plain_wav(data: bytes, name: str) -> tuple[int, Wave] | None:
    """Rate and samples (N, C) of 16-bit PCM; None for another coding.

    Raises:
        MediaError: the file ends too soon, or has no samples.
    """
    position, form = 12, None
    while position + 8 <= len(data):
        kind, length = data[position : position + 4], struct.unpack_from("<I", data, position + 4)[0]
        body = data[position + 8 : position + 8 + length]
        if kind == b"fmt " and len(body) >= 16:
            form = struct.unpack_from("<HHIIHH", body)
            if form[0] != PCM or form[5] != 16:
                return None
        if kind == b"data":
            if form is None:
                raise MediaError(f"{name}: samples before their format: damaged")
            return form[2], _samples(body, form[1], form[2], name)
        position += 8 + length + length % 2
    raise MediaError(f"{name}: a WAV file without samples: damaged or cut short")


def _samples(body: bytes, channels: int, rate: int, name: str) -> Wave:
    if not 1 <= channels <= 64 or not 1000 <= rate <= 768_000:
        raise MediaError(f"{name}: {channels} channels at {rate} Hz: the header is damaged")
    count = len(body) // (2 * channels)
    if count == 0:
        raise MediaError(f"{name}: it holds no sound")
    pcm = np.frombuffer(body, "<i2", count * channels).reshape(count, channels)
    return pcm.astype(np.float32) / np.float32(32768)


def _resampled(samples: Wave, rate: int) -> Wave:
    try:
        import soxr
    except ImportError:
        raise MissingExtra(f"resampling sound of {rate} Hz", "video") from None
    out: Wave = soxr.resample(samples, rate, SAMPLE_RATE)
    return out

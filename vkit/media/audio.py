"""Any audio file, or the sound of any video file, as mono float32 samples at the rate a model wants.

soundfile reads WAV, FLAC, Ogg and AIFF, in which it knows more sample formats; PyAV reads the rest. Limits are checked
on the header first and again while decoding, since headers lie; no more than one chunk of the original is held decoded.
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vkit.errors import InvalidRequest, MissingExtra

if TYPE_CHECKING:
    import av
    import soundfile

Samples = NDArray[np.float32]
AudioSource = Path | bytes
"""A file, or the bytes of one."""

CHUNK_FRAMES = 65536
MIN_RATE, MAX_RATE = 1000, 768_000

_SOUNDFILE_MAGIC = (b"RIFF", b"RIFX", b"RF64", b"FORM", b"fLaC", b"OggS")

CONTAINERS = (
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,eac3,flac,flv,matroska,webm,mov,mp4,m4a,3gp,3g2,mj2,mp3,mpeg,mpegts,ogg,tta,"
    "w64,wav,wv"
)
"""Container formats handed to PyAV. Playlists and the like are left out: they name further files and addresses."""


@dataclass(frozen=True, slots=True)
class AudioLimits:
    """What a recording may cost."""

    max_bytes: int = 1 << 30
    """Size of the file."""
    max_seconds: float = 6 * 3600.0
    """Length of the sound."""
    max_channels: int = 16


DEFAULT_LIMITS = AudioLimits()


def decode_audio(source: AudioSource, *, sample_rate: int, limits: AudioLimits = DEFAULT_LIMITS) -> Samples:
    """The whole recording as mono samples (N,) at `sample_rate` in hertz.

    Raises:
        InvalidRequest: not a recording, damaged, empty, or above a limit; says which.
        MissingExtra: the libraries that decode are not installed.
    """
    return np.concatenate(list(stream_audio(source, sample_rate=sample_rate, limits=limits)))


def stream_audio(source: AudioSource, *, sample_rate: int, limits: AudioLimits = DEFAULT_LIMITS) -> Iterator[Samples]:
    """The recording in pieces of mono samples at `sample_rate`, at least one sample in all; memory does not grow.

    Raises:
        InvalidRequest: as `decode_audio`, when it is met: a file damaged in the middle yields what comes before.
        MissingExtra: the libraries that decode are not installed.
    """
    _check_size(source, limits)
    resampler, from_rate, num_out, num_in = None, 0, 0, 0
    with closing(_decoded(source, limits)) as pieces:
        for rate, piece in pieces:
            if resampler is None:
                resampler, from_rate = _resampler(rate, sample_rate), rate
            if rate != from_rate:
                raise _unusable(f"its sample rate changes from {from_rate} to {rate} Hz")
            num_in += len(piece)
            _check_seconds(num_in / rate, limits)
            mono = _mono(piece)
            out: Samples = mono if from_rate == sample_rate else resampler.resample_chunk(mono)
            if len(out):
                num_out += len(out)
                yield out
    if resampler is not None and from_rate != sample_rate:
        rest: Samples = resampler.resample_chunk(np.zeros(0, np.float32), last=True)
        if len(rest):
            num_out += len(rest)
            yield rest
    if num_out == 0:
        raise _unusable("it holds no sound")


def _check_size(source: AudioSource, limits: AudioLimits) -> None:
    if isinstance(source, bytes):
        size = len(source)
    else:
        try:
            if not source.is_file():
                raise InvalidRequest(f"{source}: no such file" if not source.exists() else f"{source}: not a file")
            size = source.stat().st_size
        except OSError as error:
            raise InvalidRequest(f"{source}: {error.strerror or error}") from None
    if size == 0:
        raise _unusable("it is empty")
    if size > limits.max_bytes:
        raise _unusable(f"it has {size} bytes, at most {limits.max_bytes} are taken")


def _check_seconds(seconds: float, limits: AudioLimits) -> None:
    if seconds > limits.max_seconds:
        raise _unusable(f"it is longer than {limits.max_seconds:g} s")


def _check_form(rate: int, num_channels: int, limits: AudioLimits) -> None:
    if not MIN_RATE <= rate <= MAX_RATE:
        raise _unusable(f"its sample rate is {rate} Hz, expected {MIN_RATE} to {MAX_RATE}")
    if not 1 <= num_channels <= limits.max_channels:
        raise _unusable(f"it has {num_channels} channels, expected 1 to {limits.max_channels}")


def _mono(piece: Samples) -> Samples:
    """Frames (N, C) -> (N,): the mean of the channels."""
    if not np.isfinite(piece).all():
        raise _unusable("it holds samples that are not finite numbers")
    mono: Samples = piece[:, 0] if piece.shape[1] == 1 else piece.mean(axis=1, dtype=np.float32)
    return np.ascontiguousarray(mono)


def _resampler(from_rate: int, to_rate: int) -> Any:
    soxr = _import("soxr")
    return soxr.ResampleStream(from_rate, to_rate, 1, dtype="float32")


def _decoded(source: AudioSource, limits: AudioLimits) -> Generator[tuple[int, Samples], None, None]:
    """(sample rate, frames (N, C)) of the original, piece by piece."""
    soundfile = _import("soundfile")
    handle: Any = _Memory(source) if isinstance(source, bytes) else source.open("rb")
    with closing(handle):
        # Told by their first bytes, so that no other parser of libsndfile ever sees what a client sent.
        is_for_soundfile = handle.read(4) in _SOUNDFILE_MAGIC
        handle.seek(0)
        if is_for_soundfile:
            try:
                file = soundfile.SoundFile(handle)
            except soundfile.LibsndfileError:
                handle.seek(0)
            else:
                with file:
                    yield from _with_soundfile(file, limits, soundfile.LibsndfileError)
                return
        yield from _with_av(handle, limits)


class _Memory(io.BytesIO):
    """Bytes as a file that stays where it is when a damaged header sends it before its start.

    Decoders call `seek` from C, where an exception would be printed and lost.
    """

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        try:
            return super().seek(offset, whence)
        except ValueError:
            return self.tell()


def _with_soundfile(
    file: soundfile.SoundFile, limits: AudioLimits, failure: type[Exception]
) -> Generator[tuple[int, Samples], None, None]:
    _check_form(file.samplerate, file.channels, limits)
    if file.frames < 1 << 62:  # unknown lengths are reported as huge ones
        _check_seconds(file.frames / file.samplerate, limits)
    while True:
        try:
            piece = file.read(CHUNK_FRAMES, dtype="float32", always_2d=True)
        except failure as error:
            raise _unusable(f"it is damaged: {error}") from None
        if not len(piece):
            return
        yield file.samplerate, piece


def _with_av(handle: Any, limits: AudioLimits) -> Generator[tuple[int, Samples], None, None]:
    av = _import("av")
    try:
        container = av.open(handle, options={"format_whitelist": CONTAINERS})
    except (av.FFmpegError, ValueError, OSError):
        raise _unusable("no known audio or video format") from None
    with container:
        if not container.streams.audio:
            raise _unusable("it has no sound")
        stream = container.streams.audio[0]
        codec = stream.codec_context
        if codec is None:
            raise _unusable("its sound is in a format that nothing here decodes")
        _check_form(codec.sample_rate or 0, codec.channels or 0, limits)
        if container.duration is not None:
            _check_seconds(container.duration / 1e6, limits)
        planes = av.AudioResampler(format="fltp")  # floats, one plane per channel; rate and layout stay
        try:
            for frame in container.decode(stream):
                _check_form(frame.sample_rate, len(frame.layout.channels), limits)
                yield from _planes(planes.resample(frame))
            yield from _planes(planes.resample(None))
        except av.FFmpegError as error:
            raise _unusable(f"it is damaged: {error.strerror or error}") from None
        except ValueError as error:  # the layout changed half way
            raise _unusable(f"it is damaged: {error}") from None


def _planes(frames: list[av.AudioFrame]) -> Generator[tuple[int, Samples], None, None]:
    for frame in frames:
        yield frame.sample_rate, frame.to_ndarray().T.astype(np.float32, copy=False)


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise MissingExtra("reading audio files", "video") from None


def _unusable(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the recording cannot be used: {reason}", param="file")


def decode_channels(
    source: AudioSource, *, max_seconds: float | None = None, limits: AudioLimits = DEFAULT_LIMITS
) -> tuple[int, Samples]:
    """(sample rate, samples (N, C)) of a recording as it is, cut at `max_seconds`.

    Raises:
        InvalidRequest: as `decode_audio`.
        MissingExtra: the libraries that decode are not installed.
    """
    _check_size(source, limits)
    pieces: list[Samples] = []
    from_rate, num_in, wanted = 0, 0, 1 << 62
    with closing(_decoded(source, limits)) as decoded:
        for rate, piece in decoded:
            if not pieces:
                from_rate = rate
                wanted = wanted if max_seconds is None else round(max_seconds * rate)
            elif rate != from_rate or piece.shape[1] != pieces[0].shape[1]:
                raise _unusable("its sample rate or number of channels changes")
            if not np.isfinite(piece).all():
                raise _unusable("it holds samples that are not finite numbers")
            pieces.append(piece[: wanted - num_in])
            num_in += len(pieces[-1])
            if num_in >= wanted:
                break
    if num_in == 0:
        raise _unusable("it holds no sound")
    return from_rate, np.concatenate(pieces)

"""Recordings of every kind become the samples they hold, or one clear refusal."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile

from vkit.errors import InvalidRequest
from vkit.media.audio import AudioLimits, decode_audio, stream_audio

RATE = 16000


def tone(seconds: float, rate: int, hertz: float = 440.0) -> np.ndarray[Any, Any]:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def wav(samples: np.ndarray[Any, Any], rate: int, subtype: str = "PCM_16", format: str = "WAV") -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, subtype=subtype, format=format)
    return out.getvalue()


@pytest.mark.parametrize("subtype", ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW"])
def test_sample_formats(subtype: str) -> None:
    expected = tone(0.3, RATE)
    found = decode_audio(wav(expected, RATE, subtype), sample_rate=RATE)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < (2e-2 if subtype in ("PCM_U8", "ULAW") else 1e-4)


@pytest.mark.parametrize(("format", "subtype"), [("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("AIFF", "PCM_16")])
def test_formats_of_soundfile(format: str, subtype: str) -> None:
    expected = tone(0.5, RATE)
    found = decode_audio(wav(expected, RATE, subtype, format), sample_rate=RATE)
    assert len(found) == len(expected)
    assert np.abs(found - expected)[500:-500].max() < 0.05


def test_stereo_is_averaged() -> None:
    left, right = tone(0.2, RATE, 300), tone(0.2, RATE, 800)
    found = decode_audio(wav(np.stack([left, right], 1), RATE, "FLOAT"), sample_rate=RATE)
    assert np.allclose(found, (left + right) / 2, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 11025, 12345, 22050, 44100, 48000, 96000])
def test_other_rates_are_resampled(rate: int) -> None:
    found = decode_audio(wav(tone(1.0, rate), rate, "FLOAT"), sample_rate=RATE)
    expected = tone(1.0, RATE)
    assert abs(len(found) - RATE) <= 1
    middle = slice(1000, 15000)
    assert np.abs(found[middle] - expected[middle]).max() < 2e-3


def av_file(path: Path, codec: str, rate: int, samples: np.ndarray[Any, Any]) -> Path:
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = "mono"
        for start in range(0, len(samples), 1024):
            frame = av.AudioFrame.from_ndarray(samples[None, start : start + 1024], format="fltp", layout="mono")
            frame.sample_rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(("name", "codec"), [("a.m4a", "aac"), ("a.mkv", "aac"), ("a.mp4", "aac")])
def test_containers_of_av(tmp_path: Path, name: str, codec: str) -> None:
    expected = tone(1.0, 48000)
    path = av_file(tmp_path / name, codec, 48000, expected)
    for source in (path, path.read_bytes()):
        found = decode_audio(source, sample_rate=RATE)
        assert abs(len(found) / RATE - 1.0) < 0.1
        assert 0.3 < np.sqrt((found[4000:12000] ** 2).mean()) < 0.4


def test_streaming_equals_the_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(wav(tone(10.0, 44100), 44100))
    pieces = list(stream_audio(path, sample_rate=RATE))
    assert len(pieces) > 3
    assert np.array_equal(np.concatenate(pieces), decode_audio(path.read_bytes(), sample_rate=RATE))


def test_memory_stays_bounded(tmp_path: Path) -> None:
    path = tmp_path / "hour.flac"
    soundfile.write(path, np.zeros(48000 * 1200, np.int16), 48000)
    tracemalloc.start()
    num_samples = sum(len(piece) for piece in stream_audio(path, sample_rate=RATE))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert abs(num_samples - 1200 * RATE) <= 1
    assert peak < 8 << 20


def test_a_cut_wav_gives_what_is_there() -> None:
    whole = wav(tone(1.0, RATE), RATE)
    found = decode_audio(whole[: len(whole) // 2], sample_rate=RATE)
    assert abs(len(found) - RATE // 2) < 50


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it is empty"),
        (b"hello, this is no sound", "no known audio or video format"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n", "no known audio or video format"),
        (b"ffconcat version 1.0\nfile /etc/hostname\n", "no known audio or video format"),
        (wav(np.zeros(0, np.float32), RATE), "no sound"),
        (wav(np.full(100, np.nan, np.float32), RATE, "FLOAT"), "not finite"),
        (wav(tone(0.1, 16000), 200), "sample rate is 200 Hz"),
    ],
    ids=["empty", "text", "playlist", "concat", "no frames", "nan", "slow"],
)
def test_refusals(content: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        decode_audio(content, sample_rate=RATE)


def test_a_damaged_flac_is_refused_or_cut_short() -> None:
    whole = bytearray(wav(np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32), RATE, "PCM_16", "FLAC"))
    whole[len(whole) // 2 : len(whole) // 2 + 2000] = b"\xff" * 2000
    try:
        found = decode_audio(bytes(whole), sample_rate=RATE)
    except InvalidRequest as error:
        assert "damaged" in str(error)  # noqa: PT017
    else:
        assert 0 < len(found) <= RATE


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3", "AIFF", "m4a"])
def test_damaged_recordings_are_decoded_or_refused(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(sum(map(ord, kind)))
    if kind == "m4a":
        whole = av_file(tmp_path / "a.m4a", "aac", 44100, tone(0.5, 44100)).read_bytes()
    else:
        subtypes = {"WAV": "PCM_24", "FLAC": "PCM_16", "OGG": "VORBIS", "MP3": "MPEG_LAYER_III", "AIFF": "PCM_16"}
        whole = wav(tone(0.5, RATE), RATE, subtypes[kind], kind)
    num_decoded = num_refused = 0
    for _ in range(60):
        damaged = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole)
        for _ in range(rng.integers(1, 12)):
            damaged[rng.integers(0, min(len(damaged), rng.choice([64, 512, 1 << 30])))] = rng.integers(0, 256)
        try:
            found = decode_audio(bytes(damaged), sample_rate=RATE, limits=AudioLimits(max_seconds=30))
        except InvalidRequest as error:
            assert "\n" not in str(error)  # noqa: PT017
            num_refused += 1
        else:
            assert 0 < len(found) <= 31 * RATE
            assert np.isfinite(found).all()
            num_decoded += 1
    assert num_refused
    assert num_decoded or kind == "OGG"  # whose one page here has a checksum over all


def test_limits() -> None:
    content = wav(np.zeros((RATE * 2, 3), np.float32), RATE)
    with pytest.raises(InvalidRequest, match="longer than 1 s"):
        decode_audio(content, sample_rate=RATE, limits=AudioLimits(max_seconds=1))
    with pytest.raises(InvalidRequest, match="bytes, at most 1000"):
        decode_audio(content, sample_rate=RATE, limits=AudioLimits(max_bytes=1000))
    with pytest.raises(InvalidRequest, match="3 channels"):
        decode_audio(content, sample_rate=RATE, limits=AudioLimits(max_channels=2))
    assert len(decode_audio(content, sample_rate=RATE)) == RATE * 2


def test_missing_and_odd_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        decode_audio(tmp_path / "none.wav", sample_rate=RATE)
    with pytest.raises(InvalidRequest, match="not a file"):
        decode_audio(tmp_path, sample_rate=RATE)


def test_a_video_without_sound_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "silent.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")))
        container.mux(stream.encode(None))
    with pytest.raises(InvalidRequest, match="no sound"):
        decode_audio(path, sample_rate=RATE)

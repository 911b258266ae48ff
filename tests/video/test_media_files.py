"""Pictures, clips and sounds in; frames, sound and MP4 out. Judged by Pillow, soundfile, PyAV and ffprobe."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkit.errors import UsageError
from vkit.video.clips import clip_info, read_clip
from vkit.video.errors import MediaError, MuxError
from vkit.video.frames import FRAME_NAME, Pixels, frame_path, parse_ppm, read_picture, scale_and_crop, write_ppm
from vkit.video.mux import Muxer, MuxJob, in_process_muxer, program_muxer
from vkit.video.sound import pcm16, read_sound, write_wav

RATE = 32_000


def _picture(height: int = 12, width: int = 16, seed: int = 0) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def _same(frames: Pixels) -> Pixels:
    return frames


# pictures


def test_ppm_round_trip_and_pillow_agree(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    pixels = _picture()
    write_ppm(tmp_path / "a.ppm", pixels)
    assert (tmp_path / "a.ppm").read_bytes().startswith(b"P6\n16 12\n255\n")
    assert np.array_equal(read_picture(tmp_path / "a.ppm"), pixels)
    assert np.array_equal(np.asarray(pil.open(tmp_path / "a.ppm")), pixels)
    assert [file.name for file in tmp_path.iterdir()] == ["a.ppm"]


def test_ppm_headers_may_have_comments(tmp_path: Path) -> None:
    body = _picture(1, 2).tobytes()
    assert parse_ppm(b"P6 # made by hand\n# twice\n2 1\n# and here\n255\n" + body, "x").tobytes() == body
    assert parse_ppm(b"P6 1 1 15 " + bytes([0, 7, 15]), "x").tolist() == [[[0, 119, 255]]]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"P5\n2 1\n255\n", "expected P6"),
        (b"P6\n2 x\n255\n", "header"),
        (b"P6\n2 1\n256\n" + bytes(6), "maxval 256"),
        (b"P6\n2 1\n0\n" + bytes(6), "maxval 0"),
        (b"P6\n0 1\n255\n", "0x1"),
        (b"P6\n2 1\n255\n" + bytes(5), "cut short"),
        (b"P6", "header"),
        (b"", "empty"),
        (b"not a picture at all", "picture"),
        (b"\x89PNG\r\n\x1a\nbroken", "picture"),
    ],
)
def test_damaged_pictures(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "a.ppm").write_bytes(data)
    with pytest.raises(MediaError, match=words) as caught:
        read_picture(tmp_path / "a.ppm")
    assert str(tmp_path / "a.ppm") in str(caught.value)


def test_a_cut_png_is_damaged(tmp_path: Path) -> None:
    pil = pytest.importorskip("PIL.Image")
    pil.fromarray(_picture(64, 64)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    with pytest.raises(MediaError, match="damaged"):
        read_picture(tmp_path / "a.png")
    with pytest.raises(MediaError, match="cannot be read"):
        read_picture(tmp_path / "none.png")
    with pytest.raises(MediaError, match="cannot be read"):
        read_picture(tmp_path)


@pytest.mark.parametrize("suffix", ["png", "webp", "jpg"])
def test_other_pictures(tmp_path: Path, suffix: str) -> None:
    pil = pytest.importorskip("PIL.Image")
    pixels = np.full((16, 24, 3), (200, 40, 90), np.uint8)
    pil.fromarray(pixels).save(tmp_path / f"a.{suffix}", **({"lossless": True} if suffix == "webp" else {}))
    got = read_picture(tmp_path / f"a.{suffix}")
    assert np.abs(got.astype(int) - pixels).max() <= (4 if suffix == "jpg" else 0)


def test_resampling_is_pillow_s_lanczos() -> None:
    pil = pytest.importorskip("PIL.Image")
    pixels = _picture(40, 56)
    got = scale_and_crop(pixels[None], 32, 48, 4, 8, (24, 32))[0]
    want = np.asarray(pil.fromarray(pixels).resize((32, 48), pil.Resampling.LANCZOS))[8:40, 4:28]
    assert got.shape == (32, 24, 3)
    assert np.abs(got.astype(int) - want).max() <= 1


# clips


def _folder(path: Path, count: int, height: int = 12, width: int = 16) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    for index in range(count):
        write_ppm(frame_path(path, index), np.full((height, width, 3), index * 5, np.uint8))
    return path


def _movie(path: Path, count: int, rate: Fraction, size: tuple[int, int] = (64, 48)) -> Path:
    av = pytest.importorskip("av")
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"crf": "0"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuv444p"
        for index in range(count):
            pixels = np.full((size[1], size[0], 3), index * 5, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode(None))
    return path


def test_a_folder_is_read_up_to_the_first_gap(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "clip", 5)
    frame_path(folder, 3).unlink()
    assert clip_info(folder).num_frames == 3
    frames = read_clip(folder, 10, _same)
    assert frames[:, 0, 0, 0].tolist() == [0, 5, 10]
    assert len(read_clip(folder, 2, _same)) == 2


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(MediaError, match="no frame_000000"):
        clip_info(_folder(tmp_path / "empty", 0))
    folder = _folder(tmp_path / "mixed", 2)
    write_ppm(frame_path(folder, 2), _picture(8, 8))
    with pytest.raises(MediaError, match="8x8 pixels, the first frame has 16x12"):
        read_clip(folder, 10, _same)
    with pytest.raises(MediaError, match="no such file"):
        clip_info(tmp_path / "none.mp4")
    (tmp_path / "text.mp4").write_text("#EXTM3U\nhttp://example.com/a.mp4\n")
    with pytest.raises(MediaError, match="no known video format"):
        clip_info(tmp_path / "text.mp4")


@pytest.mark.parametrize(
    ("rate", "count", "want"),
    [
        (Fraction(24), 10, list(range(10))),
        (Fraction(12), 4, [0, 0, 1, 1, 2, 2, 3, 3]),
        (Fraction(48), 8, [0, 2, 4, 6]),
        (Fraction(30), 10, [0, 1, 3, 4, 5, 6, 8, 9]),
    ],
)
def test_any_rate_becomes_24_by_holding_and_dropping(
    tmp_path: Path, rate: Fraction, count: int, want: list[int]
) -> None:
    path = _movie(tmp_path / "clip.mkv", count, rate)
    info = clip_info(path)
    assert (info.width, info.height, info.has_sound) == (64, 48, False)
    assert info.num_frames == len(want)
    levels = read_clip(path, 100, _same)[:, 0, 0, 0]
    assert [round(level / 5) for level in levels.tolist()] == want


def test_a_cut_clip_is_told(tmp_path: Path) -> None:
    path = _movie(tmp_path / "clip.mp4", 20, Fraction(24))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
    with pytest.raises(MediaError):
        read_clip(path, 100, _same)


def test_a_clip_nothing_decodes_is_told(tmp_path: Path) -> None:
    path = _movie(tmp_path / "clip.mp4", 3, Fraction(24))
    data = path.read_bytes()
    assert b"avc1" in data
    path.write_bytes(data.replace(b"avc1", b"xvc1"))
    with pytest.raises(MediaError, match="nothing here decodes"):
        read_clip(path, 100, _same)


# sound


def _tone(seconds: float, rate: int = RATE, hertz: float = 440.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    time = np.arange(round(seconds * rate)) / rate
    left = 0.5 * np.sin(2 * np.pi * hertz * time)
    return np.stack([left, -0.25 * left]).astype(np.float32)


def test_wav_round_trip_and_soundfile_agree(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    wave = _tone(0.1)
    write_wav(tmp_path / "a.wav", wave)
    data, rate = soundfile.read(tmp_path / "a.wav", dtype="int16", always_2d=True)
    assert rate == RATE
    assert np.array_equal(data.T, pcm16(wave))
    assert np.abs(read_sound(tmp_path / "a.wav", 10.0) - wave).max() < 1e-4
    assert read_sound(tmp_path / "a.wav", 0.05).shape == (2, 1600)


def test_halves_are_rounded_away_from_zero() -> None:
    values = np.array([[0.5 / 32767, -0.5 / 32767, 1.5 / 32767, 2.0, -2.0, 0.0]])
    assert pcm16(values).tolist() == [[1, -1, 2, 32767, -32767, 0]]


@pytest.mark.parametrize("rate", [8000, 32000, 44100, 48000])
@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg"])
def test_any_rate_and_kind(tmp_path: Path, rate: int, suffix: str) -> None:
    soundfile = pytest.importorskip("soundfile")
    wave = _tone(0.5, rate)
    soundfile.write(tmp_path / f"a.{suffix}", wave[0], rate)  # mono
    got = read_sound(tmp_path / f"a.{suffix}", 0.25)
    assert got.shape[0] == 2
    assert abs(got.shape[1] - 8000) <= 1
    assert np.array_equal(got[0], got[1])
    want = _tone(0.5)[0, : got.shape[1]]
    middle = slice(1000, 7000)
    assert np.abs(got[0, middle] - want[middle]).max() < 0.05


def test_chunks_before_the_samples_and_more_channels(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    many = np.stack([np.full(3200, level, np.float32) for level in (0.1, 0.2, 0.3, 0.4)], axis=1)
    soundfile.write(tmp_path / "four.wav", many, RATE, subtype="PCM_16")
    got = read_sound(tmp_path / "four.wav", 1.0)
    assert got.shape == (2, 3200)
    assert np.allclose(got[:, 0], [0.1, 0.2], atol=1e-4)
    write_wav(tmp_path / "a.wav", _tone(0.01))
    data = (tmp_path / "a.wav").read_bytes()
    listed = data[:12] + b"LIST\x05\x00\x00\x00abcde\x00" + data[12:]
    (tmp_path / "b.wav").write_bytes(listed)
    assert np.array_equal(read_sound(tmp_path / "b.wav", 1.0), read_sound(tmp_path / "a.wav", 1.0))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"RIFF\x00\x00\x00\x00WAVE", "without samples"),
        (b"RIFF\x00\x00\x00\x00WAVEdata\x04\x00\x00\x00abcd", "before their format"),
        (b"nonsense" * 10, "no known"),
    ],
)
def test_damaged_sound(tmp_path: Path, data: bytes, words: str) -> None:
    pytest.importorskip("soundfile")
    (tmp_path / "a.wav").write_bytes(data)
    with pytest.raises(MediaError, match=words):
        read_sound(tmp_path / "a.wav", 1.0)


def test_an_empty_recording(tmp_path: Path) -> None:
    write_wav(tmp_path / "a.wav", np.zeros((2, 0), np.float32))
    with pytest.raises(MediaError, match="no sound"):
        read_sound(tmp_path / "a.wav", 1.0)
    with pytest.raises(MediaError, match="cannot be read"):
        read_sound(tmp_path / "none.wav", 1.0)


# MP4

CLICK_S = 0.25


def _job(tmp_path: Path, num_frames: int, samples: int) -> MuxJob:
    folder = tmp_path / "50% done"  # a percent sign must not be taken for a pattern
    folder.mkdir()
    for index in range(num_frames):
        write_ppm(frame_path(folder, index), _picture(32, 64, index))
    wave = np.random.default_rng(1).normal(0, 1e-4, (2, samples)).astype(np.float32)
    click = round(CLICK_S * RATE)
    wave[0, click : click + 32] = 0.9
    wave[1, click : click + 32] = -0.9
    write_wav(tmp_path / "audio.wav", wave)
    return MuxJob(folder, num_frames, tmp_path / "audio.wav", tmp_path / "out.mp4")


def _muxers() -> list[Any]:
    ffmpeg = shutil.which("ffmpeg")
    skip = pytest.mark.skipif(ffmpeg is None, reason="no ffmpeg program on this machine")
    return [
        pytest.param(in_process_muxer, id="pyav"),
        pytest.param(lambda: program_muxer("ffmpeg"), id="ffmpeg", marks=skip),
    ]


def _probe(path: Path) -> dict[str, Any]:
    if shutil.which("ffprobe") is None:
        pytest.skip("no ffprobe program on this machine")
    command = ["ffprobe", "-v", "error", "-count_frames", "-show_streams", "-show_format", "-of", "json", str(path)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


@pytest.mark.parametrize("make", _muxers())
@pytest.mark.parametrize(("num_frames", "audio_t"), [(22, 37), (39, 65), (209, 348)])
def test_what_ffprobe_says(tmp_path: Path, make: Callable[[], Muxer], num_frames: int, audio_t: int) -> None:
    pytest.importorskip("av")
    job = _job(tmp_path, num_frames, audio_t * 800)
    make()(job)
    found = _probe(job.output)
    video, audio = (next(s for s in found["streams"] if s["codec_type"] == kind) for kind in ("video", "audio"))
    assert video["r_frame_rate"] == video["avg_frame_rate"] == "24/1"
    assert int(video["nb_read_frames"]) == num_frames
    assert (video["codec_name"], video["pix_fmt"], video["color_space"]) == ("h264", "yuv420p", "bt709")
    assert (video["width"], video["height"]) == (64, 32)
    assert (audio["codec_name"], audio["sample_rate"], audio["channels"]) == ("aac", "32000", 2)
    assert abs(float(video["duration"]) - num_frames / 24) < 1e-3
    assert abs(float(audio["duration"]) - num_frames / 24) < 1 / 24
    assert float(video["start_time"]) == 0
    assert abs(float(audio["start_time"])) < 1e-3
    data = job.output.read_bytes()
    assert data.index(b"moov") < data.index(b"mdat"), "not written for a fast start"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["50% done", "audio.wav", "out.mp4"]


@pytest.mark.parametrize("make", _muxers())
def test_a_click_stays_where_it_was(tmp_path: Path, make: Callable[[], Muxer]) -> None:
    pytest.importorskip("av")
    job = _job(tmp_path, 22, 37 * 800)
    make()(job)
    if shutil.which("ffmpeg") is None:
        pytest.skip("no ffmpeg program on this machine")
    command = ["ffmpeg", "-loglevel", "error", "-i", str(job.output), "-f", "f32le", "-ac", "2", "-"]
    raw = subprocess.run(command, check=True, capture_output=True).stdout
    wave = np.frombuffer(raw, np.float32).reshape(-1, 2)
    loudest = int(np.abs(wave[:, 0]).argmax())
    assert abs(loudest / RATE - CLICK_S) < 0.010
    assert wave[loudest, 0] * wave[loudest, 1] < 0, "the channels were mixed"


@pytest.mark.parametrize("make", _muxers())
def test_colours_survive(tmp_path: Path, make: Callable[[], Muxer]) -> None:
    av = pytest.importorskip("av")
    colours = [(220, 30, 40), (30, 200, 60), (40, 60, 230)]
    for index, colour in enumerate(colours):
        write_ppm(tmp_path / FRAME_NAME.format(index), np.full((32, 64, 3), colour, np.uint8))
    make()(MuxJob(tmp_path, 3, None, tmp_path / "out.mp4"))
    with av.open(str(tmp_path / "out.mp4")) as container:
        assert not container.streams.audio
        for frame, colour in zip(container.decode(video=0), colours, strict=True):
            pixels = frame.to_ndarray(format="rgb24")
            assert np.abs(pixels[16, 32].astype(int) - colour).max() <= 6


def test_muxers_that_fail(tmp_path: Path) -> None:
    job = _job(tmp_path, 3, 4000)
    with pytest.raises(UsageError, match="no such program"):
        program_muxer(tmp_path / "ffmpeg")
    script = tmp_path / "ffmpeg"
    script.write_text("#!/bin/sh\necho 'Unknown encoder' >&2\nexit 7\n")
    script.chmod(0o755)
    with pytest.raises(MuxError, match="code 7: Unknown encoder"):
        program_muxer(script)(job)
    script.write_text("#!/bin/sh\nexit 0\n")
    with pytest.raises(MuxError, match="said nothing"):
        program_muxer(script)(job)
    assert not job.output.exists()
    pytest.importorskip("av")
    with pytest.raises(MuxError, match="cannot be written"):
        in_process_muxer()(MuxJob(job.frames, 3, job.audio, tmp_path / "no folder" / "out.mp4"))

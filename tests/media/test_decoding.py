"""Files to media: common formats decode to what an independent reader sees, everything else is refused in one line."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest
import soundfile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from vkit.media import AudioMedia, ImageMedia, VideoMedia
from vkit.media.clips import VideoLimits, decode_video
from vkit.media.decoding import decode_media
from vkit.media.pictures import ImageLimits, decode_image
from vkit.media.unusable import UnusableMedia


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """A picture of noise."""
    rng = np.random.default_rng(width * 1000 + height)
    channels = {"RGB": 3, "RGBA": 4, "L": 1, "LA": 2}[mode]
    pixels = rng.integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(pixels.squeeze(-1) if channels == 1 else pixels, mode)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    """The file of a picture."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def shade(num_frames: int) -> int:
    """How much lighter each frame is than the one before."""
    return 240 // num_frames


def clip(num_frames: int, fps: int = 24, size: tuple[int, int] = (64, 48), container: str = "mp4") -> bytes:
    """A clip whose frame i is one gray, `shade(num_frames) * i`."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream("mpeg4" if container != "gif" else "gif", rate=fps)
        stream.width, stream.height = size
        stream.pix_fmt = "yuv420p" if container != "gif" else "rgb8"
        for index in range(num_frames):
            gray = np.full((size[1], size[0], 3), shade(num_frames) * index, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(gray, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "TIFF", "PPM"])
@pytest.mark.parametrize("size", [(1, 1), (31, 639), (8000, 200), (64, 48)])
def test_lossless_pictures_keep_every_pixel(kind: str, size: tuple[int, int]) -> None:
    image = picture(*size)
    options = {"lossless": True, "exact": True, "method": 0} if kind == "WEBP" else {}
    media = decode_image(saved(image, kind, **options))
    assert np.array_equal(media.pixels, np.asarray(image))


def test_jpeg_is_turned_upright() -> None:
    image = Image.new("RGB", (40, 20), "red")
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    assert decode_image(saved(image, "JPEG", exif=exif)).pixels.shape == (40, 20, 3)


def test_transparent_pixels_lie_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (200, 0, 0, 255))
    assert decode_image(saved(image, "PNG")).pixels.tolist() == [[[255, 255, 255], [200, 0, 0]]]
    palette = Image.new("P", (1, 1), 0)
    palette.putpalette([9, 9, 9])
    assert decode_image(saved(palette, "GIF", transparency=0)).pixels.tolist() == [[[255, 255, 255]]]


def test_sixteen_bit_gray_is_scaled() -> None:
    image = Image.fromarray(np.array([[0, 32768, 65535]], np.uint16))
    assert decode_image(saved(image, "PNG")).pixels[0, :, 0].tolist() == [0, 128, 255]


def test_cmyk_and_gray_pictures_become_rgb() -> None:
    assert decode_image(saved(Image.new("CMYK", (3, 2)), "JPEG")).pixels.shape == (2, 3, 3)
    assert decode_image(saved(picture(5, 4, "L"), "PNG")).pixels.shape == (4, 5, 3)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    media = decode_image(saved(frames[0], "GIF", save_all=True, append_images=frames[1:]))
    assert media.pixels[0, 0].tolist() == [255, 0, 0]


def bomb() -> bytes:
    """A small PNG of 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))
        + chunk(b"IEND", b"")
    )


def test_a_decompression_bomb_is_refused_before_memory_is_taken() -> None:
    data = bomb()
    tracemalloc.start()
    with pytest.raises(UnusableMedia, match="pixels"):
        decode_image(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b"hello", "no known picture format"),
        (saved(picture(64, 64), "JPEG")[:900], "it is damaged"),
        (saved(picture(64, 64), "PNG")[:900], "it is damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n", "no known picture format"),
    ],
)
def test_damaged_pictures_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(UnusableMedia, match=words):
        decode_image(data)


def test_limits_on_bytes_and_pixels_are_kept() -> None:
    data = saved(picture(20, 20), "PNG")
    with pytest.raises(UnusableMedia, match="bytes, at most 100"):
        decode_image(data, ImageLimits(max_bytes=100))
    with pytest.raises(UnusableMedia, match="20 x 20 pixels, at most 399"):
        decode_image(data, ImageLimits(max_pixels=399))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_changed_files_are_decoded_or_refused(data: st.DataObject) -> None:
    """A flipped or missing byte anywhere never ends in another exception."""
    kind, file = data.draw(st.sampled_from(SAMPLES))
    changed = bytearray(file[: data.draw(st.integers(0, len(file)))])
    for _ in range(data.draw(st.integers(0, 4))):
        if changed:
            changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        outcome: object = decode_media(kind, bytes(changed))
    except UnusableMedia as error:
        outcome = error
    assert isinstance(outcome, ImageMedia | VideoMedia | AudioMedia) or "\n" not in str(outcome)


def sound(kind: str = "WAV", subtype: str = "PCM_16") -> bytes:
    """A tenth of a second of a tone."""
    buffer = io.BytesIO()
    wave = np.sin(np.arange(4410) * 0.1).astype(np.float32)
    soundfile.write(buffer, wave, 44100, format=kind, subtype=subtype)
    return buffer.getvalue()


SAMPLES = [
    ("image", saved(picture(16, 16), "PNG")),
    ("image", saved(picture(16, 16), "JPEG")),
    ("image", saved(picture(16, 16), "WEBP")),
    ("image", saved(picture(16, 16, "L"), "TIFF")),
    ("image", saved(picture(16, 16), "GIF")),
    ("video", clip(6)),
    ("video", clip(3, container="avi")),
    ("audio", sound()),
    ("audio", sound("FLAC")),
]


@pytest.mark.parametrize(("num_frames", "fps"), [(48, 24), (7, 30), (1, 10), (40, 12)])
@pytest.mark.parametrize("container", ["mp4", "avi", "matroska", "mov"])
def test_a_clip_gives_two_frames_a_second(num_frames: int, fps: int, container: str) -> None:
    media = decode_video(clip(num_frames, fps, container=container))
    assert media.fps == fps
    assert media.num_source_frames == num_frames
    expected = min(max(int(num_frames / fps * 2), 4), num_frames)
    assert media.indices is not None
    assert len(media.frames) == len(media.indices) == expected
    assert media.indices[0] == 0
    assert media.indices[-1] == num_frames - 1
    shades = media.frames.mean(axis=(1, 2, 3))
    assert np.abs(shades - shade(num_frames) * np.array(media.indices)).max() < 5


def test_an_animated_picture_is_a_clip() -> None:
    frames = [Image.new("RGB", (16, 16), color) for color in ("red", "blue", "green")]
    data = saved(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=100)
    assert decode_video(data).num_source_frames == 3


def test_large_frames_are_made_smaller_as_they_are_decoded() -> None:
    media = decode_video(clip(8, size=(320, 200)), VideoLimits(max_kept_pixels=4 * 80 * 50))
    assert media.frames.shape == (4, 50, 80, 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "it is empty"),
        (b"no clip", "no known video format"),
        (clip(6)[:200], "no known video format|it is damaged"),
        (clip(6).replace(b"mp4v", b"xp4v").replace(b"A \x11", b"A\x00\x11"), "nothing here decodes"),
        (sound(), "no known video format|no picture"),
        (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "no known video format"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "no known video format"),
    ],
)
def test_what_is_no_clip_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(UnusableMedia, match=words):
        decode_video(data)


def test_a_clip_without_frames_is_refused() -> None:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="avi") as out:
        stream = out.add_stream("mpeg4", rate=24)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        out.start_encoding()
    with pytest.raises(UnusableMedia):
        decode_video(buffer.getvalue())


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (VideoLimits(max_bytes=10), "bytes, at most 10"),
        (VideoLimits(max_source_frames=5), "more than 5 frames"),
        (VideoLimits(max_seconds=0.2), "longer than 0.2 s"),
        (VideoLimits(max_frame_pixels=100), "64 x 48 pixels"),
    ],
)
def test_limits_of_clips_are_kept(limits: VideoLimits, words: str) -> None:
    with pytest.raises(UnusableMedia, match=words):
        decode_video(clip(24), limits)


@pytest.mark.parametrize(
    ("kind", "subtype"), [("WAV", "PCM_24"), ("WAV", "FLOAT"), ("FLAC", "PCM_16"), ("OGG", "VORBIS")]
)
def test_sound_becomes_mono_at_16_khz(kind: str, subtype: str) -> None:
    media = decode_media("audio", sound(kind, subtype))
    assert isinstance(media, AudioMedia)
    assert media.sample_rate == 16_000
    assert abs(len(media.samples) - 1600) <= 2


def test_damaged_sound_is_unusable_too() -> None:
    with pytest.raises(UnusableMedia):
        decode_media("audio", b"RIFF....WAVE")


READERS: list[Callable[[bytes], object]] = [decode_image, decode_video]


@pytest.mark.parametrize("reader", READERS)
def test_text_of_this_file_is_refused(reader: Callable[[bytes], object]) -> None:
    with pytest.raises(UnusableMedia):
        reader(Path(__file__).read_bytes())

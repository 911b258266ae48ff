"""What counts as an image, a video or sound, and how a prompt may bring them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from vkit.errors import InvalidRequest
from vkit.media import AudioMedia, ImageMedia, VideoMedia, checked_media


def pixels(*shape: int, value: int = 0) -> np.ndarray:
    return np.full((*shape, 3), value, np.uint8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ImageMedia(pixels(2, 2).astype(np.float32)), "image: pixels: expected a uint8 array"),
        (lambda: ImageMedia(np.zeros((2, 2, 4), np.uint8)), r"got uint8 \(2, 2, 4\)"),
        (lambda: ImageMedia(pixels(0, 2)), "image: pixels: an empty array"),
        (lambda: ImageMedia("cat.png"), "got str"),  # type: ignore[arg-type]
        (lambda: VideoMedia(pixels(2, 2)), "video: frames"),
        (lambda: VideoMedia(pixels(0, 2, 2)), "video: frames: an empty array"),
        (lambda: VideoMedia(pixels(2, 2, 2), fps=0.0), "video: fps: expected a positive number"),
        (lambda: VideoMedia(pixels(2, 2, 2), fps=float("nan")), "video: fps"),
        (lambda: VideoMedia(pixels(2, 2, 2), indices=(1,)), "video: indices: expected 2 ascending"),
        (lambda: VideoMedia(pixels(2, 2, 2), indices=(3, 3)), "video: indices"),
        (lambda: VideoMedia(pixels(2, 2, 2), indices=(0, 9), num_source_frames=9), "num_source_frames: .* at least 10"),
        (lambda: AudioMedia(np.zeros(4), 16000), "audio: samples: expected a float32 array"),
        (lambda: AudioMedia(np.zeros((4, 3), np.float32), 16000), "audio: samples"),
        (lambda: AudioMedia(np.zeros(0, np.float32), 16000), "there are none"),
        (lambda: AudioMedia(np.array([np.inf], np.float32), 16000), "finite"),
        (lambda: AudioMedia(np.zeros(4, np.float32), 0), "sample_rate"),
    ],
)
def test_what_is_no_media_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_digests_tell_contents_apart() -> None:
    frames = pixels(4, 6, 5, value=7)
    items = [
        ImageMedia(pixels(4, 6)),
        ImageMedia(pixels(6, 4)),
        ImageMedia(pixels(4, 6, value=1)),
        VideoMedia(frames),
        VideoMedia(frames, fps=2.0),
        VideoMedia(frames, fps=2.0, indices=(0, 1, 2, 5)),
        AudioMedia(np.zeros(8, np.float32), 8000),
        AudioMedia(np.zeros(8, np.float32), 16000),
        AudioMedia(np.zeros((8, 2), np.float32), 8000),
    ]
    assert len({item.digest for item in items}) == len(items)
    assert ImageMedia(pixels(4, 6)).digest == items[0].digest
    assert ImageMedia(pixels(8, 6)[::2]).digest == items[0].digest, "strides are no content"


def test_durations() -> None:
    assert VideoMedia(pixels(4, 2, 2), fps=2.0).duration_s == 2.0
    assert VideoMedia(pixels(2, 2, 2), fps=2.0, indices=(0, 5)).duration_s == 3.0
    assert VideoMedia(pixels(2, 2, 2), fps=2.0, indices=(0, 5), num_source_frames=8).duration_s == 4.0
    assert VideoMedia(pixels(2, 2, 2)).duration_s is None
    assert AudioMedia(np.zeros(8000, np.float32), 16000).duration_s == 0.5


IMAGE = ImageMedia(pixels(2, 2))


@pytest.mark.parametrize(
    ("data", "kinds", "limits", "message"),
    [
        ([IMAGE], ("image",), {}, "expected a mapping"),
        ({"picture": IMAGE}, ("image",), {}, "got 'picture'"),
        ({"image": "nowhere/cat.png"}, ("image",), {}, "image: nowhere/cat.png: No such file"),
        ({"image": [{}]}, ("image",), {}, "image: expected ImageMedia, a Pillow image, .*; got dict"),
        ({"image": (pixels(2, 2),)}, ("image",), {}, "got tuple"),
        ({"audio": [pixels(2, 2)]}, ("audio",), {}, "got ndarray"),
        ({"video": [IMAGE]}, ("image", "video"), {}, "expected VideoMedia, .*; got ImageMedia"),
        ({"image": [IMAGE]}, (), {}, "image: this model takes text only"),
        ({"image": [IMAGE]}, ("audio",), {}, "image: this model takes text and audio"),
        ({"image": [IMAGE, IMAGE]}, ("image",), {"image": 1}, "image: 2 given, at most 1 allowed"),
    ],
)
def test_media_of_a_prompt_are_checked(data: Any, kinds: Any, limits: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        checked_media(data, kinds, limits)


def test_media_of_a_prompt() -> None:
    assert checked_media({"image": IMAGE}, ("image",), {"image": 1}) == [IMAGE]
    assert checked_media({"image": [IMAGE] * 3, "video": None, "audio": []}, ("image",), {}) == [IMAGE] * 3

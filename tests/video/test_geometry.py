"""Sizes and counts against the tables of the reference, and what must hold for all of them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkit.errors import InvalidRequest
from vkit.video.clips import first_slot
from vkit.video.h3 import geometry
from vkit.video.h3.geometry import Size

Cases = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def cases(goldens: Path) -> Cases:
    loaded: Cases = json.loads((goldens / "geometry" / "cases.json").read_text())
    return loaded


def test_canvas(cases: Cases) -> None:
    for row in cases["canvas"]:
        assert geometry.canvas(Size(row["aspect_w"], row["aspect_h"])) == Size(row["width"], row["height"])
    for row in cases["reference_video_canvas"]:
        assert geometry.canvas(Size(row["width"], row["height"])) == Size(row["out_width"], row["out_height"])


def test_frame_counts(cases: Cases) -> None:
    for row in cases["frames"]:
        aligned = geometry.align_frames(row["requested"])
        assert aligned == row["aligned"]
        assert geometry.latent_frames(aligned) == row["latent_t"]
        assert geometry.audio_latents(aligned) == row["audio_t"]
        assert aligned / geometry.FPS == row["duration"]


def test_reference_pictures(cases: Cases) -> None:
    for row in cases["reference_image"]:
        size = geometry.reference_image_size(Size(row["width"], row["height"]))
        assert size == Size(row["out_width"], row["out_height"])


def test_frames_that_the_encoder_sees(cases: Cases) -> None:
    for row in cases["qwen_video_sampling"]:
        pairs = geometry.encoder_frame_pairs(row["num_frames"])
        assert [pair.label for pair in pairs] == row["labels"]
        seen = [index for pair in pairs for index in (pair.first, pair.second)]
        assert seen[: len(row["indices"])] == row["indices"]
        assert seen[len(row["indices"]) :] == row["indices"][-1:] * (len(seen) - len(row["indices"]))
    with pytest.raises(InvalidRequest, match="12 frames"):
        geometry.encoder_frame_pairs(12)


def test_tiles(cases: Cases) -> None:
    for row in cases["tiles"]:
        plan = geometry.tiles(row["length"], row["tile"], row["min_overlap"], row["ratio"])
        assert [tile.start for tile in plan] == row["starts"]
        assert [tile.length for tile in plan] == row["lengths"]
        assert [tile.overlap for tile in plan[:-1]] == row["overlaps"]


def test_resampling_to_24(cases: Cases) -> None:
    for row in cases["fps_resample"]:
        starts = [first_slot(index, row["src_fps"]) for index in range(row["src_frames"] + 1)]
        assert [end - start for start, end in itertools.pairwise(starts)] == row["repeats"]
        assert starts[-1] == row["out_frames"]


@given(st.integers(1, 5000))
def test_the_grid_is_the_next_one_up(asked: int) -> None:
    aligned = geometry.align_frames(asked)
    assert aligned % 17 == 5
    assert 0 <= aligned - asked < 17
    assert geometry.latent_frames(aligned) == geometry.encoded_latent_frames(aligned)
    if asked >= 22:
        assert geometry.align_frames(geometry.trim_frames(asked)) == geometry.trim_frames(asked) <= asked


@given(st.integers(17, 2000), st.integers(4, 40), st.integers(0, 3), st.sampled_from([4, 8, 16]))
def test_tiles_cover_an_axis_exactly(length: int, tile_steps: int, overlap_steps: int, ratio: int) -> None:
    length, tile = length // ratio * ratio or ratio, tile_steps * ratio
    plan = geometry.tiles(length, tile, overlap_steps * ratio, ratio)
    assert plan[0].start == 0
    assert plan[-1].start + plan[-1].length == length
    for before, after in itertools.pairwise(plan):
        assert before.start + before.length - before.overlap == after.start
        assert overlap_steps * ratio <= before.overlap < tile


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_a_canvas_keeps_the_aspect(width: int, height: int) -> None:
    if not 1 / 4 <= width / height <= 4:
        with pytest.raises(InvalidRequest, match="aspect"):
            geometry.canvas(Size(width, height))
        return
    size = geometry.canvas(Size(width, height))
    assert size.width % 32 == size.height % 32 == 0
    assert abs(size.width / size.height - width / height) <= 0.09 * width / height
    assert size.width * size.height <= geometry.MAX_CANVAS_PIXELS * 1.05


@given(st.integers(16, 3000), st.integers(16, 3000), st.sampled_from([Size(1344, 768), Size(768, 768)]))
def test_a_cropped_keyframe_covers_the_output(width: int, height: int, target: Size) -> None:
    fitting = geometry.keyframe_fitting(Size(width, height), target, "crop", is_first=True)
    assert 0 <= fitting.left <= fitting.resized.width - target.width
    assert 0 <= fitting.top <= fitting.resized.height - target.height


def test_keyframes_by_order_and_by_flag() -> None:
    source, target = Size(1000, 1000), Size(1344, 768)
    assert not geometry.keyframe_fitting(source, target, "auto", is_first=True).crops
    second = geometry.keyframe_fitting(source, target, "auto", is_first=False)
    assert (second.resized, second.left, second.top) == (Size(1344, 1344), 0, 288)
    assert not geometry.keyframe_fitting(source, target, "stretch", is_first=False).crops
    with pytest.raises(InvalidRequest, match="1344x768"):
        geometry.keyframe_fitting(source, target, "exact", is_first=True)
    assert geometry.keyframe_fitting(target, target, "exact", is_first=True).resized == target


def test_sizes_and_lengths_of_a_request() -> None:
    assert geometry.resolve_size("t2va", 1280, 720, None) == Size(1280, 704)
    assert geometry.resolve_size("t2va", None, None, None) == Size(1344, 768)
    assert geometry.resolve_size("fl2va", None, None, Size(1080, 1440)) == Size(768, 1024)
    assert geometry.resolve_size("ref2va", None, None, Size(1080, 1440)) == Size(1344, 768)
    assert geometry.resolve_frames("t2va", None, None) == (209, 209)
    assert geometry.resolve_frames("ref2va", None, None) == (124, 124)
    assert geometry.resolve_frames("t2va", None, 5.0) == (120, 124)
    assert geometry.resolve_frames("t2va", 346, None) == (346, 362)
    assert geometry.resolve_frames("t2va", 346, 5.0) == (120, 124)


@pytest.mark.parametrize(
    ("frames", "duration", "words"),
    [
        (5, None, "22"),
        (1, None, "22"),
        (0, None, "positive"),
        (-3, None, "positive"),
        (None, 0.0, "above 0"),
        (None, float("nan"), "above 0"),
        (None, float("inf"), "above 0"),
        (None, 0.01, "22"),
        (100_000, None, "ten minutes"),
    ],
)
def test_lengths_that_cannot_be(frames: int | None, duration: float | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        geometry.resolve_frames("t2va", frames, duration)


@pytest.mark.parametrize(
    ("width", "height", "words"),
    [(640, None, "height: missing"), (None, 640, "width: missing"), (31, 64, "at least 32"), (2048, 256, "aspect")],
)
def test_sizes_that_cannot_be(width: int | None, height: int | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        geometry.resolve_size("t2va", width, height, None)


def test_what_the_encoder_is_shown() -> None:
    budget = {"min_pixels": 65536, "max_pixels": 16777216}
    assert geometry.encoder_size(Size(256, 256), 1, **budget) == Size(256, 256)
    small = geometry.encoder_size(Size(128, 64), 1, **budget)
    assert small.width * small.height >= 65536
    assert geometry.encoder_size(Size(2048, 8192), 1, **budget) == Size(2048, 8192)
    clip = geometry.encoder_size(Size(1344, 768), 26, min_pixels=4096, max_pixels=25165824)
    assert clip.width * clip.height * 26 <= 25165824

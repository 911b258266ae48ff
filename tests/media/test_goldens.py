"""Preparation of images and videos against the reference processor's sizes, frames and pixels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from vkit.errors import InvalidRequest
from vkit.media import ImageMedia, VideoMedia
from vkit.media.qwen import PixelRules, QwenMarks, QwenMedia
from vkit.media.sampling import chosen_frames, fitted_size

FOLDER = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models" / "preprocess"
META = json.loads((FOLDER / "meta.json").read_text())
SIZES = json.loads((FOLDER / "smart_resize.json").read_text())
TWO_STEPS = 0.016
"""Of 8-bit values spread over -1..1: how far the two common bicubic codes lie apart."""


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    return load_file(FOLDER / "preprocess.safetensors")


def processor(min_pixels: int, max_pixels: int) -> QwenMedia:
    rules = PixelRules(min_pixels, max_pixels)
    marks = QwenMarks(250, 251, 252, 253)
    return QwenMedia(
        marks, lambda token_id: f"<{token_id}>", lambda text: list(text.encode()), image_rules=rules, video_rules=rules
    )


def test_every_size() -> None:
    assert {case["kind"] for case in SIZES} == {"image", "video"}
    assert any(case["out"] is None for case in SIZES)
    for case in SIZES:
        limits = {"factor": case["factor"], "min_pixels": case["min"], "max_pixels": case["max"]}
        if case["out"] is None:
            with pytest.raises(InvalidRequest, match="200 times"):
                fitted_size(case["h"], case["w"], num_frames=case.get("frames"), **limits)
        else:
            assert list(fitted_size(case["h"], case["w"], num_frames=case.get("frames"), **limits)) == case["out"], case


@pytest.mark.parametrize("index", range(len(META["images"])))
def test_images(index: int, arrays: dict[str, np.ndarray]) -> None:
    prepared = processor(META["image"]["min_pixels"], META["image"]["max_pixels"]).prepare(
        ImageMedia(arrays[f"image_{index}"])
    )
    assert list(prepared.grid) == META["images"][index]["grid"] == arrays[f"image_{index}_grid"].tolist()
    np.testing.assert_allclose(prepared.features, arrays[f"image_{index}_pixels"], atol=TWO_STEPS, rtol=0)
    assert prepared.num_rows == len(prepared.replacement) == np.prod(prepared.grid) // 4


@pytest.mark.parametrize("index", range(len(META["videos"])))
def test_videos(index: int, arrays: dict[str, np.ndarray]) -> None:
    case: dict[str, Any] = META["videos"][index]
    own = processor(case["min_pixels"], case["max_pixels"])
    indices = chosen_frames(case["n"], case["fps"], wanted_fps=case["target_fps"])
    assert indices == case["indices"]
    assert own.timestamps(indices, case["fps"]) == pytest.approx(case["timestamps"], abs=1e-12)
    whole = VideoMedia(arrays[f"video_{index}"], fps=case["fps"])
    prepared = own.prepare(whole)
    assert list(prepared.grid) == case["grid"]
    np.testing.assert_allclose(prepared.features, arrays[f"video_{index}_pixels"], atol=TWO_STEPS, rtol=0)
    chosen = VideoMedia(
        arrays[f"video_{index}"][indices], fps=case["fps"], indices=tuple(indices), num_source_frames=case["n"]
    )
    again = own.prepare(chosen)
    np.testing.assert_array_equal(again.features, prepared.features)
    assert again.replacement == prepared.replacement
    text = bytes(token for token in prepared.replacement if token < 250).decode()
    assert text == "".join(f"<{seconds:.1f} seconds>" for seconds in case["timestamps"])

"""Where the reference data is, and a whole model of random weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from vkit.video.frames import frame_path, write_ppm
from vkit.video.h3.request import VideoModelPaths
from vkit.video.h3.tiny import make_tiny
from vkit.video.sound import write_wav

ROOT = Path(__file__).parent.parent.parent
GOLDENS = ROOT.parent / "shared" / "goldens" / "h3"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of the model's reference data; tests that need it are skipped where it is not."""
    if not GOLDENS.is_dir():
        pytest.skip(f"reference data not found: {GOLDENS}")
    return GOLDENS


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VideoModelPaths:
    """A random model of partition fl2va."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_ref(tmp_path_factory: pytest.TempPathFactory) -> VideoModelPaths:
    """A random model of partition ref2va."""
    return make_tiny(tmp_path_factory.mktemp("tiny_ref"), partition="ref2va")


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """first.ppm (64x64), other.ppm (96x48), small.ppm (64x64, for references), clip/ (26 frames of 64x48), tone.wav."""
    folder = tmp_path_factory.mktemp("media")
    draw = np.random.default_rng(3)
    for name, height, width in (("first", 64, 64), ("other", 48, 96), ("small", 64, 64)):
        write_ppm(folder / f"{name}.ppm", draw.integers(0, 256, (height, width, 3), dtype=np.uint8))
    (folder / "clip").mkdir()
    for index in range(26):
        write_ppm(frame_path(folder / "clip", index), draw.integers(0, 256, (48, 64, 3), dtype=np.uint8))
    time = np.arange(16_000) / 32_000
    write_wav(folder / "tone.wav", np.stack([np.sin(time * 2000), np.cos(time * 1500)]).astype(np.float32) * 0.3)
    return folder


@pytest.fixture
def without(tiny: VideoModelPaths) -> VideoModelPaths:
    """The transformer alone."""
    return replace(
        tiny, encoder=None, tokenizer=None, video_vae=None, video_vae_config=None, audio_vae=None, audio_vae_config=None
    )

"""Preparation of media for Muse and Gemma 4 against Pillow and the reference library's processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image

from vkit.errors import InvalidRequest
from vkit.media import AudioMedia, ImageMedia, VideoMedia
from vkit.media.gemma4 import GemmaMarks, GemmaMedia, largest_size
from vkit.media.muse import MuseMarks, MuseMedia, capped_grid

SIZES = [(31, 17), (1, 1), (9, 300), (400, 31), (64, 64), (57, 91), (700, 900)]
TWO_STEPS = 4.04 / 255
"""Of 8-bit values spread over -1..1: one from each pass."""


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)


MUSE = MuseMedia(MuseMarks(250, 251), str, lambda text: list(text.encode()), max_image_tokens=64, max_frame_tokens=16)
GEMMA = GemmaMedia(GemmaMarks(250), str, 16, 3, max_soft_tokens=70)


@pytest.mark.parametrize("size", SIZES)
def test_muse_images(size: tuple[int, int]) -> None:
    """Pillow resizes with the same filter; what is left is the order of patches, spelt out here."""
    pixels = noise(*size)
    found = MUSE.prepare(ImageMedia(pixels))
    _, rows, columns = found.grid
    assert (rows, columns) == tuple(2 * side for side in capped_grid(*size, 28, 64))
    assert found.num_rows * 4 == rows * columns == len(found.features)
    assert found.num_rows <= 64
    wide = Image.fromarray(pixels).resize((14 * columns, size[0]), Image.Resampling.LANCZOS)  # which pass comes first
    resized = np.asarray(wide.resize((14 * columns, 14 * rows), Image.Resampling.LANCZOS))  # matters once or twice
    for index, row in enumerate(found.features):
        y, x = 14 * (index // columns), 14 * (index % columns)
        patch = resized[y : y + 14, x : x + 14].transpose(2, 0, 1) / 127.5 - 1
        np.testing.assert_allclose(row.reshape(2, 3, 14, 14), np.stack([patch, patch]), atol=TWO_STEPS, rtol=0)


def test_muse_grids_keep_the_shape() -> None:
    for height, width in SIZES:
        rows, columns = capped_grid(height, width, 28, 64)
        ideal = (height / 28, width / 28)
        if ideal[0] * ideal[1] > 64:
            shrink = (64 / (ideal[0] * ideal[1])) ** 0.5
            ideal = (ideal[0] * shrink, ideal[1] * shrink)
        assert abs(rows - ideal[0]) < 1
        assert abs(columns - ideal[1]) < 1
        assert rows * columns <= 64


@pytest.mark.parametrize(
    ("frames", "fps", "indices"),
    [(20, 8.0, [0, 6, 12, 19]), (7, 3.0, [0, 2, 4, 6]), (1, 5.0, [0]), (3, 30.0, [0, 2]), (1000, 2.0, 96)],
)
def test_muse_frames(frames: int, fps: float, indices: list[int] | int) -> None:
    """Twice a second, an even number, evenly spread and rounded down."""
    found = MUSE.chosen_frames(frames, fps)
    assert len(found) == indices if isinstance(indices, int) else found == indices


def test_muse_videos() -> None:
    clip = noise(5, 28, 56)
    found = MUSE.prepare(VideoMedia(clip, fps=2.0))
    assert found.grid == (2, 2, 4)
    frames = clip[[0, 1, 2, 4]] / 127.5 - 1
    first = found.features[8 + 5].reshape(2, 3, 14, 14)  # second pair of frames, second row, second column
    np.testing.assert_allclose(first, frames[2:, 14:28, 14:28].transpose(0, 3, 1, 2), atol=1e-6, rtol=0)
    odd = MUSE.prepare(VideoMedia(clip[:3], fps=2.0, indices=(0, 2, 4)))
    assert odd.grid == (2, 2, 4), "the last frame is repeated"


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES[:1] + SIZES[2:])
def test_gemma_images(size: tuple[int, int]) -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    pixels = noise(*size)
    processor = Gemma4ImageProcessorPil(patch_size=16, pooling_kernel_size=3, max_soft_tokens=70)
    expected = processor(images=[pixels], return_tensors="np")
    places = expected["image_position_ids"][0]
    is_real = places[:, 0] >= 0
    found = GEMMA.prepare(ImageMedia(pixels))
    assert (places[is_real].max(axis=0) + 1).tolist() == [found.grid[2], found.grid[1]]
    np.testing.assert_allclose(found.features, expected["pixel_values"][0][is_real], atol=TWO_STEPS, rtol=0)


def test_sizes_that_round_to_nothing() -> None:
    assert largest_size(1, 900, 48, 70) == (1, 70)
    assert largest_size(900, 1, 48, 70) == (70, 1)
    assert capped_grid(1, 1, 28, 64) == (1, 1)
    assert capped_grid(1, 5000, 28, 64) == (1, 64)


def test_replacements() -> None:
    marked = MuseMedia(
        MuseMarks(250, 251, (1, 2), (3, 4), 5), str, lambda text: list(text.encode()), patch_size=4, max_frame_tokens=4
    )
    assert marked.prepare(ImageMedia(noise(8, 16))).replacement == (1, 250, 250, 2)
    clip = marked.prepare(VideoMedia(noise(4, 8, 8), fps=2.0))
    assert clip.replacement == (3, *b"Time: 0.0s", 251, 5, *b"Time: 1.0s", 251, 4)
    assert marked.place([9, 251, 9], [clip]).media[0].spans == ((12, 13), (24, 25))
    heard = GemmaMedia(GemmaMarks(250, 249, (1, 2), (3, None)), str, 2, 2, merges_pixels=True, samples_per_token=640)
    sound = heard.prepare(AudioMedia(np.ones(1300, np.float32), 16000))
    assert sound.replacement == (3, 249, 249, 249)
    assert sound.features.shape == (3, 640)
    assert sound.features[2, 20:].tolist() == [0.0] * 620
    stereo = heard.prepare(AudioMedia(np.stack([np.ones(640), np.zeros(640)], 1).astype(np.float32), 16000))
    assert set(stereo.features.flatten().tolist()) == {0.5}


@pytest.mark.parametrize(
    ("processor", "media", "message"),
    [
        (MUSE, AudioMedia(np.ones(4, np.float32), 16000), "audio: this model takes text and image, video"),
        (GEMMA, AudioMedia(np.ones(4, np.float32), 16000), "audio: this model takes text and image"),
        (GEMMA, VideoMedia(noise(2, 4, 4)), "video: this model takes text and image"),
        (
            GemmaMedia(GemmaMarks(250, 249), str, 2, 2, samples_per_token=640),
            AudioMedia(np.ones(4, np.float32), 8000),
            "8000 samples per second; this model listens at 16000",
        ),
        (GemmaMedia(GemmaMarks(250), str, 2, 2, max_side=8), ImageMedia(noise(4, 900)), "has learned 8 places a side"),
    ],
)
def test_what_cannot_be_shown(processor: Any, media: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        processor.prepare(media)

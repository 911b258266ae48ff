"""Models with towers against recorded rows, positions, logits and greedy continuations, through the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from vkit import kernels
from vkit.cache.media import MediaCache
from vkit.media import MediaInput, MediaKind, PlacedPrompt
from vkit.media.placing import grid_positions, place_media

Begin = Callable[..., tuple[Any, Any]]
"""Name and options -> golden and driver; see the conftest."""
QWEN = ["qwen3_vl", "qwen3_5", "qwen3_5_moe"]
PADS: dict[MediaKind, int] = {"image": 250, "video": 251, "audio": 249}
BACKENDS = ["reference", *(backend.name for backend in kernels.backends("cpu"))]


def media_input(
    kind: MediaKind, features: torch.Tensor, grid: tuple[int, int, int], num_rows: int, *, sees_itself: bool = False
) -> MediaInput:
    array = features.numpy().astype(np.float32)
    pads = (PADS[kind],) * num_rows
    return MediaInput(kind, array.tobytes()[:64], array, grid, num_rows, pads, PADS[kind], sees_itself)


def grid_inputs(golden: Any) -> list[MediaInput]:
    """The image and the video of a golden whose grids merge two by two."""
    found = []
    kinds: tuple[tuple[MediaKind, str], ...] = (("image", "pixel_values"), ("video", "pixel_values_videos"))
    for kind, name in kinds:
        if name in golden.tensors:
            (grid,) = golden.tensors[f"{kind}_grid_thw"].tolist()
            found.append(media_input(kind, golden.tensors[name], tuple(grid), int(np.prod(grid)) // 4))
    return found


def qwen_prompt(golden: Any) -> PlacedPrompt:
    ids, placed = place_media(golden.tensors["mm_input_ids"].tolist(), grid_inputs(golden), PADS)
    positions, delta = grid_positions(len(ids), placed, 2)
    np.testing.assert_array_equal(positions, golden.tensors["mm_positions"].numpy())
    assert delta == golden.tensors["mm_rope_delta"].item()
    return PlacedPrompt(ids, placed, positions, delta)


def gemma_inputs(golden: Any) -> list[MediaInput]:
    """The image of a golden, six soft tokens two rows high or three, and its sound."""
    features = golden.tensors["pixel_values"]
    places = golden.tensors["image_position_ids"]
    grid = (1, int(places[:, 1].max()) + 1, int(places[:, 0].max()) + 1)
    assert places.tolist() == [[x, y] for y in range(grid[1]) for x in range(grid[2])]
    found = [media_input("image", features, grid, 6, sees_itself=True)]
    if "audio_frames" in golden.tensors:
        frames = golden.tensors["audio_frames"]
        found.append(media_input("audio", frames, (len(frames), 1, 1), len(frames)))
    return found


def counted_prompt(golden: Any, inputs: list[MediaInput]) -> PlacedPrompt:
    """A prompt whose positions just count."""
    return PlacedPrompt(*place_media(golden.tensors["mm_input_ids"].tolist(), inputs, PADS))


MIXED = {"a": "X", "mm": "mm_X", "b": "X_b", "again": "mm_X"}
"""Text and media prompts together; the same media twice."""


@pytest.mark.parametrize("name", QWEN)
def test_rows_of_the_tower(
    name: str, load_golden: Callable[..., Any], load_model: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    golden, model = load_golden(name), load_model(name, make_options())
    for item in grid_inputs(golden):
        encoded = model.encode_media(item)
        torch.testing.assert_close(encoded.embeddings, golden.tensors[f"{item.kind}_embeds"], atol=1e-5, rtol=0)
        if item.kind == "image":
            deeper = [golden.tensors[key] for key in sorted(golden.tensors) if key.startswith("image_deepstack")]
            assert len(encoded.features) == len(deeper) == (3 if name == "qwen3_vl" else 0)
            for feature, expected in zip(encoded.features, deeper, strict=True):
                torch.testing.assert_close(feature, expected, atol=1e-5, rtol=0)


def test_several_items_at_once_are_the_items_one_by_one(
    load_golden: Callable[..., Any], load_model: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    golden, model = load_golden("qwen3_vl"), load_model("qwen3_vl", make_options())
    items = grid_inputs(golden)
    together = model.visual.encode(
        torch.from_numpy(np.concatenate([item.features for item in items])), [item.grid for item in items]
    )
    one_by_one = [model.encode_media(item) for item in items]
    torch.testing.assert_close(together.embeddings, torch.cat([encoded.embeddings for encoded in one_by_one]))
    for index in range(3):
        expected = torch.cat([encoded.features[index] for encoded in one_by_one])
        torch.testing.assert_close(together.features[index], expected)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("block_size", "chunk"), [(4, 1), (16, 7), (4, 64)])
@pytest.mark.parametrize("name", QWEN)
def test_qwen(name: str, block_size: int, chunk: int, begin: Begin) -> None:
    golden, driver = begin(name, block_size=block_size, seed=chunk)
    prompt = qwen_prompt(golden)
    prompts = {"a": golden.prompt(), "mm": prompt, "b": golden.prompt("_b"), "again": prompt}
    golden.check(driver.continue_greedily(prompts, chunk), **MIXED)
    assert driver.media.num_hits >= 2, "the second request finds what the first had encoded"


def test_rows_of_other_towers(
    load_golden: Callable[..., Any], load_model: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    for name, inputs_of in (
        ("muse_glimmer", grid_inputs),
        ("gemma4_moe", gemma_inputs),
        ("gemma4_unified", gemma_inputs),
    ):
        golden, model = load_golden(name), load_model(name, make_options())
        for item in inputs_of(golden):
            encoded = model.encode_media(item)
            if item.kind != "audio":  # the golden has the frames of sound, not their rows
                expected = golden.tensors[f"{item.kind}_embeds"]
                torch.testing.assert_close(encoded.embeddings, expected, atol=2e-5, rtol=0)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("block_size", "chunk"), [(4, 1), (16, 7), (4, 64)])
def test_muse(block_size: int, chunk: int, begin: Begin) -> None:
    golden, driver = begin("muse_glimmer", block_size=block_size, seed=chunk)
    prompt = counted_prompt(golden, grid_inputs(golden))
    prompts = {"a": golden.prompt(), "mm": prompt, "b": golden.prompt("_b"), "again": prompt}
    golden.check(driver.continue_greedily(prompts, chunk), **MIXED)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize(("block_size", "chunk"), [(4, 6), (16, 7), (4, 64)])
@pytest.mark.parametrize("name", ["gemma4_moe", "gemma4_unified"])
def test_gemma4(name: str, block_size: int, chunk: int, begin: Begin) -> None:
    """The tokens of an image see each other, so chunks hold all six of them."""
    golden, driver = begin(name, block_size=block_size, seed=chunk)
    prompt = counted_prompt(golden, gemma_inputs(golden))
    prompts = {"a": golden.prompt(), "mm": prompt, "b": golden.prompt("_b"), "again": prompt}
    golden.check(driver.continue_greedily(prompts, chunk), **MIXED)


@pytest.mark.parametrize("max_rows", [1, 8, 13])
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_little_room_for_encoded_media(name: str, max_rows: int, begin: Begin) -> None:
    """An image of 6 rows and a video of 8 come and go; the numbers stay."""
    golden, driver = begin(name, block_size=4)
    driver.media = MediaCache(max_rows, 1 << 20)
    prompt = qwen_prompt(golden)
    results = driver.continue_greedily({"mm": prompt, "a": golden.prompt(), "again": prompt}, 7)
    golden.check(results, mm="mm_X", a="X", again="mm_X")
    assert driver.media.num_rows <= max(max_rows, 8)


def test_a_missing_vision_config_means_text_only(
    make_checkpoint: Callable[..., Any], make_options: Callable[..., Any], load_golden: Callable[..., Any]
) -> None:
    from vkit.models import MediaContext, build_model

    model = build_model(make_checkpoint("qwen3_vl", vision_config=None), make_options())
    assert model.media_processor(MediaContext({}, {}, str, lambda text: [], lambda text: None)) is None


@pytest.mark.parametrize("name", [*QWEN, "muse_glimmer", "gemma4_moe", "gemma4_unified"])
def test_towers_in_bfloat16(
    name: str, load_golden: Callable[..., Any], load_model: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    """Rows keep the activations' type and stay within 5 % of their range."""
    golden, model = load_golden(name), load_model(name, make_options(dtype="bfloat16"), torch.bfloat16)
    for item in gemma_inputs(golden) if name.startswith("gemma") else grid_inputs(golden):
        encoded = model.encode_media(item)
        assert {part.dtype for part in (encoded.embeddings, *encoded.features)} == {torch.bfloat16}
        if item.kind != "audio":
            expected = golden.tensors[f"{item.kind}_embeds"]
            worst = float((encoded.embeddings.float() - expected).abs().max())
            assert worst <= 0.05 * float(expected.max() - expected.min())

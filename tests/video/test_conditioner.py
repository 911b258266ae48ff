"""The text conditioner against the reference."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vkit.video.h3.encoder_weights import EncoderWeights
from vkit.video.h3.geometry import Size
from vkit.video.h3.presentation import (
    Piece,
    Presentation,
    ShownReference,
    VisionBlock,
    VisionTokens,
    keyframe_pieces,
    present,
    reference_pieces,
)
from vkit.video.h3.text_tower import TextTower
from vkit.video.h3.vision import PatchShape, VisionTower, features
from vkit.video.h3.weights import Residency

CPU = Residency(torch.device("cpu"), "none")
TOLERANCE = 5e-5
GOLDEN_LAYERS = 5


@pytest.fixture(scope="module")
def weights(goldens: Path, tmp_path_factory: pytest.TempPathFactory) -> EncoderWeights:
    folder = tmp_path_factory.mktemp("encoder")
    source = goldens / "text_encoder"
    (folder / "config.json").write_text((source / "config.json").read_text())
    (folder / "model.safetensors").write_bytes((source / "weights.hf.safetensors").read_bytes())
    return EncoderWeights(folder, max_layers=GOLDEN_LAYERS)


@pytest.fixture(scope="module")
def io(goldens: Path) -> dict[str, Tensor]:
    return load_file(goldens / "text_encoder" / "io.safetensors")


def _tokens(weights: EncoderWeights) -> VisionTokens:
    c = weights.config
    return VisionTokens(c.image_token_id, c.video_token_id, c.vision_start_token_id, c.vision_end_token_id)


def _shown(weights: EncoderWeights, token_ids: list[int], blocks: list[VisionBlock]) -> Presentation:
    """A stored case, put together again from its text runs and blocks."""
    tokens = _tokens(weights)
    pieces: list[Piece] = []
    waiting, index = list(blocks), 0
    while index < len(token_ids):
        if token_ids[index] == tokens.start:
            block = waiting.pop(0)
            pieces.append(block)
            index += block.num_pads + 2
        else:
            pieces.append(str(token_ids[index]))
            index += 1
    shown = present(pieces, lambda text: [int(text)], tokens)
    assert list(shown.token_ids) == token_ids
    return shown


def test_text(weights: EncoderWeights, io: dict[str, Tensor]) -> None:
    shown = _shown(weights, io["text.input_ids"].tolist(), [])
    taps: dict[int, Tensor] = {}
    out = TextTower(weights, CPU, torch.float32)(shown, on_layer=lambda index, x: taps.update({index: x.clone()}))
    assert float((taps[0] - io["text.hidden_after_layer1"]).abs().max()) <= TOLERANCE
    assert float((out - io["text.hidden_after_layer5"]).abs().max()) <= TOLERANCE
    assert float((out - io["text.final_normed"]).abs().max()) > 0.1


def test_positions_of_pictures_and_clips(weights: EncoderWeights, io: dict[str, Tensor]) -> None:
    for name, kind in (("image", "image"), ("video", "video")):
        frames, rows, columns = io[f"{name}.grid_thw"][0].tolist()
        blocks = [VisionBlock(kind, rows // 2, columns // 2)] * frames  # type: ignore[arg-type]
        shown = _shown(weights, io[f"{name}.input_ids"].tolist(), blocks)
        assert shown.positions.tolist() == io[f"{name}.mrope_positions"].tolist()


def test_keyframes_and_references_are_labelled_in_order() -> None:
    picture, pair = VisionBlock("image", 1, 2), VisionBlock("video", 1, 1)
    assert keyframe_pieces("go", [picture, picture]) == ["<Picture 1>: ", picture, "<Picture 2>: ", picture, "go"]
    pieces = reference_pieces(
        "go",
        [
            ShownReference("image", False, (picture,)),
            ShownReference("video", True, (pair, pair), ("<0.2 seconds>", "<1.0 seconds>")),
            ShownReference("audio", True),
            ShownReference("image", False, (picture,)),
            ShownReference("video", False, (pair,), ("<0.2 seconds>",)),
        ],
    )
    assert pieces == [
        *("<Picture 1>: ", picture),
        *("<Audio 1>: ", "<Video 1>: ", "<0.2 seconds>", pair, "<1.0 seconds>", pair),
        "<Audio 2>: ",
        *("<Picture 2>: ", picture),
        *("<Video 2>: ", "<0.2 seconds>", pair),
        "go",
    ]


def test_tags_follow_the_kind_of_token() -> None:
    tokens = VisionTokens(60, 61, 62, 63)
    shown = present(["ab", VisionBlock("video", 2, 1), "c"], lambda text: [ord(letter) for letter in text], tokens)
    assert shown.token_ids == (97, 98, 62, 61, 61, 63, 99)
    assert shown.tags == (1, 1, 0, 0, 0, 0, 1)
    assert shown.pads.tolist() == [3, 4]
    assert shown.positions.tolist() == [[0, 1, 2, 3, 3, 5, 6], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 3, 5, 6]]


@pytest.mark.parametrize(("name", "kind"), [("image", "image"), ("video", "video")])
def test_what_is_seen(weights: EncoderWeights, io: dict[str, Tensor], name: str, kind: str) -> None:
    tower = VisionTower(weights, CPU.device, torch.float32)
    grid = tuple(io[f"{name}.grid_thw"][0].tolist())
    merged, deepstack = tower([(io[f"{name}.pixel_patches"], grid)])  # type: ignore[list-item]
    if name == "image":
        assert float((merged - io["image.merged"]).abs().max()) <= TOLERANCE
        for index, part in enumerate(deepstack):
            assert float((part - io[f"image.deepstack{index}"]).abs().max()) <= TOLERANCE
    blocks = [VisionBlock(kind, grid[1] // 2, grid[2] // 2)] * grid[0]  # type: ignore[arg-type]
    shown = _shown(weights, io[f"{name}.input_ids"].tolist(), blocks)
    out = TextTower(weights, CPU, torch.float32)(shown, merged, deepstack)
    assert float((out - io[f"{name}.hidden_after_layer5"]).abs().max()) <= TOLERANCE


def test_patches_are_ordered_by_merged_block() -> None:
    shape = PatchShape(2, 2, 2)
    frames = np.random.default_rng(0).integers(0, 256, (2, 4, 8, 3), dtype=np.uint8)
    patches, grid = features(frames, Size(8, 4), shape)
    assert grid == (1, 2, 4)
    pixels = (frames.astype(np.float32) / 255 - 0.5) / 0.5
    row = 0
    for block in range(2):
        for dy in range(2):
            for dx in range(2):
                top, left = 2 * dy, 2 * (2 * block + dx)
                want = pixels[:, top : top + 2, left : left + 2].transpose(3, 0, 1, 2).reshape(-1)
                assert np.allclose(patches[row].numpy(), want, atol=1e-6)
                row += 1
    still, still_grid = features(frames[:1], Size(8, 4), shape)
    assert still_grid == (1, 2, 4)
    both = still.view(8, 3, 2, 2, 2)
    assert torch.equal(both[:, :, 0], both[:, :, 1])

"""A random Qwen3-VL of the reference library, judged at run time on pictures of odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vkit.loaders import open_checkpoint
from vkit.media import ImageMedia, MediaInput, VideoMedia
from vkit.media.qwen import PixelRules, QwenMarks, QwenMedia
from vkit.models import build_model

IMAGE, VIDEO, START, END = 250, 251, 252, 253
RULES = PixelRules(64, 4096)
QWEN = QwenMedia(
    QwenMarks(IMAGE, VIDEO, START, END),
    str,
    lambda text: list(text.encode()),
    patch_size=4,
    image_rules=RULES,
    video_rules=PixelRules(64, 8192),
)


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, (*shape, 3), dtype=np.uint8)


def image(height: int, width: int) -> MediaInput:
    return QWEN.prepare(ImageMedia(noise(height, width)))


CASES: dict[str, tuple[list[int], list[MediaInput]]] = {
    "text": ([1, 2, 3, 4, 5], []),
    "thin": ([7, START, IMAGE, END, 8], [image(9, 150)]),
    "tall": ([START, IMAGE, END], [image(170, 31)]),
    "smallest": ([3, START, IMAGE, END, 9, 9], [image(1, 1)]),
    "several": ([START, IMAGE, END, 5, START, IMAGE, END, IMAGE], [image(31, 17), image(64, 90), image(8, 8)]),
    "video": (
        [4, START, VIDEO, END, 6, START, IMAGE, END],
        [image(23, 40), QWEN.prepare(VideoMedia(noise(9, 20, 37), fps=4.0))],
    ),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random model, with norms and biases that are not 1 and 0, and the folder it was saved to."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 24,
            "vocab_size": 256,
            "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [6, 3, 3],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 3,
            "hidden_size": 40,
            "num_heads": 5,
            "intermediate_size": 56,
            "out_hidden_size": 48,
            "num_position_embeddings": 49,
            "patch_size": 4,
            "deepstack_visual_indexes": [0, 2],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(5)
    model = Qwen3VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.3))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    folder = tmp_path_factory.mktemp("oracle")
    model.save_pretrained(folder)
    return model, folder


def expected(model: Any, ids: list[int], items: list[MediaInput]) -> tuple[torch.Tensor, list[int]]:
    """Logits at every prompt position and twelve greedy tokens."""
    given: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    kinds = {IMAGE: 1, VIDEO: 2}
    given["mm_token_type_ids"] = torch.tensor([[kinds.get(token, 0) for token in ids]])
    for kind, values, grids in (
        ("image", "pixel_values", "image_grid_thw"),
        ("video", "pixel_values_videos", "video_grid_thw"),
    ):
        own = [item for item in items if item.kind == kind]
        if own:
            given[values] = torch.from_numpy(np.concatenate([item.features for item in own]))
            given[grids] = torch.tensor([item.grid for item in own])
    with torch.inference_mode():
        logits = model(**given).logits[0]
        out = model.generate(**given, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
    return logits, out[0, len(ids) :].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("chunk", [5, 400])
def test_against_the_reference(
    name: str, chunk: int, oracle: tuple[Any, Path], make_driver: Callable[..., Any], make_options: Callable[..., Any]
) -> None:
    ids, items = CASES[name]
    placed = QWEN.place(ids, items)
    logits, tokens = expected(oracle[0], placed.token_ids, items)
    options = make_options(block_size=16, max_model_len=512)
    driver = make_driver(build_model(open_checkpoint(oracle[1]), options), options)
    sequence = driver.start("a", placed)
    rows = []
    while sequence.num_output_tokens < 12:
        share = driver.share(sequence, chunk, all_logits=sequence.num_output_tokens == 0)
        (found,) = driver.run([share])
        if sequence.num_output_tokens == 0:
            rows.append(found)
        if share.samples:
            sequence.token_ids.append(int(found[-1].argmax()))
    torch.testing.assert_close(torch.cat(rows), logits, atol=1e-3, rtol=1e-4)
    assert sequence.token_ids[sequence.num_prompt_tokens :] == tokens

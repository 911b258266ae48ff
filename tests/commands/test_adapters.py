"""`vkit complete` and `vkit chat` with a low-rank adapter, on a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    path.mkdir()
    for name in ("llama/config.json", "llama/model.safetensors"):
        shutil.copyfile(GOLDENS / name, path / Path(name).name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / "byte_tokenizer" / name, path / name)
    return path


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    torch.manual_seed(1)
    stored = {}
    for name, weight in load_file(GOLDENS / "llama" / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            key = f"base_model.model.{name.removesuffix('.weight')}"
            stored[f"{key}.lora_A.weight"] = torch.randn(4, weight.shape[1]) * 0.3
            stored[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], 4) * 0.3
    save_file(stored, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return path


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_the_adapter_is_used(
    command: str, vkit_run: Callable[..., Any], model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKIT_THREADS", "1")
    args = [command, "--model", str(model), "--max-tokens", "8"]
    stdin = "hello\n" if command == "chat" else ""
    args += ["--prompt", "hello"] if command == "complete" else []
    plain = vkit_run(*args, stdin=stdin)
    adapted = vkit_run(*args, "--enable-lora", "--lora-modules", f"a={adapter}", stdin=stdin)
    assert plain.status == adapted.status == 0, adapted.stderr
    assert plain.stdout != adapted.stdout


def test_flags_that_do_not_fit(vkit_run: Callable[..., Any], model: Path, adapter: Path) -> None:
    for flags, message in (
        (["--enable-lora"], "one adapter is needed here, got 0"),
        (["--lora-modules", f"a={adapter}"], "--lora-modules: needs --enable-lora"),
        (["--enable-lora", "--lora-modules", "a=x", "--lora-modules", "b=x"], "one adapter is needed here, got 2"),
        (["--enable-lora", "--lora-modules", "nothing"], "expected NAME=PATH"),
    ):
        result = vkit_run("complete", "--model", str(model), "--prompt", "x", *flags)
        assert (result.status, result.stdout) == (2, "")
        assert message in result.error

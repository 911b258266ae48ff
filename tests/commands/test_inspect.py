"""`vkit inspect`: the page, the JSON, and what is said of damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]
MODELS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


def test_page_and_json(vkit_run: Run) -> None:
    path = MODELS / "qwen3_5" / "model-f32.gguf"
    page = vkit_run("inspect", str(path), "--max-model-len", "256", "--max-num-seqs", "3", "--device", "cpu")
    assert (page.status, page.stderr) == (0, "")
    for words in ("Qwen3_5ForCausalLM", "can be loaded", "yes", "state layers", "full layers", "3 x 256 tokens"):
        assert words in page.stdout
    assert "model.layers.0.mlp.down_proj.weight" not in page.stdout
    assert "model.layers.0.mlp.down_proj.weight" in vkit_run("inspect", str(path), "--tensors").stdout
    found = json.loads(vkit_run("inspect", str(path), "--json").stdout)
    assert found["format"] == "gguf"
    assert found["num_tensors"] == len(found["tensors"])


def test_what_cannot_be_loaded_says_why(vkit_run: Run, tmp_path: Path) -> None:
    page = vkit_run("inspect", str(MODELS / "parakeet_ctc"))
    assert page.status == 0
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((MODELS / "llama" / "model-f32.gguf").read_bytes()[:100])
    refused = vkit_run("inspect", str(cut))
    assert refused.status == 1
    assert "cut.gguf" in refused.error
    assert vkit_run("inspect", "no/such.gguf").status == 2

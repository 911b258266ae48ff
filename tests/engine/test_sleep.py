"""Sleep gives memory back at once: nothing waits for the cycle collector, which never looks at what a program froze."""

from __future__ import annotations

import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.recorder import CallRecorder
from vkit import resident
from vkit.llm import LLM
from vkit.starting import starting
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    for source in (GOLDENS / "byte_tokenizer", GOLDENS / "llama"):
        shutil.copytree(source, path, dirs_exist_ok=True, copy_function=shutil.copyfile)
    return path


def tokens(llm: LLM) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)[0].outputs[0].token_ids


@pytest.mark.parametrize("kind", ["plain", "eager", "captured", "adapters", "drafts"])
def test_what_was_loaded_at_the_start_is_freed(kind: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = CallRecorder()
    if kind == "captured":
        monkeypatch.setattr(resident, "recorder_for", lambda device: recorder)
    settings: dict[str, dict[str, Any]] = {
        "eager": {"enforce_eager": True},
        "adapters": {"enable_lora": True},
        "drafts": {"speculative_config": {"model": str(checkpoint), "num_speculative_tokens": 2}},
    }
    sizes = {"max_model_len": 64, "block_size": 16, "num_blocks": 30, "max_num_seqs": 2}
    try:
        with starting():
            llm = LLM(str(checkpoint), dtype="float32", **sizes, **settings.get(kind, {}))
        with llm:
            before = tokens(llm)
            assert (recorder.num_replayed > 0) == (kind == "captured")
            model: Any = llm._loaded.engine.runner
            held = [model._model.model, model._runner.store, model._drafter]
            kept = [weakref.ref(part) for part in held if part is not None]
            assert len(kept) == 2 + (kind == "drafts")
            del held
            llm.sleep(2)
            assert [found() for found in kept] == [None] * len(kept)
            llm.wake_up()
            assert tokens(llm) == before
    finally:
        gc.unfreeze()

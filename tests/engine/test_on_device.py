"""Whole models with captured steps and tokens that stay on the device, on a host that stands in for one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recorder import CallRecorder
from vkit import LLM, SamplingParams, loading, resident
from vkit.facts import ModelFacts

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[CallRecorder]:
    """Every recorder that a runner was given, as for a card."""
    made: list[CallRecorder] = []

    def recorder_for(device: torch.device) -> CallRecorder:
        made.append(CallRecorder())
        return made[-1]

    monkeypatch.setattr(resident, "recorder_for", recorder_for)
    monkeypatch.setattr(loading, "keeps_tokens_on_device", lambda config: config.async_scheduling)
    monkeypatch.setattr(ModelFacts, "block_size_for", lambda facts, asked: asked)
    return made


def opened(folder: Path, name: str, **settings: Any) -> LLM:
    for source in (GOLDENS / "byte_tokenizer", GOLDENS / name):
        shutil.copytree(source, folder, dirs_exist_ok=True)
    chosen = {"dtype": "float32", "cpu_precision": "exact", "max_model_len": 96, "block_size": 16, "num_blocks": 60}
    return LLM(str(folder), **{**chosen, "max_num_seqs": 4, **settings})


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_tokens_of_the_goldens(name: str, is_async: bool, tmp_path: Path, recorders: list[CallRecorder]) -> None:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    prompts = [golden[f"input_ids{suffix}"].tolist() for suffix in ("", "_b")] * 2
    expected = [golden[f"greedy{suffix}"].tolist() for suffix in ("", "_b")] * 2
    params = SamplingParams(temperature=0.0, max_tokens=len(expected[0]), ignore_eos=True)
    with opened(tmp_path, name, async_scheduling=is_async, max_num_batched_tokens=24) as llm:
        assert llm._loaded.engine._launches_ahead == is_async
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert recorders[0].num_recorded == 3  # one, two and four rows
    assert recorders[0].num_replayed >= len(expected[0]) - 1


def test_seeded_draws_do_not_depend_on_any_of_it(tmp_path: Path, recorders: list[CallRecorder]) -> None:
    prompts = [
        {"prompt_token_ids": list(text)} for text in (b"the quick brown", b"fox", b"jumps over the lazy dog", b"a")
    ]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=12 - i, top_k=[0, 9][i % 2]) for i in range(4)]
    with opened(tmp_path, "llama", enforce_eager=True) as llm:
        text = llm.generate(prompts, params)[0].outputs[0].text
    params[0] = params[0].with_(stop=[text[4:6]])  # found in the text a step after its token, or two
    found = []
    for settings in ({"enforce_eager": True}, {"async_scheduling": False}, {"async_scheduling": True}):
        with opened(tmp_path, "llama", **settings) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            found.append([(output.token_ids, output.text, output.stop_reason) for output in outputs])
    assert found[0] == found[1] == found[2]
    assert found[0][0][2] == text[4:6]
    assert len(recorders) == 2  # none for the engine that must run op by op
    assert all(recorder.num_replayed for recorder in recorders)


def test_captured_steps_end_with_sleep_and_come_back(tmp_path: Path, recorders: list[CallRecorder]) -> None:
    prompt, params = {"prompt_token_ids": list(b"the quick brown")}, SamplingParams(temperature=0.0, max_tokens=6)
    with opened(tmp_path, "llama", async_scheduling=True) as llm:
        before = llm.generate(prompt, params)[0].outputs[0].token_ids
        replayed = recorders[0].num_replayed
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert llm.generate(prompt, params)[0].outputs[0].token_ids == before
    assert len(recorders) == 3
    assert recorders[0].num_replayed == replayed, "addresses of memory that is gone"
    assert recorders[1].num_replayed == recorders[2].num_replayed == replayed


def test_steps_with_adapters_are_not_replayed(tmp_path: Path, recorders: list[CallRecorder]) -> None:
    """The same engine, with and without, in one batch and apart: a replay would know nothing of the adapter."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    weight = load_file(GOLDENS / "llama" / "model.safetensors")[f"{name}.weight"]
    save_file(
        {
            f"base_model.model.{name}.lora_A.weight": torch.randn(2, weight.shape[1]),
            f"base_model.model.{name}.lora_B.weight": torch.randn(weight.shape[0], 2),
        },
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prompts = [{"prompt_token_ids": list(text)} for text in (b"the quick brown", b"jumps over")]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    found = []
    for settings in ({"enforce_eager": True}, {"async_scheduling": True}):
        with opened(base, "llama", enable_lora=True, lora_modules={"style": str(folder)}, **settings) as llm:
            alone = [llm.generate(prompts, params, lora=lora) for lora in (None, "style", None)]
            replayed = recorders[0].num_replayed if recorders else 0
            with_it = llm.generate(prompts, params, lora="style")
            assert (recorders[0].num_replayed if recorders else 0) == replayed
        found.append([[output.outputs[0].token_ids for output in outputs] for outputs in [*alone, with_it]])
    assert found[0] == found[1]
    assert found[0][0] == found[0][2] != found[0][1]
    assert recorders[0].num_replayed > 0

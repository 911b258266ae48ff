"""The whole engine over real checkpoints: golden continuations, in every way of running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from vkit import LLM, EngineArgs, InvalidRequest, OutOfMemoryPreflight, SamplingParams, UsageError
from vkit.types import RequestOutput

SHARED = Path(__file__).resolve().parents[3] / "shared"
GOLDENS = SHARED / "goldens" / "models"
SMALL: dict[str, Any] = {
    "num_blocks": 64,
    "block_size": 4,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "threads": 1,
}

pytestmark = pytest.mark.skipif(not GOLDENS.is_dir(), reason="needs the shared goldens")


def open_golden(name: str, file: str = "", **keywords: Any) -> LLM:
    path = GOLDENS / name / file if file else GOLDENS / name
    return LLM(str(path), tokenizer=str(GOLDENS / "byte_tokenizer"), **{**SMALL, **keywords})


def cases(name: str) -> list[tuple[list[int], list[int]]]:
    golden = load_file(GOLDENS / name / "golden.safetensors")
    return [
        (golden[f"input_ids{suffix}"].tolist(), golden[f"greedy{suffix}"].tolist())
        for suffix in ("", "_b")
        if f"greedy{suffix}" in golden
    ]


def greedy(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    outputs: list[RequestOutput] = llm.generate(list(prompts), params)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"max_num_batched_tokens": 8},
        {"enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 16},
        {"scheduling_policy": "lpm", "num_blocks": 42, "max_model_len": 80},
    ],
    ids=["plain", "chunks", "no cache", "async", "lpm, small pool"],
)
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_golden_continuations(name: str, keywords: dict[str, Any]) -> None:
    """llama: full attention only; gemma3: sliding windows beside it."""
    work = cases(name)
    pool = keywords.get("num_blocks", SMALL["num_blocks"]) * (3 if name == "gemma3" else 1)  # it has more groups
    with open_golden(name, **{**keywords, "num_blocks": pool}) as llm:
        for prompt, expected in work:
            assert greedy(llm, [prompt], len(expected)) == [expected]
        prompts = [prompt for prompt, _ in work] * 3
        assert greedy(llm, prompts, 13) == [expected[:13] for _, expected in work] * 3


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2"])
def test_golden_continuations_of_the_other_families(name: str) -> None:
    with open_golden(name) as llm:
        for prompt, expected in cases(name):
            assert greedy(llm, [prompt], len(expected)) == [expected]


def test_golden_continuation_of_a_gguf_file() -> None:
    with open_golden("llama", "model-f32.gguf") as llm:
        for prompt, expected in cases("llama"):
            assert greedy(llm, [prompt], len(expected)) == [expected]


def test_sleeping_gives_the_model_back_and_waking_brings_it_again() -> None:
    ((prompt, expected), *_) = cases("llama")
    with open_golden("llama") as llm:
        for level in (1, 2):
            llm.sleep(level)
            resident = llm._loaded.engine.runner
            assert resident._runner is None  # type: ignore[attr-defined]
            assert (resident._model is None) == (level == 2)  # type: ignore[attr-defined]
            if level == 2:
                with pytest.raises(InvalidRequest, match="weights must be woken before"):
                    llm.wake_up(["kv_cache"])
            llm.wake_up()
            assert greedy(llm, [prompt], len(expected)) == [expected]


def test_settings_are_checked_before_weights() -> None:
    with pytest.raises(TypeError, match="max_num_sequences"):
        LLM(str(GOLDENS / "llama"), max_num_sequences=3)
    with pytest.raises(UsageError, match="--block-size"):
        EngineArgs(model="x", block_size=0)
    with pytest.raises(UsageError, match="--chat-template"):
        open_golden("llama", chat_template="no-such-file.jinja")
    with pytest.raises(UsageError, match=r"--chat-template: .*line 1"):
        open_golden("llama", chat_template="{% if %}")
    with pytest.raises(OutOfMemoryPreflight, match="--num-blocks 3"):
        open_golden("llama", num_blocks=3, max_model_len=128)


def test_a_given_chat_template_is_used() -> None:
    with open_golden("llama", chat_template="{{ messages[0].content }}!") as llm:
        assert llm.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"

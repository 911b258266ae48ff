"""--deterministic: the same bits however a prompt is cut and whatever runs beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from vkit import LLM, SamplingParams, kernels
from vkit.errors import UsageError

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
LENGTHS = {"llama": 700, "gemma3": 700, "qwen3_5": 480, "kimi_linear": 100}
"""Beyond the 512 keys that are summed at once, where the model's positions reach so far."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False)


def prompt_of(name: str) -> list[int]:
    draw = random.Random(1)
    return [3 + draw.randrange(200) for _ in range(LENGTHS[name])]


def opened(name: str, budget: int, *, deterministic: bool = True) -> LLM:
    return LLM(
        str(GOLDENS / name),
        tokenizer=str(GOLDENS / "byte_tokenizer"),
        dtype="float32",
        max_model_len=LENGTHS[name] + 20,
        num_blocks=1000,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        hf_overrides={} if name == "qwen3_5" else {"max_position_embeddings": 1024},
        enable_prefix_caching=False,
        deterministic=deterministic,
    )


def values(entries: Any) -> list[float]:
    return [entry[0].logprob for entry in entries if entry is not None]


def logprobs(name: str, budget: int, num_mates: int, *, deterministic: bool = True) -> list[float]:
    prompt = prompt_of(name)
    mates = [prompt[7 * i : 7 * i + 40 + 30 * i] for i in range(num_mates)]
    with opened(name, budget, deterministic=deterministic) as model:
        output = model.generate([{"prompt_token_ids": ids} for ids in (prompt, *mates)], PARAMS)[0]
    return values(output.prompt_logprobs) + values(output.outputs[0].logprobs)


@pytest.mark.parametrize("name", LENGTHS)
def test_cuts_and_mates_change_no_bit(name: str) -> None:
    if kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    whole = logprobs(name, 1024, 0)
    assert len(whole) == LENGTHS[name] + 5
    for budget, num_mates in ((7, 0), (19, 2), (64, 3)):
        assert logprobs(name, budget, num_mates) == whole


@pytest.mark.parametrize("name", LENGTHS)
def test_what_was_decoded_has_the_same_bits_as_a_prompt(name: str) -> None:
    """As after preemption, or when a conversation goes on."""
    if kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    prompt = prompt_of(name)
    with opened(name, 1024) as model:
        (first,) = model.generate([{"prompt_token_ids": prompt}], PARAMS)
        (again,) = model.generate([{"prompt_token_ids": prompt + list(first.outputs[0].token_ids)}], PARAMS)
    assert values(first.outputs[0].logprobs) == values(again.prompt_logprobs)[len(prompt) - 1 :]


def test_without_it_small_cuts_of_long_prompts_differ() -> None:
    """So that the test above can fail."""
    if kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    assert logprobs("llama", 7, 0, deterministic=False) != logprobs("llama", 1024, 0, deterministic=False)


def test_plain_torch_cannot_promise_it() -> None:
    with (
        kernels.using_backend("cpu", "reference"),
        pytest.raises(UsageError, match="--deterministic: plain torch sums in another order"),
    ):
        logprobs("llama", 1024, 0)

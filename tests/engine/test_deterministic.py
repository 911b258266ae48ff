"""--deterministic: the same bits however a prompt is cut and whatever runs beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from vkit import LLM, SamplingParams, kernels
from vkit.errors import UsageError

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
LENGTHS = {"llama": 700, "gemma3": 700, "qwen3_5": 480, "kimi_linear": 100}
"""Beyond the 512 keys that are summed at once, where the model's positions reach so far."""


def logprobs(name: str, budget: int, num_mates: int, *, deterministic: bool = True) -> list[float]:
    draw = random.Random(1)
    prompt = [3 + draw.randrange(200) for _ in range(LENGTHS[name])]
    mates = [prompt[7 * i : 7 * i + 40 + 30 * i] for i in range(num_mates)]
    longer = {} if name == "qwen3_5" else {"max_position_embeddings": 1024}
    params = SamplingParams(
        temperature=0.0, max_tokens=6, prompt_logprobs=0, logprobs=0, ignore_eos=True, detokenize=False
    )
    with LLM(
        str(GOLDENS / name),
        tokenizer=str(GOLDENS / "byte_tokenizer"),
        dtype="float32",
        max_model_len=LENGTHS[name] + 20,
        num_blocks=1000,
        block_size=16,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        hf_overrides=longer,
        enable_prefix_caching=False,
        deterministic=deterministic,
    ) as model:
        output = model.generate([{"prompt_token_ids": ids} for ids in (prompt, *mates)], params)[0]
    assert output.prompt_logprobs is not None
    assert output.outputs[0].logprobs is not None
    entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return [entry[0].logprob for entry in entries if entry is not None]


@pytest.mark.parametrize("name", LENGTHS)
def test_cuts_and_mates_change_no_bit(name: str) -> None:
    if kernels.backends("cpu")[0].unavailable:
        pytest.skip("no native kernels here")
    whole = logprobs(name, 1024, 0)
    assert len(whole) == LENGTHS[name] + 5
    for budget, num_mates in ((7, 0), (19, 2), (64, 3)):
        assert logprobs(name, budget, num_mates) == whole


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

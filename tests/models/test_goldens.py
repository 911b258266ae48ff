"""Every model against recorded logits and greedy continuations, through the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

MODELS = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"]
TOLERANCE = 5e-4


def greedy_continuation(driver: Any, prompts: dict[str, list[int]], chunk: int, steps: int) -> dict[str, Any]:
    """Prompts admitted one step apart, so that prefill and decode mix; prompt logits and continuations by name."""
    sequences = {name: driver.start(name, prompt) for name, prompt in prompts.items()}
    logits: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
    active: list[Any] = []
    waiting = list(sequences.values())
    while waiting or active:
        if waiting:
            active.append(waiting.pop(0))
        driver.rng.shuffle(active)
        shares = [driver.share(sequence, chunk, all_logits=True) for sequence in active]
        for share, rows in zip(shares, driver.run(shares), strict=True):
            sequence = share.sequence
            if sequence.num_output_tokens == 0:
                logits[sequence.id].append(rows)
            if share.samples:
                sequence.token_ids.append(int(rows[-1].argmax()))
            if sequence.num_output_tokens == steps:
                active.remove(sequence)
                driver.finish(sequence)
    return {
        name: (torch.cat(logits[name]), sequence.token_ids[sequence.num_prompt_tokens :])
        for name, sequence in sequences.items()
    }


@pytest.mark.parametrize("chunk", [1, 5, 7, 64])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy(
    name: str,
    block_size: int,
    chunk: int,
    load_golden: Callable[..., Any],
    load_model: Callable[..., Any],
    make_driver: Callable[..., Any],
    make_options: Callable[..., Any],
) -> None:
    golden = load_golden(name)
    options = make_options(block_size=block_size)
    driver = make_driver(load_model(name, options), options, seed=chunk)
    results = greedy_continuation(driver, {"a": golden.prompt(), "b": golden.prompt("_b")}, chunk, 16)
    for key, suffix in (("a", ""), ("b", "_b")):
        logits, tokens = results[key]
        torch.testing.assert_close(logits, golden.logits(suffix), atol=TOLERANCE, rtol=0)
        assert tokens == golden.greedy(suffix)
    assert len(driver.free) == driver.num_blocks - 1

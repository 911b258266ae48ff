"""The demo model against llama.cpp on the same file: greedy tokens of 20 prompts, up to near ties of the judge."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vkit import LLM, SamplingParams
from vkit.default_model import demo_model

RECORD = Path(__file__).resolve().parents[1] / "data" / "demo_greedy.json"
CASES: list[dict[str, Any]] = json.loads(RECORD.read_text(encoding="utf-8"))["cases"]
NEAR_TIE = 0.1
"""The judge quantises activations to 8 bits: candidates whose log-probabilities differ by less may change places."""


@pytest.fixture(scope="module", params=["fast", "exact"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    found = demo_model()
    if found is None:
        pytest.skip("the demo model is not installed")
    with LLM(model=str(found.path), max_model_len=1024, cpu_precision=request.param) as llm:
        yield llm


@pytest.mark.slow
def test_greedy_tokens_equal_llamacpp_up_to_near_ties(llm: LLM) -> None:
    assert len(CASES) == 20
    prompts = [{"prompt_token_ids": case["prompt_token_ids"]} for case in CASES]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True))
    num_compared = 0
    for case, output in zip(CASES, outputs, strict=True):
        ours, theirs = output.outputs[0].token_ids, case["token_ids"]
        step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        num_compared += len(theirs) if step is None else step
        if step is not None:
            logprobs = dict(case["top"][step])
            chosen, other = logprobs[theirs[step]], logprobs.get(ours[step])
            assert other is not None, f"step {step} of {case['prompt'][:40]!r}: token {ours[step]} is not among the ten"
            assert chosen - other <= NEAR_TIE, f"step {step} of {case['prompt'][:40]!r}"
    assert num_compared > 400  # most of 960: near ties end few comparisons early

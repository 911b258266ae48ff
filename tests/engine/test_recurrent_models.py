"""Models that keep states, through the whole engine: what scheduling does to a request leaves its tokens alone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from vkit.facts import ModelFacts
from vkit.llm import LLM
from vkit.types import SamplingParams

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.mark.parametrize(
    ("name", "num_blocks", "caches_prefixes"),
    [
        ("qwen3_5", 14, False),
        ("qwen3_5", 24, True),
        ("nemotron_h", 20, True),
        pytest.param("kimi_linear", 22, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", 9, True, marks=pytest.mark.slow),
        pytest.param("deepseek_v4", 18, True, marks=pytest.mark.slow),
        pytest.param("gemma4", 14, False, marks=pytest.mark.slow),
    ],
)
def test_preemption_chunks_and_prefixes(
    name: str, num_blocks: int, caches_prefixes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The prompts are shorter than a block that takes as much as a state; small blocks put more boundaries into them.
    monkeypatch.setattr(ModelFacts, "block_size_for", lambda facts, asked: asked)
    for folder in (GOLDENS / "byte_tokenizer", GOLDENS / name):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    golden = load_file(GOLDENS / name / "golden.safetensors")
    prompts = [golden[f"input_ids{suffix}"].tolist() for suffix in ("", "_b")] * 2
    expected = [golden[f"greedy{suffix}"].tolist() for suffix in ("", "_b")] * 2
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    longest = max(map(len, prompts)) + 16
    with LLM(
        str(tmp_path),
        dtype="float32",
        max_model_len=longest,
        block_size=16,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        enable_prefix_caching=caches_prefixes,
    ) as llm:
        for _ in range(2):  # the second time, beginnings may be in the cache
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        counts = {family.name: family.samples[0].value for family in llm.metrics() if family.samples}
    assert counts["vllm:num_preemptions"] > 0
    assert (counts["vllm:prefix_cache_hits"] > 0) == caches_prefixes

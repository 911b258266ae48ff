"""`vkit bench` over the real engine, in this process and behind `vkit serve`, on the made-up model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vkit.benchmark.synthetic import write_synthetic

PROMPTS = [[104, 101, 108], list(range(40)), [7] * 20, [200, 3, 9, 250, 17], list(range(90, 10, -1))]
OUTPUT_LEN = 9
READY_TIMEOUT_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made-up model on disk."""
    return write_synthetic(tmp_path_factory.mktemp("synthetic"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Prompts of token ids."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": ids, "output_len": OUTPUT_LEN}) for ids in PROMPTS))
    return path


@pytest.fixture(scope="module")
def expected_ids(checkpoint: Path) -> list[list[int]]:
    """Greedy ids of each prompt, one request at a time."""
    from vkit import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(model=str(checkpoint)) as llm:
        return [llm.generate([{"prompt_token_ids": ids}], params)[0].outputs[0].token_ids for ids in PROMPTS]


def test_an_engine_in_this_process_gives_the_ids_of_the_library(
    vkit_run: Any, checkpoint: Path, prompt_file: Path, expected_ids: list[list[int]], tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    options = ("--dataset-path", str(prompt_file), "--concurrency", "3", "--json", "-", "--output-token-ids", str(ids))
    run = vkit_run("bench", "--model", str(checkpoint), *options)
    assert run.status == 0, run.stderr
    assert json.loads(ids.read_text()) == expected_ids
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert (summary["completed"], summary["failed"], summary["preemptions"]) == (5, 0, 0)
    assert summary["total_input_tokens"] == sum(map(len, PROMPTS))
    assert summary["total_output_tokens"] == OUTPUT_LEN * len(PROMPTS)
    assert summary["estimated_splits"] == 0
    assert summary["ttft_ms"]["median"] < summary["e2e_ms"]["median"]


def test_drafts_change_no_id_and_are_reported(
    vkit_run: Any, checkpoint: Path, prompt_file: Path, expected_ids: list[list[int]], tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    drafting = json.dumps({"model": str(checkpoint), "num_speculative_tokens": 3})
    options = ("--dataset-path", str(prompt_file), "--json", "-", "--output-token-ids", str(ids))
    run = vkit_run("bench", "--model", str(checkpoint), "--speculative-config", drafting, *options)
    assert run.status == 0, run.stderr
    assert json.loads(ids.read_text()) == expected_ids
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert summary["draft_acceptance_rate"] > 0.9
    assert 2 < summary["mean_acceptance_length"] <= 4
    shown = vkit_run("bench", "--model", str(checkpoint), "--speculative-config", drafting, *options[:2]).stdout
    assert "acceptance length, mean" in shown
    plain = vkit_run("bench", "--model", str(checkpoint), *options)
    assert json.loads(plain.stdout)["runs"][0]["summary"]["mean_acceptance_length"] is None


def test_every_request_runs_with_the_adapter(
    vkit_run: Any, checkpoint: Path, prompt_file: Path, expected_ids: list[list[int]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    weight = load_file(checkpoint / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    up, down = torch.randn(weight.shape[0], 2), torch.randn(2, weight.shape[1])
    (tmp_path / "a").mkdir()
    prefix = "base_model.model.model.layers.0.mlp.down_proj"
    pair = {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
    save_file(pair, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    ids = tmp_path / "ids.json"
    options = ("--dataset-path", str(prompt_file), "--json", "-", "--output-token-ids", str(ids))
    adapter = ("--enable-lora", "--lora-modules", f"a={tmp_path / 'a'}")
    run = vkit_run("bench", "--model", str(checkpoint), *adapter, *options)
    assert run.status == 0, run.stderr
    assert json.loads(run.stdout)["settings"]["lora"] == "a"

    from vkit import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    with LLM(model=str(checkpoint), enable_lora=True, lora_modules={"a": str(tmp_path / "a")}) as llm:
        adapted = [llm.generate([{"prompt_token_ids": ids}], params, lora="a")[0].outputs[0] for ids in PROMPTS]
    assert json.loads(ids.read_text()) == [output.token_ids for output in adapted] != expected_ids
    refused = vkit_run("bench", "--url", "http://127.0.0.1:9", *adapter)
    assert refused.status == 2
    assert "cannot be used here: --url measures a server with settings of its own" in refused.stderr
    none = vkit_run("bench", "--model", str(checkpoint), "--enable-lora")
    assert (none.status, "one adapter is needed here" in none.stderr) == (2, True)


def test_a_mistyped_key_ends_before_the_model_is_looked_at(vkit_run: Any, tmp_path: Path) -> None:
    for command in (("bench",), ("complete", "--prompt", "x"), ("chat",), ("serve",)):
        config = '{"method": "ngram", "num_speculative_token": 3}'
        run = vkit_run(*command, "--model", str(tmp_path), "--speculative-config", config)
        assert run.status == 2, (command, run.stderr)
        assert "--speculative-config: unknown key 'num_speculative_token'" in run.stderr
        assert "did you mean 'num_speculative_tokens'" in run.stderr
        assert "Traceback" not in run.stderr


def test_a_pool_smaller_than_the_load_is_said_and_changes_no_id(
    vkit_run: Any, checkpoint: Path, prompt_file: Path, expected_ids: list[list[int]], tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    pool = ("--block-size", "16", "--num-blocks", "8", "--max-model-len", "112", "--concurrency", "5")
    options = ("--dataset-path", str(prompt_file), "--output-len", "25", "--json", "-", "--output-token-ids", str(ids))
    run = vkit_run("bench", "--model", str(checkpoint), *pool, *options)
    assert run.status == 0, run.stderr
    assert json.loads(run.stdout)["runs"][0]["summary"]["preemptions"] > 0
    assert "preempted: the KV cache holds less than the load" in run.stderr
    assert [found[:OUTPUT_LEN] for found in json.loads(ids.read_text())] == expected_ids


def test_a_request_that_cannot_fit_fails_alone(vkit_run: Any, checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": [1] * 100}) + "\n" + json.dumps({"prompt": [1, 2]}))
    limits = ("--max-model-len", "64", "--output-len", "4")
    run = vkit_run("bench", "--model", str(checkpoint), "--dataset-path", str(path), *limits, "--json", "-")
    assert run.status == 1
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert (summary["completed"], summary["failed"], summary["total_output_tokens"]) == (1, 1, 4)
    assert "1 of 2 requests failed: prompt: 100 tokens" in run.stderr


def _wait_until_ready(url: str) -> None:
    """The socket is there before the model is."""
    end = time.monotonic() + READY_TIMEOUT_S
    while httpx.get(f"{url}/v1/health/ready").status_code != httpx.codes.OK:
        assert time.monotonic() < end, "the model never got ready"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served_url(checkpoint: Path) -> Iterator[str]:
    """The address of `vkit serve` over the made-up model, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("VKIT_")}
    options = ["--host", "127.0.0.1", "--port", "0", "--max-num-seqs", "8"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "vkit", "serve", "--model", str(checkpoint), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                _wait_until_ready(found[1])
                yield found[1]
                break
        else:
            pytest.fail("".join(lines))
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def test_a_server_of_ours_gives_the_same_ids_and_exact_counts(
    vkit_run: Any, served_url: str, prompt_file: Path, expected_ids: list[list[int]], tmp_path: Path
) -> None:
    ids = tmp_path / "ids.json"
    options = ("--dataset-path", str(prompt_file), "--concurrency", "3", "--json", "-", "--output-token-ids", str(ids))
    run = vkit_run("bench", "--url", served_url, *options)
    assert run.status == 0, run.stderr
    assert json.loads(ids.read_text()) == expected_ids
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert summary["total_input_tokens"] == sum(map(len, PROMPTS))
    assert summary["total_output_tokens"] == OUTPUT_LEN * len(PROMPTS)
    assert summary["estimated_splits"] == 0, "each event carries its count"
    assert "refuses" not in run.stderr


def test_prompts_beyond_the_context_are_refused_before_any_runs(vkit_run: Any) -> None:
    run = vkit_run("bench", "--synthetic", "--max-model-len", "512", "--input-len", "100000", "--json", "-")
    assert (run.status, run.stdout) == (2, "")
    assert run.error == "--input-len: 100000 tokens leave nothing to generate in the context of 512 (at most 511)"


def test_made_up_prompts_of_words_meet_their_length_on_a_server_of_ours(vkit_run: Any, served_url: str) -> None:
    options = ("--num-prompts", "4", "--input-len", "300", "--output-len", "3", "--request-rate", "100", "--json", "-")
    run = vkit_run("bench", "--url", served_url, *options)
    assert run.status == 0, run.stderr
    summary = json.loads(run.stdout)["runs"][0]["summary"]
    assert (summary["completed"], summary["total_output_tokens"]) == (4, 12)
    assert summary["total_input_tokens"] == pytest.approx(1200, rel=0.1)

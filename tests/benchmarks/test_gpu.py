"""The GPU benchmark: its arithmetic, and a run of it with models that are tiny, on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from vkit.kernels import check
from vkit.types import Logprob

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The script's files as modules."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("run", "synthetic", "report")
    before = {name: sys.modules.pop(name, None) for name in names}
    yield {name: importlib.import_module(name) for name in names}
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(FOLDER / "run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def test_a_tiny_run_measures_reports_and_goes_on(tmp_path: Path) -> None:
    document, output = tmp_path / "doc.md", tmp_path / "gpu.json"
    document.write_text("before\n<!-- gpu: begin -->\nold\n<!-- gpu: end -->\nafter\n")
    arguments = ("--tiny", "--output", str(output), "--work", str(tmp_path / "work"), "--markdown", str(document))
    first = run(*arguments, "--only", "kernels,equality")
    assert first.returncode == 0, first.stderr
    report = json.loads(output.read_text())
    assert report["identity"]["tiny"] is True
    assert set(report["stages"]) == {"kernels", "equality"}
    assert "skipped" in report["stages"]["kernels"]
    rows = report["stages"]["equality"]["rows"]
    assert [row["num_equal"] for row in rows] == [192] * 3
    second = run(*arguments, "--only", "equality,engine")
    assert second.returncode == 0, second.stderr
    assert "stage equality" not in second.stderr, "done before"
    report = json.loads(output.read_text())
    assert report["stages"]["equality"]["rows"] == rows
    engine = report["stages"]["engine"]["rows"]
    assert {(row["model"], row["variant"]) for row in engine} == {
        (model, variant) for model in ("bf16", "Q4_K") for variant in ("recorded", "op by op", "planned ahead")
    }
    assert sum(row["what"].startswith("prefill") for row in engine) == 2
    assert all(row["seconds"] > 0 and row["share"] > 0 for row in engine)
    text = document.read_text()
    assert text.startswith("before\n<!-- gpu: begin -->\nMeasured ")
    assert text.endswith("<!-- gpu: end -->\nafter\n")
    assert "says nothing about speed" in text
    assert "| bf16 | op by op | decode, batch 4 |" in text
    assert "old" not in text


@pytest.mark.slow
def test_a_tiny_run_against_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "gpu.json"
    assert run("--tiny", "--output", str(output), "--only", "against").returncode == 0
    rows = json.loads(output.read_text())["stages"]["against"]["rows"]
    assert [row["what"] for row in rows] == ["decode, batch 4", "prefill, 64 tokens"]
    assert all(row["ratio"] > 0 for row in rows)


def test_arguments_that_cannot_be(scripts: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main = scripts["run"].main
    for arguments, message in (
        (["--only", "engine,speed"], "no stage 'speed'"),
        (["--tiny", "--markdown", str(tmp_path / "performance.md")], "has no place in performance.md"),
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


def test_without_a_card_it_says_so(
    scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "unavailable", lambda: "no card here")
    assert scripts["run"].main([]) == 1
    assert "no GPU to measure: no card here" in capsys.readouterr().err


def test_bytes_and_operations_are_those_of_the_model(scripts: dict[str, Any], tmp_path: Path) -> None:
    synthetic = scripts["synthetic"]
    shape = synthetic.LLAMA_8B
    assert shape.num_multiplied == 32 * (4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336) + 128_256 * 4096
    assert shape.kv_bytes_per_token == 131_072
    small = synthetic.Shape(8, 4, 1, 2, 1, 4, 10, 16)
    products = 2 * 3 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 4) + 2 * 10 * 8
    pairs = 3 * 4 // 2
    assert small.prefill_flop(3) == products + 4 * 2 * 4 * pairs
    stored = synthetic.write_plain(tmp_path / "m", synthetic.TINY, torch.device("cpu"))
    files = sum(file.stat().st_size for file in (tmp_path / "m").glob("*.safetensors"))
    embedding = 2 * synthetic.TINY.vocab * synthetic.TINY.hidden
    assert 0 <= files - stored.weight_bytes - embedding < 10_000  # headers
    packed = synthetic.write_q4_k(tmp_path / "m.gguf", synthetic.TINY, stored.path)
    size = (tmp_path / "m.gguf").stat().st_size
    assert 0 <= size - packed.weight_bytes - synthetic.TINY.vocab * synthetic.TINY.hidden * 144 // 256 < 10_000


def test_random_blocks_are_weights_of_a_usual_size(scripts: dict[str, Any]) -> None:
    import numpy as np

    from vkit.quantization import QuantizedTensor

    raw = scripts["synthetic"]._random_blocks(np.random.default_rng(0), 1024, 512)
    blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(512, -1)
    weights = QuantizedTensor(blocks, "Q4_K", (512, 512)).dequantize()
    assert 0.5 < float(weights.std()) * 512**0.5 < 2.0
    assert abs(float(weights.mean())) < 0.2 * float(weights.std())


@dataclass
class Output:
    token_ids: list[int]
    logprobs: list[list[Logprob]]


def outputs(gap: float) -> list[Output]:
    row = [Logprob(7, -1.0, 1), Logprob(7, -1.0, 1), Logprob(8, -1.0 - gap, 2)]
    return [Output([7, 7, 7], [row] * 3), Output([7, 7, 7], [row] * 3)]


def test_tokens_are_compared_up_to_a_near_tie(scripts: dict[str, Any]) -> None:
    compared = scripts["run"].compared
    same = compared([[7, 7, 7], [7, 7, 7]], outputs(1.0))
    assert same == {"num_equal": 6, "num_compared": 6, "worst_gap": 0.0, "passed": True}
    tie = compared([[7, 8, 3], [7, 7, 7]], outputs(1e-4))
    assert (tie["num_equal"], tie["num_compared"], tie["passed"]) == (4, 5, True)
    wrong = compared([[7, 8, 3], [7, 7, 7]], outputs(0.1))
    assert not wrong["passed"]


def test_shares_are_of_what_was_measured(scripts: dict[str, Any]) -> None:
    run, synthetic = scripts["run"], scripts["synthetic"]
    plan = run.card_plan()
    stored = synthetic.Stored(Path("m"), Path("m"), plan.shape, 15_000_000_000)
    ceilings = run.speeds.Ceilings(4e12, 8e14)
    row = run.decode_row(stored, plan, 64, 0.01, ceilings)
    moved = 15_000_000_000 + 64 * (512 + 80) * 131_072
    assert row["tokens_per_s"] == 6400
    assert row["share"] == pytest.approx(moved / 0.01 / 4e12)
    prefill = run.prefill_row(stored, plan, 0.25, ceilings)
    assert prefill["share"] == pytest.approx(plan.shape.prefill_flop(8192) / 0.25 / 8e14)
    assert plan.max_model_len == 8194
    assert plan.num_blocks >= 64 * 21


def test_failures_come_first_in_what_is_said_and_in_the_exit_status(scripts: dict[str, Any], tmp_path: Path) -> None:
    run = scripts["run"]
    report = {
        "identity": {"device": "card", "tiny": False, "vkit": "1", "torch": "2"},
        "date": "2026-11-30",
        "stages": {
            "kernels": {
                "report": {
                    "num_failed": 1,
                    "parity": [{"op": "rope", "dtype": "bfloat16", "shape": "5", "passed": False}],
                    "speeds": [{"op": "rope", "shape": "5", "seconds": 1e-6, "share": 0.5}, {"failure": "x"}],
                }
            },
            "engine": {"failure": "RuntimeError: gone"},
        },
    }
    text = scripts["report"].section(report)
    assert "0 of 1 comparisons" in text
    assert "- FAILED: rope bfloat16 5" in text
    assert "**engine: failed.** RuntimeError: gone" in text
    assert run.has_failed(report)
    assert not run.has_failed({"stages": {"equality": {"passed": True}}})
    (tmp_path / "doc.md").write_text("no marks")
    with pytest.raises(ValueError, match="once each"):
        scripts["report"].written(tmp_path / "doc.md", text)

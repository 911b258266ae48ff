"""The check of a card, with the interpreter standing in for one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from vkit.kernels import check, speeds
from vkit.kernels.cases import CASES, Case, Source

CPU = torch.device("cpu")
FEW = [case for case in CASES if case.op in ("silu_and_mul", "axis_table")][:3]


def test_every_op_is_compared_and_timed() -> None:
    from vkit.kernels.triton.ops import OPS

    lines: list[str] = []
    report = check.check(CPU, speeds.SMALL, speeds.time_on_host, lines.append, FEW)
    assert report["num_failed"] == 0
    assert [(row["op"], row["passed"]) for row in report["parity"]] == [(case.op, True) for case in FEW for _ in "123"]
    assert {row["op"] for row in report["speeds"]} == set(OPS) - {"axis_table"}
    assert all(row["seconds"] > 0 and row["share"] > 0 for row in report["speeds"])
    assert len(lines) == len(report["parity"]) + 1 + len(report["speeds"])
    assert lines[0].startswith("PASS silu_and_mul float32 (0, 8): error")
    json.dumps(report, allow_nan=False)


def test_a_wrong_and_a_failing_kernel_are_reported_and_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from vkit.kernels.triton import ops

    def wrong(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x[..., ::2], float("nan"))

    def failing(x: torch.Tensor, approximate: str = "tanh") -> torch.Tensor:
        raise RuntimeError("out of resources: shared memory\nmore")

    works = [work for work in speeds.works(CPU, speeds.SMALL) if work.op in ("silu_and_mul", "gelu_and_mul")]
    monkeypatch.setattr(speeds, "works", lambda device, sizes: works)
    monkeypatch.setattr(ops, "OPS", {**ops.OPS, "silu_and_mul": wrong, "gelu_and_mul": failing})
    cases = [case for case in CASES if case.op in ("silu_and_mul", "gelu_and_mul") and case.label == "(3, 154)"]
    lines: list[str] = []
    report = check.check(CPU, speeds.SMALL, speeds.time_on_host, lines.append, cases)
    assert "FAIL silu_and_mul float32 (3, 154): not finite where the reference is, or the other way round" in lines
    assert "FAIL gelu_and_mul float32 (3, 154): RuntimeError: out of resources: shared memory" in lines
    assert "FAIL gelu_and_mul 3 x 24: RuntimeError: out of resources: shared memory" in lines
    assert report["num_failed"] == 7
    json.dumps(report, allow_nan=False)


def test_rates_are_bytes_or_operations_over_time() -> None:
    ceilings = speeds.measure_ceilings(CPU, replace(speeds.SMALL, copy_bytes=4000, matrix=10), lambda run: 0.5)
    assert (ceilings.copy_bytes_per_s, ceilings.matmul_flop_per_s) == (16000.0, 4000.0)
    moved = speeds.Work("rms_norm", "x", lambda: (1,), num_bytes=1000)
    row = speeds.measure(moved, lambda x: x, ceilings, speeds.SMALL, lambda run: 0.25)
    assert (row["bytes_per_s"], row["share"]) == (4000.0, 0.25)
    product = speeds.Work("paged_attention", "x", lambda: (1,), num_flop=1000)
    row = speeds.measure(product, lambda x: x, ceilings, speeds.SMALL, lambda run: 0.25)
    assert (row["flop_per_s"], row["share"]) == (4000.0, 1.0)


def test_inputs_rotate() -> None:
    made = iter(range(100))
    seen: list[int] = []
    work = speeds.Work("rms_norm", "x", lambda: (next(made),), num_bytes=1000)

    def timer(run: object) -> float:
        for index in range(7):
            run(index)  # type: ignore[operator]
        return 1.0

    speeds.measure(work, seen.append, speeds.Ceilings(1.0, 1.0), replace(speeds.SMALL, rotated_bytes=2500), timer)
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_work_of_a_known_size() -> None:
    works = {f"{work.op} {work.label}": work for work in speeds.works(CPU, speeds.SMALL)}
    assert works["rms_norm 3 x 40"].num_bytes == 2 * 3 * 40 * 2
    assert works["paged_attention prefill, 9"].num_flop == 4 * 4 * 16 * 45  # 4 heads of 16, 45 pairs
    assert works["paged_attention decode, 2 x 20"].num_bytes == 2 * (2 * 20 * 2 * 16 * 2) + 2 * (2 * 4 * 16 * 2)


def test_without_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "unavailable", lambda: "torch finds no usable card")
    assert check.main(["--json", str(tmp_path / "out.json")]) == 1
    assert capsys.readouterr().err == "no GPU to check: torch finds no usable card\n"
    assert not (tmp_path / "out.json").exists()


def test_the_report_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for num_failed in (0, 3):
        monkeypatch.setattr(check, "check_card", lambda say, n=num_failed: {"num_failed": n})
        assert check.main(["--json", str(tmp_path / "out.json")]) == (1 if num_failed else 0)
        assert json.loads((tmp_path / "out.json").read_text()) == {"num_failed": num_failed}


def test_cases_are_the_same_each_time() -> None:
    case: Case = FEW[1]
    first, second = (case.make(Source(CPU, torch.float32, torch.Generator().manual_seed(0))) for _ in range(2))
    assert torch.equal(first[0], second[0])

"""The check of a card's CUDA kernels, with the processor standing in for one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from vkit.kernels import check, dispatch, speeds
from vkit.kernels.cuda import backend

CPU = torch.device("cpu")


def few() -> check.Checked:
    from vkit.kernels.cuda import ops

    every = check.cuda_kernels(ops.find)
    labels = ("(3, 1023) offset 0.0", "few queries, 4/4 heads of 80/80", "IQ4_NL, (5, 1, 1120)", "8 wide")
    return check.Checked(every.name, every.find, [case for case in every.selected if case.label in labels], every.works)


def test_every_op_is_compared_and_timed_by_its_own_kernel() -> None:
    from vkit.kernels.cuda.ops import OPS

    lines: list[str] = []
    report = check.check(CPU, speeds.SMALL, speeds.time_on_host, lines.append, (), [few()])
    assert report["num_failed"] == 0
    assert {row["backend"] for row in report["parity"]} == {"cuda"}
    assert {(row["op"], row["dtype"]) for row in report["parity"]} == {
        (op, dtype)
        for op in OPS
        for dtype in ("float32", "bfloat16", "float16")
        if (op, dtype) != ("paged_attention", "float32")
    }
    timed = [row for row in report["speeds"] if row["backend"] == "cuda"]
    assert {row["op"] for row in timed} == set(OPS)
    assert all("bytes_per_s" in row and row["share"] > 0 for row in timed)
    assert "PASS cuda rms_norm float32 (3, 1023) offset 0.0: error" in "\n".join(lines)
    assert any(line.startswith("cuda paged_attention decode, 2 x 20: ") for line in lines)
    json.dumps(report, allow_nan=False)


def test_a_wrong_kernel_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = few()

    def find(op: str, dtype: torch.dtype) -> Any:
        return (lambda x, *rest: x * 2) if op == "rms_norm" else None

    wrong = check.Checked("cuda", find, kernels.selected, lambda device, sizes: ())
    lines: list[str] = []
    rows = check.parity(CPU, wrong, lines.append)
    assert rows
    assert not any(row["passed"] for row in rows)
    assert all(line.startswith("FAIL cuda rms_norm") for line in lines)


@pytest.mark.parametrize("reason", [None, "nvcc is not found"])
def test_what_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> None:
    offered = [
        dispatch.Backend("cuda", "cuda", backend.find, unavailable=reason),
        dispatch.Backend("triton", "cuda", lambda op, dtype: None),
    ]
    monkeypatch.setattr(dispatch, "backends", lambda device_type: offered)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    given: list[Any] = []
    monkeypatch.setattr(check, "check", lambda *arguments: given.append(arguments) or {"num_failed": 0})
    lines: list[str] = []
    check.check_card(lines.append)
    assert [item.name for item in given[0][-1]] == ([] if reason else ["cuda"])
    assert lines == (["cuda kernels are not checked: nvcc is not found"] if reason else [])

"""Checks every kernel on the card at hand and says how fast each is: `python -m vkit.kernels.check [--json FILE]`.

First each op against its reference, over odd shapes, strides and types; then the ceilings of the card, and each op's
share of them. `vkit doctor --gpu` is the same. Without a card that can run the kernels it says so and exits with 1.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from vkit.kernels import cases, dispatch, speeds

Say = Callable[[str], object]
BACKEND = "triton"


def unavailable() -> str | None:
    """Why no kernel can be checked on this machine, in one clause; None if they can."""
    for backend in dispatch.backends("cuda"):
        if backend.name == BACKEND and backend.unavailable:
            return backend.unavailable
    return None if torch.cuda.is_available() else "torch finds no usable card"


def check_card(say: Say, selected: Sequence[cases.Case] = cases.CASES) -> dict[str, Any]:
    """The report of the present card; see `check`.

    Raises:
        RuntimeError: no card here can run the kernels; the message says why in one clause.
    """
    reason = unavailable()
    if reason:
        raise RuntimeError(reason)
    return check(torch.device("cuda"), speeds.CARD, speeds.time_on_card, say, selected)


def check(
    device: torch.device,
    sizes: speeds.Sizes,
    timer: speeds.Timer,
    say: Say,
    selected: Sequence[cases.Case] = cases.CASES,
) -> dict[str, Any]:
    """Everything on one device, a line for each item as it is done: what ran where, parity, ceilings and speeds."""
    from vkit.kernels.triton.ops import OPS

    report = {**identify(device), "parity": parity(device, OPS, say, selected)}
    ceilings = speeds.measure_ceilings(device, sizes, timer)
    copy, product = ceilings.copy_bytes_per_s, ceilings.matmul_flop_per_s
    say(f"ceilings: copy {copy / 1e9:.1f} GB/s, bf16 products {product / 1e12:.2f} TFLOP/s")
    timed = []
    for work in speeds.works(device, sizes):
        row = _attempt(speeds.measure, work, OPS[work.op], ceilings, sizes, timer)
        timed.append(row if isinstance(row, dict) else {"op": work.op, "shape": work.label, "failure": row})
        say(_speed_line(timed[-1]))
    return {**report, "ceilings": asdict(ceilings), "speeds": timed, "num_failed": _count_failed(report, timed)}


def identify(device: torch.device) -> dict[str, Any]:
    """The device and the versions and the date of what ran on it."""
    import triton

    found: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "device": device.type,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "total_bytes": properties.total_memory,
        }
    return found


def parity(
    device: torch.device, ops: Mapping[str, Callable[..., Any]], say: Say, selected: Sequence[cases.Case]
) -> list[dict[str, Any]]:
    """Each case in each type: its error, the tolerance, and whether it passed."""
    reference = dispatch.reference_ops()
    rows = []
    for case in selected:
        for dtype in case.dtypes:
            found = _attempt(cases.judge, case, dtype, ops[case.op], reference[case.op], device)
            row: dict[str, Any] = {"op": case.op, "dtype": str(dtype).removeprefix("torch."), "shape": case.label}
            if isinstance(found, cases.Verdict):
                error = found.error if math.isfinite(found.error) else None  # JSON has no infinity
                row |= {"error": error, "tolerance": found.tolerance, "passed": found.is_good}
            else:
                row |= {"failure": found, "passed": False}
            rows.append(row)
            say(_parity_line(row))
    return rows


def _attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """What `run` gives, or the first line of the error it ended in: one failing item must not hide the others."""
    from triton.runtime.errors import TritonError

    try:
        return run(*arguments)
    except (RuntimeError, ValueError, TypeError, TritonError) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _parity_line(row: Mapping[str, Any]) -> str:
    mark = "PASS" if row["passed"] else "FAIL"
    if "failure" in row:
        found = row["failure"]
    elif row["error"] is None:
        found = "not finite where the reference is, or the other way round"
    else:
        found = f"error {row['error']:.2e} of {row['tolerance']:.2e}"
    return f"{mark} {row['op']} {row['dtype']} {row['shape']}: {found}"


def _speed_line(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return f"FAIL {row['op']} {row['shape']}: {row['failure']}"
    if "flop_per_s" in row:
        rate = f"{row['flop_per_s'] / 1e12:.2f} TFLOP/s"
    else:
        rate = f"{row['bytes_per_s'] / 1e9:.1f} GB/s"
    return f"{row['op']} {row['shape']}: {row['seconds'] * 1e6:.1f} us, {rate}, {row['share']:.0%} of the ceiling"


def _count_failed(report: Mapping[str, Any], timed: Sequence[Mapping[str, Any]]) -> int:
    return sum(not row["passed"] for row in report["parity"]) + sum("failure" in row for row in timed)


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 without a usable card or with a kernel that failed."""
    parser = argparse.ArgumentParser(prog="python -m vkit.kernels.check", description="Check the GPU kernels.")
    parser.add_argument("--json", type=Path, help="file to write the report to")
    options = parser.parse_args(arguments)
    try:
        report = check_card(print)
    except RuntimeError as reason:
        print(f"no GPU to check: {reason}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 1 if report["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

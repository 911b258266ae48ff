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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from vkit.kernels import cases, dispatch, speeds

Say = Callable[[str], object]
BACKEND = "triton"


@dataclass(frozen=True)
class Checked:
    """Kernels of one backend that are compared and timed."""

    name: str
    find: dispatch.OpFinder
    selected: Sequence[cases.Case]
    works: Callable[[torch.device, speeds.Sizes], Iterable[speeds.Work]] = speeds.works

    @property
    def prefix(self) -> str:
        """What a line about them begins with, after PASS or FAIL: Triton's are the rule."""
        return "" if self.name == BACKEND else f"{self.name} "


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
    others = []
    for backend in dispatch.backends("cuda"):
        if backend.name == "cuda" and backend.unavailable is None:
            others.append(cuda_kernels(backend.find))
        elif backend.name == "cuda":
            say(f"cuda kernels are not checked: {backend.unavailable}")
    return check(torch.device("cuda"), speeds.CARD, speeds.time_on_card, say, selected, others)


def cuda_kernels(find: dispatch.OpFinder) -> Checked:
    """The kernels in CUDA C++, on the common cases and their own; timed where no other kernel takes the call."""
    from vkit.kernels.cuda.cases import OWN_CASES
    from vkit.kernels.cuda.ops import OPS

    def works(device: torch.device, sizes: speeds.Sizes) -> Iterator[speeds.Work]:
        for work in speeds.works(device, sizes):
            if work.op in OPS and not work.num_flop:  # those bound by products are Triton's
                yield work

    return Checked("cuda", find, [*(case for case in cases.CASES if case.op in OPS), *OWN_CASES], works)


def check(
    device: torch.device,
    sizes: speeds.Sizes,
    timer: speeds.Timer,
    say: Say,
    selected: Sequence[cases.Case] = cases.CASES,
    others: Sequence[Checked] = (),
) -> dict[str, Any]:
    """Everything on one device, a line for each item as it is done: what ran where, parity, ceilings and speeds.

    Of Triton's kernels, then of `others`.
    """
    from vkit.kernels.triton.ops import OPS

    checked = [Checked(BACKEND, lambda op, dtype: OPS.get(op), selected), *others]
    report = {**identify(device), "parity": [row for item in checked for row in parity(device, item, say)]}
    ceilings = speeds.measure_ceilings(device, sizes, timer)
    copy, product = ceilings.copy_bytes_per_s, ceilings.matmul_flop_per_s
    say(f"ceilings: copy {copy / 1e9:.1f} GB/s, bf16 products {product / 1e12:.2f} TFLOP/s")
    timed = []
    for item in checked:
        for work in item.works(device, sizes):
            op = item.find(work.op, torch.bfloat16)
            if op is None:
                continue
            row = _attempt(speeds.measure, work, op, ceilings, sizes, timer)
            row = row if isinstance(row, dict) else {"op": work.op, "shape": work.label, "failure": row}
            timed.append({"backend": item.name, **row})
            say(_speed_line(timed[-1], item.prefix))
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


def parity(device: torch.device, checked: Checked, say: Say) -> list[dict[str, Any]]:
    """Each case in each type that has a kernel: its error, the tolerance, and whether it passed."""
    reference = dispatch.reference_ops()
    rows = []
    for case in checked.selected:
        for dtype in case.dtypes:
            op = checked.find(case.op, dtype)
            if op is None:
                continue
            found = _attempt(cases.judge, case, dtype, op, reference[case.op], device)
            about = {"op": case.op, "dtype": str(dtype).removeprefix("torch."), "shape": case.label}
            row: dict[str, Any] = {"backend": checked.name, **about}
            if isinstance(found, cases.Verdict):
                error = found.error if math.isfinite(found.error) else None  # JSON has no infinity
                row |= {"error": error, "tolerance": found.tolerance, "passed": found.is_good}
            else:
                row |= {"failure": found, "passed": False}
            rows.append(row)
            say(_parity_line(row, checked.prefix))
    return rows


def _attempt(run: Callable[..., Any], *arguments: Any) -> Any:
    """What `run` gives, or the first line of the error it ended in: one failing item must not hide the others."""
    from triton.runtime.errors import TritonError

    try:
        return run(*arguments)
    except (RuntimeError, ValueError, TypeError, TritonError) as error:
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _parity_line(row: Mapping[str, Any], prefix: str) -> str:
    mark = f"{'PASS' if row['passed'] else 'FAIL'} {prefix}".rstrip()
    if "failure" in row:
        found = row["failure"]
    elif row["error"] is None:
        found = "not finite where the reference is, or the other way round"
    else:
        found = f"error {row['error']:.2e} of {row['tolerance']:.2e}"
    return f"{mark} {row['op']} {row['dtype']} {row['shape']}: {found}"


def _speed_line(row: Mapping[str, Any], prefix: str) -> str:
    if "failure" in row:
        return f"FAIL {prefix}{row['op']} {row['shape']}: {row['failure']}"
    if "flop_per_s" in row:
        rate = f"{row['flop_per_s'] / 1e12:.2f} TFLOP/s"
    else:
        rate = f"{row['bytes_per_s'] / 1e9:.1f} GB/s"
    return (
        f"{prefix}{row['op']} {row['shape']}: {row['seconds'] * 1e6:.1f} us, {rate}, {row['share']:.0%} of the ceiling"
    )


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

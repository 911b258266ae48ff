"""What every kernel takes on real cards, compiled without one, against the table in tests/data.

After a change: `python -m vkit.kernels.triton.ahead --write tests/data/gpu_resources.json`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).parents[2] / "data" / "gpu_resources.json"
SPILLS_ALLOWED: dict[tuple[str, str], str] = {}
"""(kernel, target) -> why it may spill."""


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def test_the_table_has_every_kernel_as_it_is_written_now(recorded: dict[str, Any]) -> None:
    from vkit.kernels.triton.ahead import TARGETS, fingerprint
    from vkit.kernels.triton.ops import AHEAD

    names = [ahead.name for ahead in AHEAD]
    assert len(set(names)) == len(names)
    assert {ahead.name: fingerprint(ahead) for ahead in AHEAD} == {
        name: row["source"] for name, row in recorded["kernels"].items()
    }
    assert all(set(recorded["kernels"][ahead.name]) == {"source", *ahead.targets} for ahead in AHEAD)
    assert {target for ahead in AHEAD for target in ahead.targets} == set(TARGETS)


def test_nothing_spills_and_everything_fits(recorded: dict[str, Any]) -> None:
    from vkit.kernels.triton.ahead import SHARED_LIMIT
    from vkit.kernels.triton.ops import AHEAD

    for ahead in AHEAD:
        for target in ahead.targets:
            row = recorded["kernels"][ahead.name][target]
            if (ahead.name, target) not in SPILLS_ALLOWED:
                assert row["stack"] + row["local"] == 0, f"{ahead.name} spills on {target}"
            assert row["registers"] * 32 * ahead.num_warps <= 65536, f"{ahead.name} does not fit on {target}"
            assert row["shared"] <= SHARED_LIMIT[target], f"{ahead.name} does not fit on {target}"
            for wanted in (*ahead.expects.get("all", ()), *ahead.expects.get(target, ())):
                assert wanted in row["instructions"], f"{ahead.name} lost {wanted} on {target}"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_compiling_gives_the_table(recorded: dict[str, Any], target: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "vkit.kernels.triton.ahead", "--targets", target]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    for name, row in found["kernels"].items():
        before, now = recorded["kernels"][name][target], row[target]
        assert (now["stack"], now["local"]) == (before["stack"], before["local"]), f"{name} on {target}"
        if found["triton"] == recorded["triton"]:
            assert now == before, f"{name} on {target}"

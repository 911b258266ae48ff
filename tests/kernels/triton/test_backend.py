"""Where the Triton kernels are offered, and what loading them costs where they cannot run."""

from __future__ import annotations

import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from vkit.kernels import dispatch
from vkit.kernels.triton import backend


def _library(monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]] | None) -> list[str]:
    """A management library with these cards, or without a driver; says what was asked of it."""
    asked: list[str] = []

    class NVMLError(Exception):
        pass

    def start() -> None:
        asked.append("init")
        if capabilities is None:
            raise NVMLError("Driver Not Loaded")

    library: Any = types.ModuleType("pynvml")
    library.NVMLError = NVMLError
    library.nvmlInit = start
    library.nvmlShutdown = lambda: asked.append("shutdown")
    library.nvmlDeviceGetCount = lambda: len(capabilities or ())
    library.nvmlDeviceGetHandleByIndex = lambda index: index
    library.nvmlDeviceGetCudaComputeCapability = lambda index: (capabilities or [])[index]
    monkeypatch.setitem(sys.modules, "pynvml", library)
    monkeypatch.setattr(backend, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setenv("CC", "cc")
    return asked


def test_it_is_offered_for_cuda_alone_and_says_why_it_cannot_run() -> None:
    assert backend.NAME not in [item.name for item in dispatch.backends("cpu")]
    offered = {item.name: item.unavailable for item in dispatch.backends("cuda")}
    if torch.version.cuda is None:
        assert offered[backend.NAME] == "this torch build has no CUDA"


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ([(9, 0)], None),
        ([(8, 0), (12, 0)], None),
        ([(9, 0), (7, 5)], "a card of compute capability 7.5, expected 8.0 or later"),
        ([], "the driver knows no card"),
        (None, "no NVIDIA driver answers (Driver Not Loaded)"),
    ],
)
def test_capability(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]] | None, expected: str | None
) -> None:
    asked = _library(monkeypatch, capabilities)
    assert backend.unavailable() == expected
    assert asked == (["init"] if capabilities is None else ["init", "shutdown"])
    assert not torch.cuda.is_initialized()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    _library(monkeypatch, [(9, 0)])
    monkeypatch.delenv("CC")
    monkeypatch.setattr(backend.shutil, "which", lambda name: None)
    assert str(backend.unavailable()).startswith("no C compiler found")
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    assert backend.unavailable() == "triton is not installed (pip install 'vkit[cuda]')"
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(backend, "find_spec", lambda name: object() if name == "triton" else None)
    assert backend.unavailable() == "nvidia-ml-py is not installed (pip install 'vkit[cuda]')"


def test_it_has_an_implementation_per_op_and_type() -> None:
    from vkit.kernels.triton.ops import OPS

    assert all(backend.find(op, torch.bfloat16) is OPS[op] for op in OPS)
    assert backend.find("rms_norm", torch.float64) is None
    assert backend.find("linear", torch.bfloat16) is None


def test_a_machine_without_a_card_loads_no_triton() -> None:
    code = (
        "import sys, torch; from vkit import kernels; kernels.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6);"
        "kernels.backends('cuda'); sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

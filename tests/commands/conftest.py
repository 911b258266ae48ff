"""Runs the program in this process or in one of its own, with a model that is made up."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import vkit
from vkit.cli import main

HERE = Path(__file__).parent


@dataclass
class Result:
    """What a run of the program left behind."""

    status: int
    stdout: str
    stderr: str

    @property
    def error(self) -> str:
        """The one error line."""
        lines = [line for line in self.stderr.splitlines() if line.startswith("vkit: error: ")]
        assert len(lines) == 1, self.stderr
        assert "Traceback" not in self.stderr
        return lines[0].removeprefix("vkit: error: ")


def _fake_module() -> Any:
    spec = importlib.util.spec_from_file_location("fake_llm", HERE / "fake_llm.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_llm"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the person running the tests may change their result."""
    for name in list(os.environ):
        if name.startswith("VKIT_") or name in ("NO_COLOR", "FORCE_COLOR"):
            monkeypatch.delenv(name)


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class that stands in for vkit.LLM; its `made` lists the instances."""
    fake = type("FakeLLM", (_fake_module().FakeLLM,), {})
    sys.modules["fake_llm"].FakeLLM.made.clear()
    monkeypatch.setitem(vars(vkit), "LLM", fake)  # without looking the real one up, which would import torch
    return fake


@pytest.fixture
def vkit_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run the program in this process: `vkit_run("complete", "--prompt", "x", stdin="")`."""

    def run(*args: str, stdin: str | bytes = b"") -> Result:
        raw = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))
        capfd.readouterr()
        status = main(args)
        sys.stdout.flush()
        captured = capfd.readouterr()
        return Result(status, captured.out, captured.err)

    return run


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    """A path that exists; the stand-in never reads it."""
    path = tmp_path / "model.gguf"
    path.touch()
    return path


FAKE_PROGRAM = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
import vkit
from fake_llm import FakeLLM
for setting in sys.argv.pop(1).split(";"):
    name, _, value = setting.partition("=")
    if name:
        setattr(FakeLLM, name, float(value) if name == "delay_s" else value)
vkit.LLM = FakeLLM
from vkit.cli import main
sys.exit(main())
"""


def fake_program(*args: str, settings: str = "") -> list[str]:
    """The command line of a process whose vkit.LLM is the stand-in."""
    return [sys.executable, "-P", "-c", FAKE_PROGRAM, settings, *args]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start the program with the stand-in as a process of its own; whatever still runs is ended."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(*args: str, settings: str = "", env: Mapping[str, str] | None = None, **pipes: Any) -> Any:
        process = subprocess.Popen(
            fake_program(*args, settings=settings),
            env={**os.environ, **(env or {})},
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **pipes},
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        process.kill()
        process.wait()

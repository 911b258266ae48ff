"""How the program starts: what ends it early, and what it must not run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("heavy", ["typer", "vkit.command", "logging"])
def test_an_interrupt_while_modules_load_is_one_line(heavy: str, tmp_path: Path) -> None:
    # The interpreter's own hook sends the interrupt exactly when the import begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {heavy!r}:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "vkit", "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "vkit: interrupted\n")


def test_files_of_the_current_folder_are_not_run(tmp_path: Path) -> None:
    for name in ("tokenize", "torch", "typer", "signal", "yaml"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong file ran')\n")
    command = [sys.executable, "-m", "vkit", "complete", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--prompt" in done.stdout

"""`vkit serve` as a process of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
PROGRAM = [sys.executable, "-m", "vkit"]


def environment() -> dict[str, str]:
    """This process's, without settings of vkit."""
    return {key: value for key, value in os.environ.items() if not key.startswith("VKIT_")}


def make_tiny_checkpoint(folder: Path) -> Path:
    """A random Llama of three layers with a byte tokenizer and a chat template."""
    folder.mkdir(parents=True)
    for name in ("llama/config.json", "llama/model.safetensors", "byte_tokenizer/tokenizer.json"):
        shutil.copyfile(GOLDENS / name, folder / Path(name).name)
    shutil.copyfile(GOLDENS / "byte_tokenizer" / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


class Running:
    """A served process; `model` None: the one it finds by itself. Ready, or ended, once made."""

    def __init__(self, model: Path | None, *args: str) -> None:
        given = [] if model is None else ["--model", str(model)]
        command = [*PROGRAM, "serve", *given, "--host", "127.0.0.1", "--port", "0", "--threads", "1", *args]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        self.lines: list[str] = []
        self.url = ""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("listening on "):
                self.url = line.split()[-1]
            if line.startswith("ready after "):
                break
        # Somebody must read on, or the process stops when the pipe is full.
        self._reader = threading.Thread(target=self._read_on, daemon=True)
        self._reader.start()

    def _read_on(self) -> None:
        assert self.process.stderr is not None
        self.lines.extend(self.process.stderr)

    def stop(self) -> int:
        """End it as an operator would; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=120)
        self._reader.join(timeout=120)
        assert self.process.stdout is not None
        assert self.process.stdout.read() == ""
        return status

    def close(self) -> None:
        """Make sure that it has ended."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout=120)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

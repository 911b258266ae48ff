"""A video model of random weights, things to refer to, and command lines over them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vkit.video.frames import frame_path, write_ppm
from vkit.video.h3.request import VideoModelPaths
from vkit.video.h3.tiny import make_tiny
from vkit.video.sound import write_wav


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> VideoModelPaths:
    """Partition fl2va."""
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_ref(tmp_path_factory: pytest.TempPathFactory) -> VideoModelPaths:
    """Partition ref2va."""
    return make_tiny(tmp_path_factory.mktemp("tiny_ref"), partition="ref2va")


@pytest.fixture(scope="session")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and bad files: see the names."""
    folder = tmp_path_factory.mktemp("media")
    draw = np.random.default_rng(5)

    def noise(height: int, width: int) -> Any:
        return draw.integers(0, 256, (height, width, 3), dtype=np.uint8)

    write_ppm(folder / "square.ppm", noise(64, 64))
    write_ppm(folder / "wide.ppm", noise(48, 96))
    write_ppm(folder / "strip.ppm", noise(10, 60))
    (folder / "cut.ppm").write_bytes((folder / "square.ppm").read_bytes()[:500])
    (folder / "text.png").write_text("this is no picture")
    (folder / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    (folder / "empty.jpg").touch()
    for name, sizes in (("clip", [(48, 64)] * 26), ("uneven", [(48, 64), (64, 48)]), ("hollow", [])):
        (folder / name).mkdir()
        for index, size in enumerate(sizes):
            write_ppm(frame_path(folder / name, index), noise(*size))
    time = np.arange(16_000) / 32_000
    write_wav(folder / "tone.wav", np.stack([np.sin(time * 2000), np.cos(time * 1500)]).astype(np.float32) * 0.3)
    (folder / "silent.wav").write_bytes((folder / "tone.wav").read_bytes()[:44])
    np.ones(64, "<f4").tofile(folder / "two.f32")
    np.ones(5, "<f4").tofile(folder / "odd.f32")
    np.full(32, np.nan, "<f4").tofile(folder / "nan.f32")
    np.ones(64, "<f4").tofile(folder / "tagged.f32")
    (folder / "tagged.f32.tags.json").write_text("[1, 1, 1]")
    return folder


Line = Callable[..., list[str]]


@pytest.fixture
def line(tiny: VideoModelPaths, tmp_path: Path) -> Line:
    """Builds the arguments of a short run; None leaves a flag out, True gives it alone, a list repeats it."""

    def build(paths: VideoModelPaths = tiny, **changes: Any) -> list[str]:
        flags: dict[str, Any] = {
            "dit": paths.dit,
            "encoder": paths.encoder,
            "video_vae": paths.video_vae,
            "audio_vae": paths.audio_vae,
            "prompt": "waves",
            "frames": 22,
            "size": "64x64",
            "steps": 3,
            "out": tmp_path / "out.mp4",
        }
        args = ["h3-gen"]
        for name, value in {**flags, **changes}.items():
            if value is None:
                continue
            for item in value if isinstance(value, list) else [value]:
                args.append("--" + name.replace("_", "-"))
                args += [] if item is True else [str(item)]
        return args

    return build


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@dataclass
class Program:
    """The program as a process of its own, its streams in files."""

    process: subprocess.Popen[bytes]
    out: Path
    log: Path

    @property
    def stdout(self) -> str:
        """What it printed so far."""
        return self.out.read_text()

    @property
    def stderr(self) -> str:
        """What it said so far."""
        return self.log.read_text()

    def until(self, found: Callable[[], Any], seconds: float = 120.0) -> Any:
        """What `found` gives once it gives something; the program must live until then."""
        end = time.monotonic() + seconds
        while not (value := found()):
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < end, self.stderr
            time.sleep(0.02)
        return value

    def ended(self, number: int | None = None) -> int:
        """Its status, after the signal `number` if one is given."""
        if number is not None:
            self.process.send_signal(number)
        return self.process.wait(timeout=120)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts the program; whatever still runs is ended."""
    running: list[Program] = []

    def start(*args: str) -> Program:
        out, log = (tmp_path / f"{len(running)}.{name}" for name in ("out", "log"))
        with out.open("wb") as stdout, log.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "vkit", *args],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        running.append(Program(process, out, log))
        return running[-1]

    yield start
    for program in running:
        program.process.kill()
        program.process.wait()

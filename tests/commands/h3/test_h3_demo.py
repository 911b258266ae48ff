"""`make demo-video` as it stands in the Makefile, in a folder of its own, over this interpreter."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
STAMPS = ("python", "torch", "vkit", "video")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="no make program on this machine")
def test_the_demo_renders_a_file_in_seconds(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    (tmp_path / "tests").mkdir()
    for name in ("Makefile", "pyproject.toml", "tests/constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in (("python", ""), ("vkit", "-m vkit ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" -P {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    for name in STAMPS:
        (tmp_path / ".venv" / f".stamp-{name}").touch()
    (tmp_path / "demo-video.work" / "state").mkdir(parents=True)  # of an earlier run
    done = subprocess.run(["make", "demo-video"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "what it renders is noise" in done.stderr
    with av.open(str(tmp_path / "demo-video.mp4")) as container:
        (video,), (sound,) = container.streams.video, container.streams.audio
        assert (video.average_rate, video.width, video.height, sound.rate) == (24, 96, 96, 32_000)
        frames = [frame.to_ndarray(format="gray") for frame in container.decode(video)]
    assert len(frames) == 107
    assert frames[50].std() > 5

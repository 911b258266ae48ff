"""Wheels: with the native kernels inside where there is a compiler, and working ones where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from vkit.kernels.compiler import find_compiler

ROOT = Path(__file__).parents[1]
USE = """
import vkit, torch
from vkit import kernels
from vkit.kernels.cpu import library
assert vkit.__file__.startswith({folder!r}), vkit.__file__
y = kernels.linear(torch.ones(1, 32), torch.ones(16, 32))
assert y.tolist() == [[32.0] * 16]
print(kernels.backends("cpu")[0].unavailable or library._installed().level)
"""

pytestmark = pytest.mark.slow


def tools_without_compiler(folder: Path) -> str:
    """A PATH on which only the interpreter is found."""
    folder.mkdir()
    (folder / "python").symlink_to(sys.executable)
    return str(folder)


def wheel_of(tmp_path: Path, **environment: str) -> Path:
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    source = tmp_path / "source"
    for name in listed.stdout.split():
        if (ROOT / name).is_file() and not name.startswith(("tests/", "docs/", "benchmarks/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w"]
    done = subprocess.run(
        [*command, str(tmp_path / "out"), str(source)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "out").glob("*.whl")
    return wheel


def used(wheel: Path, tmp_path: Path, **environment: str) -> str:
    """What the package inside the wheel says of its kernels."""
    folder = tmp_path / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    values = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(folder), **environment}
    done = subprocess.run(
        [sys.executable, "-c", USE.format(folder=str(folder))],
        env=values,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.skipif(find_compiler() is None or not sys.platform.startswith("linux"), reason="no compiler here")
def test_kernels_are_in_the_wheel(tmp_path: Path) -> None:
    wheel = wheel_of(tmp_path)
    assert wheel.name.startswith("vkit-")
    assert "-py3-none-linux_" in wheel.name
    assert used(wheel, tmp_path) in ("scalar", "avx2", "avx512vnni", "amx")
    assert not (tmp_path / "cache").exists()  # nothing was compiled


def test_without_a_compiler(tmp_path: Path) -> None:
    path = tools_without_compiler(tmp_path / "bin")
    wheel = wheel_of(tmp_path, PATH=path, CXX="")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {Path(name).name for name in archive.namelist() if name.startswith("vkit/kernels/cuda/")}
    assert {path.name for pattern in ("*.cu", "*.cuh") for path in (ROOT / "kernels" / "cuda").glob(pattern)} <= inside
    assert "there is no C++ compiler" in used(wheel, tmp_path, PATH=path, CXX="")


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    path = tools_without_compiler(tmp_path / "bin")
    wheel = wheel_of(tmp_path, PATH=path, CXX="/bin/false")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]
    assert "false failed" in used(wheel, tmp_path, PATH=path, CXX="/bin/false")

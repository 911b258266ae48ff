"""Building, choosing a level, counting threads."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from vkit.kernels import build
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.build import build_library
from vkit.kernels.compiler import BuildError, Unit
from vkit.kernels.cpu import threads
from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.sources import LEVEL_FLAGS
from vkit.kernels.cpu.weights import PACKED_FORMATS

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
PROGRAM = "from vkit.kernels.cpu.library import load_library; print(load_library().level)"


def run_python(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Unit:
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "cache")
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return VALUE; }\n')
    return Unit(source, ("-DVALUE=1",))


def test_level_can_be_forced_down(library: Library) -> None:
    for level in library.levels:
        assert run_python(VKIT_CPU_LEVEL=level).stdout.strip() == level


def test_unknown_level_is_refused(library: Library) -> None:
    done = run_python(VKIT_CPU_LEVEL="mmx")
    assert done.returncode
    assert "ValueError: VKIT_CPU_LEVEL=mmx: expected one of scalar, avx2, avx512vnni, amx" in done.stderr


@pytest.mark.parametrize("command", [["doctor"], ["complete", "--prompt", "x", "--model"]])
def test_unknown_level_is_one_line_of_a_command(library: Library, command: list[str], tmp_path: Path) -> None:
    if command[-1] == "--model":
        for source in (GOLDENS / "byte_tokenizer", GOLDENS / "llama"):
            shutil.copytree(source, tmp_path, dirs_exist_ok=True, copy_function=shutil.copyfile)
        command = [*command, str(tmp_path)]
    environment = {**os.environ, "VKIT_CPU_LEVEL": "mmx"}
    done = subprocess.run(
        [sys.executable, "-m", "vkit", *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip().splitlines()[-1].startswith("vkit: error: VKIT_CPU_LEVEL=mmx: expected one of scalar")
    assert done.returncode == 2


def test_level_beyond_the_processor_is_refused(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LEVEL_FLAGS, "imaginary", ())
    with pytest.raises(ValueError, match="this processor runs scalar"):
        library.use_level("imaginary")


def test_levels_share_no_function(library: Library) -> None:
    """The linker keeps one of several equal inline functions: a lower level would run a higher one's instructions."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    listing = subprocess.run([nm, "-C", "--defined-only", library.path], check=True, capture_output=True, text=True)
    symbols = [line.split(maxsplit=2) for line in listing.stdout.splitlines()]
    names = [name for _, kind, name in symbols if kind in "tTwW"]
    assert any("(anonymous namespace)::Q6_K::" in name for name in names)
    shared = [name for name in names if "::" in name and "(anonymous namespace)" not in name]
    assert not [name for name in shared if "std::" not in name]


def test_a_library_is_built_once(unit: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    first = build_library("one", [unit], [], ("-fPIC",))
    assert first.exists()
    monkeypatch.setattr(build, "_compile", lambda *arguments: pytest.fail("compiled again"))
    assert build_library("one", [unit], [], ("-fPIC",)) == first


def test_source_headers_and_flags_are_part_of_the_key(unit: Unit, tmp_path: Path) -> None:
    header = tmp_path / "one.h"
    header.write_text("// 1\n")
    built = {build_library("one", [unit], [header], ("-fPIC",))}
    header.write_text("// 2\n")
    built.add(build_library("one", [unit], [header], ("-fPIC",)))
    built.add(build_library("one", [Unit(unit.source, ("-DVALUE=2",))], [header], ("-fPIC",)))
    built.add(build_library("one", [unit], [header], ("-fPIC", "-O1")))
    unit.source.write_text('extern "C" int one() { return VALUE + 1; }\n')
    built.add(build_library("one", [unit], [header], ("-fPIC",)))
    assert len(built) == 5


def test_a_compiler_is_asked_its_version_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, cache = tmp_path / "c++", tmp_path / "cache"
    monkeypatch.setattr(build, "cache_folder", lambda: cache)

    def put(version: str) -> None:
        compiler.write_text(f"#!/bin/sh\necho {version}\necho asked >> {tmp_path}/asked\n")
        compiler.chmod(0o755)

    def version() -> tuple[str, int]:
        told = build._version(str(compiler))
        return told, (tmp_path / "asked").read_text().count("asked")

    put("compiler 1.0")
    assert [version(), version()] == [("compiler 1.0\n", 1)] * 2
    (kept,) = cache.iterdir()
    kept.write_text(kept.read_text().replace("1.0", "6.6"))
    assert [version(), version()] == [("compiler 1.0\n", 2)] * 2, "a damaged note was believed"
    put("compiler 20.0")
    assert [version(), version()] == [("compiler 20.0\n", 3)] * 2
    compiler.unlink()
    with pytest.raises(BuildError, match="cannot be run"):
        version()


def test_failures_are_one_clause(unit: Unit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"failed: .*error"):
        build_library("one", [Unit(unit.source, ("-DVALUE=)",))], [], ("-fPIC",))
    assert not list((tmp_path / "cache").glob("*.so"))
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    with pytest.raises(BuildError, match=r"no C\+\+ compiler"):
        build_library("one", [unit], [], ())


def test_no_cache_folder_is_a_build_error(unit: Unit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(build, "cache_folder", lambda: tmp_path / "file" / "cache")
    with pytest.raises(BuildError, match="cannot be used"):
        build_library("one", [unit], [], ())


def test_packed_weights_keep_their_size(library: Library) -> None:
    for qtype in PACKED_FORMATS:
        block = BLOCK_FORMATS[qtype]
        assert library.group_bytes(block.type_id, 512) == 16 * block.row_bytes(512)
        assert library.group_bytes(block.type_id, 512 + block.num_elements // 2) == 0
    assert library.group_bytes(BLOCK_FORMATS["IQ1_S"].type_id, 512) == 0


def test_thread_count_respects_the_mask() -> None:
    assert 1 <= threads.usable_threads() <= len(os.sched_getaffinity(0))
    assert threads._quota(7) >= 1


def test_a_forked_child_works(library: Library) -> None:
    """Workers do not survive a fork; the child starts its own."""
    script = (
        "import os, torch; from vkit.kernels.cpu.library import load_library\n"
        "from vkit.kernels.cpu.ops import Operations\n"
        "library = load_library(); library.set_num_threads(3); ops = Operations(library, {})\n"
        "x, w = torch.randn(40, 64), torch.randn(90, 64); y = ops.linear(x, w)\n"
        "pid = os.fork()\n"
        "if not pid: os._exit(0 if torch.equal(ops.linear(x, w), y) else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and torch.equal(ops.linear(x, w), y)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_only_a_files_pages_are_given_back(library: Library, tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(1 << 20))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        kept = view.copy()
        assert resident(view) == view.size
        library.release_mapping(view.ctypes.data, view.size)
        assert resident(view) == 0
        assert np.array_equal(view, kept)
        del view
    library.release_mapping(kept.ctypes.data, kept.size)
    assert kept.tobytes() == path.read_bytes()


def resident(view: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    """Bytes of a mapping that this process holds."""
    lines = Path("/proc/self/smaps").read_text(encoding="ascii").splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"{view.ctypes.data:x}-"))
    (line,) = [line for line in lines[start : start + 8] if line.startswith("Rss:")]
    return int(line.split()[1]) * 1024

"""Compile native sources once per machine and keep the result in the user's cache folder. No torch."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

logger = logging.getLogger("vkit.kernels")


class BuildError(RuntimeError):
    """A library could not be built. The message is one clause that fits behind "because"."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One compiler call: a source file and the flags of its own."""

    source: Path
    flags: tuple[str, ...]


def build_library(name: str, units: Sequence[Unit], headers: Sequence[Path], flags: Sequence[str]) -> Path:
    """The shared library made of `units`, compiled now unless the cache holds it.

    The key covers the text of all files, the flags and the compiler's version. Processes that want the same library at
    the same time wait for the first of them.

    Raises:
        BuildError: there is no compiler, it failed, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (looked for $CXX, g++, c++, clang++)")
    key = _key(compiler, units, headers, flags)
    folder = cache_folder()
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not library.exists():
                _compile(compiler, name, units, flags, library)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    return library


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return Path(platformdirs.user_cache_dir("vkit")) / "kernels"


def find_compiler() -> str | None:
    """The C++ compiler that would be called, or None."""
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if command:
            found = shutil.which(command)
            if found:
                return found
    return None


def _key(compiler: str, units: Sequence[Unit], headers: Sequence[Path], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    # Two machines may share a home folder: what the compiler targets is part of the key, as is its version.
    digest.update(
        f"{_run([compiler, '--version'])}\0{platform.machine()}\0{platform.libc_ver()}\0{list(flags)}".encode()
    )
    for unit in units:
        digest.update(f"\0{unit.source.name}\0{list(unit.flags)}\0".encode())
        digest.update(unit.source.read_bytes())
    for header in sorted(headers):
        digest.update(f"\0{header.name}\0".encode())
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, name: str, units: Sequence[Unit], flags: Sequence[str], library: Path) -> None:
    logger.warning("building the %s kernels with %s (once per machine, about 20 s)", name, Path(compiler).name)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{name}-") as scratch:
        objects = [Path(scratch) / f"{index}.o" for index in range(len(units))]

        def compile_one(unit: Unit, target: Path) -> None:
            _run([compiler, *flags, *unit.flags, "-c", str(unit.source), "-o", str(target)])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(compile_one, units, objects))
        linked = Path(scratch) / library.name
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked), "-pthread"])
        linked.replace(library)  # within one folder, so no other process ever sees half a library
    logger.info("built %s in %.1f s", library, time.monotonic() - started)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        lines = (
            [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["no message"]
        )
        raise BuildError(f"{Path(command[0]).name} failed: {lines[0]}")
    return done.stdout

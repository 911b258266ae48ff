"""Calls the C++ compiler. Standard library alone, nothing of ours: the package's build loads this file by its path."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


class BuildError(RuntimeError):
    """A library could not be built. The message is one clause that fits behind "because"."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One compiler call: a source file and the flags of its own."""

    source: Path
    flags: tuple[str, ...]


def find_compiler() -> str | None:
    """The C++ compiler that would be called, or None."""
    for command in (os.environ.get("CXX"), "g++", "c++", "clang++"):
        if command:
            found = shutil.which(command)
            if found:
                return found
    return None


def source_key(units: Sequence[Unit], headers: Sequence[Path], flags: Sequence[str]) -> str:
    """What tells one library's sources and flags from another's: 16 hexadecimal digits."""
    digest = hashlib.sha256(f"{list(flags)}".encode())
    for unit in units:
        digest.update(f"\0{unit.source.name}\0{list(unit.flags)}\0".encode())
        digest.update(unit.source.read_bytes())
    for header in sorted(headers):
        digest.update(f"\0{header.name}\0".encode())
        digest.update(header.read_bytes())
    return digest.hexdigest()[:16]


def compile_library(
    compiler: str,
    units: Sequence[Unit],
    flags: Sequence[str],
    library: Path,
    link_flags: Sequence[str] = ("-pthread",),
) -> None:
    """Make `library` of the units, as many at a time as there are processors; it appears whole or not at all.

    Raises:
        BuildError: the compiler failed, or cannot be run.
        OSError: the folder cannot be written.
    """
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}-") as scratch:
        objects = [Path(scratch) / f"{index}.o" for index in range(len(units))]

        def compile_one(unit: Unit, target: Path) -> None:
            run([compiler, *flags, *unit.flags, "-c", str(unit.source), "-o", str(target)])

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            list(pool.map(compile_one, units, objects))
        linked = Path(scratch) / library.name
        run([compiler, "-shared", *map(str, objects), "-o", str(linked), *link_flags])
        linked.replace(library)  # within one folder, so no other process ever sees half a library


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        BuildError: it cannot be run, or failed.
    """
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

"""Compile native sources once per machine and keep the result in the user's cache folder. No torch."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from vkit.kernels.compiler import BuildError, Unit, compile_library, find_compiler, run, source_key

logger = logging.getLogger("vkit.kernels")


def build_library(
    name: str,
    units: Sequence[Unit],
    headers: Sequence[Path],
    flags: Sequence[str],
    *,
    compiler: str | None = None,
    link_flags: Sequence[str] = ("-pthread",),
) -> Path:
    """The shared library made of `units`, compiled now unless the cache holds it; by the C++ compiler if none is named.

    The key covers the text of all files, the flags and the compiler's version. Processes that want the same library at
    the same time wait for the first of them.

    Raises:
        BuildError: there is no compiler, it failed, or the cache folder cannot be written.
    """
    compiler = compiler or find_compiler()
    if compiler is None:
        raise BuildError("there is no C++ compiler (looked for $CXX, g++, c++, clang++)")
    key = _key(compiler, source_key(units, headers, (*flags, *link_flags)))
    folder = cache_folder()
    library = folder / f"{name}-{key}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not library.exists():
                _compile(compiler, name, units, flags, library, link_flags)
    except OSError as error:
        raise BuildError(f"{folder} cannot be used: {error}") from error
    return library


def cache_folder() -> Path:
    """Where built libraries are kept."""
    return Path(platformdirs.user_cache_dir("vkit")) / "kernels"


def _key(compiler: str, sources: str) -> str:
    # Two machines may share a home folder: what the compiler targets is part of the key, as is its version.
    about = f"{_version(compiler)}\0{platform.machine()}\0{platform.libc_ver()}\0{sources}"
    return hashlib.sha256(about.encode()).hexdigest()[:16]


def _version(compiler: str) -> str:
    """What the compiler says of itself. Asked once, and remembered as long as its file stays as it is.

    Raises:
        BuildError: it cannot be run.
    """
    real = os.path.realpath(compiler)
    try:
        found = os.stat(real)
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error}") from error
    state = f"{compiler}\0{real}\0{found.st_ino}\0{found.st_size}\0{found.st_mtime_ns}\0{found.st_ctime_ns}"
    kept = cache_folder() / f"compiler-{hashlib.sha256(state.encode()).hexdigest()[:16]}"
    try:
        digest, _, version = kept.read_text("utf-8").partition("\n")
        if digest == hashlib.sha256(version.encode()).hexdigest():
            return version
    except (OSError, UnicodeDecodeError):
        pass
    version = run([compiler, "--version"])
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_text(f"{hashlib.sha256(version.encode()).hexdigest()}\n{version}", "utf-8")
        beside.replace(kept)
    except OSError as error:
        logger.info("%s: the compiler's version is not kept: %s", kept.parent, error.strerror or error)
    return version


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(
    compiler: str, name: str, units: Sequence[Unit], flags: Sequence[str], library: Path, link_flags: Sequence[str]
) -> None:
    logger.warning("building the %s kernels with %s (once per machine, about 20 s)", name, Path(compiler).name)
    started = time.monotonic()
    compile_library(compiler, units, flags, library, link_flags)
    logger.info("built %s in %.1f s", library, time.monotonic() - started)

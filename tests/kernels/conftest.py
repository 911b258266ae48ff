"""A backend fixture (every backend of this machine, the reference included), and the native kernels at every level."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vkit import kernels
from vkit.kernels.build import build_library
from vkit.kernels.compiler import BuildError, Unit
from vkit.kernels.cpu import library as library_module
from vkit.kernels.cpu.library import Library, LibraryError, load_library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.sources import FLAGS, LEVEL_FLAGS, emulation_calls
from vkit.kernels.dispatch import REFERENCE
from vkit.kernels.reference import OPS

BACKENDS = [REFERENCE, *(backend.name for backend in kernels.backends("cpu"))]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The public ops, served by one backend alone, with activations in floating point."""
    unavailable = {item.name: item.unavailable for item in kernels.backends("cpu")}
    if unavailable.get(request.param):
        pytest.skip(f"{request.param}: {unavailable[request.param]}")
    num_threads = len(os.sched_getaffinity(0))
    with kernels.using_backend("cpu", request.param):
        kernels.configure("cpu", num_threads=num_threads, is_exact=True)
        yield request.param
        kernels.configure("cpu", num_threads=num_threads, is_exact=False)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def library() -> Library:
    try:
        return load_library()
    except LibraryError as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def emulated(library: Library) -> Library | None:
    """The tiles' level alone, with tiles made of loops; None where even that needs more than this machine has."""
    folder = Path(library_module.__file__).parent
    units = [Unit(*call) for call in emulation_calls(folder)]
    try:
        built = Library(build_library("cpu-emulated", units, list(folder.glob("*.h")), FLAGS))
    except (BuildError, LibraryError):
        return None
    if not built.can_run("amx"):
        return None
    built.use_level("amx")
    return built


@pytest.fixture(params=list(LEVEL_FLAGS))
def level(request: pytest.FixtureRequest, library: Library, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each level in turn; those the processor lacks are skipped, but for tiles, which are emulated then."""
    before = library.level
    if request.param == "amx" and not library.can_run("amx"):
        stand_in: Library | None = request.getfixturevalue("emulated")
        if stand_in is None:
            pytest.skip("tiles cannot be emulated here")
        stand_in.set_num_threads(library.num_threads)
        monkeypatch.setattr(library, "_c", stand_in._c)
    if not library.can_run(request.param):
        pytest.skip(f"this processor does not run {request.param}")
    library.use_level(request.param)
    assert library.level == request.param
    yield request.param
    monkeypatch.undo()
    library.use_level(before)


@pytest.fixture(params=[1, 3])
def num_threads(request: pytest.FixtureRequest, library: Library) -> Iterator[int]:
    """One thread, and more than most tests have work items."""
    before = library.num_threads
    library.set_num_threads(request.param)
    yield request.param
    library.set_num_threads(before)


@pytest.fixture(scope="session")
def operations(library: Library) -> Operations:
    return Operations(library, dict(OPS))


@pytest.fixture(scope="session")
def golden_blocks() -> dict[str, torch.Tensor]:
    """NAME.raw (blocks, bytes) and NAME.values (blocks, elements) of every block format."""
    shared = Path(__file__).resolve().parents[3] / "shared"
    return load_file(shared / "goldens" / "models" / "gguf_blocks" / "blocks.safetensors")

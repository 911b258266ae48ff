"""The CUDA kernels' own source on the processor: compiled by g++ over host/host_shim.h, called as on a card.

Triton, which takes the calls that are not for them, is interpreted; it must be asked for that before it is imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["TRITON_INTERPRET"] = "1"

HOST = Path(__file__).parent / "host"
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-DVK_HOST", "-xc++", f"-I{HOST}", "-Wno-unknown-pragmas")


@pytest.fixture(scope="session")
def host_library() -> object:
    """The kernels as a library for the processor."""
    pytest.importorskip("triton", reason="the extra cuda is not installed")
    from vkit.kernels.build import build_library
    from vkit.kernels.compiler import find_compiler
    from vkit.kernels.cuda import sources
    from vkit.kernels.cuda.library import Library

    if find_compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels on the processor with")
    headers = [*sources.headers(), *HOST.glob("*.h")]
    return Library(build_library("cuda-host", sources.units(), headers, FLAGS))


@pytest.fixture(autouse=True)
def _on_the_host(host_library: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Wrappers find that library in place of the card's."""
    from vkit.kernels.cuda import attention, library
    from vkit.kernels.triton.common import INTERPRETED

    assert INTERPRETED.value, "triton was loaded without TRITON_INTERPRET=1 before these tests"
    monkeypatch.setattr(library, "load_library", lambda: host_library)
    yield
    assert not any(bool(counter.any()) for kept in attention._counters.values() for counter in kept)

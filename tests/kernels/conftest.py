"""A backend fixture: every backend that this machine can run, the reference included."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from vkit import kernels
from vkit.kernels.dispatch import REFERENCE

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

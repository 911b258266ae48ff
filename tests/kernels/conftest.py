"""A backend fixture: every backend that this machine can run, the reference included."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from vkit import kernels
from vkit.kernels.dispatch import REFERENCE

BACKENDS = [REFERENCE, *(backend.name for backend in kernels.backends("cpu"))]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """The public ops, served by one backend alone."""
    unavailable = {item.name: item.unavailable for item in kernels.backends("cpu")}
    if unavailable.get(request.param):
        pytest.skip(f"{request.param}: {unavailable[request.param]}")
    with kernels.using_backend("cpu", request.param):
        yield request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

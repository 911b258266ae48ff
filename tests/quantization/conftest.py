"""Packing is judged here, not speed: products run in plain torch, whose rounding is that of the dense reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vkit import kernels
from vkit.kernels.dispatch import REFERENCE


@pytest.fixture(autouse=True)
def _plain_torch() -> Iterator[None]:
    with kernels.using_backend("cpu", REFERENCE):
        yield

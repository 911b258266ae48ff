"""Kernels under triton's interpreter. It must be asked for before triton is imported, hence at import."""

from __future__ import annotations

import os

import pytest

os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    """Fails if compiled kernels were loaded before, since nothing here could run them."""
    pytest.importorskip("triton", reason="the extra cuda is not installed")
    from vkit.kernels.triton.common import INTERPRETED

    assert INTERPRETED.value, "triton was loaded without TRITON_INTERPRET=1 before these tests"

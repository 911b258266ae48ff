"""Where the reference data is, and short ways to read it."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
GOLDENS = ROOT.parent / "shared" / "goldens" / "h3"


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The folder of the model's reference data; tests that need it are skipped where it is not."""
    if not GOLDENS.is_dir():
        pytest.skip(f"reference data not found: {GOLDENS}")
    return GOLDENS

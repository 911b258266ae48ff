"""Golden tensors as numpy arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file


@pytest.fixture(scope="session")
def load_golden() -> Callable[[str], dict[str, np.ndarray]]:
    folder = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
    return lambda name: load_file(folder / name / "golden.safetensors")

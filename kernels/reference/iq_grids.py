"""The code books of the IQ1, IQ2 and IQ3 block formats, read from `iq_grids.npz` when one is first needed.

The tables are data of the GGUF format (see NOTICE); `extract_iq_grids` writes the file.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch

GRID_FILE = Path(__file__).with_name("iq_grids.npz")
GRID_NAMES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")


@cache
def grid(name: str, device: torch.device) -> torch.Tensor:
    """The grid of one format, float32 (entries, 8) or, for IQ3, (entries, 4): row i holds the values of index i."""
    with np.load(GRID_FILE) as file:
        return torch.from_numpy(file[name].astype(np.float32)).to(device)

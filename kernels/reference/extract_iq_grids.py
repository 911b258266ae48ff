"""Writes `iq_grids.npz` from the `gguf` package: `python -m vkit.kernels.reference.extract_iq_grids`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vkit.kernels.reference.iq_grids import GRID_FILE, GRID_NAMES


def extract_grids() -> dict[str, npt.NDArray[np.int8]]:
    """The grids of all formats as the `gguf` package holds them, (entries, 8) or, for IQ3, (entries, 4).

    Raises:
        ValueError: a value that does not fit a byte.
    """
    from gguf import quants

    grids = {}
    for name in GRID_NAMES:
        source = getattr(quants, name)
        source.init_grid()
        values = source.grid.reshape(source.grid_shape)
        grids[name] = values.astype(np.int8)
        if not np.array_equal(grids[name], values):
            raise ValueError(f"{name}: grid values do not fit int8")
    return grids


if __name__ == "__main__":
    np.savez_compressed(GRID_FILE, **extract_grids())  # type: ignore[arg-type]

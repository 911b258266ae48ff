"""What the CUDA library is compiled from, and by what. No torch."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from vkit.kernels.compiler import Unit

FOLDER = Path(__file__).parent
UNITS = ("attention.cu", "norm.cu", "packed.cu")
FLAGS = ("-std=c++17", "-O3")


def units() -> list[Unit]:
    """The compiler calls of the library."""
    return [Unit(FOLDER / name, ()) for name in UNITS]


def headers() -> list[Path]:
    """The files that the units include."""
    return sorted(FOLDER.glob("*.cuh"))


def library_flags(targets: Sequence[str]) -> tuple[str, ...]:
    """nvcc's flags for a shared library that runs on these targets ("sm_90")."""
    code = [f"-gencode=arch=compute_{number},code={target}" for target in targets for number in [target[3:]]]
    return (*FLAGS, "-Xcompiler", "-fPIC,-fvisibility=hidden", *code)


def find_nvcc() -> str | None:
    """The CUDA compiler that would be called, or None."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    places = [f"{home}/bin/nvcc" for home in homes if home]
    for command in (*places, "nvcc", "/usr/local/cuda/bin/nvcc"):
        found = shutil.which(command)
        if found:
            return found
    return None

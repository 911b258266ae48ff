"""What the native library is compiled from. Standard library alone, as compiler.py, and for the same reason."""

from __future__ import annotations

import platform
from pathlib import Path

_AVX512 = (
    *("-mavx2", "-mfma", "-mf16c"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni"),
)
LEVEL_FLAGS: dict[str, tuple[str, ...]] = {
    "scalar": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512vnni": _AVX512,
    "amx": (*_AVX512, "-mavx512bf16", "-DVK_TILES"),
}
"""Levels from the lowest to the highest, and the instructions each may use."""

_X86 = ("x86_64", "AMD64")
FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    "-ffp-contract=off",  # a fused multiply-add is written as one, so that levels and tile heights agree
)


def compiler_calls(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """Source files in `folder` and the flags of their own: one call for each level of this architecture."""
    levels = [name for name in LEVEL_FLAGS if name == "scalar" or platform.machine() in _X86]
    calls = [(folder / "level.cpp", (f"-DVK_LEVEL_NAME={name}", *LEVEL_FLAGS[name])) for name in reversed(levels)]
    return [*calls, (folder / "core.cpp", ())]


def emulation_calls(folder: Path) -> list[tuple[Path, tuple[str, ...]]]:
    """As `compiler_calls`, for a library whose only level is `amx` with tiles made of loops: for tests, not for use."""
    flags = ("-DVK_TILE_EMULATION",)
    return [
        (folder / "level.cpp", ("-DVK_LEVEL_NAME=amx", *LEVEL_FLAGS["amx"], *flags)),
        (folder / "core.cpp", flags),
    ]


def library_name(key: str) -> str:
    """The file that a wheel carries, for sources of this key."""
    return f"native-{key}.so"

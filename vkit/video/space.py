"""Whether what a run writes fits on the disk, and may be written at all."""

from __future__ import annotations

import shutil
from pathlib import Path


def lack_of_space(folder: Path, needed: int) -> str | None:
    """What is needed and what is free where `folder` is or will be; None if it fits."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free >= needed:
        return None
    return f"about {needed / 1e9:.2f} GB will be written, {free / 1e9:.2f} GB are free"


def bytes_below(folder: Path) -> int:
    """What the files of a folder take; those that vanish meanwhile take nothing."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:
            continue
    return total


def write_fault(output: Path) -> str | None:
    """Why no file can be made where `output` will be; None if one can: a probe is made beside it and removed."""
    probe = output.with_name(f".{output.name}.probe")
    try:
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None

"""Whether what a run writes fits on the disk."""

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

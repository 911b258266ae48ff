"""Numbers of videos: each is given once, also to a request that was refused and after a restart."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from vkit.server.problems import unavailable

logger = logging.getLogger("vkit.server.video")

COUNTER = "last_number"
PREFIX = "vid_"


class Numbers:
    """The numbers of one folder of jobs. The highest ever given is kept in a file there."""

    def __init__(self, root: Path) -> None:
        """Go on after the highest that was ever given, or has a folder."""
        self._path = root / COUNTER
        self._last = max([_kept(self._path), *(number_of(path) for path in root.glob(f"{PREFIX}*"))])

    def take(self) -> int:
        """The next one, kept before it is given.

        Raises:
            Problem: 503 where it cannot be kept.
        """
        number = self._last + 1
        temporary = self._path.with_suffix(".tmp")
        try:
            with temporary.open("w", encoding="ascii") as file:
                file.write(f"{number}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            logger.error("%s: cannot be written: %s", self._path, error.strerror or error)
            raise unavailable("The server cannot write to its folder of videos.") from None
        self._last = number
        return number


def number_of(path: Path) -> int:
    """The number in the name of a job's folder, 0 for other names."""
    digits = path.name.removeprefix(PREFIX)
    return int(digits) if path.name.startswith(PREFIX) and digits.isascii() and digits.isdecimal() else 0


def _kept(path: Path) -> int:
    try:
        text = path.read_text("ascii").strip()
    except FileNotFoundError:
        return 0
    except (OSError, ValueError) as error:
        logger.warning("%s: cannot be read, numbers go on after the folders there: %s", path, error)
        return 0
    if not text.isdecimal():
        logger.warning("%s: expected a number, numbers go on after the folders there", path)
        return 0
    return int(text)

"""One part of a file, as a Range header asks for it.

Source: RFC 9110, section 14.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio

CHUNK_BYTES = 1 << 18
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)


class UnsatisfiableRange(Exception):
    """The range lies outside the file."""


def asked_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(first, beyond) of the bytes asked for; None for the whole file, also where several ranges are asked for.

    Raises:
        UnsatisfiableRange: a range outside the file.
    """
    found = _RANGE.fullmatch(header.strip()) if header else None
    if found is None or not (found[1] or found[2]):
        return None
    if not found[1]:
        length = int(found[2])
        if not length:
            raise UnsatisfiableRange
        return max(0, size - length), size
    first = int(found[1])
    last = min(int(found[2]), size - 1) if found[2] else size - 1
    if found[2] and int(found[2]) < first:
        return None
    if first >= size:
        raise UnsatisfiableRange
    return first, last + 1


async def part_of(path: Path, first: int, beyond: int) -> AsyncGenerator[bytes, None]:
    """The bytes of a file from `first` up to `beyond`, in pieces."""
    async with await anyio.open_file(path, "rb") as file:
        await file.seek(first)
        left = beyond - first
        while left > 0:
            piece = await file.read(min(CHUNK_BYTES, left))
            if not piece:
                return
            left -= len(piece)
            yield piece

"""Merge tables kept in the user's cache folder, so that a vocabulary is worked through once and not at every start.

An entry is found by a digest of everything it was made of, carries that digest and one of its own bytes, and is written
beside and renamed into place. What does not hold together, or belongs to another vocabulary or version, is no entry.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import tempfile
from pathlib import Path
from typing import Protocol, runtime_checkable

import platformdirs

from vkit import __version__
from vkit.env import TOKENIZER_CACHE
from vkit.text.tables import MergeTables

logger = logging.getLogger("vkit.cache")

MIN_TOKENS = 4096
"""Smaller vocabularies are built faster than looked up."""
_MAGIC = b"vkit merge tables 1".ljust(31) + b"\n"  # as long as a digest, so that numbers lie at multiples of their size
_KEYS = ("general.architecture", "tokenizer.ggml.")


@runtime_checkable
class Digested(Protocol):
    """Metadata that can name its own bytes."""

    def digest(self, *prefixes: str) -> str:
        """SHA-256, in hexadecimal digits, of every key that begins with one of these, and of its bytes."""


def table_folder() -> Path:
    """Where tables are kept."""
    return platformdirs.user_cache_path("vkit") / "tokenizers"


def table_key(metadata: object) -> str | None:
    """The name of the tables of a file with this metadata; None where they are not to be kept.

    Raises:
        UsageError: VKIT_TOKENIZER_CACHE is neither 0 nor 1.
    """
    if not TOKENIZER_CACHE.read() or not isinstance(metadata, Digested):
        return None
    return hashlib.sha256(_MAGIC + f"{__version__}\n{metadata.digest(*_KEYS)}".encode()).hexdigest()


def kept_tables(key: str) -> MergeTables | None:
    """The tables of that name; None if there are none, or none that are whole."""
    try:
        with (table_folder() / key).open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):  # not there, or empty
        return None
    start = len(_MAGIC)
    content = data[start + 64 :]
    is_ours = data[:start] == _MAGIC and data[start : start + 32] == bytes.fromhex(key)
    if not is_ours or data[start + 32 : start + 64] != hashlib.sha256(content).digest():
        return None
    try:
        return MergeTables.unpack(content)
    except ValueError:
        return None


def keep_tables(key: str, tables: MergeTables) -> None:
    """Write the tables of that name; where that fails the next start takes longer, no more."""
    content, folder = tables.pack(), table_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(_MAGIC + bytes.fromhex(key) + hashlib.sha256(content).digest() + content)
            os.replace(beside, folder / key)
        except OSError:
            os.unlink(beside)
            raise
    except OSError as error:
        logger.info("%s: the tokenizer's tables cannot be kept: %s", folder, error.strerror or error)

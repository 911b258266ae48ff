"""Digests of whole files, kept in the user's cache folder so that a file is read once and not at every start.

A digest is kept under everything that changes when a file does: where it lies, its size, its times to the nanosecond,
its inode. The time of change (ctime) is part of it since no program can set that back, as it can the time of writing.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from pathlib import Path

import platformdirs

from vkit.errors import CheckpointError

logger = logging.getLogger("vkit.cache")

TELL_BYTES = 1 << 30
"""Bytes from which reading a file takes long enough to be announced."""
_DIGEST = re.compile(r"[0-9a-f]{128}")


def digest_folder() -> Path:
    """Where digests are kept."""
    return platformdirs.user_cache_path("vkit") / "file-digests"


def file_digest(path: Path) -> str:
    """BLAKE2b of every byte of a file, in hexadecimal digits; from the cache where the file has not changed since.

    Raises:
        CheckpointError: the file cannot be read.
    """
    try:
        real = path.resolve(strict=True)
        state = _state(real)
        kept = digest_folder() / hashlib.sha256(state.encode()).hexdigest()
        known = _read(kept)
        if known is not None:
            return known
        if (size := real.stat().st_size) >= TELL_BYTES:
            logger.info("%s: reading all %.1f GB once, to name cache entries by their weights", path, size / 2**30)
        with real.open("rb") as stream:
            digest = hashlib.file_digest(stream, "blake2b").hexdigest()
        is_settled = _state(real) == state
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    if is_settled:  # one that changed meanwhile has a digest that belongs to no state of it
        _keep(kept, digest)
    return digest


def _state(real: Path) -> str:
    found = real.stat()
    return repr((str(real), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns))


def _read(kept: Path) -> str | None:
    try:
        text = kept.read_text("ascii")
    except (OSError, UnicodeDecodeError):
        return None
    return text if _DIGEST.fullmatch(text) else None


def _keep(kept: Path, digest: str) -> None:
    """Write beside and rename into place; a folder that cannot be written costs time at the next start, no more."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        handle, beside = tempfile.mkstemp(dir=kept.parent)
        with os.fdopen(handle, "w") as stream:
            stream.write(digest)
        os.replace(beside, kept)
    except OSError as error:
        logger.warning("%s: digests of weights cannot be kept: %s", kept.parent, error.strerror or error)

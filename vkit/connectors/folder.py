"""Chunks as files: one each, written beside and renamed into place, so that a reader sees a whole file or none.

Files of one identity lie in a folder of its own and name their identity again inside. What is torn, damaged, renamed or
someone else's is a miss, and is removed where it stands in the way.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from vkit.connectors.envelope import Payload, seal, sealed_bytes, unseal
from vkit.connectors.identity import identity_digest
from vkit.connectors.moving import Chunk, StoreUnavailable
from vkit.errors import UsageError

logger = logging.getLogger("vkit.cache")

SUFFIX = ".kv"
_TEMPORARY = re.compile(r"\.tmp-(\d+)-\d+$")
_STALE_S = 3600.0
_numbers = itertools.count()


class Folder:
    """The files of one identity below `root`. `capacity_bytes` None: never removed for room."""

    def __init__(self, root: Path, identity: Mapping[str, str], capacity_bytes: int | None = None) -> None:
        """Raises:
        UsageError: the folder cannot be made or read.
        """
        self._identity = dict(identity)
        self._capacity = capacity_bytes
        self._path = root / identity_digest(identity)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            self._scan()
        except OSError as error:
            raise UsageError(f"--kv-transfer-config: root_dir: {root}: {error.strerror or error}") from None

    @property
    def num_bytes(self) -> int:
        """Bytes of the files known."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._known)

    def contains(self, key: bytes) -> bool:
        """Whether there is a file of that name; it may yet turn out to be damaged."""
        return key.hex() in self._known or self._file(key).exists()

    def read(self, key: bytes, payload_bytes: int) -> Payload | None:
        """The payload, or None where there is no sound one."""
        file = self._file(key)
        try:
            data = bytearray(file.stat().st_size)
            with file.open("rb", buffering=0) as stream:
                if stream.readinto(data) != len(data):
                    data = bytearray()
        except FileNotFoundError:
            self._drop(key.hex())
            return None
        except OSError as error:
            logger.warning("%s: %s", file, error.strerror or error)
            return None
        payload = unseal(self._identity, key, data, payload_bytes)
        if payload is None:
            logger.warning("%s: torn, damaged or not ours: ignored and removed", file)
            self._remove(key.hex())
            return None
        self._touch(key.hex(), len(data))
        return payload

    def write(self, key: bytes, payload: Payload) -> None:
        """Put a file in place.

        Raises:
            StoreUnavailable: the folder takes no more.
        """
        file = self._file(key)
        temporary = file.with_name(f"{file.name}.tmp-{os.getpid()}-{next(_numbers)}")
        size = sealed_bytes(self._identity, key, len(payload))
        if self._capacity is not None and size > self._capacity:
            raise StoreUnavailable(f"{self._path}: a chunk of {size} bytes is larger than the capacity")
        self._make_room(size)
        try:
            file.parent.mkdir(exist_ok=True)
            with temporary.open("wb") as stream:
                for part in seal(self._identity, key, payload):
                    stream.write(part)
            os.replace(temporary, file)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise StoreUnavailable(f"{file}: {error.strerror or error}") from None
        self._touch(key.hex(), size)

    def clear(self) -> bool:
        """Remove every file; False if one would not go."""
        with self._lock:
            names = list(self._known)
        for name in names:
            self._remove(name)
        return not self._known

    def _file(self, key: bytes) -> Path:
        name = key.hex()
        return self._path / name[:2] / f"{name}{SUFFIX}"

    def _scan(self) -> None:
        """Learn what is there, least recently used first; remove what a killed writer left."""
        found = []
        for file in self._path.glob("??/*"):
            stat = file.stat()
            left = _TEMPORARY.search(file.name)
            if left is not None:
                if not _is_running(int(left.group(1))) or time.time() - stat.st_mtime > _STALE_S:
                    file.unlink(missing_ok=True)
            elif file.suffix == SUFFIX:
                found.append((stat.st_mtime, file.stem, stat.st_size))
        for _, name, size in sorted(found):
            self._known[name] = size
            self._num_bytes += size
        self._make_room(0)

    def _touch(self, name: str, size: int) -> None:
        """Note a use, here and for the next process."""
        with self._lock:
            self._num_bytes += size - self._known.pop(name, 0)
            self._known[name] = size
        with suppress(OSError):
            os.utime(self._file(bytes.fromhex(name)))

    def _make_room(self, size: int) -> None:
        if self._capacity is None:
            return
        while self._num_bytes + size > self._capacity and self._known:
            self._remove(next(iter(self._known)))

    def _remove(self, name: str) -> None:
        try:
            self._file(bytes.fromhex(name)).unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            logger.warning("%s: %s", name, error)
        self._drop(name)

    def _drop(self, name: str) -> None:
        with self._lock:
            self._num_bytes -= self._known.pop(name, 0)


def leading_chunks(folder: Folder, read: Callable[[bytes], Chunk | None], keys: Sequence[bytes]) -> list[Chunk]:
    """What `read` gives for the first keys, up to the first that is missing or damaged.

    Damage rarely comes alone: what follows a damaged file is read too, so that all that is bad is written anew.
    """
    chunks: list[Chunk] = []
    for index, key in enumerate(keys):
        was_there = folder.contains(key)
        chunk = read(key)
        if chunk is None:
            for other in keys[index + 1 :] if was_there else ():
                read(other)
            break
        chunks.append(chunk)
    return chunks


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True

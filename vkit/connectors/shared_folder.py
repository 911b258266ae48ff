"""`FileConnector`: a folder that several engines share. No tier of its own in memory, no limit but the disk's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vkit.cache.connector import ConnectorContext, KVConnector
from vkit.connectors.envelope import Payload
from vkit.connectors.folder import Folder, leading_chunks
from vkit.connectors.moving import Chunk
from vkit.connectors.planning import chunked_connector
from vkit.kv_transfer import ExtraConfig


class FolderStore:
    """Chunks straight from and to files."""

    def __init__(self, folder: Folder) -> None:
        self.payload_bytes = 0
        self._folder = folder

    def peek(self, keys: Sequence[bytes]) -> list[Chunk] | None:
        """Files that are not there need not be read."""
        return None if self._folder.contains(keys[0]) else []

    def read_leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Up to the first file that is missing or damaged."""
        return leading_chunks(self._folder, self.read, keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """Files that are there."""
        return next((i for i, key in enumerate(keys) if not self._folder.contains(key)), len(keys))

    def read(self, key: bytes) -> Chunk | None:
        """One file."""
        payload = self._folder.read(key, self.payload_bytes)
        return None if payload is None else Chunk(payload, "disk")

    def may_contain(self, key: bytes) -> bool:
        """Whether the file is there."""
        return self._folder.contains(key)

    def write(self, key: bytes, payload: Payload) -> None:
        """Put the file in place."""
        self._folder.write(key, payload)

    def clear(self) -> bool:
        """Remove the files."""
        return self._folder.clear()

    def close(self) -> None:
        """Nothing is open."""


def make(context: ConnectorContext) -> KVConnector:
    """The connector.

    Raises:
        UsageError: root_dir missing or unusable, or other keys.
    """
    extra = ExtraConfig(context.config)
    root = extra.required_text("root_dir")
    extra.done()
    return chunked_connector(context, FolderStore(Folder(Path(root), context.identity)))

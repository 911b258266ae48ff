"""`OffloadingConnector`: what falls out of the engine's own cache is kept in host memory, and below that on disk.

Every chunk goes to both tiers; memory forgets the least recently used first, the disk likewise once it is full. A chunk
read from disk is put back into memory.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from vkit.cache.connector import ConnectorContext, ConnectorStats, KVConnector
from vkit.cache.groups import CacheKind
from vkit.connectors.envelope import Payload
from vkit.connectors.folder import Folder, leading_chunks
from vkit.connectors.moving import Chunk, Mover
from vkit.connectors.planning import chunked_connector
from vkit.kv_transfer import ExtraConfig

DEFAULT_MEMORY_BYTES = 1 << 30
"""Host memory where neither num_cpu_blocks nor cpu_bytes_to_use says otherwise; at most an eighth of what is free."""


class HostMemory:
    """Chunks in memory, least recently used forgotten first."""

    def __init__(self, *, max_chunks: int | None = None, max_bytes: int | None = None) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self._chunks: OrderedDict[bytes, Payload] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: bytes) -> Payload | None:
        """The chunk, which counts as used."""
        with self._lock:
            payload = self._chunks.get(key)
            if payload is not None:
                self._chunks.move_to_end(key)
            return payload

    def put(self, key: bytes, payload: Payload) -> None:
        """Keep a chunk, if it fits at all."""
        with self._lock:
            old = self._chunks.pop(key, None)
            self.num_bytes += len(payload) - (0 if old is None else len(old))
            self._chunks[key] = payload
            while self._is_over():
                _, evicted = self._chunks.popitem(last=False)
                self.num_bytes -= len(evicted)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._chunks.clear()
            self.num_bytes = 0

    def _is_over(self) -> bool:
        too_many = self._max_chunks is not None and len(self._chunks) > self._max_chunks
        return too_many or (self._max_bytes is not None and self.num_bytes > self._max_bytes)


class TieredStore:
    """Memory above a folder."""

    def __init__(self, memory: HostMemory, folder: Folder) -> None:
        self.payload_bytes = 0
        self.memory = memory
        self.folder = folder
        self.queued: Callable[[bytes], Payload | None] = lambda key: None
        """Chunks that are still on their way to the folder."""

    def peek(self, keys: Sequence[bytes]) -> list[Chunk] | None:
        """The chunks in memory, unless the disk has to be read for more."""
        chunks: list[Chunk] = []
        for key in keys:
            payload = self._at_hand(key)
            if payload is None:
                return None if self.folder.contains(key) else chunks
            chunks.append(Chunk(payload, "host"))
        return chunks

    def read_leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        """From memory and disk, up to the first that neither has."""
        return leading_chunks(self.folder, self.read, keys)

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """By name only."""
        return next((i for i, key in enumerate(keys) if not self.may_contain(key)), len(keys))

    def read(self, key: bytes) -> Chunk | None:
        """One chunk; from disk it goes back to memory."""
        payload = self._at_hand(key)
        if payload is not None:
            return Chunk(payload, "host")
        payload = self.folder.read(key, self.payload_bytes)
        if payload is None:
            return None
        self.memory.put(key, payload)
        return Chunk(payload, "disk")

    def may_contain(self, key: bytes) -> bool:
        """Whether either tier has it."""
        return self._at_hand(key) is not None or self.folder.contains(key)

    def write(self, key: bytes, payload: Payload) -> None:
        """Keep it in both tiers."""
        self.memory.put(key, payload)
        self.folder.write(key, payload)

    def clear(self) -> bool:
        """Empty both tiers."""
        self.memory.clear()
        return self.folder.clear()

    def close(self) -> None:
        """Give the memory back."""
        self.memory.clear()

    def _at_hand(self, key: bytes) -> Payload | None:
        payload = self.memory.get(key)
        return self.queued(key) if payload is None else payload


def make(context: ConnectorContext) -> KVConnector:
    """The connector.

    Raises:
        UsageError: settings that cannot be; names the key.
    """
    extra = ExtraConfig(context.config)
    root = extra.required_text("root_dir")
    num_blocks, num_bytes = extra.whole("num_cpu_blocks"), extra.whole("cpu_bytes_to_use")
    capacity = extra.whole("fs_capacity_bytes")
    extra.text("eviction_policy", "lru", choices=("lru",))
    group = extra.whole("group_idx", 0, low=0)
    chunk_tokens = extra.whole("offload_block_tokens", context.block_size)
    prompt_only = extra.flag("offload_prompt_only", True)
    extra.done()
    assert group is not None
    assert chunk_tokens is not None
    if num_blocks is not None and num_bytes is not None:
        raise extra.refuse("num_cpu_blocks", "cpu_bytes_to_use was given too; give one of them")
    if group >= len(context.groups) or context.groups[group].kind is not CacheKind.FULL:
        raise extra.refuse("group_idx", f"{group} is no group of full attention of this model")
    if chunk_tokens % context.block_size:
        raise extra.refuse(
            "offload_block_tokens", f"{chunk_tokens} is no multiple of the block size, {context.block_size}"
        )
    chunk_blocks = chunk_tokens // context.block_size
    if num_blocks is not None and num_blocks < chunk_blocks:
        raise extra.refuse("num_cpu_blocks", f"{num_blocks} blocks hold no chunk of {chunk_tokens} tokens")
    if num_blocks is None and num_bytes is None:
        num_bytes = min(DEFAULT_MEMORY_BYTES, psutil.virtual_memory().available // 8)
    memory = HostMemory(max_chunks=None if num_blocks is None else num_blocks // chunk_blocks, max_bytes=num_bytes)
    identity = {**context.identity, "chunk_tokens": str(chunk_tokens)}
    store = TieredStore(memory, Folder(Path(root), identity, capacity))
    stats = ConnectorStats()
    budgets = {"cpu_bytes_to_use": num_bytes, "fs_capacity_bytes": capacity}
    mover = Mover(store, context.groups, chunk_blocks, context.notify, stats, budgets=budgets)
    store.queued = mover.queued
    return chunked_connector(
        context, store, chunk_blocks=chunk_blocks, prompt_only=prompt_only, mover=mover, stats=stats
    )

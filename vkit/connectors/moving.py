"""The worker's half of every built-in connector: chunks of blocks from pages to a store and back.

A chunk is a fixed number of consecutive blocks of one sequence, all layers of all groups together. Stores see bytes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from vkit.cache.connector import ConnectorStats, WorkerSide
from vkit.cache.groups import CacheGroup
from vkit.connectors.envelope import Payload
from vkit.kv_transfer import FLAG

logger = logging.getLogger("vkit.cache")

MAX_QUEUED_BYTES = 512 << 20
"""Bytes that may wait to be written; what comes on top is not stored."""
NUM_READERS = 4
CLOSE_TIMEOUT_S = 30.0


class StoreUnavailable(Exception):
    """The store cannot be reached; the message says why."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes found, and the tier they were found in (one of metrics.CACHED_SOURCES)."""

    payload: Payload
    tier: str


class ChunkStore(Protocol):
    """Where chunks are kept. Methods are called from several threads; `payload_bytes` is set before the first."""

    payload_bytes: int

    def peek(self, keys: Sequence[bytes]) -> list[Chunk] | None:
        """`read_leading` if it can be answered without waiting for a device, else None."""

    def read_leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        """The chunks of the first keys, up to the first that is missing or damaged.

        Raises:
            StoreUnavailable: nobody answers.
        """

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first keys are there, by the store's word.

        Raises:
            StoreUnavailable: nobody answers.
        """

    def read(self, key: bytes) -> Chunk | None:
        """One chunk; None where it is missing or damaged.

        Raises:
            StoreUnavailable: nobody answers.
        """

    def may_contain(self, key: bytes) -> bool:
        """Whether writing this chunk would be in vain, as far as is known without asking anybody."""

    def write(self, key: bytes, payload: Payload) -> None:
        """Keep a chunk.

        Raises:
            StoreUnavailable: nobody takes it.
        """

    def clear(self) -> bool:
        """Forget everything of this identity."""

    def close(self) -> None:
        """Let go of files and connections."""


@dataclass(slots=True)
class LoadOrder:
    """Blocks to fill for a sequence: those of token blocks first_block .. end_block - 1."""

    sequence_id: str
    first_block: int
    end_block: int
    tables: list[list[int]]
    """Per group, the blocks to fill, from first_block on."""
    first_chunk: int
    keys: list[bytes]
    payloads: list[Payload] | None
    """The chunks' bytes, where they are at hand; else they are read."""


@dataclass(slots=True)
class SaveOrder:
    """One chunk to keep: its blocks, per group."""

    sequence_id: str
    key: bytes
    tables: list[list[int]]


@dataclass(slots=True)
class Moves:
    """What one step moves."""

    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)


class Mover(WorkerSide):
    """Moves chunks. Loads at hand are copied before the step, others by threads; stores are written by one thread."""

    def __init__(
        self,
        store: ChunkStore,
        groups: Sequence[CacheGroup],
        chunk_blocks: int,
        notify: Callable[[], None],
        stats: ConnectorStats,
        *,
        pack: Callable[[Tensor], Payload] | None = None,
        unpack: Callable[[Payload], Tensor] | None = None,
        budgets: Mapping[str, int | None] | None = None,
    ) -> None:
        """`pack` and `unpack` give chunks (layers, blocks, page_bytes) another form than their bytes in that order.

        `budgets` are settings that limit bytes; one that holds no chunk is warned of once the size of chunks is known.
        """
        self.store = store
        self.readers = ThreadPoolExecutor(NUM_READERS, "vkit-kv-read")
        self._groups = list(groups)
        self._chunk_blocks = chunk_blocks
        self._budgets = {name: limit for name, limit in (budgets or {}).items() if limit is not None}
        self._notify = notify
        self._stats = stats
        self._pages: list[tuple[int, Tensor]] = []
        self._page_bytes = 0
        self._pack = pack or _bytes_of
        self._unpack = unpack or self._plain
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed_now: set[str] = set()
        self._saves: list[SaveOrder] = []
        self._queued: OrderedDict[bytes, Payload] = OrderedDict()
        self._queued_bytes = 0
        self._work: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._has_warned = False
        self._is_closed = False
        self._writer = threading.Thread(target=self._write_queued, name="vkit-kv-write", daemon=True)
        self._writer.start()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(layers, blocks, page_bytes) of a chunk."""
        return len(self._pages), self._chunk_blocks, self._page_bytes

    def register_kv_caches(self, caches: Mapping[str, Tensor]) -> None:
        """Take the pages of every layer."""
        self._pages = [
            (group.index, caches[name])
            for group in self._groups
            for name in (f"layers.{layer}" for layer in group.layers)
        ]
        self._page_bytes = self._pages[0][1].shape[1]
        layers, blocks, page_bytes = self.shape
        self.store.payload_bytes = size = layers * blocks * page_bytes
        for name, limit in self._budgets.items():
            if limit < size:
                logger.warning(
                    "%s: %s: %d bytes hold no chunk, which takes %d: nothing is kept there", FLAG, name, limit, size
                )

    def queued(self, key: bytes) -> Payload | None:
        """A chunk that waits to be written."""
        with self._lock:
            return self._queued.get(key)

    def start_load_kv(self, meta: Any) -> None:
        """Copy what is at hand; let threads read the rest."""
        self._failed_now.clear()
        if not isinstance(meta, Moves):
            return
        self._saves = meta.saves
        for order in meta.loads:
            if order.payloads is None:
                self.readers.submit(self._load_remote, order)
            else:
                self._load_at_hand(order)

    def wait_for_save(self) -> None:
        """Copy finished blocks out of their pages; they are written to the store later."""
        saves, self._saves = self._saves, []
        saves = [order for order in saves if order.sequence_id not in self._failed_now and self._is_new(order.key)]
        if not saves:
            return
        start = time.perf_counter()
        gathered = self._gathered(saves)
        for order, chunk in zip(saves, gathered.unbind(0), strict=True):
            self._enqueue(order.key, self._pack(chunk.clone()))
        with self._lock:
            self._stats.store_time += time.perf_counter() - start

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Blocks are copied at once, so no send is ever under way."""
        with self._lock:
            received, self._received = self._received, set()
        return set(), received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not filled."""
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> bool:
        """Wait until everything queued is written; False if it takes longer than that."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            with self._lock:
                if not self._queued:
                    return True
            time.sleep(0.002)
        return False

    def shutdown(self) -> None:
        """Write what is queued, end the threads, close the store."""
        if self._is_closed:
            return
        self._is_closed = True
        self._work.put(None)
        self._writer.join(CLOSE_TIMEOUT_S)
        if self._writer.is_alive():
            logger.warning("cache entries: %d chunks could not be written in time", len(self._queued))
        self.readers.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    # Into pages

    def _load_at_hand(self, order: LoadOrder) -> None:
        assert order.payloads is not None
        start = time.perf_counter()
        self._fill(order, order.payloads, order.first_chunk)
        with self._lock:
            self._stats.load_bytes += sum(map(len, order.payloads))
            self._stats.load_time += time.perf_counter() - start

    def _load_remote(self, order: LoadOrder) -> None:
        """On a reader's thread."""
        start = time.perf_counter()
        num_bytes = 0
        bad: list[int] = []
        try:
            for index, key in enumerate(order.keys):
                chunk = self._read(key)
                if chunk is None:
                    first = max(0, (order.first_chunk + index) * self._chunk_blocks - order.first_block)
                    bad = [block for table in order.tables for block in table[first:] if block]
                    break
                num_bytes += len(chunk.payload)
                self._fill(order, [chunk.payload], order.first_chunk + index)
        except Exception:
            # Whatever a store's client throws, the sequence must not wait for ever.
            logger.exception("cache entries of sequence %s could not be loaded", order.sequence_id)
            bad = [block for table in order.tables for block in table if block]
        with self._lock:
            self._bad_blocks.update(bad)
            self._received.add(order.sequence_id)
            self._stats.load_bytes += num_bytes
            self._stats.load_time += time.perf_counter() - start
        self._notify()

    def _read(self, key: bytes) -> Chunk | None:
        try:
            return self.store.read(key)
        except StoreUnavailable as error:
            logger.warning("cache entries: %s", error)
            return None

    def _fill(self, order: LoadOrder, payloads: Sequence[Payload], first_chunk: int) -> None:
        """Copy consecutive chunks, the first of them number `first_chunk`, as far as the order wants their blocks."""
        size = self._chunk_blocks
        first = max(order.first_block, first_chunk * size)
        end = min(order.end_block, (first_chunk + len(payloads)) * size)
        chunks = torch.stack([self._unpack(payload) for payload in payloads])
        rows = slice(first - first_chunk * size, end - first_chunk * size)
        targets = self._targets([table[first - order.first_block : end - order.first_block] for table in order.tables])
        for layer, (group, pages) in enumerate(self._pages):
            kept, blocks = targets[group]
            values = chunks[:, layer].reshape(-1, self._page_bytes)[rows]
            pages.index_copy_(0, blocks.to(pages.device), values[kept].to(pages.device))

    @staticmethod
    def _targets(tables: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
        """Per group, which of the blocks are wanted, and where they go."""
        listed = [torch.tensor(table, dtype=torch.int64) for table in tables]
        return [(blocks.nonzero().flatten(), blocks[blocks != 0]) for blocks in listed]

    def _plain(self, payload: Payload) -> Tensor:
        # torch has no read-only tensors, and complains of buffers that are.
        is_writable = isinstance(payload, memoryview) and not payload.readonly
        return torch.frombuffer(payload if is_writable else bytearray(payload), dtype=torch.uint8).view(self.shape)

    # Out of pages

    def _is_new(self, key: bytes) -> bool:
        with self._lock:
            if key in self._queued:
                return False
        return not self.store.may_contain(key)

    def _gathered(self, saves: Sequence[SaveOrder]) -> Tensor:
        """(chunks, layers, blocks, page_bytes) of the chunks to save, on the host."""
        layers, blocks, page_bytes = self.shape
        out = torch.empty((len(saves), layers, blocks, page_bytes), dtype=torch.uint8)
        tables = {
            group.index: torch.tensor([order.tables[group.index] for order in saves], dtype=torch.int64).flatten()
            for group in self._groups
        }
        for layer, (group_index, pages) in enumerate(self._pages):
            taken = pages.index_select(0, tables[group_index].to(pages.device))
            out[:, layer] = taken.view(len(saves), blocks, page_bytes)
        return out

    def _enqueue(self, key: bytes, payload: Payload) -> None:
        with self._lock:
            if key in self._queued:
                return
            if self._queued_bytes + len(payload) > MAX_QUEUED_BYTES:
                is_full = True
            else:
                is_full = False
                self._queued[key] = payload
                self._queued_bytes += len(payload)
        if is_full:
            self._warn_once("the store takes cache entries more slowly than they are made: some are not stored")
        else:
            self._work.put(key)

    def _write_queued(self) -> None:
        while (key := self._work.get()) is not None:
            payload = self.queued(key)
            assert payload is not None, "queued chunks are removed here only"
            start = time.perf_counter()
            num_bytes = 0
            try:
                self.store.write(key, payload)
                num_bytes = len(payload)
            except StoreUnavailable as error:
                self._warn_once(f"cache entries cannot be stored: {error}")
            except Exception:
                # The writer must live on: a chunk that cannot be stored is one that will be computed.
                logger.exception("a chunk of cache entries could not be stored")
            with self._lock:
                del self._queued[key]
                self._queued_bytes -= len(payload)
                self._stats.store_bytes += num_bytes
                self._stats.store_time += time.perf_counter() - start

    def _warn_once(self, message: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("%s", message)


def _bytes_of(chunk: Tensor) -> Payload:
    return chunk.contiguous().numpy().data.cast("B")

"""An engine over a fake runner whose cache entries a connector moves, and a store that misbehaves on demand."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fakes import FULL, FakeBatch, FakeRunner
from vkit.cache.connector import ConnectorContext, ConnectorStats, KVConnector, TransferReport, WorkerSide
from vkit.cache.groups import CacheGroup
from vkit.connectors.envelope import Payload
from vkit.connectors.moving import Chunk, Mover, StoreUnavailable
from vkit.connectors.planning import chunked_connector
from vkit.engine import Engine, EngineSettings
from vkit.kv_transfer import KVTransferConfig
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan

IDENTITY = {"model": "fake"}


@dataclass
class Step:
    batch: FakeBatch
    meta: Any


class ConnectedRunner(FakeRunner):
    """Pages are the fake's own slots, seen as bytes, so what a connector moves is what the model reads."""

    def __init__(self, worker: WorkerSide, groups: Sequence[CacheGroup], num_blocks: int, block_size: int) -> None:
        super().__init__(groups, num_blocks, block_size)
        self.worker = worker
        self.pages = torch.from_numpy(self.slots).view(torch.uint8)
        worker.register_kv_caches({"layers.0": self.pages})

    def prepare(self, plan: Plan) -> Step:  # type: ignore[override]
        return Step(super().prepare(plan), plan.connector_meta)

    def execute(self, batch: Step) -> torch.Tensor:  # type: ignore[override]
        self.worker.start_load_kv(batch.meta)
        self.worker.wait_for_layer_load("layers.0")
        logits = super().execute(batch.batch)
        self.worker.save_kv_layer("layers.0", self.pages)
        self.worker.wait_for_save()
        return logits

    def exchange(self, meta: Any) -> None:
        self.worker.start_load_kv(meta)
        self.worker.wait_for_layer_load("layers.0")
        self.worker.wait_for_save()

    def transfer_report(self) -> TransferReport:
        sent, received = self.worker.get_finished()
        return TransferReport(sent, received, self.worker.get_block_ids_with_load_errors())


@dataclass
class Store:
    """Chunks in a dictionary. `loses` and `is_down` are asked at every access."""

    chunks: dict[bytes, bytes] = field(default_factory=dict)
    payload_bytes: int = 0
    delay_s: float = 0.0
    loses: Callable[[bytes], bool] = lambda key: False
    is_down: bool = False
    is_instant: bool = False
    num_reads: int = 0
    gate: threading.Event | None = None

    def _wait(self) -> None:
        if self.gate is not None:
            self.gate.wait(10)
        if self.delay_s:
            time.sleep(random.random() * self.delay_s)
        if self.is_down:
            raise StoreUnavailable("the store is down")

    def peek(self, keys: Sequence[bytes]) -> list[Chunk] | None:
        return self.read_leading(keys) if self.is_instant else None

    def read_leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        found = []
        for key in keys:
            chunk = self.read(key)
            if chunk is None:
                break
            found.append(chunk)
        return found

    def count_leading(self, keys: Sequence[bytes]) -> int:
        self._wait()
        return next((i for i, key in enumerate(keys) if key not in self.chunks), len(keys))

    def read(self, key: bytes) -> Chunk | None:
        self._wait()
        self.num_reads += 1
        if self.loses(key) or key not in self.chunks:
            return None
        return Chunk(self.chunks[key], "host")

    def may_contain(self, key: bytes) -> bool:
        return key in self.chunks

    def write(self, key: bytes, payload: Payload) -> None:
        self._wait()
        self.chunks[key] = bytes(payload)

    def clear(self) -> bool:
        self.chunks.clear()
        return True

    def close(self) -> None:
        pass


def config_of(role: str = "kv_both", policy: str = "fail", **extra: Any) -> KVTransferConfig:
    return KVTransferConfig("Test", role, extra, kv_load_failure_policy=policy)


def context_of(
    config: KVTransferConfig | None = None, *, groups: Sequence[CacheGroup] = FULL, block_size: int = 4
) -> ConnectorContext:
    return ConnectorContext(config or config_of(), tuple(groups), block_size, IDENTITY, "fake", "float32")


def connected_engine(
    connector: KVConnector,
    *,
    config: KVTransferConfig | None = None,
    groups: Sequence[CacheGroup] = FULL,
    num_blocks: int = 64,
    block_size: int = 4,
    limits: dict[str, Any] | None = None,
    **settings: Any,
) -> Engine:
    """An engine that uses `connector`."""
    config = config or config_of()
    assert connector.worker is not None
    chosen = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **(limits or {})}
    return Engine(
        EngineSettings(
            limits=SchedulerLimits(**chosen),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=24,
            prefix_caching_seed="shared",
            loads_kv=config.loads,
            recomputes_kv=config.kv_load_failure_policy == "recompute",
            **{"seed": 7, **settings},
        ),
        ConnectedRunner(connector.worker, groups, num_blocks, block_size),
        list(groups),
        None,
        connector=connector,
    )


def store_connector(
    store: Store, *, config: KVTransferConfig | None = None, is_remote: bool = False, chunk_blocks: int = 1
) -> KVConnector:
    return chunked_connector(context_of(config), store, is_remote=is_remote, chunk_blocks=chunk_blocks)


def flushed(connector: KVConnector) -> None:
    """Wait until everything queued has been written."""
    assert isinstance(connector.worker, Mover)
    assert connector.worker.flush()


def check_held(engine: Engine) -> None:
    """Every block is held as often as tables say, those of ended sequences whose blocks must stay included."""
    transfer, pool = engine._transfer, engine.pool
    assert transfer is not None
    sequences = {id(sequence): sequence for sequence in engine.scheduler._sequences.values()}
    for held in (transfer._sending.values(), [load.sequence for load in transfer._receiving.values()]):
        sequences.update((id(sequence), sequence) for sequence in held)
    if engine._next_plan is not None:
        sequences.update((id(item.sequence), item.sequence) for item in engine._next_plan.scheduled)
    count = Counter(block for s in sequences.values() for table in s.block_ids for block in table if block)
    free = set(pool.free_order())
    for block in range(1, pool.num_blocks):
        assert pool.ref_count(block) == count[block], f"block {block}"
        assert (block in free) == (count[block] == 0)


__all__ = ["ConnectorStats", "check_held", "config_of", "connected_engine", "context_of", "flushed", "store_connector"]

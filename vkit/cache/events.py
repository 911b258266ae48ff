"""What happened to cached blocks, for those who route requests by cache content. Costs nothing when nobody listens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks became reusable: `hashes[i]` covers `token_ids[i * block_size : (i + 1) * block_size]`."""

    hashes: tuple[bytes, ...]
    parent_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora: str | None
    group: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks with these hashes can no longer be reused in this group."""

    hashes: tuple[bytes, ...]
    group: int


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


CacheEvent = BlockStored | BlockRemoved | AllBlocksCleared
CacheListener = Callable[[int, CacheEvent], None]
"""(sequence number, event); numbers start at 0 and have no gaps."""


class CacheEvents:
    """Numbers events and hands them to the listeners, in order, on the thread that caused them."""

    def __init__(self) -> None:
        self._listeners: list[CacheListener] = []
        self._next_number = 0

    @property
    def has_listeners(self) -> bool:
        """Whether publishing reaches anyone; callers build no event otherwise."""
        return bool(self._listeners)

    def subscribe(self, listener: CacheListener) -> Callable[[], None]:
        """Start passing events to `listener`; the result ends it again."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def publish(self, event: CacheEvent) -> None:
        """Number the event and pass it on."""
        number = self._next_number
        self._next_number += 1
        for listener in self._listeners:
            listener(number, event)

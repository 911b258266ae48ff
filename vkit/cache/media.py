"""Which encoded media are at hand, and which a step may encode. Host only: no torch.

The runner keeps what a tower made under the item's digest; this module decides what comes and goes. Rows are counted,
each the embedding of one prompt token. An entry is held by the sequences that still have tokens of the item to compute;
entries that nobody holds stay until their room is wanted, least recently held first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from vkit.media import MediaInput, PlacedMedia
from vkit.sequence import MediaOrders, Sequence


@dataclass(slots=True)
class _Entry:
    num_rows: int
    holders: set[str] = field(default_factory=set)


@dataclass(slots=True)
class _Holding:
    """What one sequence holds."""

    sequence: Sequence
    stops: dict[bytes, int] = field(default_factory=dict)
    """Digest -> the position from which on the item is needed no more."""


class MediaCache:
    """Accounts for encoded items. An item larger than a limit has it to itself, so that none is impossible."""

    def __init__(self, max_rows: int, max_step_rows: int, *, splits_items: bool = True) -> None:
        """Keeps at most `max_rows`, lets a step encode `max_step_rows`.

        `splits_items` False: a chunk holds all remaining tokens of an item or none.
        """
        self.num_queries = 0
        """Items that sequences came to need."""
        self.num_hits = 0
        """Those that were there."""
        self._max_rows = max_rows
        self._max_step_rows = max_step_rows
        self._splits_items = splits_items
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._held: dict[str, _Holding] = {}
        self._num_rows = 0
        self._num_step_rows = 0
        self._orders = MediaOrders()

    @property
    def num_rows(self) -> int:
        """Rows at hand, those of the orders not taken yet included."""
        return self._num_rows

    @property
    def digests(self) -> list[bytes]:
        """The items at hand."""
        return list(self._entries)

    def begin_pass(self) -> None:
        """Start a scheduling pass: what sequences have computed by now they hold no longer."""
        self._num_step_rows = 0
        for holding in list(self._held.values()):
            computed = holding.sequence.num_computed_tokens
            for digest in [digest for digest, stop in holding.stops.items() if stop <= computed]:
                self._let_go(holding, digest)

    def cap(self, sequence: Sequence, start: int, want: int) -> int:
        """How many of the `want` tokens from `start` on can be computed, given what may be encoded. Changes nothing."""
        if not sequence.media:
            return want
        fresh: dict[bytes, int] = {}
        needed = [entry.item.digest for entry in _overlapping(sequence, start, want)]
        for entry in _overlapping(sequence, start, want):
            item = entry.item
            is_cut = not self._splits_items and entry.stop > start + want
            is_here = item.digest in self._entries or item.digest in fresh
            if is_cut or not (is_here or self._has_room(item, fresh, needed)):
                return max(0, entry.start - start)
            if not is_here:
                fresh[item.digest] = item.num_rows
        return want

    def take(self, sequence: Sequence, start: int, want: int) -> None:
        """Hold what the tokens need, and order what is not there; `cap` has allowed it."""
        if not sequence.media:
            return
        missing = []
        for entry in _overlapping(sequence, start, want):
            digest = entry.item.digest
            holding = self._held.setdefault(sequence.id, _Holding(sequence))
            is_new_need = digest not in holding.stops
            holding.stops[digest] = max(entry.stop, holding.stops.get(digest, 0))
            found = self._entries.get(digest)
            if is_new_need:
                self.num_queries += 1
                self.num_hits += found is not None
            if found is not None:
                found.holders.add(sequence.id)
            else:
                missing.append(entry.item)
        for item in missing:
            if item.digest not in self._entries:
                self._order(item)
            self._entries[item.digest].holders.add(sequence.id)

    def give_back(self, sequence: Sequence) -> None:
        """A sequence that ends or is preempted holds nothing."""
        holding = self._held.get(sequence.id)
        for digest in list(holding.stops) if holding is not None else ():
            assert holding is not None
            self._let_go(holding, digest)

    def clear(self) -> None:
        """Forget everything: orders were lost on the way, or the memory is gone. The next orders say so."""
        self._entries.clear()
        self._held.clear()
        self._num_rows = 0
        self._orders = MediaOrders(clears=True)

    def take_orders(self) -> MediaOrders:
        """What the step is to free and to encode; the caller now owns it."""
        orders, self._orders = self._orders, MediaOrders()
        return orders

    def _has_room(self, item: MediaInput, fresh: dict[bytes, int], needed: list[bytes]) -> bool:
        num_fresh = sum(fresh.values())
        encodes = self._num_step_rows + num_fresh
        if encodes and encodes + item.num_rows > self._max_step_rows:
            return False
        kept = num_fresh + sum(
            entry.num_rows for digest, entry in self._entries.items() if entry.holders or digest in needed
        )
        return kept == 0 or kept + item.num_rows <= self._max_rows

    def _order(self, item: MediaInput) -> None:
        """Make room and ask for the item."""
        idle = [digest for digest, entry in self._entries.items() if not entry.holders]
        for digest in idle:
            if self._num_rows + item.num_rows <= self._max_rows:
                break
            self._evict(digest)
        self._entries[item.digest] = _Entry(item.num_rows)
        self._num_rows += item.num_rows
        self._num_step_rows += item.num_rows
        self._orders.encode.append(item)

    def _evict(self, digest: bytes) -> None:
        self._num_rows -= self._entries.pop(digest).num_rows
        still_wanted = [item for item in self._orders.encode if item.digest != digest]
        if len(still_wanted) == len(self._orders.encode):
            self._orders.free.append(digest)
        self._orders.encode[:] = still_wanted  # an order of this pass, whose sequence was preempted since

    def _let_go(self, holding: _Holding, digest: bytes) -> None:
        del holding.stops[digest]
        if not holding.stops:
            self._held.pop(holding.sequence.id, None)
        entry = self._entries[digest]
        entry.holders.discard(holding.sequence.id)
        if not entry.holders:
            self._entries.move_to_end(digest)


def _overlapping(sequence: Sequence, start: int, want: int) -> list[PlacedMedia]:
    """The items that tokens start .. start + want - 1 touch."""
    return [entry for entry in sequence.media if entry.start < start + want and entry.stop > start]

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


class _Draft:
    """What admitting a chunk's items one after the other would do."""

    def __init__(self, cache: MediaCache) -> None:
        self.evicted: list[bytes] = []
        self._cache = cache
        self._gone: set[bytes] = set()
        self._passed: set[bytes] = set()
        self._num_rows = cache.num_rows
        self._num_step_rows = cache.num_step_rows

    def admits(self, item: MediaInput) -> bool:
        """Whether the item is there or may be encoded; if so, it stays for the rest of the chunk."""
        digest = item.digest
        is_here = digest in self._passed or (digest in self._cache.entries and digest not in self._gone)
        if not is_here and not self._makes_room(item):
            return False
        self._passed.add(digest)
        return True

    def _makes_room(self, item: MediaInput) -> bool:
        cache, num_rows = self._cache, item.num_rows
        if self._num_step_rows and self._num_step_rows + num_rows > cache.max_step_rows:
            return False
        for digest, entry in cache.entries.items():
            if self._num_rows + num_rows <= cache.max_rows:
                break
            if not entry.holders and digest not in self._passed and digest not in self._gone:
                self._gone.add(digest)
                self.evicted.append(digest)
                self._num_rows -= entry.num_rows
        if self._num_rows and self._num_rows + num_rows > cache.max_rows:
            return False
        self._num_rows += num_rows
        self._num_step_rows += num_rows
        return True


class MediaCache:
    """Accounts for encoded items. An item larger than a limit has it to itself, so that none is impossible."""

    def __init__(self, max_rows: int, max_step_rows: int, *, splits_items: bool = True) -> None:
        """Keeps at most `max_rows`, lets a step encode `max_step_rows`.

        `splits_items` False: a chunk holds all remaining tokens of an item's run (of a video's frame) or none, as it
        does for items that see themselves in any case.
        """
        self.num_queries = 0
        """Items that sequences came to need."""
        self.num_hits = 0
        """Those that were there."""
        self.max_rows = max_rows
        self.max_step_rows = max_step_rows
        self.splits_items = splits_items
        self.entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._held: dict[str, _Holding] = {}
        self.num_rows = 0
        """Rows at hand, those of the orders not taken yet included."""
        self.num_step_rows = 0
        """Rows that this pass has ordered."""
        self._orders = MediaOrders()

    @property
    def digests(self) -> list[bytes]:
        """The items at hand."""
        return list(self.entries)

    def begin_pass(self) -> None:
        """Start a scheduling pass: what sequences have computed by now they hold no longer."""
        self.num_step_rows = 0
        for holding in list(self._held.values()):
            computed = holding.sequence.num_computed_tokens
            for digest in [digest for digest, stop in holding.stops.items() if stop <= computed]:
                self._let_go(holding, digest)

    def cap(self, sequence: Sequence, start: int, want: int) -> int:
        """How many of the `want` tokens from `start` on can be computed, given what may be encoded. Changes nothing."""
        if not sequence.media:
            return want
        draft = _Draft(self)
        for entry in _overlapping(sequence, start, want):
            if not draft.admits(entry.item):
                return max(0, entry.start - start)
            may_cut = self.splits_items and not entry.item.sees_itself
            cut = None if may_cut else _run_across(entry, start + want)
            if cut is not None:
                return max(0, cut - start)
        return want

    def take(self, sequence: Sequence, start: int, want: int) -> None:
        """Hold what the tokens need, and order what is not there; `cap` has allowed it."""
        if not sequence.media:
            return
        draft = _Draft(self)
        for entry in _overlapping(sequence, start, want):
            item = entry.item
            is_admitted = draft.admits(item)
            assert is_admitted, "more tokens than the cap"
            for digest in draft.evicted:
                self._evict(digest)
            draft.evicted.clear()
            was_here = item.digest in self.entries
            if not was_here:
                self._order(item)
            holding = self._held.setdefault(sequence.id, _Holding(sequence))
            if item.digest not in holding.stops:
                self.num_queries += 1
                self.num_hits += was_here
            holding.stops[item.digest] = max(entry.stop, holding.stops.get(item.digest, 0))
            self.entries[item.digest].holders.add(sequence.id)

    def give_back(self, sequence: Sequence) -> None:
        """A sequence that ends or is preempted holds nothing."""
        holding = self._held.get(sequence.id)
        for digest in list(holding.stops) if holding is not None else ():
            assert holding is not None
            self._let_go(holding, digest)

    def clear(self) -> None:
        """Forget everything: orders were lost on the way, or the memory is gone. The next orders say so."""
        self.entries.clear()
        self._held.clear()
        self.num_rows = 0
        self._orders = MediaOrders(clears=True)

    def take_orders(self) -> MediaOrders:
        """What the step is to free and to encode; the caller now owns it."""
        orders, self._orders = self._orders, MediaOrders()
        return orders

    def _order(self, item: MediaInput) -> None:
        """Ask for the item, for which there is room."""
        self.entries[item.digest] = _Entry(item.num_rows)
        self.num_rows += item.num_rows
        self.num_step_rows += item.num_rows
        self._orders.encode.append(item)

    def _evict(self, digest: bytes) -> None:
        self.num_rows -= self.entries.pop(digest).num_rows
        still_wanted = [item for item in self._orders.encode if item.digest != digest]
        if len(still_wanted) == len(self._orders.encode):
            self._orders.free.append(digest)
        self._orders.encode[:] = still_wanted  # an order of this pass, whose sequence was preempted since

    def _let_go(self, holding: _Holding, digest: bytes) -> None:
        del holding.stops[digest]
        if not holding.stops:
            self._held.pop(holding.sequence.id, None)
        entry = self.entries[digest]
        entry.holders.discard(holding.sequence.id)
        if not entry.holders:
            self.entries.move_to_end(digest)


def _run_across(entry: PlacedMedia, end: int) -> int | None:
    """The first position of the item's run that a chunk up to `end` would cut."""
    return next((first for first, beyond in entry.spans if first < end < beyond), None)


def _overlapping(sequence: Sequence, start: int, want: int) -> list[PlacedMedia]:
    """The items that tokens start .. start + want - 1 touch."""
    return [entry for entry in sequence.media if entry.start < start + want and entry.stop > start]

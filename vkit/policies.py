"""In which order waiting sequences are admitted, and which running one makes room. No torch, no cache.

A policy holds the waiting sequences. It changes order only, never tokens.
"""

from __future__ import annotations

import logging
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from vkit.sequence import Sequence

logger = logging.getLogger("vkit.scheduler")

MAX_MATCHED_WAITING = 128
"""Above this many waiting sequences, longest-prefix order costs more than it gains and arrival order is used."""

IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD = 32
"""A sequence whose cached prefix is longer than this is never held back for another waiting one."""

IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD = 32
"""Tokens shared with an earlier waiting sequence from which on a sequence is held back behind it."""

HitLength = Callable[[Sequence], int]
"""Tokens a waiting sequence would find in the cache now."""


class Policy(Protocol):
    """The waiting sequences in their order of admission, and the choice of victims."""

    def __len__(self) -> int: ...
    def __contains__(self, sequence: Sequence) -> bool: ...

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue a sequence that had to give up its blocks."""

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out of the queue."""

    def order(self, hit_length: HitLength) -> Iterator[Sequence]:
        """Waiting sequences, next to be admitted first. The queue may not change while this is read."""

    def victim(self, running: list[Sequence]) -> Sequence:
        """The running sequence that gives up its blocks."""


class Fcfs:
    """First come, first served; preempted sequences return to the front, the last admitted is the victim."""

    def __init__(self) -> None:
        self._queue: OrderedDict[str, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._queue

    def add(self, sequence: Sequence) -> None:
        """Queue at the end."""
        self._queue[sequence.id] = sequence

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue at the front."""
        self._queue[sequence.id] = sequence
        self._queue.move_to_end(sequence.id, last=False)

    def remove(self, sequence: Sequence) -> None:
        """Take out."""
        del self._queue[sequence.id]

    def order(self, hit_length: HitLength) -> Iterator[Sequence]:
        """Arrival order, preempted ones first."""
        return iter(self._queue.values())

    def victim(self, running: list[Sequence]) -> Sequence:
        """The last admitted."""
        return running[-1]


class Priority:
    """Lowest priority value first, then arrival; the worst running sequence is the victim."""

    def __init__(self) -> None:
        self._queue: list[tuple[int, float, str, Sequence]] = []
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.id in self._ids

    def add(self, sequence: Sequence) -> None:
        """Queue by (priority, arrival, id)."""
        insort(self._queue, self._entry(sequence), key=lambda entry: entry[:3])
        self._ids.add(sequence.id)

    def add_preempted(self, sequence: Sequence) -> None:
        """Queue by (priority, arrival, id): a preempted sequence keeps its place."""
        self.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take out."""
        del self._queue[bisect_left(self._queue, self._entry(sequence)[:3], key=lambda entry: entry[:3])]
        self._ids.remove(sequence.id)

    def order(self, hit_length: HitLength) -> Iterator[Sequence]:
        """Best priority first."""
        return (entry[3] for entry in self._queue)

    def victim(self, running: list[Sequence]) -> Sequence:
        """The largest (priority, arrival)."""
        return max(running, key=lambda sequence: (sequence.priority, sequence.arrival_time))

    @staticmethod
    def _entry(sequence: Sequence) -> tuple[int, float, str, Sequence]:
        return (sequence.priority, sequence.arrival_time, sequence.id, sequence)


class LongestPrefix(Fcfs):
    """Longest cached prefix first; of several waiting with the same uncached beginning, one goes ahead."""

    def order(self, hit_length: HitLength) -> Iterator[Sequence]:
        """By cached tokens, ties in arrival order; those that would repeat another's prefill come last."""
        if len(self._queue) > MAX_MATCHED_WAITING:
            return iter(self._queue.values())
        ranked: list[tuple[int, Sequence]] = []
        held_back: list[Sequence] = []
        # Sharing at least the threshold means agreeing on exactly that many leading tokens: a set does a tree's work.
        beginnings: set[tuple[str | None, tuple[int, ...]]] = set()
        for sequence in self._queue.values():
            hit = hit_length(sequence)
            if hit <= IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD:
                tokens = tuple(sequence.token_ids[:IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD])
                beginning = (sequence.cache_salt, tokens)
                if len(tokens) == IN_BATCH_PREFIX_CACHING_DEPRIORITIZE_THRESHOLD:
                    if beginning in beginnings:
                        held_back.append(sequence)
                        continue
                    beginnings.add(beginning)
            ranked.append((hit, sequence))
        ranked.sort(key=lambda entry: -entry[0])
        return iter([sequence for _, sequence in ranked] + held_back)


POLICIES: dict[str, type[Fcfs] | type[Priority]] = {"fcfs": Fcfs, "priority": Priority, "lpm": LongestPrefix}


def make_policy(name: str, *, caches_prefixes: bool) -> Policy:
    """The policy of that name; `lpm` without prefix caching is first come, first served, and says so."""
    if name == "lpm" and not caches_prefixes:
        logger.warning("scheduling policy lpm needs prefix caching, which is off: using fcfs")
        return Fcfs()
    return POLICIES[name]()

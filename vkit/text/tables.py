"""Byte-pair merges as sorted tables: ready to use the moment their bytes are there, nothing to build.

Enough for short texts, a lookup being a search among some hundred thousand numbers; long ones want the tokenizer
library, whose model takes 0.1 s and more to build from the same vocabulary.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, overload

import numpy as np
import numpy.typing as npt

_COUNTS = struct.Struct("<QQQQ")
_NO_MERGE = (-1, -1)


class Strings(Sequence[str]):
    """Strings that lie one after the other in one buffer, decoded when asked for."""

    def __init__(self, data: memoryview, offsets: npt.NDArray[np.uint32]) -> None:
        """String i is bytes offsets[i] to offsets[i + 1]; bytes that are not UTF-8 become surrogate escapes."""
        self._data = data
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return str(self.raw(index), "utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        bounds = self._offsets.tolist()
        for start, end in pairwise(bounds):
            yield str(self._data[start:end], "utf-8", "surrogateescape")

    def raw(self, index: int) -> bytes:
        """The bytes of one string."""
        return bytes(self._data[self._offsets[index] : self._offsets[index + 1]])


@dataclass(frozen=True)
class MergeTables:
    """A vocabulary and its merges."""

    tokens: Strings
    """Every token by id, as the file spells it."""
    order: npt.NDArray[np.uint32]
    """Ids of the tokens that text can become, one per spelling, by rising bytes."""
    pairs: npt.NDArray[np.uint64]
    """left << 32 | right of every merge, rising."""
    ranks: npt.NDArray[np.uint32]
    """Of the same merges: which goes first."""
    results: npt.NDArray[np.uint32]
    """Of the same merges: what they make."""

    @classmethod
    def build(cls, tokens: Sequence[str], ids: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> MergeTables:
        """The tables of `merges`, the first going first, over the spellings `ids`; of equals the last counts."""
        by_pair = {ids[left] << 32 | ids[right]: (rank, ids[left + right]) for rank, (left, right) in enumerate(merges)}
        pairs = sorted(by_pair)
        order = sorted((text.encode(), token_id) for text, token_id in ids.items())
        raw = [token.encode("utf-8", "surrogateescape") for token in tokens]
        offsets = np.zeros(len(raw) + 1, np.uint32)
        np.cumsum([len(token) for token in raw], out=offsets[1:])
        return cls(
            Strings(memoryview(b"".join(raw)), offsets),
            np.array([token_id for _, token_id in order], np.uint32),
            np.array(pairs, np.uint64),
            np.array([by_pair[pair][0] for pair in pairs], np.uint32),
            np.array([by_pair[pair][1] for pair in pairs], np.uint32),
        )

    def vocabulary(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """The spellings and the merges they were built of, in order."""
        tokens = list(self.tokens)
        by_rank = self.pairs[np.argsort(self.ranks)]
        lefts, rights = (by_rank >> np.uint64(32)).tolist(), (by_rank & np.uint64(0xFFFFFFFF)).tolist()
        merges = [(tokens[left], tokens[right]) for left, right in zip(lefts, rights, strict=True)]
        return {tokens[token_id]: token_id for token_id in self.order.tolist()}, merges

    def pack(self) -> bytes:
        """The tables as bytes that `unpack` reads."""
        arrays = (self.tokens._offsets, self.order, self.ranks, self.results)
        counts = _COUNTS.pack(len(self.tokens), len(self.order), len(self.pairs), len(self.tokens._data))
        return b"".join((counts, self.pairs.tobytes(), *(array.tobytes() for array in arrays), self.tokens._data))

    @classmethod
    def unpack(cls, data: memoryview) -> MergeTables:
        """The tables in `data`, whose bytes they go on using.

        Raises:
            ValueError: these are no such tables.
        """
        if len(data) < _COUNTS.size:
            raise ValueError("too short")
        num_tokens, num_texts, num_merges, num_bytes = _COUNTS.unpack_from(data)
        if len(data) != _COUNTS.size + 8 * num_merges + 4 * (num_tokens + 1 + num_texts + 2 * num_merges) + num_bytes:
            raise ValueError("of another length")
        position = _COUNTS.size

        def array(kind: type[np.unsignedinteger[Any]], length: int) -> npt.NDArray[Any]:
            nonlocal position
            found = np.frombuffer(data, kind, length, position)
            position += found.nbytes
            return found

        pairs = array(np.uint64, num_merges)
        offsets, order, ranks, results = (
            array(np.uint32, length) for length in (num_tokens + 1, num_texts, num_merges, num_merges)
        )
        is_sound = offsets[0] == 0 and offsets[-1] == num_bytes and bool(np.all(offsets[1:] >= offsets[:-1]))
        if not is_sound or any(ids.size and int(ids.max()) >= num_tokens for ids in (order, results)):
            raise ValueError("contradicting itself")
        return cls(Strings(data[position:], offsets), order, pairs, ranks, results)


class TableMerger:
    """Byte-pair encoding of short words from tables."""

    def __init__(self, tables: MergeTables, *, takes_whole_words: bool, falls_back_to_bytes: bool) -> None:
        """`takes_whole_words`: a word that is a token needs no merges. The other: characters that are no token become
        the tokens of their bytes, <0x0A> and so on."""
        self._tables = tables
        self._takes_whole_words = takes_whole_words
        self._falls_back_to_bytes = falls_back_to_bytes
        # Plain memory, of which single numbers are read several times as fast as of arrays.
        self._order, self._pairs = tables.order.data, tables.pairs.data
        self._ids: dict[str, int | None] = {}
        self._merges: dict[int, tuple[int, int]] = {}

    def encode(self, word: str) -> list[int] | None:
        """The token ids of a word; None where it holds a character that no token stands for."""
        if self._takes_whole_words and (whole := self._id_of(word)) is not None:
            return [whole]
        ids: list[int] = []
        for character in word:
            own = self._id_of(character)
            if own is not None:
                ids.append(own)
                continue
            if not self._falls_back_to_bytes:
                return None
            for byte in character.encode():
                spelled = self._id_of(f"<0x{byte:02X}>")
                if spelled is None:
                    return None
                ids.append(spelled)
        return self._merged(ids)

    def _id_of(self, text: str) -> int | None:
        """The token spelled `text`."""
        if text in self._ids:
            return self._ids[text]
        wanted, raw = text.encode(), self._tables.tokens.raw
        at = bisect_left(self._order, wanted, key=raw)
        found = int(self._order[at]) if at < len(self._order) and raw(self._order[at]) == wanted else None
        self._ids[text] = found
        return found

    def _merge(self, left: int, right: int) -> tuple[int, int]:
        """(rank, result) of a pair, both -1 if it does not merge."""
        pair = left << 32 | right
        found = self._merges.get(pair)
        if found is None:
            at = bisect_left(self._pairs, pair)
            is_there = at < len(self._pairs) and self._pairs[at] == pair
            found = (int(self._tables.ranks[at]), int(self._tables.results[at])) if is_there else _NO_MERGE
            self._merges[pair] = found
        return found

    def _merged(self, ids: list[int]) -> list[int]:
        """What is left when the pair of lowest rank has merged, the leftmost of equals, until none can."""
        end = len(ids)
        following, preceding = list(range(1, end + 1)), list(range(-1, end - 1))
        waiting = []
        for at in range(end - 1):
            rank, result = self._merge(ids[at], ids[at + 1])
            if rank >= 0:
                waiting.append((rank, at, ids[at], ids[at + 1], result))
        heapify(waiting)
        while waiting:
            _, at, left, right, result = heappop(waiting)
            after = following[at]
            if ids[at] != left or after >= end or ids[after] != right:
                continue  # one of the two has merged with another neighbour
            ids[at], ids[after] = result, -1
            following[at] = beyond = following[after]
            if beyond < end:
                preceding[beyond] = at
            for start, stop in ((preceding[at], at), (at, beyond)):
                if start >= 0 and stop < end:
                    rank, made = self._merge(ids[start], ids[stop])
                    if rank >= 0:
                        heappush(waiting, (rank, start, ids[start], ids[stop], made))
        return [token_id for token_id in ids if token_id >= 0]

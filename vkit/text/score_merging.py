"""SentencePiece's merging, done here: for vocabularies whose scores have ties, which ranked merges cannot express."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass

from vkit.text.vocabulary import WORD_START


@dataclass(frozen=True, kw_only=True)
class ScoreMerger:
    """Merges the adjacent pair whose union has the highest score, leftmost among equals, until none is a token.

    Source: the BPE encoder of SentencePiece; llama.cpp's tokenizer model "llama".
    """

    scores: Mapping[str, float]
    """Tokens that merging may arrive at."""

    ids: Mapping[str, int]
    """Tokens that may stay as they are."""

    byte_ids: Mapping[int, int]
    """Tokens for the bytes of everything else."""

    unknown_id: int | None
    has_prefix: bool

    def encode(self, text: str) -> list[int]:
        """Token ids of a text without added tokens."""
        if not text:
            return []
        text = text.replace(" ", WORD_START)
        token_ids: list[int] = []
        for symbol in self._merge(list(WORD_START + text if self.has_prefix else text)):
            token_id = self.ids.get(symbol)
            token_ids += self._bytes(symbol) if token_id is None else [token_id]
        return token_ids

    def _merge(self, symbols: list[str]) -> list[str]:
        """The symbols that remain. A symbol that was merged into the one before it is empty."""
        count = len(symbols)
        before, after = list(range(-1, count - 1)), list(range(1, count + 1))
        heap: list[tuple[float, int, str]] = []

        def propose(left: int) -> None:
            if left >= 0 and after[left] < count:
                union = symbols[left] + symbols[after[left]]
                score = self.scores.get(union)
                if score is not None:
                    heapq.heappush(heap, (-score, left, union))

        for left in range(count - 1):
            propose(left)
        while heap:
            _, left, union = heapq.heappop(heap)
            right = after[left]
            if not symbols[left] or right >= count or symbols[left] + symbols[right] != union:
                continue  # one of the two has been merged with another since
            symbols[left], symbols[right] = union, ""
            after[left] = after[right]
            if after[right] < count:
                before[after[right]] = left
            propose(before[left])
            propose(left)
        return [symbol for symbol in symbols if symbol]

    def _bytes(self, symbol: str) -> list[int]:
        ids = [self.byte_ids.get(value, self.unknown_id) for value in symbol.encode("utf-8")]
        return [token_id for token_id in ids if token_id is not None]

"""The bitmasks of one step, filled while the model runs. Knows grammars and plans, no tensors."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vkit.sequence import Grammar, Plan, ScheduledSequence
from vkit.structured.messages import in_one_line
from vkit.types import GRAMMAR_FAULT

logger = logging.getLogger("vkit.structured")


@dataclass(slots=True)
class FilledMasks:
    """Masks of a step's constrained sequences."""

    words: Any
    """int32 numpy array (rows, ceil(V / 32)): bit i of word w of a row allows id 32 w + i."""
    rows: dict[str, slice] = field(default_factory=dict)
    """Sequence id -> its rows: one, and one more per draft."""
    errors: dict[str, str] = field(default_factory=dict)
    """Sequence id -> why its grammar cannot be followed further."""


class GrammarMasks:
    """Fills the masks of each step on a thread of its own: the library lets other threads run meanwhile."""

    def __init__(self, vocab_size: int, end_ids: Collection[int] = ()) -> None:
        """`vocab_size`: width of the logits. `end_ids`: ids that ignore_eos forbids while a grammar can go on."""
        self._words = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        self._end_ids = [token_id for token_id in end_ids if token_id < vocab_size]
        self._worker: ThreadPoolExecutor | None = None

    def begin(self, plan: Plan) -> Future[FilledMasks] | None:
        """The masks of a step, on their way; None when nothing in it is constrained.

        Grammars must not move, and no other step may begin, until the future is done and its masks are used.
        """
        wanted = [item for item in plan.scheduled if item.samples and item.sequence.grammar is not None]
        if not wanted:
            return None
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "vkit-masks")
        return self._worker.submit(self._fill, wanted)

    def close(self) -> None:
        """Stop the thread."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _fill(self, wanted: list[ScheduledSequence]) -> FilledMasks:
        num_rows = sum(1 + item.num_drafts for item in wanted)
        if num_rows > len(self._words):
            self._words = np.zeros((num_rows, self._words.shape[1]), dtype=np.int32)
        filled = FilledMasks(self._words)
        first = 0
        for item in wanted:
            sequence, rows = item.sequence, slice(first, first + 1 + item.num_drafts)
            first = rows.stop
            filled.rows[sequence.id] = rows
            assert sequence.grammar is not None
            words = self._words[rows]
            words.fill(0)
            try:
                fill_rows(sequence.grammar, sequence.draft_token_ids[: item.num_drafts], words)
            except Exception as error:  # a limit of the grammar library: it fails that request alone
                logger.warning("grammar of sequence %s failed: %r", sequence.id, error)
                filled.errors[sequence.id] = f"{GRAMMAR_FAULT} cannot be followed further: {in_one_line(str(error))}"
            else:
                if sequence.params.ignore_eos:
                    self._forbid_ends(words)
        return filled

    def _forbid_ends(self, words: Any) -> None:
        """Take the ends out of the rows in which anything else is allowed."""
        bits = words.view(np.uint32)
        for row in bits:
            without = row.copy()
            for token_id in self._end_ids:
                without[token_id // 32] &= ~np.uint32(1 << token_id % 32)
            if without.any():
                row[:] = without


def fill_rows(grammar: Grammar, draft_ids: Sequence[int], words: Any) -> None:
    """Write what may follow now, after the first draft, after the second, ...; the grammar stays where it is.

    words (1 + drafts, W) int32, zero. After a draft the grammar does not accept, rows allow everything: what they say
    is never used, since that draft is rejected.
    """
    grammar.fill_bitmask(words[0])
    num_accepted = 0
    try:
        for draft_id in draft_ids:
            if not grammar.accept_tokens([draft_id]):
                words[num_accepted + 1 :] = -1
                return
            num_accepted += 1
            grammar.fill_bitmask(words[num_accepted])
    finally:
        grammar.rollback(num_accepted)

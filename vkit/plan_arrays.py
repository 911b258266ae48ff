"""What single numbers of a plan become as arrays: ids, positions, targets of states, rows of logits. Host only."""

from __future__ import annotations

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vkit.sequence import ScheduledSequence, Sequence

IntArray: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens of a running sequence that a drafter runs through a model of its own."""

    sequence: Sequence
    start: int
    token_ids: list[int]
    num_logits: int
    """Rows wanted, for the last of the tokens."""

    num_drafts = 0

    @property
    def num_tokens(self) -> int:
        """Tokens."""
        return len(self.token_ids)


Shares: TypeAlias = SequenceABC[ScheduledSequence | TokenRun]


def token_ids_of(item: ScheduledSequence) -> list[int]:
    """The ids of a sequence's share: known tokens, then drafts."""
    sequence = item.sequence
    stop = item.start + item.num_tokens - item.num_drafts
    ids = sequence.token_ids[item.start : stop]
    return ids + sequence.draft_token_ids[: item.num_drafts] if item.num_drafts else ids


def state_targets(scheduled: Shares, group: int) -> IntArray:
    """Where the state after each token goes: in a verification the rows after the current one, else that one."""
    targets: list[int] = []
    for item in scheduled:
        table, row = item.sequence.block_ids[group], item.sequence.state_row
        if item.num_drafts:
            assert item.num_tokens == 1 + item.num_drafts <= len(table), "every state of a verification has a row"
            targets.extend(table[(row + place) % len(table)] for place in range(1, item.num_tokens + 1))
        else:
            targets.extend([-1] * (item.num_tokens - 1) + [table[row]])
    return np.array(targets, np.int64)


def axis_positions(scheduled: Shares, indices: IntArray, cu: IntArray) -> IntArray:
    """(3, T): every token's position in time, row and column; `indices` (T,) are the places in their sequences."""
    axes: IntArray = np.broadcast_to(indices, (3, len(indices))).copy()
    for item, first, beyond in zip(scheduled, cu, cu[1:], strict=False):
        sequence = item.sequence
        if sequence.rope_positions is not None:
            own = sequence.rope_positions[:, item.start : item.start + item.num_tokens]
            axes[:, first:beyond] += sequence.position_delta
            axes[:, first : first + own.shape[1]] = own
    return axes


def spans_of(scheduled: Shares) -> list[list[tuple[int, int]]] | None:
    """Per sequence the runs of media that see themselves, if any of them is computed in this step."""
    found = [
        [span for placed in item.sequence.media if placed.item.sees_itself for span in placed.spans]
        for item in scheduled
    ]
    is_seen = any(
        start < item.start + item.num_tokens and stop > item.start
        for item, spans in zip(scheduled, found, strict=True)
        for start, stop in spans
    )
    return found if is_seen else None


def last_rows(cu: IntArray, wanted: IntArray) -> IntArray:
    """Indices of the last wanted[b] tokens of each sequence, in order."""
    before = np.cumsum(wanted) - wanted
    rows: IntArray = np.arange(wanted.sum()) + np.repeat(cu[1:] - wanted - before, wanted)
    return rows

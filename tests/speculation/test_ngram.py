"""Prompt lookup against a search that tries everything, and how it paces itself."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from vkit.sequence import Sequence
from vkit.speculation.ngram import NgramIndex, NgramProposer
from vkit.speculation.pace import LONGEST_WAIT, Pace
from vkit.types import SamplingParams


def search(token_ids: list[int], shortest: int, longest: int, num_wanted: int) -> list[int]:
    """What follows the earliest occurrence of the longest n-gram that the tokens end with."""
    for n in range(min(longest, len(token_ids) - 1), shortest - 1, -1):
        for start in range(len(token_ids) - n):
            if token_ids[start : start + n] == token_ids[-n:]:
                return token_ids[start + n : start + n + num_wanted]
    return []


def test_the_example_of_the_specification() -> None:
    index = NgramIndex(2, 3)
    index.extend([1, 2, 3, 4, 2, 3])
    assert index.follow(4) == [4, 2, 3]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=6),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
    num_wanted=st.integers(1, 6),
)
def test_follow_equals_the_search(pieces: list[list[int]], shortest: int, more: int, num_wanted: int) -> None:
    index = NgramIndex(shortest, shortest + more)
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += piece
        index.extend(piece)
        assert index.follow(num_wanted) == search(token_ids, shortest, shortest + more, num_wanted)


def test_a_long_text_outgrows_the_first_memory() -> None:
    token_ids = [value * value % 101 for value in range(1500)]
    index = NgramIndex(3, 5)
    for start in range(0, 1500, 7):
        index.extend(token_ids[start : start + 7])
    assert len(index) == 1500
    assert index.follow(8) == search(token_ids, 3, 5, 8) != []


def test_pace_widens_while_right_and_falls_silent_while_wrong() -> None:
    pace = Pace(8)
    assert pace.num_drafts(10) == 3
    pace.book(14, 3, 3)
    pace.book(20, 6, 6)
    assert pace.num_drafts(20) == 8
    pace.book(23, 8, 2)
    assert pace.num_drafts(23) == 3
    waits = []
    position = 24
    for _ in range(8):
        pace.book(position, 3, 0)
        waits.append(pace.silent_until - position)
        assert pace.num_drafts(position) == 0
        assert pace.num_drafts(pace.silent_until) == 3
        position = pace.silent_until
    assert waits == [2, 4, 8, 16, 32, LONGEST_WAIT, LONGEST_WAIT, LONGEST_WAIT]


def test_proposer_reads_what_came_while_it_was_silent() -> None:
    proposer = NgramProposer(4, 2, 2)
    sequence = Sequence("a", [1, 2, 3, 1, 2], 5, SamplingParams(), 0.0)
    assert proposer.propose(sequence).token_ids == [3, 1, 2]
    sequence.token_ids += [9]
    proposer.book(sequence, 3, 0)
    assert proposer.propose(sequence).token_ids == []
    sequence.token_ids += [8, 9, 8]
    assert proposer.propose(sequence).token_ids == [9, 8]
    proposer.forget(["a"])
    sequence.token_ids = [5, 6, 5, 6]
    assert proposer.propose(sequence).token_ids == [5, 6]

"""Suffix decoding against a suffix trie built token by token, and what is kept of earlier answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import ScriptedRunner, generate, make_engine, make_request
from vkit.sequence import Sequence
from vkit.speculation.earlier import MAX_PLACES, EarlierOutputs
from vkit.speculation.suffix import SuffixProposer, likeliest
from vkit.speculative_config import SuffixSettings
from vkit.types import SamplingParams

Trie = dict[int, Any]
COUNT = -1


def trie_of(texts: list[list[int]], depth: int) -> Trie:
    """Every run of up to `depth` tokens of the texts, with how often it occurs."""
    root: Trie = {}
    for text in texts:
        for start in range(len(text)):
            node = root
            for token_id in text[start : start + depth]:
                node = node.setdefault(token_id, {COUNT: 0})
                node[COUNT] += 1
    return root


def walk(root: Trie, suffix: list[int]) -> Trie | None:
    node: Trie | None = root
    for token_id in suffix:
        node = node.get(token_id) if node is not None else None
    return node


def expected_drafts(
    root: Trie, text: list[int], lengths: tuple[int, int], max_drafts: int, min_prob: float
) -> set[tuple[int, ...]]:
    """Paths below the longest suffix that occurred before: each step to a child met most often, while likely enough."""
    shortest, longest = lengths
    for length in range(min(longest, len(text)), shortest - 1, -1):
        top = walk(root, text[-length:])
        assert top is not None
        num_before = top[COUNT] - 1  # the suffix itself is no occurrence before
        if not num_before:
            continue
        found: set[tuple[int, ...]] = set()
        paths: list[tuple[tuple[int, ...], Trie]] = [((), top)]
        while paths:
            path, node = paths.pop()
            counts = {token_id: child[COUNT] for token_id, child in node.items() if token_id != COUNT}
            most = max(counts.values(), default=0)
            if not most or most < min_prob * num_before or len(path) == min(max_drafts, length):
                found.add(path)
                continue
            paths += [((*path, token_id), node[token_id]) for token_id, count in counts.items() if count == most]
        return found
    return {()}


def proposer_of(max_drafts: int, **values: Any) -> SuffixProposer:
    return SuffixProposer(max_drafts, SuffixSettings(**values))


def sequence_of(
    token_ids: list[int], num_prompt: int | None = None, *, name: str = "a", salt: str | None = None
) -> Sequence:
    count = len(token_ids) if num_prompt is None else num_prompt
    return Sequence(name, token_ids, count, SamplingParams(), 0.0, cache_salt=salt)


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=30)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(text=TEXTS, depth=st.integers(2, 9), min_prob=st.sampled_from([0.0, 0.3, 0.7]))
def test_own_tokens_as_a_trie_would_say(text: list[int], depth: int, min_prob: float) -> None:
    proposer = proposer_of(3, max_tree_depth=depth, min_token_prob=min_prob)
    drafts = proposer.propose(sequence_of(text)).token_ids
    root = trie_of([text], depth)
    assert tuple(drafts) in expected_drafts(
        root, text, (proposer.shortest, proposer.longest), proposer.max_drafts, min_prob
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    texts=st.lists(TEXTS, min_size=1, max_size=6),
    tail=st.lists(st.integers(0, 2), min_size=1, max_size=12),
    kept=st.integers(1, 4),
    longest=st.integers(1, 12),
)
def test_earlier_outputs_as_a_trie_would_say(texts: list[list[int]], tail: list[int], kept: int, longest: int) -> None:
    earlier = EarlierOutputs(kept, longest, 256)
    for text in texts:
        earlier.add(text)
    assert len(earlier) == min(kept, len(texts))
    length, rows = earlier.find(np.array(tail), 1, 3)
    root = trie_of(texts[-kept:], longest + 3)
    matching = [n for n in range(1, min(longest, len(tail)) + 1) if walk(root, tail[-n:])]
    if max(matching, default=0) < min(3, longest):  # shorter matches are not looked for
        assert (length, rows) == (0, [])
        return
    assert length == matching[-1]
    node = walk(root, tail[-length:])
    assert node is not None
    assert len(rows) == min(node[COUNT], MAX_PLACES)
    for width in range(1, 4):
        for row in rows if node[COUNT] <= MAX_PLACES else []:
            if -1 not in row[:width]:
                below = walk(node, row[:width])
                assert below is not None
                assert below[COUNT] == sum(other[:width] == row[:width] for other in rows)


def test_the_ring_forgets_and_never_grows() -> None:
    earlier = EarlierOutputs(1000, 12, 64)
    nbytes = earlier.nbytes
    for first in range(0, 5000, 10):
        earlier.add(list(range(first, first + 10)))
    assert earlier.nbytes == nbytes
    assert len(earlier) == 5  # of eleven places each, in 64
    assert earlier.find(np.arange(4990, 4996), 1, 9) == (6, [[4996, 4997, 4998, 4999, -1, -1, -1, -1, -1]])
    assert earlier.find(np.arange(4950, 4956), 1, 2) == (6, [[4956, 4957]])
    assert earlier.find(np.arange(4940, 4946), 1, 2) == (0, [])
    earlier.add(list(range(200)))  # longer than the ring: its end
    assert earlier.find(np.array([196, 197, 198]), 1, 2) == (3, [[199, -1]])
    assert earlier.find(np.array([100, 101, 102]), 1, 2) == (0, [])


def test_the_latest_of_many_are_asked() -> None:
    earlier = EarlierOutputs(1000, 12)
    for number in range(MAX_PLACES + 8):
        earlier.add([1, 2, 3, number])
    length, rows = earlier.find(np.array([9, 1, 2, 3]), 1, 1)
    assert (length, [row[0] for row in rows]) == (3, list(range(MAX_PLACES + 7, 7, -1)))


def test_likeliest_follows_the_most_and_stops_where_few_agree() -> None:
    rows = [[1, 2, 3], [1, 2, 4], [1, 5, -1], [6, -1, -1]]
    assert likeliest(rows, 3, 0.0) == ([1, 2, 3], 0.75 + 0.5 + 0.25)
    assert likeliest(rows, 3, 0.5) == ([1, 2], 0.75 + 0.5)
    assert likeliest(rows, 1, 0.0) == ([1], 0.75)
    assert likeliest([[-1], [-1]], 1, 0.0) == ([], 0.0)
    assert likeliest([], 1, 0.0) == ([], 0.0)


def test_depth_and_factor_bound_the_drafts() -> None:
    text = [*range(40), *range(20)]
    for depth, factor, longest, most in ((24, 1.0, 12, 12), (24, 2.0, 8, 16), (24, 0.5, 16, 8), (2, 1.0, 1, 1)):
        proposer = proposer_of(32, max_tree_depth=depth, max_spec_factor=factor)
        assert proposer.longest == longest
        for _ in range(4):
            sequence = sequence_of(list(text))
            drafts = proposer.propose(sequence).token_ids
            proposer.book(sequence, len(drafts), len(drafts))  # widens
        assert drafts == list(range(20, 20 + most))


def test_outputs_of_ended_requests_are_looked_at_but_not_prompts() -> None:
    proposer = proposer_of(4)
    first = sequence_of([1, 2, 3, 4, 11, 12, 13, 14, 15], 4)
    assert proposer.propose(first).token_ids == []
    proposer.forget(["a"])
    assert proposer.propose(sequence_of([7, 11, 12, 13], name="b")).token_ids == [14, 15]
    assert proposer.propose(sequence_of([9, 1, 2, 3], name="c")).token_ids == []


def test_a_tenant_shares_nothing() -> None:
    proposer = proposer_of(4)
    for salt in ("tenant", None):
        proposer.propose(sequence_of([1, 11, 12, 13, 14, 15], 1, salt=salt))
        proposer.forget(["a"])
        other = sequence_of([7, 11, 12, 13], name="b")
        assert bool(proposer.propose(other).token_ids) == (salt is None)
        own = sequence_of([7, 11, 12, 13], name="c", salt="tenant")
        assert proposer.propose(own).token_ids == []
        proposer.forget(["b", "c"])


def test_nothing_is_kept_when_nothing_may_be() -> None:
    proposer = proposer_of(4, max_cached_requests=0)
    proposer.propose(sequence_of([1, 11, 12, 13, 14, 15], 1))
    proposer.forget(["a"])
    assert proposer.propose(sequence_of([7, 11, 12, 13], name="b")).token_ids == []


def test_stands_down_after_misses_until_a_far_longer_match() -> None:
    proposer = proposer_of(4)
    sequence = sequence_of([0, 1, 2, 8, 3, 4, 5, 6, 7, 10, 11, 12, 9, 0, 1, 2])
    assert proposer.propose(sequence).token_ids == [8, 3, 4]  # a match of three
    for _ in range(3):
        proposer.book(sequence, 3, 0)
    assert proposer.propose(sequence).token_ids == []
    sequence.token_ids += [3, 4, 5, 6, 7]
    assert proposer.propose(sequence).token_ids == []  # a match of five
    sequence.token_ids += [10]
    assert proposer.propose(sequence).token_ids == [11, 12, 9]  # a match of six
    sequence.token_ids += [11, 12, 9]
    proposer.book(sequence, 3, 3)
    assert proposer.propose(sequence).token_ids == [0, 1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_the_second_time_an_answer_takes_few_steps(is_async: bool) -> None:
    script = [65 + value % 26 for value in range(24)]
    runner = ScriptedRunner(script, 100)
    engine = make_engine(runner, vocab_size=100, proposer=proposer_of(8), async_scheduling=is_async)
    params = SamplingParams(temperature=0.0, max_tokens=24)
    steps = []
    for name in ("first", "second"):
        before = len(runner.step_log)
        output = generate(engine, [make_request(engine, [1, 2, 3], params, name=name)])[name]
        assert output.outputs[0].token_ids == script
        steps.append(len(runner.step_log) - before)
    assert steps[0] == 24
    assert steps[1] < 12
    engine.close()

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vkit.text.stops import StopMatcher


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    """The pieces a client gets, and the stop string."""
    matcher = StopMatcher(stops, include_stop=include)
    emitted = []
    for piece in pieces:
        push = matcher.push(piece)
        emitted.append(push.emit)
        if push.matched is not None:
            return emitted, push.matched
    emitted.append(matcher.finish())
    return emitted, None


def oracle(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The first place where some stop string ends, looked for character by character."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def test_pitfall_1_a_stop_over_two_tokens_never_leaks_its_beginning() -> None:
    emitted, matched = run(["AB", "CDE", "FG", "x"], ["CDEF"])
    assert ("".join(emitted), matched) == ("AB", "CDEF")
    assert not any("C" in piece for piece in emitted)


def test_pitfall_1_text_that_can_no_longer_match_is_released() -> None:
    emitted, matched = run(["AB", "CDE", "FG", "x"], ["CDEFZ"])
    assert matched is None
    assert emitted == ["AB", "", "CDEFG", "x", ""]


def test_text_held_at_the_end_is_released() -> None:
    assert run(["AB", "CD"], ["CDEF"]) == (["AB", "", "CD"], None)


def test_pitfall_2_before_min_tokens_nothing_matches() -> None:
    matcher = StopMatcher(["\n"])
    text, num_tokens = "", 0
    for num_tokens, piece in enumerate(["a", "\n", "b", "c", "\n", "d"], start=1):
        push = matcher.push(piece, armed=num_tokens >= 4)
        text += push.emit
        if push.matched:
            break
    assert (text, num_tokens) == ("a\nbc", 5)


def test_a_stop_that_begins_before_it_counts_and_ends_after_is_found_whole() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("aSTOPb ST", armed=False) == ("aSTOPb ", None)
    assert matcher.push("OP") == ("", "STOP")


@pytest.mark.parametrize(
    ("text", "stops", "cut", "matched"),
    [
        ("xabcy", ["bc", "abc"], "x", "abc"),  # one the end of the other: the longer
        ("xabcy", ["abcy", "bc"], "xa", "bc"),  # one inside the other: the one that ends first
        ("xabcy", ["ab", "abc"], "x", "ab"),  # one the beginning of the other
        ("one two", ["two", "one"], "", "one"),
        ("aab", ["ab"], "a", "ab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("n\u00e9e", ["\u00e9"], "n", "\u00e9"),
    ],
)
def test_which_stop_counts(text: str, stops: list[str], cut: str, matched: str) -> None:
    for order in (stops, stops[::-1]):
        emitted, found = run([text], order)
        assert ("".join(emitted), found) == (cut, matched)


def test_including_the_stop_holds_nothing_back() -> None:
    assert run(["AB", "CDE", "FG", "x"], ["CDEF"], include=True) == (["AB", "CDE", "F"], "CDEF")
    assert run(["AB", "CD"], ["CDEF"], include=True) == (["AB", "CD", ""], None)


def test_without_stops_everything_passes() -> None:
    assert run(["a", "", "b"], []) == (["a", "", "b", ""], None)


@given(
    pieces=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_equals_looking_character_by_character(pieces: list[str], stops: list[str], include: bool) -> None:
    text = "".join(pieces)
    expected, expected_stop = oracle(text, stops, include=include)
    emitted, matched = run(pieces, stops, include=include)
    assert ("".join(emitted), matched) == (expected, expected_stop)
    # What is held back is never more than a beginning of a stop string.
    matcher, seen, out = StopMatcher(stops), "", ""
    for piece in pieces:
        push = matcher.push(piece)
        if push.matched:
            break
        seen, out = seen + piece, out + push.emit
        held = seen[len(out) :]
        assert seen.startswith(out)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)
        longer = [seen[i:] for i in range(len(out)) if any(s.startswith(seen[i:]) and s != seen[i:] for s in stops)]
        assert not longer, "the beginning of a stop string was handed out"


def test_a_long_stop_string_costs_a_constant_per_character() -> None:
    stop = "a" * 2000 + "b"
    matcher = StopMatcher([stop])
    emitted = "".join(matcher.push("a" * 7).emit for _ in range(3000))
    assert len(emitted) == 21000 - 2000
    assert matcher.finish() == "a" * 2000

"""Stop strings in streamed text. Knows text only: which tokens it came from, and when to look, is the caller's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopPush(NamedTuple):
    """What one push settles."""

    emit: str
    """Text that can be handed out now."""

    matched: str | None
    """The stop string that ended the text, if one did."""


class StopMatcher:
    """Finds the stop string that ends first, and holds back text that may yet turn out to be the beginning of one.

    Of several that end at the same character the longest counts. The result does not depend on how the text is
    cut into pushes. Costs one automaton step per character and stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """`include_stop` keeps the stop string in the text; nothing needs to be held back then."""
        # Longest first: the first automaton to arrive at a character is then the one that counts.
        self._automata = [_Prefixes(stop) for stop in sorted(dict.fromkeys(stops), key=len, reverse=True)]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include_stop = include_stop
        self._states = [0] * len(self._automata)
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> StopPush:
        """What `text` settles. After a match there must be no further push.

        While not `armed` (before `min_tokens`), stop strings that end inside `text` do not count; one that begins there
        and ends later does.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return StopPush(text, None)
        for i, character in enumerate(text):
            matched = self._step(character, armed)
            if matched is not None:
                return self._settle(text[: i + 1], matched)
        settled = self._held + text
        length = len(settled) - max(self._states, default=0)
        emit, self._held = settled[:length], settled[length:]
        if self._include_stop:
            return StopPush(text, None)
        return StopPush(emit, None)

    def finish(self) -> str:
        """What was held back: at the end of the text it is no stop string."""
        held = "" if self._include_stop else self._held
        self._held = ""
        return held

    def _step(self, character: str, armed: bool) -> str | None:
        found = None
        for i, automaton in enumerate(self._automata):
            state = automaton.step(self._states[i], character)
            if state == len(automaton.stop):
                if armed and found is None:
                    found = automaton.stop
                state = automaton.shorter[state]
            self._states[i] = state
        return found

    def _settle(self, text: str, matched: str) -> StopPush:
        """The text up to `matched`, which ends `text`."""
        if self._include_stop:
            return StopPush(text, matched)
        settled = self._held + text
        self._held = ""
        return StopPush(settled[: len(settled) - len(matched)], matched)


class _Prefixes:
    """How much of the beginning of one stop string the text so far ends with.

    Source: Knuth, Morris and Pratt 1977, "Fast pattern matching in strings".
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        # shorter[n]: length of the longest proper prefix of stop[:n] that also ends it.
        self.shorter = [0, 0]
        for n in range(1, len(stop)):
            self.shorter.append(self.step(self.shorter[n], stop[n]))

    def step(self, state: int, character: str) -> int:
        """Length of the longest beginning of the stop string that ends the text once `character` is added."""
        while state and self.stop[state] != character:
            state = self.shorter[state]
        return state + (self.stop[state] == character)

"""Completes JSON that was cut off."""

from __future__ import annotations

import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[-+.0-9A-Za-z]+', re.DOTALL)
_OPEN_STRING = re.compile(r'"(?:[^"\\]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_CLOSER = {"{": "}", "[": "]"}


def completed(text: str) -> str:
    """`text`, the beginning of a JSON object, as a whole object.

    A string value that was cut is closed where it stops; a key without value, and a number or word that the text ends
    in, are left out.
    """
    end, closers, in_string = _last_complete(text)
    return text[:end] + ('"' if in_string else "") + "".join(reversed(closers))


def _last_complete(text: str) -> tuple[int, list[str], bool]:
    """(where the last complete value ends, brackets open there, whether that is inside a string)."""
    closers: list[str] = []
    end, num_open = 0, 0
    expects_value = True
    pos = 0
    while (match := _TOKEN.search(text, pos)) is not None:
        if '"' in text[pos : match.start()]:
            break
        token, pos = match[0], match.end()
        if token in _CLOSER:
            closers.append(_CLOSER[token])
            expects_value = token == "["
        elif token in "}]":
            closers.pop()
        elif token in ":,":
            expects_value = token == ":" or closers[-1] == "]"
            continue
        elif not expects_value or (token[0] != '"' and pos == len(text)):
            continue
        end, num_open = pos, len(closers)
        if not closers:
            break
    rest = text[pos:].lstrip()
    if rest.startswith('"') and expects_value and closers:
        string = _OPEN_STRING.match(rest)
        assert string is not None
        return len(text) - len(rest) + string.end(), closers, True
    return end, closers[:num_open], False

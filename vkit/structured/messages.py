"""Error text: every refusal of a constraint is one line that begins with the field and names the offender."""

from __future__ import annotations

import re

from vkit.errors import InvalidRequest

MAX_MESSAGE_LEN = 400
"""Characters of a library's message that are passed on."""

_PLAIN = {"NoExtensionBias": "it refers to itself without an end, so no output can satisfy it"}
"""Codes of the grammar library -> what they mean to whoever wrote the constraint."""

_CAUSE = re.compile(r"^error: (.*)$", re.MULTILINE)


def refused(what: str, message: str) -> InvalidRequest:
    """The refusal of a constraint; `what` is its kind, or its kind and a place in it."""
    return InvalidRequest(f"structured_outputs: {what}: {message}", param="structured_outputs")


def clip(text: str, limit: int = 120) -> str:
    """The text on one line, cut to `limit` characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


def cause_of(message: str) -> str:
    """What the grammar library has against a pattern, without the pattern and its picture."""
    causes = _CAUSE.findall(message)
    head = message.split("\n", 1)[0]
    return clip(
        causes[0] if causes else head.rpartition("(in regex): ")[2].partition(" in regex /")[0], MAX_MESSAGE_LEN
    )


def in_one_line(message: str) -> str:
    """What a multi-line message of the grammar library says, without the picture of the place."""
    causes = _CAUSE.findall(message)
    head = message.split("\n", 1)[0]
    head = _PLAIN.get(head.strip(), head)
    if causes and causes[0] not in head:
        head = causes[0] if head.endswith("regex parse error:") and ":" not in head[:-1] else f"{head} {causes[0]}"
    return clip(head, MAX_MESSAGE_LEN)

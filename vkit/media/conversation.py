"""Chat messages that bring media: bare parts for the template, and the items beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vkit.errors import InvalidRequest
from vkit.media.given import as_media
from vkit.media.inputs import MediaProcessor
from vkit.media.items import KINDS, Media, MediaKind

Message = Mapping[str, Any]

_KEYS: Mapping[str, tuple[MediaKind, str]] = {
    **{kind: (kind, kind) for kind in KINDS},
    **{f"{kind}_url": (kind, f"{kind}_url") for kind in KINDS},
}
"""Part type -> kind, and the key that holds the item."""


def split_media(messages: Sequence[Message]) -> tuple[list[Message], dict[MediaKind, list[Media]]]:
    """The messages with media parts bare, such as {"type": "image"}, and the items by kind, in order.

    A media part is {"type": "image", "image": item} or {"type": "image_url", "image_url": {"url": URL}}; likewise for
    "video" and "audio". An item is whatever `as_media` takes.

    Raises:
        InvalidRequest: a part without its item, or one that cannot be read.
    """
    found: dict[MediaKind, list[Media]] = {}
    made: list[Message] = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list | tuple):
            made.append(message)
            continue
        parts = []
        for j, part in enumerate(content):
            if not (isinstance(part, Mapping) and part.get("type") in _KEYS):
                parts.append(part)
                continue
            kind, key = _KEYS[part["type"]]
            item = part.get(key)
            if isinstance(item, Mapping):
                item = item.get("url")
            if item is None:
                where = f"messages.{i}.content.{j}"
                raise InvalidRequest(f"{where}: expected the {kind} under the key {key!r}", param=where)
            found.setdefault(kind, []).append(as_media(kind, item))
            parts.append({"type": kind})
        made.append({**message, "content": parts})
    return made, found


def with_placeholders(messages: Sequence[Message], processor: MediaProcessor) -> list[Message]:
    """Messages for a template that knows text alone: bare media parts become the text that stands for them."""
    made: list[Message] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {"type": "text", "text": processor.placeholder(part["type"])}
                if isinstance(part, Mapping) and part.get("type") in KINDS
                else part
                for part in content
            ]
            message = {**message, "content": parts}
        made.append(message)
    return made

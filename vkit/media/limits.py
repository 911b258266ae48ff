"""How many items of each kind a request may bring, and the check of what it did bring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vkit.errors import InvalidRequest
from vkit.media.given import as_media
from vkit.media.items import KINDS, Media, MediaKind

MediaLimits = Mapping[MediaKind, int]
"""Most items of each kind in one prompt; a kind that is not listed is not limited."""


def checked_media(data: Any, kinds: Sequence[MediaKind], limits: MediaLimits) -> list[Media]:
    """The items of a `multi_modal_data` mapping, {"image": [item, ...], ...}; one item needs no list.

    An item is whatever `as_media` takes.

    Raises:
        InvalidRequest: another form, a kind this model does not take, or more items than allowed.
    """
    name = "multi_modal_data"
    if not isinstance(data, Mapping):
        raise InvalidRequest(f"{name}: expected a mapping of kinds to items, got {type(data).__name__}", param=name)
    if unknown := [key for key in data if key not in KINDS]:
        raise InvalidRequest(f"{name}: expected the keys {', '.join(KINDS)}; got {unknown[0]!r}", param=name)
    found: list[Media] = []
    for kind in KINDS:
        items = data.get(kind)
        if items is None:
            continue
        listed = items if isinstance(items, list) else [items]
        if listed and kind not in kinds:
            known = f"takes text and {', '.join(kinds)}" if kinds else "takes text only"
            raise InvalidRequest(f"{kind}: this model {known}", param=kind)
        if len(listed) > (limit := limits.get(kind, len(listed))):
            raise InvalidRequest(
                f"{kind}: {len(listed)} given, at most {limit} allowed here", param=kind, remedy="--limit-mm-per-prompt"
            )
        found.extend(as_media(kind, item) for item in listed)
    return found

"""Refusals of media: what cannot be fetched or decoded, and what may not be looked at."""

from __future__ import annotations

from vkit.errors import InvalidRequest
from vkit.media.items import MediaKind


class UnusableMedia(InvalidRequest):
    """A well-formed request names media that cannot be fetched or decoded: 422 over HTTP."""

    def __init__(self, kind: MediaKind, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{kind}: {message}", param=kind, remedy=remedy)


class ForbiddenMedia(InvalidRequest):
    """Media at an address or path that the operator did not allow: 403 over HTTP."""

    def __init__(self, kind: MediaKind, message: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{kind}: {message}", param=kind, remedy=remedy)

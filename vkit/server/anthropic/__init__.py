"""The Anthropic Messages routes."""

from __future__ import annotations

from vkit.server.routes import Route
from vkit.server.settings import ServerSettings


def anthropic_routes(settings: ServerSettings) -> list[Route]:
    """The routes of this family."""
    return []

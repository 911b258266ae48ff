"""The table of routes: one row says method, path, protection and shapes; the app, the document and the log read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from vkit.server.call import Handler
from vkit.server.problems import is_anthropic_path
from vkit.server.settings import ModelKind


@dataclass(frozen=True, slots=True)
class Parameter:
    """A query parameter."""

    name: str
    type: type[Any]
    text: str


@dataclass(frozen=True, slots=True)
class Route:
    """One path and what answers on it."""

    methods: tuple[str, ...]
    path: str
    """Litestar notation; `{id:path}` takes the rest of the path."""
    handler: Handler
    summary: str
    tag: str
    needs_key: bool = True
    needs_engine: bool = False
    """Answers 503 until the model is loaded, and counts as load."""
    kinds: tuple[ModelKind, ...] = (ModelKind.TEXT,)
    """Models that can answer, where the engine is needed; others get 501."""
    body: type[msgspec.Struct] | None = None
    is_form: bool = False
    """Whether the body is multipart/form-data instead of JSON."""
    reply: Any = None
    """Type of the JSON reply; None for one that is not JSON."""
    streams: bool = False
    media_type: str = "application/json"
    """Of a reply that is not JSON; with `reply`, of what is sent to clients that ask for it instead."""
    parameters: tuple[Parameter, ...] = ()
    is_probe: bool = False
    """Left out of http_requests_total."""

    @property
    def template(self) -> str:
        """The path as documents and metrics show it."""
        return self.path.replace(":path}", "}").replace(":str}", "}")

    @property
    def is_anthropic(self) -> bool:
        """Whether errors have Anthropic's shape."""
        return is_anthropic_path(self.path)

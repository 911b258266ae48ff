"""What surrounds every request: header limits, root path, CORS, keys, identity, access log, HTTP metrics.

Plain ASGI around the application, because the framework's own middleware does not see paths it has no route for.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Mapping
from typing import Any

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from vkit.server.call import Exchange, new_id
from vkit.server.problems import Problem, error_body
from vkit.server.settings import CorsSettings
from vkit.server.state import ServerState

logger = logging.getLogger("vkit.server")
access_logger = logging.getLogger("vkit.server.access")

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 256
MAX_ECHOED_ID_LEN = 256
PREFLIGHT_MAX_AGE_S = 600


class Gate:
    """The outermost ASGI application."""

    def __init__(self, app: ASGIApp, state: ServerState, guarded: Guarded) -> None:
        self.app = app
        self.state = state
        self.settings = state.settings
        self._guarded = guarded
        self._key_digests = [_digest(key) for key in self.settings.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == ScopeType.HTTP:
            await self._serve(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        given_id = headers.get("x-request-id", "")[:MAX_ECHOED_ID_LEN]
        exchange = Exchange(given_id or new_id(), bool(given_id))
        scope["vkit"] = exchange  # type: ignore[typeddict-unknown-key]
        self._strip_root(scope)
        sent = _Sent()
        reply = self._watched(send, sent, exchange, headers)
        try:
            problem = self._refusal(scope, headers)
            if problem is not None:
                await _send_problem(problem, scope, exchange, reply)
            elif self._is_preflight(scope, headers):
                await _send_empty(reply)
            else:
                await self.app(scope, receive, reply)
        finally:
            self.state.num_http_requests -= exchange.is_counted
            self._record(scope, exchange, sent, time.monotonic() - started)

    def _strip_root(self, scope: HTTPScope) -> None:
        root = self.settings.root_path
        if root and (scope["path"] == root or scope["path"].startswith(root + "/")):
            scope["path"] = scope["path"][len(root) :] or "/"
            scope["raw_path"] = scope["path"].encode()

    def _refusal(self, scope: HTTPScope, headers: Mapping[str, str]) -> Problem | None:
        raw = list(scope["headers"])
        num_bytes = sum(len(name) + len(value) + 4 for name, value in raw)
        if len(raw) > MAX_HEADERS or num_bytes > MAX_HEADER_BYTES:
            return Problem(
                431,
                f"The request headers are too large: at most {MAX_HEADERS} headers and {MAX_HEADER_BYTES} bytes.",
                headers={"connection": "close"},
            )
        if not self._key_digests or scope["method"] == "OPTIONS" or not self._guarded(scope["path"]):
            return None
        if self._has_key(headers):
            return None
        return Problem(401, "Missing or wrong API key.", headers={"www-authenticate": "Bearer"})

    def _has_key(self, headers: Mapping[str, str]) -> bool:
        offered = [headers["x-api-key"]] if "x-api-key" in headers else []
        scheme, _, token = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer":
            offered.append(token.strip())
        digests = [_digest(key) for key in offered]
        # No early exit: the time taken must not tell which key was close.
        matches = [hmac.compare_digest(mine, theirs) for mine in self._key_digests for theirs in digests]
        return any(matches)

    def _is_preflight(self, scope: HTTPScope, headers: Mapping[str, str]) -> bool:
        return (
            self.settings.cors is not None
            and scope["method"] == "OPTIONS"
            and "origin" in headers
            and "access-control-request-method" in headers
        )

    def _watched(self, send: Send, sent: _Sent, exchange: Exchange, headers: Mapping[str, str]) -> Send:
        extra = _cors_headers(self.settings.cors, headers)

        async def reply(message: Message) -> None:
            if message["type"] == "http.response.start":
                sent.status = message["status"]
                added = list(extra)
                if self.settings.enable_request_id_headers:
                    added.append((b"x-request-id", _plain(exchange.request_id)))
                message["headers"] = [*message["headers"], *added]
            elif message["type"] == "http.response.body":
                sent.num_bytes += len(message.get("body", b""))
            await send(message)

        return reply

    def _record(self, scope: HTTPScope, exchange: Exchange, sent: _Sent, seconds: float) -> None:
        path = scope["path"]
        settings = self.settings
        if not settings.disable_access_log and path not in settings.access_log_excluded:
            labels = "".join(f" {name}={value!r}" for name, value in exchange.labels.items())
            access_logger.info(
                "%s %s %d %.1f ms %s%s", scope["method"], path, sent.status, seconds * 1000, exchange.request_id, labels
            )
        route = exchange.route
        if route is not None and route.is_probe:
            return
        handler = "none" if route is None else route.template
        try:
            self.state.metrics.observe_http(
                scope["method"], handler, sent.status or 499, seconds, exchange.body_bytes, sent.num_bytes
            )
        except ValueError:
            logger.exception("HTTP metrics failed")


class Guarded:
    """Which paths need a key."""

    def __init__(self, exact: frozenset[str], prefixes: tuple[str, ...]) -> None:
        self._exact = exact
        self._prefixes = prefixes

    def __call__(self, path: str) -> bool:
        """Whether this path needs a key."""
        bare = path.rstrip("/") or "/"
        return bare in self._exact or bare.startswith(self._prefixes)


class _Sent:
    __slots__ = ("num_bytes", "status")

    def __init__(self) -> None:
        self.status = 0
        self.num_bytes = 0


def _cors_headers(cors: CorsSettings | None, headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Reply headers that let a page of the request's origin read the reply; none for other origins."""
    origin = headers.get("origin")
    if cors is None or origin is None or not ("*" in cors.origins or origin in cors.origins):
        return []
    names_origin = cors.allow_credentials or "*" not in cors.origins
    fields = [
        ("access-control-allow-origin", origin if names_origin else "*"),
        ("access-control-expose-headers", "X-Request-Id, X-Vkit-Ignored-Fields"),
    ]
    if names_origin:
        fields.append(("vary", "Origin"))
    if cors.allow_credentials:
        fields.append(("access-control-allow-credentials", "true"))
    if "access-control-request-method" in headers:
        asked = headers.get("access-control-request-headers", "")
        fields += [
            ("access-control-allow-methods", _listed(cors.methods, headers["access-control-request-method"])),
            ("access-control-allow-headers", _listed(cors.headers, asked)),
            ("access-control-max-age", str(PREFLIGHT_MAX_AGE_S)),
        ]
    return [(name.encode(), value.encode("latin-1", "replace")) for name, value in fields if value]


def _listed(allowed: tuple[str, ...], asked: str) -> str:
    return asked if "*" in allowed else ", ".join(allowed)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _plain(text: str) -> bytes:
    """A header value: printable ASCII, bounded."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:MAX_ECHOED_ID_LEN]).encode()


async def _send_problem(problem: Problem, scope: HTTPScope, exchange: Exchange, send: Send) -> None:
    body = error_body(problem, scope["path"], exchange.request_id)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **problem.headers}
    await send(
        {
            "type": "http.response.start",
            "status": problem.status,
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }
    )
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body, "more_body": False})


async def _send_empty(send: Send) -> None:
    start: Any = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    await send(start)
    await send({"type": "http.response.body", "body": b"", "more_body": False})

"""The application factory: routes of all families under one gate."""

from __future__ import annotations

import logging
from typing import Any

from litestar import Litestar, Request, route
from litestar.exceptions import HTTPException
from litestar.handlers import HTTPRouteHandler
from litestar.response.base import Response
from litestar.types import ASGIApp

from vkit.server.anthropic import anthropic_routes
from vkit.server.call import Call, ClientGone, Exchange
from vkit.server.gate import Gate, Guarded
from vkit.server.lowlevel import lowlevel_routes
from vkit.server.nim import nim_routes
from vkit.server.openai import openai_routes
from vkit.server.openapi import document_routes
from vkit.server.problems import Problem, error_body, problem_from
from vkit.server.routes import Route
from vkit.server.settings import ModelKind
from vkit.server.state import ServerState
from vkit.server.video.routes import video_routes

logger = logging.getLogger("vkit.server")

CLIENT_CLOSED_REQUEST = 499
TAGS_WITHOUT_TEXT = frozenset({"health", "models", "management", "videos"})
"""Routes of a server without a text model."""


def all_routes(state: ServerState) -> list[Route]:
    """Every route this server registers, in the order of the documentation."""
    routes = [
        *openai_routes(state.settings),
        *anthropic_routes(state.settings),
        *lowlevel_routes(state.settings),
        *nim_routes(state.settings),
    ]
    if state.settings.video is not None:
        routes += video_routes()
    if state.settings.model_kind is ModelKind.VIDEO:
        routes = [row for row in routes if row.tag in TAGS_WITHOUT_TEXT or row.path == "/server_info"]
    return [*routes, *document_routes(state.settings, routes)]


def create_app(state: ServerState) -> ASGIApp:
    """The ASGI application that serves `state`."""
    routes = all_routes(state)
    app = Litestar(
        [_handler(row, state) for row in routes],
        openapi_config=None,
        request_max_body_size=None,
        exception_handlers={Exception: _framework_problem},
        logging_config=None,
    )
    return Gate(app, state, _guarded(routes))


def _guarded(routes: list[Route]) -> Guarded:
    guarded = [row.template for row in routes if row.needs_key]
    exact = frozenset(path for path in guarded if "{" not in path)
    prefixes = tuple(path[: path.index("{")] for path in guarded if "{" in path)
    return Guarded(exact, prefixes)


def _handler(row: Route, state: ServerState) -> HTTPRouteHandler:
    async def handle(request: Request[Any, Any, Any]) -> Response[Any]:
        exchange: Exchange = request.scope["vkit"]  # type: ignore[typeddict-item]
        exchange.route = row
        call = Call(request, state, exchange)
        if row.needs_engine:
            exchange.is_counted = True
            state.num_http_requests += 1
        try:
            if row.needs_engine:
                _check_kind(row, state.settings.model_kind)
                _ = state.engine
            return await row.handler(call)
        except ClientGone:
            return Response(b"", status_code=CLIENT_CLOSED_REQUEST, media_type="text/plain")
        except Exception as exc:
            return _problem_reply(problem_from(exc), request, call.headers(), state)

    methods = [*row.methods, "HEAD"] if "GET" in row.methods and "HEAD" not in row.methods else list(row.methods)
    return route(row.path, http_method=methods, name=f"{row.methods[0]} {row.path}", status_code=200)(handle)  # type: ignore[arg-type]


_WORKING_ROUTES = {
    ModelKind.EMBEDDING: "makes embeddings and generates no text; use POST /v1/embeddings",
    ModelKind.SPEECH: "transcribes speech and generates no text; use POST /v1/audio/transcriptions",
}


def _check_kind(row: Route, kind: ModelKind) -> None:
    """Refuse what the loaded model does not do.

    Raises:
        Problem: 501 naming the route that works.
    """
    if kind not in row.kinds:
        raise Problem(501, f"This model {_WORKING_ROUTES[kind]}.")


def _problem_reply(
    problem: Problem, request: Request[Any, Any, Any], headers: dict[str, str], state: ServerState
) -> Response[bytes]:
    path = request.scope["path"]
    exchange: Exchange = request.scope["vkit"]  # type: ignore[typeddict-item]
    if problem.status < 500:
        stack = problem if state.settings.log_error_stack else None
        logger.info("%s %s: %d %s", request.method, path, problem.status, problem.message[:500], exc_info=stack)
    return Response(
        error_body(problem, path, exchange.request_id),
        status_code=problem.status,
        media_type="application/json",
        headers={**headers, **problem.headers},
    )


def _framework_problem(request: Request[Any, Any, Any], exc: Exception) -> Response[bytes]:
    """The framework's own refusals: unknown paths and wrong methods."""
    status = exc.status_code if isinstance(exc, HTTPException) else 500
    headers = dict(exc.headers or {}) if isinstance(exc, HTTPException) else {}
    path = request.scope["path"]
    if status == 404:
        problem = Problem(404, f"The path {path[:200]!r} does not exist.")
    elif status == 405:
        problem = Problem(405, f"{request.method} is not allowed on {path[:200]!r}.", headers=headers)
    elif 400 <= status < 500:
        problem = Problem(status, str(exc))
    else:
        problem = problem_from(exc)
    exchange: Exchange = request.scope["vkit"]  # type: ignore[typeddict-item]
    return Response(
        error_body(problem, path, exchange.request_id),
        status_code=problem.status,
        media_type="application/json",
        headers=problem.headers,
    )

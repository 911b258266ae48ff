"""The OpenAPI 3.1 document, built from the table of routes and the request and reply structs; and its explorer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.pages import load_page, page_reply
from vkit.server.problems import AnthropicErrorBody, OpenAIErrorBody
from vkit.server.routes import Parameter, Route
from vkit.server.schema import Json
from vkit.server.settings import ServerSettings

API_VERSION = "1.0.0"

_JSON_TYPES: dict[type[Any], str] = {str: "string", bool: "boolean", int: "integer"}


def document_routes(settings: ServerSettings, routes: Sequence[Route]) -> list[Route]:
    """/openapi.json and /docs over the given routes; none when the operator turned them off."""
    if settings.disable_docs:
        return []
    page = load_page("docs.html")
    document = b""

    async def openapi_json(call: Call) -> Response[Any]:
        """The document, built at the first request."""
        nonlocal document
        if not document:
            document = msgspec.json.encode(build_document(settings, [*routes, *own]))
        return Response(document, status_code=200, media_type="application/json")

    async def docs(call: Call) -> Response[Any]:
        """The explorer, which needs nothing but this server."""
        return page_reply(call, page)

    own = [
        Route(
            ("GET",), "/openapi.json", openapi_json, "OpenAPI document", "documentation", needs_key=False, reply=Json
        ),
        Route(("GET",), "/docs", docs, "Explorer", "documentation", needs_key=False, media_type="text/html"),
    ]
    return own


def build_document(settings: ServerSettings, routes: Sequence[Route]) -> dict[str, Any]:
    """The document of these routes."""
    shapes = [OpenAIErrorBody, AnthropicErrorBody]
    shapes += [row.body for row in routes if row.body is not None]
    shapes += [row.reply for row in routes if row.reply is not None]
    schemas, components = msgspec.json.schema_components(shapes, ref_template="#/components/schemas/{name}")
    by_shape = dict(zip((repr(shape) for shape in shapes), schemas, strict=True))
    paths: dict[str, Any] = {}
    for row in routes:
        for method in row.methods:
            paths.setdefault(row.template, {})[method.lower()] = _operation(row, method, by_shape)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vkit",
            "version": API_VERSION,
            "description": "One server for OpenAI, Anthropic, token-level and NIM clients.",
        },
        "servers": [{"url": settings.root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(row: Route, method: str, by_shape: dict[str, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": row.summary,
        "tags": [row.tag],
        "operationId": f"{method.lower()}{row.template.replace('/', '_').replace('{', '').replace('}', '')}",
        "responses": _responses(row, by_shape),
    }
    parameters = [_parameter(item) for item in row.parameters]
    if "{" in row.template:
        name = row.template[row.template.index("{") + 1 : row.template.index("}")]
        parameters.append({"name": name, "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        operation["parameters"] = parameters
    if row.body is not None:
        media_type = "multipart/form-data" if row.is_form else "application/json"
        content = {media_type: {"schema": by_shape[repr(row.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    if row.needs_key:
        operation["security"] = [{}, {"bearer": []}, {"api_key": []}]
    return operation


def _responses(row: Route, by_shape: dict[str, dict[str, Any]]) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success"}
    if row.reply is not None:
        success["content"] = {"application/json": {"schema": by_shape[repr(row.reply)]}}
    if row.media_type != "application/json":
        success.setdefault("content", {})[row.media_type.split(";")[0]] = {"schema": {"type": "string"}}
    if row.streams:
        success["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    error = by_shape[repr(AnthropicErrorBody if row.is_anthropic else OpenAIErrorBody)]
    problem = {"content": {"application/json": {"schema": error}}}
    codes = {"500": "Fault of the server"}
    if row.body is not None or row.parameters or ("{" in row.path and "POST" in row.methods):
        codes["400"] = "The request is wrong; the message says where"
    if row.body is not None:
        codes["413"] = "The body is too large"
    if row.needs_key:
        codes["401"] = "Missing or wrong key"
    if row.body is not None or "{" in row.path:
        codes["404"] = "Unknown model or id"
    if row.needs_engine or row.path.startswith(("/v1/health", "/health", "/ping")):
        codes["503"] = "Loading, shutting down, or full"
    responses: dict[str, Any] = {"200": success}
    for code, text in sorted(codes.items()):
        responses[code] = {"description": text, **problem}
    if row.path in ("/health", "/ping"):
        responses["503"] = {"description": "The engine died"}
    return responses


def _parameter(item: Parameter) -> dict[str, Any]:
    return {
        "name": item.name,
        "in": "query",
        "required": False,
        "description": item.text,
        "schema": {"type": _JSON_TYPES[item.type]},
    }

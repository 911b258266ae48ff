"""Token-level inference, scoring, health, metrics and administration."""

from __future__ import annotations

from typing import Any

from vkit.server.call import Handler
from vkit.server.lowlevel.adapters import (
    LoadAdapterBody,
    UnloadAdapterBody,
    load_lora_adapter,
    unload_lora_adapter,
)
from vkit.server.lowlevel.admin import health, load, metrics, reset_prefix_cache, root, server_info, version
from vkit.server.lowlevel.generate import abort_requests, generate
from vkit.server.lowlevel.schemas import (
    AbortBody,
    AbortReply,
    GenerateBody,
    GenerateReply,
    LoadReply,
    ResetReply,
    RootReply,
    ScoringBody,
    ScoringReply,
    ServerInfoReply,
    VersionReply,
)
from vkit.server.lowlevel.scoring import generative_scoring
from vkit.server.metrics import CONTENT_TYPE
from vkit.server.routes import Parameter, Route
from vkit.server.settings import ModelKind, ServerSettings

GET, POST = ("GET",), ("POST",)


def lowlevel_routes(settings: ServerSettings) -> list[Route]:
    """The routes of this family."""
    routes = [*_inference_routes(), *_probe_routes(), *_admin_routes()]
    if settings.enable_lora:
        routes += _adapter_routes()
    if not settings.disable_metrics:
        routes += [
            Route(
                GET,
                path,
                metrics,
                "Prometheus metrics",
                "health",
                needs_key=False,
                media_type=CONTENT_TYPE,
                is_probe=True,
            )
            for path in ("/metrics", "/v1/metrics")
        ]
    return routes


def _inference_routes() -> list[Route]:
    return [
        Route(
            POST,
            "/inference/v1/generate",
            generate,
            "Continue token ids",
            "tokens",
            needs_engine=True,
            body=GenerateBody,
            reply=GenerateReply,
            streams=True,
        ),
        Route(
            POST,
            "/inference/v1/abort_requests",
            abort_requests,
            "End requests by id",
            "tokens",
            body=AbortBody,
            reply=AbortReply,
        ),
        Route(
            POST,
            "/generative_scoring",
            generative_scoring,
            "Probabilities of label tokens after a prompt",
            "tokens",
            needs_engine=True,
            body=ScoringBody,
            reply=ScoringReply,
        ),
    ]


def _adapter_routes() -> list[Route]:
    return [
        Route(
            POST,
            path,
            handler,
            summary,
            "administration",
            needs_engine=True,
            kinds=tuple(ModelKind),
            body=body,
            media_type="text/plain",
        )
        for path, handler, summary, body in (
            ("/v1/load_lora_adapter", load_lora_adapter, "Load an adapter", LoadAdapterBody),
            ("/v1/unload_lora_adapter", unload_lora_adapter, "Forget an adapter", UnloadAdapterBody),
        )
    ]


def _probe_routes() -> list[Route]:
    def probe(methods: tuple[str, ...], path: str, handler: Handler, summary: str, reply: Any) -> Route:
        return Route(
            methods,
            path,
            handler,
            summary,
            "health",
            needs_key=False,
            reply=reply,
            is_probe=True,
        )

    return [
        Route(
            GET,
            "/",
            root,
            "What this server is; the built-in page for browsers",
            "health",
            needs_key=False,
            reply=RootReply,
            media_type="text/html",
        ),
        probe(GET, "/health", health, "Whether the process lives", None),
        probe(("GET", "POST"), "/ping", health, "Whether the process lives", None),
        probe(GET, "/version", version, "Version", VersionReply),
        probe(GET, "/load", load, "Inference requests being answered", LoadReply),
    ]


def _admin_routes() -> list[Route]:
    return [
        Route(
            GET,
            "/server_info",
            server_info,
            "Effective configuration",
            "administration",
            reply=ServerInfoReply,
            parameters=(Parameter("config_format", str, "text or json"),),
        ),
        Route(
            POST,
            "/reset_prefix_cache",
            reset_prefix_cache,
            "Forget reusable cache blocks",
            "administration",
            reply=ResetReply,
            parameters=(
                Parameter("reset_running_requests", bool, "Preempt running requests first"),
                Parameter("reset_external", bool, "Also reset an external cache"),
            ),
        ),
    ]

"""Health, version, load, metrics, server information, cache reset, and the root path."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from litestar.response.base import Response

from vkit import __version__
from vkit.server.call import Call
from vkit.server.inference import has_connector
from vkit.server.lowlevel.schemas import LoadReply, ResetReply, RootReply, ServerInfoReply, VersionReply
from vkit.server.metrics import CONTENT_TYPE
from vkit.server.pages import load_page, page_reply, prefers_html
from vkit.server.problems import bad_request
from vkit.server.state import Phase

_SECRET_WORDS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


async def health(call: Call) -> Response[Any]:
    """200 while the process lives, 503 once the engine died; no body."""
    status = 503 if call.state.phase is Phase.DEAD else 200
    return Response(b"", status_code=status, media_type="text/plain")


async def version(call: Call) -> Response[Any]:
    """The server's version."""
    return call.json(VersionReply(__version__))


async def load(call: Call) -> Response[Any]:
    """Inference requests being answered."""
    return call.json(LoadReply(call.state.num_http_requests))


async def metrics(call: Call) -> Response[Any]:
    """All metrics in Prometheus text format."""
    return Response(
        call.state.metrics.scrape(), status_code=200, media_type=CONTENT_TYPE, headers={"content-type": CONTENT_TYPE}
    )


async def root(call: Call) -> Response[Any]:
    """Tells a probing client what it is talking to; a browser gets the built-in page."""
    if prefers_html(call.header("accept")):
        return page_reply(call, load_page("index.html"))
    return call.json(RootReply(), headers={"vary": "Accept"})


async def server_info(call: Call) -> Response[Any]:
    """Effective configuration, environment and machine, without secrets."""
    form = call.query("config_format") or "text"
    if form not in ("text", "json"):
        raise bad_request(f"config_format: expected text or json, got {form[:50]!r}", "config_format")
    engine = call.state.loaded_engine
    config = {"model": call.settings.model_argument, **(dict(engine.settings) if engine is not None else {})}
    text = ", ".join(f"{key}={value!r}" for key, value in config.items())
    return call.json(ServerInfoReply(config if form == "json" else text, _environment(), _system()))


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("VKIT_", "VLLM_")) and not any(word in name for word in _SECRET_WORDS)
    }


def _system() -> dict[str, Any]:
    # Read from the loaded module only: asking torch for devices here would load it into a server that has none.
    torch = sys.modules.get("torch")
    has_cuda = torch is not None and torch.cuda.is_available()
    return {
        "python_version": platform.python_version(),
        "torch_version": _version_of("torch"),
        "cuda_version": None if torch is None else torch.version.cuda,
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if has_cuda and torch else [],
    }


def _version_of(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


async def reset_prefix_cache(call: Call) -> Response[Any]:
    """Forget reusable cache blocks."""
    reset_running = call.query_bool("reset_running_requests")
    reset_external = call.query_bool("reset_external")
    engine = call.state.engine
    if reset_external and not has_connector(engine):
        raise bad_request("reset_external: this server has no external cache", "reset_external")
    success = await engine.reset_prefix_cache(reset_running_requests=reset_running, reset_external=reset_external)
    return call.json(ResetReply(success))

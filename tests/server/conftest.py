"""A server over a scripted engine, in this process."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from vkit.server.app import create_app
from vkit.server.settings import ServerSettings
from vkit.server.state import ServerState


def _fakes() -> Any:
    """The fakes module, loaded by path: tests are not a package."""
    if "vkit_server_fakes" not in sys.modules:
        spec = importlib.util.spec_from_file_location("vkit_server_fakes", Path(__file__).with_name("fakes.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["vkit_server_fakes"] = module
        spec.loader.exec_module(module)
    return sys.modules["vkit_server_fakes"]


fakes = _fakes()


class Served:
    """A server, its engine and a client."""

    def __init__(self, engine: Any, settings: ServerSettings, *, is_loaded: bool = True) -> None:
        self.engine = engine
        self.settings = settings
        self.state = ServerState(settings, max_model_len=engine.max_model_len)
        if is_loaded:
            self.state.attach(engine)
        self.app = create_app(self.state)
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=True), base_url="http://server", timeout=20
        )

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """A JSON request."""
        return await self.client.post(path, json=body, headers=headers)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        """A request without a body."""
        return await self.client.get(path, headers=headers)

    async def frames(self, path: str, body: dict[str, Any]) -> list[Any]:
        """Payloads of a stream, [DONE] checked and left out."""
        import json

        reply = await self.post(path, {**body, "stream": True})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = reply.text.split("\n\n")
        assert blocks[-1] == ""
        assert blocks[-2] == "data: [DONE]"
        lines = blocks[:-2]
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [json.loads(line[6:]) for line in lines]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Served]]:
    """Builds servers: engine keywords in `engine`, the rest are settings."""
    made: list[Served] = []

    def build(engine: Any = None, *, is_loaded: bool = True, **settings: Any) -> Served:
        settings.setdefault("served_model_names", ("toy", "alias/with/slash"))
        settings.setdefault("model_argument", "toys/toy")
        engine = engine if engine is not None else fakes.FakeAsyncLLM()
        served = Served(engine, ServerSettings(**settings), is_loaded=is_loaded)
        made.append(served)
        return served

    yield build
    for served in made:
        await served.client.aclose()


@pytest.fixture
def toys() -> Any:
    """The fakes module."""
    return fakes

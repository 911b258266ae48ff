"""A server over a scripted engine, in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from vkit.server.app import create_app
from vkit.server.lifecycle import NetworkSettings, Service, open_socket
from vkit.server.settings import ServerSettings
from vkit.server.state import Phase, ServerState


def _load(name: str) -> Any:
    """A module beside this one, loaded by path: tests are not a package."""
    full_name = f"vkit_server_{name}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full_name] = module
        spec.loader.exec_module(module)
    return sys.modules[full_name]


fakes = _load("fakes")
toy_parser = _load("toy_parser")
running = _load("running")


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


@pytest.fixture
def parsers() -> Any:
    """Parsers of the toy syntax."""
    return toy_parser.ToyParsers()


class Process:
    """A real server in a thread of this process, for what needs sockets."""

    def __init__(self, engine: Any, settings: ServerSettings, network: NetworkSettings, gate: threading.Event) -> None:
        self.engine = engine
        self.state = ServerState(settings, max_model_len=engine.max_model_len)

        async def load() -> Any:
            await asyncio.to_thread(gate.wait)
            return engine

        self.service = Service(self.state, network, load, open_socket(network))
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread.start()
        self.wait(lambda: self.service.server.started)
        self.url = self.service.url

    def _run(self) -> None:
        async def main() -> None:
            self.loop = asyncio.get_running_loop()
            await self.service.serve(handles_signals=False)

        with asyncio.Runner(loop_factory=self.service.server.config.get_loop_factory()) as runner:
            runner.run(main())

    def wait(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        """Block until the condition holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "timed out"
            time.sleep(0.01)

    def ready(self) -> Process:
        """Block until the model is loaded."""
        self.wait(lambda: self.state.phase is Phase.READY)
        return self

    def stop(self) -> None:
        """Drain and end."""
        assert self.loop is not None
        if self.thread.is_alive():
            self.loop.call_soon_threadsafe(self.service.stop)

    def close(self) -> None:
        """End and wait."""
        if not self.service._is_stopping:
            self.stop()
        self.thread.join(120)
        assert not self.thread.is_alive()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    """Starts real servers on 127.0.0.1."""
    processes: list[Process] = []

    def build(
        engine: Any = None,
        *,
        gate: threading.Event | None = None,
        network: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Any:
        """`gate`: the model loads when it is set."""
        if gate is None:
            gate = threading.Event()
            gate.set()
        settings.setdefault("served_model_names", ("toy", "alias/with/slash"))
        settings.setdefault("model_argument", "toys/toy")
        settings.setdefault("shutdown_timeout_s", 0.0)
        engine = engine if engine is not None else fakes.FakeAsyncLLM()
        listen = NetworkSettings(**{"host": "127.0.0.1", "port": 0, **(network or {})})
        process = Process(engine, ServerSettings(**settings), listen, gate)
        processes.append(process)
        return process

    yield build
    for process in processes:
        process.close()


@pytest.fixture(scope="session")
def programs() -> Any:
    """The module that runs `vkit serve` as a process of its own."""
    return running


def _launched() -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def build(model: Path | None, *args: str) -> Any:
        made.append(running.Running(model, *args))
        return made[-1]

    yield build
    for process in made:
        process.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Any]]:
    """Starts processes of `vkit serve` that end with the test."""
    yield from _launched()


@pytest.fixture(scope="module")
def launch_once() -> Iterator[Callable[..., Any]]:
    """Starts processes of `vkit serve` that end with the module's last test."""
    yield from _launched()

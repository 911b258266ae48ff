"""A server process from its socket to its exit: listen, load, serve, drain.

The socket opens before the model is read, so that probes get answers. The first signal drains, the second ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from litestar.types import ASGIApp

from vkit.errors import ExitStatus, UsageError, VkitError
from vkit.server.app import all_routes, create_app
from vkit.server.engine_protocol import Engine
from vkit.server.state import Phase, ServerState
from vkit.starting import starting

logger = logging.getLogger("vkit.server")

BACKLOG = 2048
KEEP_ALIVE_S = 75
POLL_S = 0.1
ABORT_GRACE_S = 5.0
"""How long aborted requests may take to tell their clients."""
STATISTICS_INTERVAL_S = 10.0
HEALTH_INTERVAL_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkSettings:
    """Where a server listens."""

    host: str = "0.0.0.0"
    port: int = 8000
    uds: str | None = None
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = ssl.CERT_NONE
    ssl_refresh: bool = False

    @property
    def scheme(self) -> str:
        """http or https."""
        return "https" if self.ssl_certfile else "http"


def open_socket(network: NetworkSettings) -> socket.socket:
    """A bound socket, not yet listening.

    Raises:
        UsageError: the address is taken, or cannot be had.
    """
    if network.uds is not None:
        return _unix_socket(Path(network.uds))
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            network.host, network.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as exc:
        raise UsageError(f"--host: {network.host!r} is no address of this machine: {exc.strerror or exc}") from None
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as exc:
        made.close()
        raise UsageError(
            f"cannot listen on {network.host} port {network.port}: {exc.strerror or exc}",
            remedy="choose another --port",
        ) from None
    return made


def _unix_socket(path: Path) -> socket.socket:
    """A socket at `path`; one left over by a dead process is replaced."""
    if path.exists() or path.is_symlink():
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise UsageError(f"--uds: {path} exists and is not a socket")
        if _answers(path):
            raise UsageError(f"--uds: another process is listening on {path}")
        path.unlink()
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
    except OSError as exc:
        made.close()
        raise UsageError(f"--uds: cannot listen on {path}: {exc.strerror or exc}") from None
    return made


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: when to stop is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals alone."""
        yield


def uvicorn_config(app: ASGIApp, network: NetworkSettings) -> uvicorn.Config:
    """How uvicorn serves the application.

    Raises:
        UsageError: key or certificate cannot be read.
    """
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        ws="none",
        ssl_keyfile=network.ssl_keyfile,
        ssl_certfile=network.ssl_certfile,
        ssl_ca_certs=network.ssl_ca_certs,
        ssl_cert_reqs=network.ssl_cert_reqs,
        h11_max_incomplete_event_size=256 * 1024,
    )
    try:
        config.load()
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(f"--ssl-certfile, --ssl-keyfile: {exc.strerror or exc}") from None
    return config


class Service:
    """One server process."""

    def __init__(
        self, state: ServerState, network: NetworkSettings, load: Callable[[], Awaitable[Engine]], sock: socket.socket
    ) -> None:
        self.state = state
        self.network = network
        self.load = load
        self.sock = sock
        self.server = _Uvicorn(uvicorn_config(create_app(state), network))
        self.exit_status = ExitStatus.OK
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def url(self) -> str:
        """Where clients find the server."""
        if self.network.uds is not None:
            return f"unix:{self.network.uds}"
        host, port = self.sock.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        return f"{self.network.scheme}://{shown}:{port}"

    def run(self) -> ExitStatus:
        """Serve until told to stop; the process's exit status."""
        factory = self.server.config.get_loop_factory()
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self.serve())
        return self.exit_status

    async def serve(self, *, handles_signals: bool = True) -> None:
        """Serve until told to stop."""
        loop = asyncio.get_running_loop()
        if handles_signals:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.stop)
        self._log_start()
        self._tasks = [
            asyncio.ensure_future(task)
            for task in (self._load(), self._watch_engine(), self._log_statistics(), self._refresh_ssl())
        ]
        try:
            await self.server.serve([self.sock])
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            engine = self.state.loaded_engine
            if engine is not None:
                await engine.shutdown()
            await self._close_videos()
            self._remove_socket()

    def stop(self) -> None:
        """Drain and end; called again, end at once."""
        if self._is_stopping:
            self._remove_socket()
            os._exit(ExitStatus.INTERRUPTED)
        self._is_stopping = True
        self.state.drain()
        self._tasks.append(asyncio.ensure_future(self._drain()))

    async def _close_videos(self) -> None:
        videos, self.state.videos = self.state.videos, None
        if videos is not None:
            await asyncio.to_thread(videos.close)

    async def _drain(self) -> None:
        deadline = time.monotonic() + self.state.settings.shutdown_timeout_s
        logger.info("shutting down: %d requests in flight", self.state.num_http_requests)
        while self.state.is_busy and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        if self.state.is_busy:
            await self.state.abort_all()
            deadline = time.monotonic() + ABORT_GRACE_S
            while self.state.is_busy and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S / 10)
        await self._close_videos()
        self._end()

    def _end(self) -> None:
        self.server.should_exit = True
        # Idle keep-alive connections must not hold the process.
        self.server.config.timeout_graceful_shutdown = 1

    async def _load(self) -> None:
        while not self.server.started:
            await asyncio.sleep(0.005)
        print(f"listening on {self.url}", file=sys.stderr, flush=True)
        begin = time.monotonic()
        try:
            with starting():  # requests, which come later, are spared long runs of it too
                engine = await self.load()
        except VkitError as exc:
            self._fail(str(exc), exc.exit_status)
        except Exception as exc:  # a load that broke must end the process with a line, whatever broke it
            logger.debug("load failed", exc_info=exc)
            self._fail(f"the model could not be loaded: {type(exc).__name__}: {exc}", ExitStatus.FAILURE)
        else:
            self.state.attach(engine)
            print(f"ready after {time.monotonic() - begin:.1f} s", file=sys.stderr, flush=True)

    def _fail(self, line: str, status: ExitStatus) -> None:
        print(f"vkit serve: {line}", file=sys.stderr, flush=True)
        self.exit_status = status
        self.state.fail()
        self._end()

    async def _watch_engine(self) -> None:
        """When the engine dies, answer what is in flight and end the process."""
        while self.state.phase is not Phase.DEAD or self.state.loaded_engine is None:
            await asyncio.sleep(HEALTH_INTERVAL_S)
        deadline = time.monotonic() + ABORT_GRACE_S
        while self.state.is_busy and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        self._fail("the engine stopped after a failure; the log has the cause", ExitStatus.FAILURE)

    async def _log_statistics(self) -> None:
        """One line every 10 s while there is work."""
        metrics = self.state.metrics
        before = [metrics.engine_value(name) for name in ("vllm:prompt_tokens", "vllm:generation_tokens")]
        while True:
            await asyncio.sleep(STATISTICS_INTERVAL_S)
            totals = [metrics.engine_value(name) for name in ("vllm:prompt_tokens", "vllm:generation_tokens")]
            if totals != before or self.state.num_sequences:
                prompt, generated = (
                    (now - then) / STATISTICS_INTERVAL_S for now, then in zip(totals, before, strict=True)
                )
                queries = metrics.engine_value("vllm:prefix_cache_queries")
                hits = metrics.engine_value("vllm:prefix_cache_hits")
                logger.info(
                    "running %d, waiting %d, prompt %.1f tok/s, generation %.1f tok/s, KV use %.1f%%, "
                    "prefix hits %.1f%%",
                    metrics.engine_value("vllm:num_requests_running"),
                    metrics.engine_value("vllm:num_requests_waiting"),
                    prompt,
                    generated,
                    100 * metrics.engine_value("vllm:kv_cache_usage_perc"),
                    100 * hits / queries if queries else 0.0,
                )
            before = totals

    async def _refresh_ssl(self) -> None:
        """Load key and certificate again when their files change."""
        context = self.server.config.ssl
        cert, key = self.network.ssl_certfile, self.network.ssl_keyfile
        if not self.network.ssl_refresh or context is None or cert is None:
            return
        watched = [Path(path) for path in (cert, key, self.network.ssl_ca_certs) if path]
        seen = [path.stat().st_mtime_ns for path in watched]
        while True:
            await asyncio.sleep(1.0)
            try:
                current = [path.stat().st_mtime_ns for path in watched]
                if current == seen:
                    continue
                context.load_cert_chain(cert, key)
                if self.network.ssl_ca_certs:
                    context.load_verify_locations(self.network.ssl_ca_certs)
            except (OSError, ssl.SSLError) as exc:
                logger.warning("the certificate could not be loaded again: %s", exc)
            else:
                seen = current
                logger.info("certificate loaded again")

    def _log_start(self) -> None:
        for row in all_routes(self.state):
            logger.info("route %s %s", ",".join(row.methods), row.template)
        host = self.network.host
        is_open = self.network.uds is None and host not in ("127.0.0.1", "::1", "localhost")
        if is_open and not self.state.settings.api_keys:
            logger.warning("listening on %s without an API key: anyone who can reach it can use it", host)

    def _remove_socket(self) -> None:
        if self.network.uds is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.network.uds)

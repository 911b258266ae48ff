"""What a running server knows: its engine once there is one, the requests in flight, and where it is in its life."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Coroutine
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from vkit import __version__
from vkit.parsers.output import OutputParsers
from vkit.server.engine_protocol import Engine
from vkit.server.media import MediaReader
from vkit.server.metrics import ServerMetrics
from vkit.server.parsing import ReplyParsers
from vkit.server.problems import clip, not_found, unavailable
from vkit.server.sampling import Defaults
from vkit.server.settings import ServerSettings

if TYPE_CHECKING:
    from vkit.server.openai.responses.store import ResponseStore
    from vkit.server.video.jobs import VideoJobs


class EngineWithAdapters(Protocol):
    """What an engine offers where adapters are on."""

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters."""


class Phase(StrEnum):
    """Where a server is in its life."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


_UNAVAILABLE = {
    Phase.LOADING: "The model is still loading.",
    Phase.DRAINING: "The server is shutting down.",
    Phase.DEAD: "The engine has stopped.",
}


class ServerState:
    """Shared by all routes of one server. Lives on the event loop; nothing here is called from another thread."""

    def __init__(self, settings: ServerSettings, *, max_model_len: int | None = None) -> None:
        self.settings = settings
        self.metrics = ServerMetrics(settings.served_model_names[0], max_model_len)
        self.parsers: ReplyParsers = OutputParsers(None, None)
        self.created = int(time.time())
        self.num_http_requests = 0
        """Inference requests being answered."""
        self.num_sequences = 0
        """Sequences submitted to the engine and not finished."""
        self.running: dict[str, set[str]] = {}
        """Ids as clients see them to ids inside the engine."""
        self.defaults = Defaults({}, None)
        self.videos: VideoJobs | None = None
        """What makes videos, in a server that does."""
        self.media = MediaReader(settings.media_access)
        self.response_store: ResponseStore | None = None
        self._engine: Engine | None = None
        self.system_fingerprint = f"vkit-{__version__}-00000000"
        """Version and a digest of what shapes the output."""
        self._is_draining = False
        self._is_dead = False
        self._seen_fields: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def phase(self) -> Phase:
        """Where the server is in its life."""
        if self._is_dead or (self._engine is not None and not self._engine.is_healthy):
            return Phase.DEAD
        if self._is_draining:
            return Phase.DRAINING
        return Phase.LOADING if self._engine is None else Phase.READY

    @property
    def engine(self) -> Engine:
        """The loaded engine.

        Raises:
            Problem: 503 while there is none, or it takes no more requests.
        """
        phase = self.phase
        if phase is Phase.READY and self._engine is not None:
            return self._engine
        raise unavailable(_UNAVAILABLE[phase])

    @property
    def is_busy(self) -> bool:
        """Whether anybody waits for an answer."""
        return self.num_http_requests > 0 or self.num_sequences > 0

    @property
    def loaded_engine(self) -> Engine | None:
        """The engine whatever the phase, for display."""
        return self._engine

    def attach(self, engine: Engine) -> None:
        """The model is loaded: serve it."""
        self._engine = engine
        shape = msgspec.json.encode(dict(engine.settings), order="sorted")
        self.system_fingerprint = f"vkit-{__version__}-{hashlib.sha256(shape).hexdigest()[:8]}"
        self.defaults = Defaults.of(self.settings, engine)
        self.metrics.read_engine = engine.metric_families

    def fail(self) -> None:
        """The engine died or never came to life."""
        self._is_dead = True

    def drain(self) -> None:
        """Take no new inference requests."""
        self._is_draining = True

    async def abort_all(self) -> None:
        """End every request in the engine; their clients get finish_reason abort."""
        if self._engine is None:
            return
        for engine_ids in list(self.running.values()):
            for engine_id in list(engine_ids):
                await self._engine.abort(engine_id)

    async def cancel_in_engine(self, engine_id: str) -> None:
        """End one request in the engine, whatever the server's phase."""
        if self._engine is not None:
            await self._engine.abort(engine_id)

    @property
    def lora_names(self) -> tuple[str, ...]:
        """Names of the loaded adapters, which requests may use as the model's."""
        if not self.settings.enable_lora or self._engine is None:
            return ()
        return cast(EngineWithAdapters, self._engine).loras

    def lora_of(self, asked: str | None) -> str | None:
        """The adapter that a request's model name means; None: the model itself."""
        return asked if asked and asked not in self.settings.served_model_names else None

    def served_name(self, asked: str | None) -> str:
        """The model name to echo.

        Raises:
            Problem: 404 for a name this server does not know.
        """
        names = (*self.settings.served_model_names, *self.lora_names)
        if not asked:
            return names[0]
        if asked in names:
            return asked
        raise not_found(f"The model `{clip(asked)}` does not exist. Valid aliases: {', '.join(names)}.", "model")

    def admit(self, num_sequences: int) -> None:
        """Refuse work that would make the queue longer than allowed.

        Raises:
            Problem: 503.
        """
        limit = self.settings.max_num_queued_reqs
        if not limit:
            return
        engine = self.engine
        in_flight = self.num_sequences
        # The engine's own queue length lags behind a burst, so the count is taken from what was submitted here.
        if max(0, in_flight + num_sequences - engine.max_num_seqs) > limit:
            self.metrics.rejections["max_num_queued_reqs"].inc()
            raise unavailable(f"The queue is full: at most {limit} requests may wait.")

    def first_sighting(self, field: str) -> bool:
        """Whether this unknown field is seen for the first time; remembers a bounded number of names."""
        if field in self._seen_fields or len(self._seen_fields) >= 1000:
            return False
        self._seen_fields.add(field)
        return True

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work that outlives the request that started it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

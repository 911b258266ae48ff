"""The one thread an engine runs on, and how other threads talk to it. Adds no policy.

Everything reaches the engine as a call put into one inbox, which is emptied between steps; so the engine itself needs
no lock. A step loop that fails takes all requests down with it, in words, and stays down.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from vkit.engine import Engine
from vkit.errors import EngineDeadError
from vkit.inputs import EngineRequest
from vkit.types import RequestOutput

logger = logging.getLogger("vkit.engine")

Result = TypeVar("Result")


class Mailbox(Protocol):
    """Where several sinks' news is announced at once."""

    def announce(self) -> None:
        """Called on the engine's thread after a step's outputs have been put."""


class Sink(Protocol):
    """Receives one request's outputs on the engine's thread; must not block."""

    @property
    def mailbox(self) -> Mailbox | None:
        """To be told once per step, however many sinks share it."""

    def put(self, output: RequestOutput) -> None:
        """Take the next output."""

    def fail(self, error: EngineDeadError) -> None:
        """No more outputs will come."""


@dataclass(slots=True)
class _Flight:
    """A request on its way."""

    caller_id: str
    sink: Sink


class EngineThread:
    """Runs an engine and delivers its outputs."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._flights: dict[str, _Flight] = {}
        self._ids: dict[str, list[str]] = {}
        self._lock = threading.Lock()
        self._num_submitted = 0
        self._failure: EngineDeadError | None = None
        self._is_closing = False
        engine.wake = lambda: self._inbox.put(_nothing)
        self._thread = threading.Thread(target=self._run, name="vkit-engine", daemon=True)
        self._thread.start()

    @property
    def engine(self) -> Engine:
        """The engine; others may only read counters of it."""
        return self._engine

    @property
    def is_healthy(self) -> bool:
        """Whether requests can be served."""
        return self._failure is None and not self._is_closing and self._thread.is_alive()

    @property
    def num_in_flight(self) -> int:
        """Requests submitted and not finished."""
        return len(self._flights)

    def check_open(self) -> None:
        """Raises:
        EngineDeadError: the engine has stopped, or is being closed.
        """
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise EngineDeadError("the engine has been shut down")

    def submit(self, request: EngineRequest, sink: Sink) -> str:
        """Hand a request over; the result names it for `abort_one`. Its id need not be unique.

        Raises:
            EngineDeadError: the engine has stopped.
        """
        with self._lock:
            self.check_open()
            self._num_submitted += 1
            key = f"{request.id}~{self._num_submitted}"
            self._flights[key] = _Flight(request.id, sink)
            self._ids.setdefault(request.id, []).append(key)
        request.id = key
        self._inbox.put(lambda: self._engine.add_request(request))
        return key

    def abort(self, request_id: str) -> None:
        """End every request the caller knows by this id; unknown and finished ones are passed over."""
        for key in list(self._ids.get(request_id, ())):
            self.abort_one(key)

    def abort_one(self, key: str) -> None:
        """End the request that `submit` called `key`."""
        self._inbox.put(lambda: self._engine.abort(key))

    def call(self, function: Callable[[Engine], Result]) -> Future[Result]:
        """Run a function on the engine between two steps."""
        future: Future[Result] = Future()

        def run() -> None:
            try:
                future.set_result(function(self._engine))
            except Exception as error:  # carried to whoever waits for the future
                future.set_exception(error)

        with self._lock:
            if self._failure is not None or not self._thread.is_alive():
                future.set_exception(self._failure or EngineDeadError("the engine has been shut down"))
                return future
            self._inbox.put(run)
        return future

    def close(self, *, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones finish for at most `drain_s` seconds, end the rest, stop."""
        with self._lock:
            if self._is_closing:
                already = True
            else:
                already, self._is_closing = False, True
        if not already:
            deadline = time.monotonic() + drain_s
            while self._flights and time.monotonic() < deadline and self._thread.is_alive():
                time.sleep(0.005)
            self._inbox.put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # On the engine's thread

    def _run(self) -> None:
        try:
            while True:
                self._empty_inbox()
                self._deliver(self._engine.step())
        except _Stopped:
            self._deliver(self._engine.step())
            self._fail_all(EngineDeadError("the engine has been shut down"))
        except EngineDeadError as error:
            logger.error("the engine stopped: %s", error)
            self._fail_all(error)
            self._engine.stop_threads()
        except Exception as error:
            # Not one request's fault: everyone must hear of it, and nobody may wait for ever.
            logger.exception("the engine failed")
            self._fail_all(EngineDeadError(f"the engine failed: {type(error).__name__}: {error}"))
            self._engine.stop_threads()

    def _empty_inbox(self) -> None:
        """Run every waiting call; wait for one when the engine has nothing to do."""
        may_wait = not self._engine.has_work or self._engine.is_stalled
        try:
            if may_wait:
                is_idle = not self._engine.has_work
                self._inbox.get(timeout=None if is_idle else self._engine.poll_interval_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        mailboxes: dict[int, Mailbox] = {}
        for output in outputs:
            flight = self._flights.get(output.request_id)
            if flight is None:
                continue
            if output.finished:
                self._forget(output.request_id, flight)
            output.request_id = flight.caller_id
            flight.sink.put(output)
            mailbox = flight.sink.mailbox
            if mailbox is not None:
                mailboxes[id(mailbox)] = mailbox
        for mailbox in mailboxes.values():
            mailbox.announce()

    def _forget(self, key: str, flight: _Flight) -> None:
        with self._lock:
            del self._flights[key]
            keys = self._ids[flight.caller_id]
            keys.remove(key)
            if not keys:
                del self._ids[flight.caller_id]

    def _stop(self) -> None:
        self._engine.close()
        raise _Stopped

    def _fail_all(self, error: EngineDeadError) -> None:
        with self._lock:
            self._failure = error
            flights, self._flights = self._flights, {}
            self._ids.clear()
        mailboxes: dict[int, Mailbox] = {}
        for flight in flights.values():
            flight.sink.fail(error)
            if flight.sink.mailbox is not None:
                mailboxes[id(flight.sink.mailbox)] = flight.sink.mailbox
        for mailbox in mailboxes.values():
            mailbox.announce()
        self._refuse_waiting_calls()

    def _refuse_waiting_calls(self) -> None:
        """Calls already in the inbox run against the stopped engine, so that their futures end."""
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return
            except _Stopped:
                continue


def close_with(owner: object, thread: EngineThread, free: Callable[[], None]) -> None:
    """Stop the thread and then call `free` once `owner` is gone, should nobody have closed it before."""
    weakref.finalize(owner, _close_elsewhere, thread, free).atexit = False


def _close_elsewhere(thread: EngineThread, free: Callable[[], None]) -> None:
    """Close on a thread of its own: the collector may run on any, the engine's included."""

    def close() -> None:
        thread.close()
        free()

    threading.Thread(target=close, name="vkit-close", daemon=True).start()


class _Stopped(BaseException):
    """Leaves the step loop."""


def _nothing() -> None:
    """Put into the inbox to wake the thread."""

"""Rank 0's side of the others: started, watched, told what to do, and ended with the engine whatever happens."""

from __future__ import annotations

import contextlib
import logging
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

import torch

from vkit.config import EngineConfig
from vkit.distributed import Ranks
from vkit.distributed.groups import ProcessGroup, open_group
from vkit.errors import EngineDeadError, ModelLoadError
from vkit.parallel.channel import BEAT_S, CONNECT_TIMEOUT_S, SILENCE_S, Channel, accept, listen
from vkit.parallel.launch import (
    LOCALHOST,
    Launch,
    Meeting,
    new_key,
    own_store,
    publish,
    reachable_host,
    start_follower,
    torchrun_store,
)
from vkit.parallel.messages import Close, Failed, Ready, Start, ToFollower

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("vkit.parallel")

BLAME_S = 5.0
"""How long a step that failed here waits for news of a rank that failed first."""
ECHO_S = 2.0
"""How long the news that a rank has noticed a loss waits for the end of the rank that was lost."""
END_S = 10.0
"""How long followers may take to end when told to."""
_POLL_S = 0.2


lost = threading.Event()
"""Set when any team of this process has lost a rank."""


class Team:
    """The ranks beside this one."""

    def __init__(self, config: EngineConfig, launch: Launch | None) -> None:
        """Start the others, or meet those that torchrun started, and have them load the model.

        Raises:
            ModelLoadError: one of them did not come, or ended.
        """
        self._size = config.tensor_parallel_size
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._channels: dict[int, Channel] = {}
        self._heard: dict[int, float] = {}
        self._ready: set[int] = set()
        self._last_words: dict[int, str] = {}
        self._echo: tuple[int, float] | None = None
        """The first rank that noticed the loss of another, and when that was heard."""
        self._group: ProcessGroup | None = None
        self._failure: EngineDeadError | None = None
        self._news = threading.Condition()
        self._on_failure: Callable[[EngineDeadError], None] | None = None
        self._is_closing = False
        self._watcher: threading.Thread | None = None
        try:
            self._store = self._meet(launch)
            self._watcher = threading.Thread(target=self._watch, name="vkit-team", daemon=True)
            self._watcher.start()
            self.send(Start(config))
            self._group = self._open_group(config, launch)
        except BaseException:  # an interrupt included: the others must not outlive this
            self.kill()
            raise

    @property
    def ranks(self) -> Ranks:
        """This rank, with the way to the others."""
        return Ranks(0, self._size, self._group)

    def wait_ready(self) -> None:
        """Return once every rank has its share in memory.

        Raises:
            ModelLoadError: one could not load it.
        """
        with self._news:
            self._news.wait_for(lambda: self._failure is not None or len(self._ready) == self._size - 1)
        if self._failure is not None:
            raise ModelLoadError(self._failure.message)

    def watch_with(self, on_failure: Callable[[EngineDeadError], None]) -> None:
        """Call `on_failure`, from a thread of this team's, if a rank is lost."""
        with self._news:
            self._on_failure = on_failure
            failure = self._failure
        if failure is not None:
            on_failure(failure)

    def send(self, message: ToFollower) -> None:
        """Tell every rank.

        Raises:
            EngineDeadError: one is lost.
        """
        if self._failure is not None:
            raise self._failure
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        try:
            for channel in self._channels.values():
                channel.send_bytes(data)
        except OSError as error:
            raise self.blame(error) from error

    def blame(self, error: Exception) -> EngineDeadError:
        """What to say of an error of this rank's step: that another was lost, if one was."""
        with self._news:
            self._news.wait_for(lambda: self._failure is not None, BLAME_S)
        if self._failure is not None:
            return self._failure
        logger.error("rank 0 failed", exc_info=error)
        self._fail(f"rank 0 failed: {type(error).__name__}: {error}")
        assert self._failure is not None, "set just now"
        return self._failure

    def close(self) -> None:
        """End the others, gently first."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._failure is None:
            with contextlib.suppress(EngineDeadError, OSError):
                for channel in self._channels.values():
                    channel.send(Close())
            self._wait_for_processes(END_S)
        self.kill()

    def kill(self) -> None:
        """End the others at once."""
        self._is_closing = True
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        self._wait_for_processes(END_S)
        watcher = self._watcher
        if watcher is not None and watcher is not threading.current_thread():
            watcher.join(END_S)
        self._hang_up()
        if self._group is not None:
            self._group.abort()

    def _hang_up(self) -> None:
        """Close the channels, which ends followers that are no processes of this one."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.close()

    # Beginning

    def _meet(self, launch: Launch | None) -> Store:
        """Have all others call; the store in which the process group meets."""
        key = new_key()
        with listen(reachable_host(launch)) as listener:
            host, port = listener.getsockname()[:2]
            if launch is None:
                store, store_port = own_store()
                meeting = Meeting(host, port, key.hex(), store_port)
                for rank in range(1, self._size):
                    self._processes[rank] = start_follower(rank, self._size, meeting)
            else:
                store = torchrun_store()
                publish(store, Meeting(host, port, key.hex(), None))
            deadline = time.monotonic() + CONNECT_TIMEOUT_S
            while len(self._channels) < self._size - 1:
                called = accept(listener, key, _POLL_S)
                if called is not None:
                    rank, self._channels[rank] = called[0], called[1]
                    self._heard[rank] = time.monotonic()
                self._check_beginning(deadline)
        return store

    def _check_beginning(self, deadline: float) -> None:
        missing = [rank for rank in range(1, self._size) if rank not in self._channels]
        for rank in missing:
            process = self._processes.get(rank)
            if process is not None and process.poll() is not None:
                raise ModelLoadError(f"--tensor-parallel-size: {self._end_of(rank)} before it could begin")
        if missing and time.monotonic() > deadline:
            named = ", ".join(map(str, missing))
            raise ModelLoadError(f"--tensor-parallel-size: rank {named} did not come within {CONNECT_TIMEOUT_S:.0f} s")

    def _open_group(self, config: EngineConfig, launch: Launch | None) -> ProcessGroup:
        """The process group; opening it would wait for a lost rank, so somebody else does."""
        address = LOCALHOST if launch is None else launch.address
        device = torch.device(config.device)
        pool = ThreadPoolExecutor(1, "vkit-group")
        opening = pool.submit(open_group, self._store, 0, self._size, device, address)
        pool.shutdown(wait=False)
        while True:
            try:
                return opening.result(_POLL_S)
            except FutureTimeout:
                if self._failure is not None:
                    raise ModelLoadError(self._failure.message) from None

    # Watching

    def _watch(self) -> None:
        last_beat = time.monotonic()
        ranks = {channel.connection: rank for rank, channel in self._channels.items()}
        while self._failure is None and not self._is_closing:
            for connection in wait(list(ranks), _POLL_S):
                self._listen(ranks[connection])  # type: ignore[index]
            now = time.monotonic()
            if now - last_beat >= BEAT_S:
                last_beat = now
                for channel in self._channels.values():
                    with contextlib.suppress(OSError):  # one that is gone is heard of
                        channel.beat()
            for rank, heard in self._heard.items():
                if now - heard > SILENCE_S:
                    self._fail(f"rank {rank} has been silent for {SILENCE_S:.0f} s")
            if self._echo is not None and now - self._echo[1] > ECHO_S:
                self._fail(self._end_of(self._echo[0]))
        if self._failure is not None:
            self._hang_up()

    def _listen(self, rank: int) -> None:
        try:
            message = self._channels[rank].receive()
        except (EOFError, OSError):
            if not self._is_closing:
                self._fail(self._end_of(rank))
            return
        self._heard[rank] = time.monotonic()
        if isinstance(message, Ready):
            with self._news:
                self._ready.add(rank)
                self._news.notify_all()
        elif isinstance(message, Failed):
            self._last_words[rank] = message.reason
            if message.details is not None:
                logger.error("rank %d failed:\n%s", rank, message.details)
            if not message.is_echo:
                self._fail(self._end_of(rank))
            elif self._echo is None:
                self._echo = rank, time.monotonic()

    def _end_of(self, rank: int) -> str:
        """What is known of the end of a rank."""
        if rank in self._last_words:
            return f"rank {rank}: {self._last_words[rank]}"
        process = self._processes.get(rank)
        if process is None:
            return f"rank {rank} is gone"
        try:
            status = process.wait(BLAME_S)
        except subprocess.TimeoutExpired:
            return f"rank {rank} (process {process.pid}) hung up"
        if status < 0:
            return f"rank {rank} (process {process.pid}) was ended by {signal.Signals(-status).name}"
        return f"rank {rank} (process {process.pid}) ended with status {status}"

    def _fail(self, reason: str) -> None:
        """Once: end all others, so that nothing here waits for them, and tell the engine."""
        with self._news:
            if self._failure is not None or self._is_closing:
                return
            self._failure = EngineDeadError(reason)
            lost.set()
            self._news.notify_all()
            on_failure = self._on_failure
        logger.debug("%s; the other ranks are ended", reason)
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        if self._group is not None:
            self._group.abort()
        if on_failure is not None:
            on_failure(self._failure)

    def _wait_for_processes(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

"""A rank other than 0: loads its share, runs the steps it is sent, and ends with rank 0, however that ends.

Started by rank 0 as `python -m vkit.parallel.follower`, with a JSON object on stdin; or what a process that torchrun
started becomes.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from vkit.config import EngineArgs, EngineConfig
from vkit.distributed import Ranks
from vkit.distributed.groups import RankLost, open_group
from vkit.errors import ExitStatus, ModelLoadError, VkitError
from vkit.parallel.channel import BEAT_S, SILENCE_S, Channel, call
from vkit.parallel.launch import LOCALHOST, Launch, Meeting, find_meeting, join_store, torchrun_store
from vkit.parallel.messages import Close, Failed, Ready, Sleep, Start, Step, ToFollower, WakeUp
from vkit.parallel.wire import PlanReader
from vkit.resident import ResidentModel, open_share

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class _Inbox:
    """Messages of rank 0, received on a thread of their own, which ends the process when rank 0 is gone.

    The main thread may be in the middle of a sum that will never end, so it cannot be asked to.
    """

    def __init__(self, channel: Channel, rank: int) -> None:
        self._channel = channel
        self._rank = rank
        self._messages: queue.SimpleQueue[ToFollower] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="vkit-inbox", daemon=True).start()

    def get(self) -> ToFollower:
        """The next message."""
        return self._messages.get()

    def _receive(self) -> None:
        heard = beaten = time.monotonic()
        while True:
            try:
                if self._channel.connection.poll(BEAT_S / 2):
                    message = self._channel.receive()
                    heard = time.monotonic()
                    if message is not None:
                        self._messages.put(message)
                    if isinstance(message, Close):
                        return
                now = time.monotonic()
                if now - beaten >= BEAT_S:
                    beaten = now
                    self._channel.beat()
            except (EOFError, OSError):
                os._exit(ExitStatus.FAILURE)
            if now - heard > SILENCE_S:
                print(f"vkit: rank {self._rank}: rank 0 has been silent for {SILENCE_S:.0f} s", file=sys.stderr)
                os._exit(ExitStatus.FAILURE)


def follow(
    channel: Channel,
    store: Store,
    rank: int,
    size: int,
    *,
    local_rank: int,
    address: str | None,
    own_paths: Callable[[EngineConfig], EngineConfig] = lambda config: config,
) -> None:
    """Do what rank 0 says until it says that this is all.

    Raises:
        VkitError: the share cannot be loaded.
    """
    inbox = _Inbox(channel, rank)
    start = inbox.get()
    assert isinstance(start, Start), "the first thing a follower hears"
    config = own_paths(start.config)
    if config.device == "cuda":
        torch.cuda.set_device(local_rank)
    group = open_group(store, rank, size, torch.device(config.device), address)
    resident = open_share(config, Ranks(rank, size, group))
    channel.send(Ready())
    _serve(inbox, resident)
    resident.close()
    group.close()


def _serve(inbox: _Inbox, resident: ResidentModel) -> None:
    reader = PlanReader()
    while True:
        message = inbox.get()
        if isinstance(message, Step):
            resident.execute(resident.prepare(reader.read(message.plan)))
        elif isinstance(message, Sleep):
            resident.sleep(message.level)
        elif isinstance(message, WakeUp):
            resident.wake_up(message.tags)
            reader = PlanReader()
        else:
            return


def _run(channel: Channel, work: Callable[[], None]) -> ExitStatus:
    """Do the work; what ends it early is said to rank 0."""
    logging.getLogger("vkit").setLevel(logging.ERROR)  # rank 0 warns for all
    try:
        work()
    except Exception as error:  # whatever it was, rank 0 must hear of it
        try:
            channel.send(_last_words(error))
        except OSError:
            return ExitStatus.FAILURE  # rank 0 went first
        # Rank 0 hangs up when it has read this; leaving earlier could lose it.
        time.sleep(BEAT_S)
        return ExitStatus.FAILURE
    return ExitStatus.OK


def _last_words(error: Exception) -> Failed:
    if isinstance(error, VkitError):
        return Failed(str(error))
    if isinstance(error, RankLost):
        return Failed(f"another rank was lost: {error}", is_echo=True)
    return Failed(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))


def _on_signals(action: signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, action)


def follow_torchrun(args: EngineArgs, launch: Launch) -> ExitStatus:
    """The life of a process that torchrun started as another rank than 0; its own paths hold.

    Raises:
        ModelLoadError: rank 0 is not there.
    """
    # While rank 0 is waited for, in one long call, no handler of this program's would run; dying is enough.
    _on_signals(signal.SIG_DFL)
    try:
        store = torchrun_store()
        meeting = find_meeting(store)
        channel = call(meeting.host, meeting.port, bytes.fromhex(meeting.key), launch.rank)
    except (OSError, EOFError, RuntimeError) as error:
        raise ModelLoadError(f"--tensor-parallel-size: rank {launch.rank} cannot reach rank 0: {error}") from None
    _on_signals(signal.SIG_IGN)  # torchrun signals all ranks, and rank 0 finishes what runs

    def own_paths(config: EngineConfig) -> EngineConfig:
        return replace(config, model=args.model, mmproj=args.mmproj)

    return _run(
        channel,
        lambda: follow(
            channel,
            store,
            launch.rank,
            launch.size,
            local_rank=launch.local_rank,
            address=launch.address,
            own_paths=own_paths,
        ),
    )


def main() -> ExitStatus:
    """The life of a process that rank 0 started."""
    try:
        job = json.load(sys.stdin)
    except ValueError:
        return ExitStatus.FAILURE  # rank 0 ended before it could say anything
    rank, size = job.pop("rank"), job.pop("size")
    meeting = Meeting(**job)
    assert meeting.store_port is not None, "followers of one host meet in rank 0's own store"
    try:
        channel = call(meeting.host, meeting.port, bytes.fromhex(meeting.key), rank)
    except (OSError, EOFError):
        return ExitStatus.FAILURE  # rank 0 gave up meanwhile
    store = join_store(meeting.store_port)
    return _run(channel, lambda: follow(channel, store, rank, size, local_rank=rank, address=LOCALHOST))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    # Threads of process groups may still wait for ranks that are gone.
    os._exit(status)

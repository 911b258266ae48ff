"""Who the ranks are and where they meet: started by torchrun, or by rank 0 itself."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vkit.errors import UsageError
from vkit.parallel.channel import CONNECT_TIMEOUT_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

LOCALHOST = "127.0.0.1"
_MARK = "TORCHELASTIC_RUN_ID"
_KEYS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MEETING = "vkit/control"
_TIMEOUT = timedelta(seconds=CONNECT_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Launch:
    """This process among those that torchrun started."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    """Ranks on this host."""
    master: str
    """Rank 0's host."""

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_size == self.size

    @property
    def address(self) -> str | None:
        """The address to talk from; None: whatever the system chooses."""
        return LOCALHOST if self.is_one_host else None


def find_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """What torchrun says of this process; None if it did not start it.

    Raises:
        UsageError: it says only half of it.
    """
    if _MARK not in environ:
        return None
    try:
        rank, size, local_rank, local_size = (int(environ[key]) for key in _KEYS[:4])
        return Launch(rank, size, local_rank, local_size, environ["MASTER_ADDR"])
    except (KeyError, ValueError):
        given = ", ".join(f"{key}={environ.get(key)!r}" for key in _KEYS)
        raise UsageError(f"{_MARK} is set, so torchrun should have set numbers and hosts too, got {given}") from None


def check_launch(size: int, launch: Launch | None) -> None:
    """Raises:
    UsageError: torchrun started another number of processes than ranks were asked for.
    """
    if launch is not None and launch.size != size:
        raise UsageError(
            f"--tensor-parallel-size: {size}, but torchrun started {launch.size} processes",
            remedy=f"use --tensor-parallel-size {launch.size}",
        )


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where another rank finds rank 0, and the secret that lets it in."""

    host: str
    port: int
    key: str
    store_port: int | None
    """Of the store in which the process group meets; None: torchrun's own store."""


def new_key() -> bytes:
    """A fresh secret."""
    return secrets.token_bytes(32)


def torchrun_store() -> Store:
    """The store that torchrun's ranks share."""
    store, _, _ = next(iter(rendezvous("env://", timeout=_TIMEOUT)))
    return dist.PrefixStore("vkit", store)  # type: ignore[attr-defined]


def publish(store: Store, meeting: Meeting) -> None:
    """Tell torchrun's other ranks where to call."""
    store.set(_MEETING, json.dumps(asdict(meeting)))


def find_meeting(store: Store) -> Meeting:
    """Where rank 0 waits, once it says so."""
    store.wait([_MEETING], _TIMEOUT)
    return Meeting(**json.loads(store.get(_MEETING)))


def own_store() -> tuple[Store, int]:
    """A store of rank 0's own for ranks on this host, and its port."""
    store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]
    return store, store.port


def join_store(port: int) -> Store:
    """The store of rank 0 on this host."""
    return dist.TCPStore(LOCALHOST, port, is_master=False, timeout=_TIMEOUT)  # type: ignore[attr-defined]


def reachable_host(launch: Launch | None) -> str:
    """The address on which rank 0 waits for the others."""
    if launch is None or launch.is_one_host:
        return LOCALHOST
    return str(socket.getaddrinfo(launch.master, None, type=socket.SOCK_STREAM)[0][4][0])


def start_follower(rank: int, size: int, meeting: Meeting) -> subprocess.Popen[bytes]:
    """Start a rank on this host. It has a process group of its own: an interrupt of the terminal reaches rank 0 alone,
    which then ends the others. The secret goes through a pipe, where no list of processes shows it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vkit.parallel.follower"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        process_group=0,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({"rank": rank, "size": size, **asdict(meeting)}).encode())
        process.stdin.close()
    except BaseException:  # an interrupt included: nobody else knows of the process yet
        process.kill()
        process.wait()
        raise
    return process

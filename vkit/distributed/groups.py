"""Ranks over torch's process groups: NCCL between cards, gloo between hosts' processors."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from vkit.errors import UsageError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

COLLECTIVE_TIMEOUT = timedelta(minutes=5)
"""How long one sum may wait for the others: ranks enter it together, so only a rank that hangs makes it long."""


class RankLost(RuntimeError):
    """A sum or gathering that another rank did not take part in."""


class ProcessGroup:
    """A group of processes, apart from torch's global one, so that a process may hold several models."""

    def __init__(self, group: Any) -> None:
        """`group`: one of torch's backends, which share their methods and no type."""
        self._group = group

    def sum(self, x: Tensor) -> None:
        """Replace contiguous `x` by its sum over all ranks. A ring adds up each part in one place: equal bits."""
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from error

    def gather(self, x: Tensor) -> Tensor:
        """Contiguous x (...) of every rank -> (ranks, ...), in their order."""
        out = x.new_empty((self._group.size(), *x.shape))
        try:
            self._group.allgather([list(out.unbind(0))], [x]).wait()
        except RuntimeError as error:
            raise RankLost(str(error)) from error
        return out

    def abort(self) -> None:
        """Have whoever waits in a sum give up."""
        self._group.abort()

    def close(self) -> None:
        """Leave the group."""
        self._group.shutdown()


def open_group(store: Store, rank: int, size: int, device: torch.device, address: str | None) -> ProcessGroup:
    """The group of `size` processes that meet in `store`. `address`: this host's, for gloo; None: gloo's own choice.

    Raises:
        UsageError: this build of torch has no NCCL.
    """
    if device.type == "cuda":
        if not dist.is_nccl_available():
            raise UsageError("--tensor-parallel-size: this torch build has no NCCL", remedy="--device cpu uses gloo")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = COLLECTIVE_TIMEOUT
        return ProcessGroup(dist.ProcessGroupNCCL(store, rank, size, options))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_default_device() if address is None else gloo.create_device(hostname=address)]
    options._timeout = COLLECTIVE_TIMEOUT
    options._threads = 1
    return ProcessGroup(gloo(store, rank, size, options))

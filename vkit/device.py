"""What this machine can compute on: asked once at start-up, passed on as a value."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from vkit import kernels
from vkit.errors import UsageError

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Device:
    """One device, as found."""

    kind: str
    """"cpu" or "cuda"."""
    name: str
    """The processor's or card's own name, if it tells one."""
    total_bytes: int
    available_bytes: int
    """Free now, before anything of ours is loaded; container limits respected."""
    num_threads: int
    """Host threads this process may use."""
    dtypes: frozenset[str]
    """Types that `--dtype auto` takes over from a checkpoint. On a CPU float32 alone: weights stay as narrow as stored,
    and the residual stream keeps its precision."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""

    @property
    def torch_device(self) -> torch.device:
        """The same as torch names it."""
        return torch.device(self.kind)


def find_device(asked: str) -> Device:
    """The device for "auto", "cpu" or "cuda". Auto takes a card if there is one.

    Raises:
        UsageError: the named device is not there, or the name is unknown.
    """
    if asked not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: expected auto, cpu or cuda, got {asked!r}")
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return _cpu()
    if not torch.cuda.is_available():
        built = "this torch build has no CUDA" if torch.version.cuda is None else "torch finds no usable card"
        raise UsageError(f"--device cuda: {built}", remedy="use --device cpu, or install a CUDA build of torch")
    return _cuda()


def check_kernels(kind: str) -> None:
    """Load the kernel backends of a kind of device.

    Raises:
        UsageError: a variable asks for kernels that do not exist, or that this machine cannot run.
    """
    try:
        kernels.backends(kind)
    except ValueError as error:
        raise UsageError(str(error)) from None


def num_usable_threads() -> int:
    """Threads worth starting: processors in the affinity mask, no more than the container's quota allows."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_words("cpu.max")
    if len(quota) == 2 and quota[0].isdigit() and quota[1].isdigit():
        count = min(count, max(1, round(int(quota[0]) / int(quota[1]))))
    return count


def return_freed_memory() -> None:
    """Give memory that was freed, but that the C library keeps for later, back to the system; nothing where it cannot.

    Reading a vocabulary makes and drops hundreds of thousands of small objects: megabytes that would stay resident.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def return_device_memory(device: torch.device) -> None:
    """Give memory of a card that was freed, but that torch keeps for later, back to the card; nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()  # captured steps and models hold each other
        torch.cuda.empty_cache()


def _cpu() -> Device:
    total, available = _system_memory()
    limit, used = _cgroup_words("memory.max"), _cgroup_words("memory.current")
    if limit and limit[0].isdigit():
        total = min(total, int(limit[0]))
        if used and used[0].isdigit():
            available = min(available, max(0, int(limit[0]) - int(used[0])))
    return Device("cpu", _cpu_name(), total, available, num_usable_threads(), frozenset({"float32"}))


def _system_memory() -> tuple[int, int]:
    """(all, available) bytes of this machine. Source: proc_meminfo(5); elsewhere psutil, which is slower to come."""
    try:
        words = [line.split() for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines()]
        sizes = {name: int(size) * 1024 for name, size, *_ in words if name in ("MemTotal:", "MemAvailable:")}
        return sizes["MemTotal:"], sizes["MemAvailable:"]
    except (OSError, KeyError):
        import psutil

        memory = psutil.virtual_memory()
        return memory.total, memory.available


def _cuda() -> Device:
    free, total = torch.cuda.mem_get_info()
    capability = torch.cuda.get_device_capability()
    dtypes = {"float32", "float16"} | ({"bfloat16"} if capability >= (8, 0) else set())
    return Device(
        "cuda", torch.cuda.get_device_name(), total, free, num_usable_threads(), frozenset(dtypes), capability
    )


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "cpu"


def _cgroup_words(name: str) -> list[str]:
    """The words of a control-group file, none where there is no such file."""
    try:
        return (_CGROUP / name).read_text(encoding="utf-8").split()
    except OSError:
        return []

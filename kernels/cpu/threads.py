"""How many threads are worth starting here. No torch."""

from __future__ import annotations

import os
from pathlib import Path


def usable_threads() -> int:
    """Physical cores in the affinity mask, no more than the container's quota."""
    cpus = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in cpus}
    return max(1, min(len(cores), _quota(len(cpus))))


def _siblings(cpu: int) -> str:
    """The core a processor belongs to; two hardware threads of one core would only share its vector units."""
    try:
        return (
            Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
        )
    except OSError:
        return str(cpu)


def _quota(count: int) -> int:
    """Whole processors of the control group's quota, or `count` if there is none."""
    for path, period_path in (
        ("/sys/fs/cgroup/cpu.max", None),
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
    ):
        try:
            words = Path(path).read_text(encoding="ascii").split()
            if period_path is not None:
                words += Path(period_path).read_text(encoding="ascii").split()
        except OSError:
            continue
        if len(words) == 2 and all(word.isdigit() for word in words):
            return max(1, int(words[0]) // int(words[1]))
    return count

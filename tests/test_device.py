"""What the machine offers, as far as it can be said without one's own kind of machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vkit import device
from vkit.errors import UsageError


def test_cpu() -> None:
    found = device.find_device("cpu")
    assert found.kind == "cpu"
    assert 0 < found.available_bytes <= found.total_bytes
    assert found.num_threads >= 1
    assert found.torch_device == torch.device("cpu")


def test_absent_and_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.find_device("auto").kind == "cpu"
    with pytest.raises(UsageError, match="--device cuda: "):
        device.find_device("cuda")
    with pytest.raises(UsageError, match="--device: expected auto, cpu or cuda, got 'tpu'"):
        device.find_device("tpu")


@pytest.mark.parametrize(("quota", "threads"), [("max 100000", 4), ("150000 100000", 2), ("10000 100000", 1)])
def test_threads_follow_affinity_and_quota(
    quota: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert device.num_usable_threads() == threads


def test_memory_follows_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    monkeypatch.setattr(device, "_CGROUP", tmp_path)
    found = device.find_device("cpu")
    assert (found.total_bytes, found.available_bytes) == (1000000, 600000)


def test_memory_is_what_psutil_says() -> None:
    import psutil

    total, available = device._system_memory()
    said = psutil.virtual_memory()
    assert total == said.total
    assert abs(available - said.available) < said.total // 4  # others allocate meanwhile

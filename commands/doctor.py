"""`vkit doctor`: what this installation and this machine can do, on one page."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated, Any

import typer

from vkit import __version__, discovery
from vkit.commands import _options, _render
from vkit.default_model import demo_model
from vkit.errors import VkitError

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "gguf", "typer", "rich")
DEVELOPER_EXTRAS = frozenset({"dev"})


GpuFlag = Annotated[
    bool,
    typer.Option(
        "--gpu", help="Check every GPU kernel against plain torch on this machine's card, and measure how fast each is."
    ),
]


def doctor(json: _options.JsonFlag = False, gpu: GpuFlag = False) -> None:
    """Report what this installation can do.

    Versions, devices, kernel backends, missing extras, the model found and free memory.
    """
    if gpu:
        _check_gpu(json)
        return
    report = {
        "vkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": devices(),
        "memory": memory(),
        "kernel_backends": kernel_backends(),
        "cpu_kernels": cpu_kernels(),
        "missing_extras": missing_extras(requires("vkit") or ()),
        "model": _model(),
        "plugins": _plugins(),
    }
    if json:
        _render.write_json(report)
        return
    _render.table(None, ["", ""], list(_rows(report)))


def _check_gpu(json: bool) -> None:
    """Show how the card's kernels do, line by line; with `json` the lines go to stderr and the report to stdout."""
    from vkit.kernels import check

    try:
        report = check.check_card(_render.note if json else lambda line: _render.write_text(f"{line}\n"))
    except RuntimeError as reason:
        raise VkitError(f"--gpu: no GPU to check: {reason}") from reason
    if json:
        _render.write_json(report)
    if report["num_failed"]:
        raise VkitError(
            f"--gpu: {report['num_failed']} checks failed", remedy="each is on a line that begins with FAIL"
        )


def devices() -> list[dict[str, Any]]:
    """The CPU, and each CUDA device torch sees."""
    import torch

    found: list[dict[str, Any]] = [{"kind": "cpu", "name": _cpu_name(), "threads": len(os.sched_getaffinity(0))}]
    if not torch.cuda.is_available():
        return found
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free_bytes, total_bytes = torch.cuda.mem_get_info(index)
        found.append(
            {
                "kind": "cuda",
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "free_bytes": free_bytes,
                "total_bytes": total_bytes,
            }
        )
    return found


def memory() -> dict[str, int]:
    """Host memory in bytes: in all, and available without swapping."""
    import psutil

    now = psutil.virtual_memory()
    return {"total_bytes": now.total, "available_bytes": now.available}


def kernel_backends() -> dict[str, str]:
    """Backend -> "available", or the reason why it is not."""
    from vkit.device import check_kernels
    from vkit.kernels import backends

    states = {"reference": "available"}
    for device_type in ("cpu", "cuda"):
        check_kernels(device_type)
        for backend in backends(device_type):
            states[f"{backend.name} ({device_type})"] = backend.unavailable or "available"
    return states


def cpu_kernels() -> dict[str, Any] | None:
    """The native kernels' level, threads and measured memory read rate; None without them."""
    from vkit.kernels import backends

    for backend in backends("cpu"):
        if backend.report is not None:
            return dict(backend.report())
    return None


def missing_extras(requirements: Iterable[str]) -> dict[str, list[str]]:
    """Extra -> its distributions that are not installed, for every extra that is not complete."""
    missing: dict[str, list[str]] = {}
    for requirement in requirements:
        extra = re.search(r"""extra\s*==\s*["']([\w.-]+)["']""", requirement)
        name = re.match(r"[\w.-]+", requirement)
        if extra and name and extra[1] not in DEVELOPER_EXTRAS and _version(name[0]) is None:
            missing.setdefault(extra[1], []).append(name[0])
    return missing


def _model() -> dict[str, Any] | None:
    found = demo_model()
    return None if found is None else {"name": found.name, "path": str(found.path), "num_bytes": found.num_bytes}


def _plugins() -> list[str]:
    found = discovery.find(discovery.COMMANDS)
    lines = [f"{offer.name} ({offer.origin})" for offer in found.offers.values() if not offer.is_builtin]
    return lines + found.problems


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _rows(report: dict[str, Any]) -> Iterable[tuple[str, str]]:
    yield "vkit", report["vkit"]
    yield "python", f"{report['python']} ({sys.executable})"
    yield "platform", report["platform"]
    for name, found in report["packages"].items():
        yield name, found or "not installed"
    for device in report["devices"]:
        if device["kind"] == "cpu":
            yield "cpu", f"{device['name']}, {device['threads']} threads"
        else:
            free, total = _render.size(device["free_bytes"]), _render.size(device["total_bytes"])
            yield "cuda", f"{device['name']}, capability {device['capability']}, {free} of {total} free"
    if len(report["devices"]) == 1:
        yield "cuda", "no device"
    host = report["memory"]
    yield "memory", f"{_render.size(host['available_bytes'])} of {_render.size(host['total_bytes'])} available"
    for name, state in report["kernel_backends"].items():
        yield f"kernels: {name}", state
    native, model = report["cpu_kernels"], report["model"]
    if native:
        rate = native["bytes_per_s"]
        yield "cpu kernels", f"{native['level']}, {native['threads']} threads, read {rate / 1e9:.1f} GB/s"
        if model:
            yield "a token", f"{model['num_bytes'] / rate * 1e3:.1f} ms if only reading the model's weights took time"
    for extra, distributions in report["missing_extras"].items():
        yield f"extra: {extra}", f"not installed: {', '.join(distributions)} (pip install 'vkit[{extra}]')"
    yield "model", f"{model['name']}, {_render.size(model['num_bytes'])}" if model else "none installed"
    for plugin in report["plugins"]:
        yield "plug-in", plugin

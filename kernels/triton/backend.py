"""Offers the Triton kernels to dispatch, for CUDA devices alone. Importing this loads no triton and wakes no card."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch

from vkit.kernels.block_formats import PLANE_SUFFIX, PLANES
from vkit.kernels.dispatch import Backend, Op, register_backend
from vkit.kernels.planes import as_rows, to_planes

NAME = "triton"
LEAST_CAPABILITY = (8, 0)


def unavailable() -> str | None:
    """Why the kernels cannot run here, in one clause; None if they can.

    Asks the driver's management library: asking CUDA itself would create a context, and forked children could then not
    use the card.
    """
    if torch.version.cuda is None:
        return "this torch build has no CUDA"
    if find_spec("triton") is None:
        return "triton is not installed (pip install 'vkit[cuda]')"
    if not _compiler():
        return "no C compiler found, with which triton builds its launcher (install gcc, or set CC)"
    found = capabilities()
    if isinstance(found, str):
        return found
    old = sorted(item for item in found if item < LEAST_CAPABILITY)
    if old:
        return f"a card of compute capability {old[0][0]}.{old[0][1]}, expected 8.0 or later"
    return None


def capabilities() -> list[tuple[int, int]] | str:
    """The compute capability of every card of this machine, or in one clause why there is none."""
    if find_spec("pynvml") is None:
        return "nvidia-ml-py is not installed (pip install 'vkit[cuda]')"
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVIDIA driver answers ({error})"
    try:
        count = pynvml.nvmlDeviceGetCount()
        cards = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        found = [tuple(pynvml.nvmlDeviceGetCudaComputeCapability(card)) for card in cards]
    finally:
        pynvml.nvmlShutdown()
    return [(major, minor) for major, minor in found] or "the driver knows no card"


def find(op: str, dtype: torch.dtype) -> Op | None:
    """The Triton implementation of `op` for activations of `dtype`."""
    from vkit.kernels.triton.ops import FLOATS, OPS

    return OPS.get(op) if dtype in FLOATS else None


def pack(data: torch.Tensor, qtype: str) -> tuple[torch.Tensor, str]:
    """Packed rows in planes where the kernels read them so."""
    return (to_planes(data, qtype), qtype + PLANE_SUFFIX) if qtype in PLANES else (data, qtype)


def _compiler() -> str | None:
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")


register_backend(Backend(NAME, "cuda", find, unavailable=unavailable(), pack=pack, pack_scaled=as_rows))

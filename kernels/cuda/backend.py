"""Offers the CUDA kernels to dispatch, before Triton's. Importing this compiles nothing and wakes no card."""

from __future__ import annotations

import logging
from functools import cache

import torch

from vkit.kernels.compiler import BuildError
from vkit.kernels.cuda import sources
from vkit.kernels.dispatch import Backend, Op, register_backend
from vkit.kernels.triton import backend as triton_backend

logger = logging.getLogger("vkit.kernels")

NAME = "cuda"


def unavailable() -> str | None:
    """Why the kernels cannot run here, in one clause; None if they can, once compiled.

    They ask for what Triton asks for, since Triton runs the tiles of a prefill.
    """
    reason = triton_backend.unavailable()
    if reason is None and sources.find_nvcc() is None:
        return "nvcc is not found (install the CUDA toolkit, or set CUDA_HOME)"
    return reason


def find(op: str, dtype: torch.dtype) -> Op | None:
    """The CUDA implementation of `op` for activations of `dtype`; the first call of all compiles the library."""
    from vkit.kernels.cuda import ops

    found = ops.find(op, dtype)
    return found if found is not None and _is_built() else None


@cache
def _is_built() -> bool:
    from vkit.kernels.cuda.library import load_library

    try:
        load_library()
    except BuildError as reason:
        logger.warning("cuda kernels are not used: %s; triton runs", reason)
        return False
    return True


register_backend(Backend(NAME, "cuda", find, unavailable=unavailable()))

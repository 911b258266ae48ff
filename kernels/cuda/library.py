"""The compiled CUDA library through ctypes: the structures of its calls, and how one is started; built if need be."""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from vkit.kernels.build import build_library
from vkit.kernels.compiler import BuildError
from vkit.kernels.cuda import sources
from vkit.kernels.triton.backend import capabilities

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""VkType of device.cuh."""

_P, _I64, _I32, _F32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Norm(ctypes.Structure):
    """VkNorm of norm.cu."""

    _fields_ = (
        *((name, _P) for name in ("x", "residual", "weight", "out", "total")),
        *(
            (name, _I64)
            for name in ("rows", "width", "inner", "x_outer", "x_inner", "residual_outer", "residual_inner")
        ),
        ("eps", _F32),
        ("offset", _F32),
        *((name, _I32) for name in ("type", "weight_type", "has_wide_loads")),
    )


class Packed(ctypes.Structure):
    """VkPacked of packed.cu."""

    _fields_ = (
        *((name, _P) for name in ("x", "data", "bias", "out")),
        *((name, _I64) for name in ("rows", "row_bytes", "num_blocks", "x_row", "out_row")),
        *((name, _I32) for name in ("tokens", "type", "bias_type", "format", "is_planes")),
    )


class Decode(ctypes.Structure):
    """VkDecode of attention.cu."""

    _fields_ = (
        *((name, _P) for name in ("q", "k_cache", "v_cache", "out", "part", "part_lse", "sinks", "finished")),
        *((name, _P) for name in ("table", "rows", "seq_lens", "cu_seqlens")),
        *((name, _I64) for name in ("table_row", "q_token", "q_head", "k_block", "k_slot", "k_head")),
        *((name, _I64) for name in ("v_block", "v_slot", "v_head")),
        *((name, _I32) for name in ("num_sequences", "num_kv_heads", "group", "block_size", "width", "value_width")),
        *((name, _I32) for name in ("max_queries", "num_splits", "chunk", "window", "type", "num_tiles", "columns")),
        ("scale", _F32),
        ("soft_cap", _F32),
    )


Arguments = Norm | Packed | Decode
CALLS: dict[str, type[Arguments]] = {"rms_norm": Norm, "packed": Packed, "decode": Decode}
"""Each a function vk_NAME(arguments, device, stream)."""


class Library:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        try:
            self._c = ctypes.CDLL(str(path))
        except OSError as error:
            raise BuildError(f"{path} cannot be loaded: {error}") from error
        for name, arguments in CALLS.items():
            if getattr(self._c, f"vk_{name}_bytes")() != ctypes.sizeof(arguments):
                raise BuildError(f"{path} is of another version")

    def start(self, name: str, arguments: Arguments, device: torch.device) -> None:
        """Put a kernel on the current stream of `device`.

        Raises:
            RuntimeError: CUDA refuses; the message has its error code.
        """
        call = getattr(self._c, f"vk_{name}")
        with _current(device):
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
            code = call(ctypes.byref(arguments), ctypes.c_int32(device.index or 0), ctypes.c_void_p(stream))
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A with block in which `device` is the current one."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@cache
def load_library() -> Library:
    """The library of `load_for`, built or loaded once.

    Raises:
        BuildError: it cannot be had; the message is one clause.
    """
    return load_for()


def load_for() -> Library:
    """The library for every card of this machine, compiled by nvcc unless the cache holds it.

    Raises:
        BuildError: it cannot be had; the message is one clause.
    """
    compiler = sources.find_nvcc()
    if compiler is None:
        raise BuildError("nvcc is not found (looked in $CUDA_HOME, $CUDA_PATH, PATH and /usr/local/cuda)")
    found = capabilities()
    if isinstance(found, str):
        raise BuildError(found)
    flags = sources.library_flags([f"sm_{major}{minor}" for major, minor in sorted(set(found))])
    path = build_library(
        "cuda", sources.units(), sources.headers(), flags, compiler=compiler, link_flags=("-cudart=static",)
    )
    return Library(path)


def pointer(x: Tensor | None) -> int | None:
    """Where the first element lies; None for no tensor."""
    return None if x is None else x.data_ptr()


def is_aligned(*tensors: Tensor | None, num_bytes: int = 16) -> bool:
    """Whether all begin at a multiple of `num_bytes`."""
    return all(x is None or x.data_ptr() % num_bytes == 0 for x in tensors)

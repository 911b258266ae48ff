"""Offers the native kernels to dispatch. Importing this module builds or loads the library."""

from __future__ import annotations

from dataclasses import replace

import torch

from vkit.kernels import dispatch
from vkit.kernels.cpu.cache import kv_layout
from vkit.kernels.cpu.dtypes import DTYPE_IDS
from vkit.kernels.cpu.library import LibraryError, load_library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.cpu.probe import read_rate
from vkit.kernels.cpu.program import StepFunction, StepRunner
from vkit.kernels.cpu.threads import usable_threads

NAME = "native"

OPS = frozenset(
    {
        *("add", "concat", "gelu_and_mul", "multiply", "scale", "silu_and_mul", "soft_cap", "unary"),
        *("add_rms_norm", "layer_norm", "rms_norm", "qk_norm_rope", "rope"),
        *("embedding", "linear", "quantized_embedding", "quantized_linear"),
        *("paged_attention", "write_kv"),
        *("draw", "head_linear", "largest", "replace_ids", "scale_rows", "scaled_linear"),
        *("route_experts", "route_scored_experts", "run_experts"),
        *("causal_conv1d", "gated_delta_net", "log_decay", "mamba2_scan"),
    }
)
"""Each a method of Operations."""


def _backend() -> dispatch.Backend:
    refused = dispatch.Backend(NAME, "cpu", lambda op, dtype: None)
    try:
        library = load_library()
    except LibraryError as reason:
        return replace(refused, unavailable=f"{reason}; products of packed weights take many times longer without them")
    library.set_num_threads(usable_threads())
    operations = Operations(library, dict(dispatch.reference_ops()))

    def find(op: str, dtype: torch.dtype, /) -> dispatch.Op | None:
        fits = dtype in DTYPE_IDS or op == "replace_ids"
        found: dispatch.Op | None = getattr(operations, op) if op in OPS and fits else None
        return found

    def wrap_step(step: StepFunction) -> StepFunction:
        return StepRunner(library, step)

    def configure(num_threads: int, is_exact: bool, is_deterministic: bool) -> None:
        library.set_num_threads(num_threads)
        operations.is_exact, operations.is_deterministic = is_exact, is_deterministic

    def report() -> dict[str, str | int | float]:
        return {"level": library.level, "threads": library.num_threads, "bytes_per_s": read_rate(library)}

    return replace(refused, find=find, wrap_step=wrap_step, kv_layout=kv_layout, configure=configure, report=report)


dispatch.register_backend(_backend())

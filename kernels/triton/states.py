"""Launches the kernels of layers that keep a state: which sequences go token by token and which by chunks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

from vkit.kernels.recurrent import ScanConstants, StateBatch
from vkit.kernels.triton.common import Ahead, power_of_two
from vkit.kernels.triton.recurrent import output_kernel, pass_kernel, solve_kernel, step_kernel

CHUNK = 64
CHANNEL_CHUNK = 16
"""Tokens per chunk where every channel decays on its own."""
CHANNELS = 32
"""Of keys, in one step of a product."""
STEP_COLUMNS = 32
PASS_COLUMNS = 16
OUTPUT_COLUMNS = 32
SOLVE_COLUMNS = 32
WARPS_AND_STAGES = {"step": (4, 2), "solve": (4, 2), "pass": (8, 1), "delta pass": (4, 1), "output": (8, 2)}
"""Columns of a matrix that one program works on. Chosen so that nothing spills; not measured."""


def gated_delta_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    write: Tensor,
    state: Tensor,
    batch: StateBatch,
    is_tiled: bool = False,
) -> Tensor:
    """As the reference of this name."""
    decay = decay if decay[0:1].is_contiguous() else decay.contiguous()
    return _run(_Layer(q, k, v, decay, write, None, 0.0, state, is_delta=True, is_tiled=is_tiled), batch)


def mamba2_scan(
    x: Tensor, step: Tensor, b: Tensor, c: Tensor, constants: ScanConstants, state: Tensor, batch: StateBatch
) -> Tensor:
    """As the reference of this name."""
    joined = torch.stack([constants.rate, constants.skip, constants.step_bias]).float()
    return _run(_Layer(c, b, x, None, step, joined, constants.least_step, state, is_delta=False, is_tiled=False), batch)


@dataclass(frozen=True)
class _Layer:
    """What a call is about, in the kernels' words."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    write: Tensor
    constants: Tensor | None
    least_step: float
    state: Tensor
    is_delta: bool
    is_tiled: bool


@dataclass(frozen=True)
class _Cut:
    """How a step's sequences are dealt out."""

    has_steps: bool
    has_chunks: bool

    @staticmethod
    def of(batch: StateBatch) -> _Cut:
        verified = set(batch.verified)
        counts = [after - before for before, after in pairwise(batch.host_cu_seqlens)]
        stepped = [count == 1 or (count > 1 and index in verified) for index, count in enumerate(counts)]
        return _Cut(any(stepped), any(count > 1 and not own for count, own in zip(counts, stepped, strict=True)))


def _run(layer: _Layer, batch: StateBatch) -> Tensor:
    q, k, v, write = (x if x.stride(-1) == 1 else x.contiguous() for x in (layer.q, layer.k, layer.v, layer.write))
    num_heads, value_width = v.shape[1:]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    state = layer.state
    if not state[0].is_contiguous():
        raise ValueError(f"state of strides {state.stride()}, expected the values of a sequence side by side")
    decay = write if layer.decay is None else layer.decay
    has_channels = decay.ndim == 3
    constants = {
        "KEY_HEADS": q.shape[1],
        "D": q.shape[2],
        "DV": value_width,
        "BLOCK_D": max(16, power_of_two(q.shape[2])),
        "HAS_CHANNELS": has_channels,
        "HAS_TARGETS": batch.targets is not None,
        "IS_TILED": layer.is_tiled,
    }
    targets = batch.blocks if batch.targets is None else batch.targets
    given = write if layer.constants is None else layer.constants
    scale = q.shape[2] ** -0.5 if layer.is_delta else 1.0
    kv = (*k.stride()[:2], *v.stride()[:2], decay.stride(0), write.stride(0))
    cut = _Cut.of(batch)
    num_sequences = len(batch.host_cu_seqlens) - 1
    if cut.has_steps:
        columns = _columns(value_width, STEP_COLUMNS)
        step_kernel[(num_sequences, num_heads, triton.cdiv(value_width, columns))](
            q, k, v, decay, write, given, state, out, batch.blocks, batch.is_fresh, batch.cu_seqlens, targets,
            layer.least_step, scale, *q.stride()[:2], *kv, state.stride(0),
            BLOCK_DV=columns, IS_DELTA=layer.is_delta, **_launch("step"), **constants,
        )  # fmt: skip
    if cut.has_chunks:
        _run_chunks(_Call(layer, batch, (q, k, v, decay, write, given), targets, scale, kv, out, constants))
    return out


@dataclass(frozen=True)
class _Call:
    layer: _Layer
    batch: StateBatch
    inputs: tuple[Tensor, ...]
    targets: Tensor
    scale: float
    strides: tuple[int, ...]
    out: Tensor
    constants: dict[str, Any]


def _run_chunks(call: _Call) -> None:
    layer, batch, constants, out = call.layer, call.batch, call.constants, call.out
    q, k, v, decay, write, given = call.inputs
    num_tokens, num_heads, value_width = v.shape
    width = constants["D"]
    length = CHANNEL_CHUNK if constants["HAS_CHANNELS"] else CHUNK
    num_sequences = len(batch.host_cu_seqlens) - 1
    most = num_tokens // length + num_sequences

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=v.device)

    pieces = min(CHANNELS, constants["BLOCK_D"])
    passing = scratch(most, num_heads, width, value_width)
    solved_k = solved_v = written = passing
    if layer.is_delta:
        solved_k = scratch(num_tokens, num_heads, width)
        solved_v, written = (scratch(num_tokens, num_heads, value_width) for _ in range(2))
        columns = _columns(value_width, SOLVE_COLUMNS)
        solve_kernel[(most, num_heads)](
            k, v, decay, write, solved_k, solved_v, batch.cu_seqlens, call.targets, num_sequences, num_heads,
            *call.strides, BLOCK_DV=columns, BLOCK_K=pieces, LENGTH=length, **_launch("solve"), **constants,
        )  # fmt: skip
    columns, passes = _columns(value_width, PASS_COLUMNS), _pass_name(layer.is_delta, constants["HAS_CHANNELS"])
    pass_kernel[(num_sequences, num_heads, triton.cdiv(value_width, columns))](
        k, v, decay, write, given, solved_k, solved_v, written, passing, layer.state, batch.blocks, batch.is_fresh,
        batch.cu_seqlens, call.targets, layer.least_step, *call.strides, layer.state.stride(0),
        BLOCK_DV=columns, LENGTH=length, IS_DELTA=layer.is_delta, **_launch(passes), **constants,
    )  # fmt: skip
    columns = _columns(value_width, OUTPUT_COLUMNS)
    output_kernel[(most, num_heads, triton.cdiv(value_width, columns))](
        q, k, v, decay, write, given, written, passing, out, batch.cu_seqlens, call.targets, layer.least_step,
        call.scale, num_sequences, num_heads, *q.stride()[:2], *call.strides,
        BLOCK_DV=columns, BLOCK_K=pieces, LENGTH=length, IS_DELTA=layer.is_delta, **_launch("output"), **constants,
    )  # fmt: skip


def _launch(name: str) -> dict[str, int]:
    num_warps, num_stages = WARPS_AND_STAGES[name]
    return {"num_warps": num_warps, "num_stages": num_stages}


def _pass_name(is_delta: bool, has_channels: bool) -> str:
    return "delta pass" if is_delta and not has_channels else "pass"


def _columns(width: int, most: int) -> int:
    return min(most, max(16, power_of_two(width)))


INPUTS = {**dict.fromkeys(("q", "k", "v", "write"), "*bf16"), **dict.fromkeys(("decay", "constants"), "*fp32")}
SCRATCH = dict.fromkeys(("solved_k", "solved_v", "written", "passing"), "*fp32")
BATCH = {"blocks": "*i64", "is_fresh": "*i1", "cu_seqlens": "*i32", "targets": "*i64"}
STRIDES = dict.fromkeys(
    ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "decay_token", "write_token", "state_row"), "i32:16"
)
NUMBERS = {"least_step": "fp32", "scale": "fp32", "num_sequences": "i32", "num_heads": "i32"}
KERNELS = {
    "step": (step_kernel, STEP_COLUMNS),
    "solve": (solve_kernel, SOLVE_COLUMNS),
    "pass": (pass_kernel, PASS_COLUMNS),
    "output": (output_kernel, OUTPUT_COLUMNS),
}


def _ahead(
    name: str, layer: str, widths: tuple[int, int], *, has_channels: bool = False, is_delta: bool = True
) -> Ahead:
    kernel, columns = KERNELS[name]
    known = {**INPUTS, **SCRATCH, **BATCH, **STRIDES, **NUMBERS, "state": "*fp32", "out": "*bf16"}
    constants = {
        "KEY_HEADS": 16,
        "D": widths[0],
        "DV": widths[1],
        "BLOCK_D": power_of_two(widths[0]),
        "BLOCK_K": CHANNELS,
        "BLOCK_DV": _columns(widths[1], columns),
        "LENGTH": CHANNEL_CHUNK if has_channels else CHUNK,
        "HAS_CHANNELS": has_channels,
        "HAS_TARGETS": False,
        "IS_DELTA": is_delta,
        "IS_TILED": False,
    }
    names = kernel.arg_names
    num_warps, num_stages = WARPS_AND_STAGES[_pass_name(is_delta, has_channels) if name == "pass" else name]
    return Ahead(
        f"{layer}_{name}_{widths[0]}x{widths[1]}",
        kernel,
        {name: kind for name, kind in known.items() if name in names},
        {name: value for name, value in constants.items() if name in names},
        num_warps=num_warps,
        num_stages=num_stages,
    )


AHEAD = (
    *(_ahead(name, "delta", (128, 128)) for name in KERNELS),
    *(_ahead(name, "kimi", (128, 128), has_channels=True) for name in KERNELS),
    *(_ahead(name, "mamba2", (128, 64), is_delta=False) for name in ("step", "pass", "output")),
)

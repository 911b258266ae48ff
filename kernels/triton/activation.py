"""Gated activations: f(left half) · right half. One program per row and piece of it; bound by memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import LOG2E, Ahead, power_of_two, rounded

MAX_BLOCK = 2048


@triton.jit  # type: ignore[untyped-decorator]
def tanh(x: tl.tensor) -> tl.tensor:
    """1 − 2 / (e^2x + 1): saturates without overflow at both ends."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def gated_kernel(
    x: tl.tensor, out: tl.tensor, width: tl.tensor, x_row: tl.tensor, BLOCK: tl.constexpr, KIND: tl.constexpr
) -> None:
    """out (rows, width) = f(x[:, :width]) · x[:, width:] with x (rows, 2 · width) by a row stride."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    x += row * x_row
    gate = tl.load(x + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x + width + column, mask=is_column, other=0.0).to(tl.float32)
    if KIND == "silu":
        gate = gate / (1.0 + tl.exp2(gate * -LOG2E))
    elif KIND == "gelu_tanh":
        gate = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    else:
        gate = 0.5 * gate * (1.0 + tl.erf(0.7071067811865476 * gate))
    tl.store(out + row * width + column, rounded(gate * up, out.dtype.element_ty), mask=is_column)


def silu_and_mul(x: Tensor) -> Tensor:
    """As the reference of this name."""
    return _launch(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "tanh") -> Tensor:
    """As the reference of this name."""
    return _launch(x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _launch(x: Tensor, kind: str) -> Tensor:
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    rows = x.reshape(-1, 2 * width)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    block = min(power_of_two(width), MAX_BLOCK)
    grid = (rows.shape[0], triton.cdiv(width, block))
    gated_kernel[grid](rows, out, width, rows.stride(0), BLOCK=block, KIND=kind, num_warps=_num_warps(block))
    return out


def _num_warps(block: int) -> int:
    return min(8, max(1, block // 256))


def _ahead(kind: str) -> Ahead:
    signature: dict[str, Any] = {"x": "*bf16", "out": "*bf16", "width": "i32:16", "x_row": "i32:16"}
    constants = {"BLOCK": MAX_BLOCK, "KIND": kind}
    return Ahead(f"{kind}_and_mul", gated_kernel, signature, constants, num_warps=_num_warps(MAX_BLOCK))


AHEAD = (_ahead("silu"), _ahead("gelu_tanh"), _ahead("gelu"))

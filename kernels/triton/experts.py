"""A mixture of experts: tokens grouped by expert, one grouped product for each layer of the experts.

The tokens of an expert are found on the device, so nothing waits for the host: programs that have no tile return.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.reference import moe as reference
from vkit.kernels.triton import activation
from vkit.kernels.triton.common import Ahead, power_of_two, product, rounded
from vkit.kernels.triton.expert_groups import Groups, expert_of, slots_of
from vkit.kernels.triton.expert_products import PackedExperts, packed_experts, uneven
from vkit.kernels.triton.fallback import leave_to_torch

OUTPUTS = 128
INPUTS = 64
"""Outputs and inputs of one step of a tile. Not measured."""


@triton.jit(do_not_specialize=["num_experts"])  # type: ignore[untyped-decorator]
def grouped_kernel(
    x: tl.tensor,
    addresses: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    slot_ends: tl.tensor,
    tile_ends: tl.tensor,
    num_experts: tl.tensor,
    num_outputs: tl.tensor,
    num_inputs: tl.tensor,
    x_row: tl.tensor,
    weight_row: tl.tensor,
    out_row: tl.tensor,
    SLOTS_PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """out[slot] = x[slot // SLOTS_PER_ROW] @ weight[expert of slot].T, with float32 sums. addresses (E,): the weights'.

    Grid (tiles at most, pieces of the outputs). order (slots,): the slots by expert; slot_ends and tile_ends (E,):
    slots and tiles of all experts up to each. A tile is up to ROWS slots of one expert.
    """
    tile = tl.program_id(0)
    expert = expert_of(tile, tile_ends, num_experts)
    if expert >= num_experts:
        return
    slot, is_row = slots_of(tile, expert, order, slot_ends, tile_ends, ROWS)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < num_outputs
    column = tl.arange(0, INPUTS)
    x_at = x + (slot // SLOTS_PER_ROW)[:, None] * x_row + column[None, :]
    address = tl.multiple_of(tl.load(addresses + expert), 16)
    weight = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), 16)
    weight_at = weight + output.to(tl.int64)[None, :] * weight_row + column[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, num_inputs, INPUTS):
        is_input = start + column < num_inputs
        a = tl.load(x_at + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
        b = tl.load(weight_at + start, mask=is_input[:, None] & is_output[None, :], other=0.0)
        total += product(a, b)
    to = out + slot[:, None] * out_row + output[None, :]
    tl.store(to, rounded(total, out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(
    parts: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out (T, width) = Σ weights[t, s] · parts[t, s], in float32 and in the order of the slots. Grid (T, pieces)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(TOP_K):
        at = token * TOP_K + slot
        part = tl.load(parts + at * width + column, mask=is_column, other=0.0).to(tl.float32)
        total += part * tl.load(weights + at)
    tl.store(out + token * width + column, rounded(total, out.dtype.element_ty), mask=is_column)


@dataclass(frozen=True)
class PlainExperts:
    """One projection of all experts, dense."""

    addresses: Tensor
    """Where each expert's weights begin, (E,) int64 on the device; they stay where they are as long as the matrix."""
    num_rows: int
    num_columns: int
    row_stride: int
    dtype: torch.dtype

    def multiply(self, x: Tensor, groups: Groups, out: Tensor, slots_per_row: int) -> None:
        """out[slot] = x[slot // slots_per_row] times the slot's expert."""
        grouped_kernel[(groups.most_tiles, triton.cdiv(self.num_rows, OUTPUTS))](
            x, self.addresses, out, groups.order, groups.slot_ends, groups.tile_ends, self.addresses.shape[0],
            self.num_rows, self.num_columns, x.stride(0), self.row_stride, out.stride(0),
            SLOTS_PER_ROW=slots_per_row, ROWS=groups.rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
            num_warps=num_warps(groups.rows), num_stages=3,
        )  # fmt: skip


_known: WeakKeyDictionary[ExpertMatrix, PlainExperts | PackedExperts | str] = WeakKeyDictionary()


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[ExpertMatrix],
    down: ExpertMatrix,
    activation_name: str,
) -> Tensor:
    """As the reference of this name; what the kernels do not read is left to it."""
    tables = [_table(matrix) for matrix in (*gate_up, down)]
    reason = _unfit(x, tables, activation_name)
    if reason:
        leave_to_torch("run_experts", reason)
        return reference.run_experts(x, weights, ids, gate_up, down, activation_name)
    products = [table for table in tables if not isinstance(table, str)]
    num_tokens, top_k = ids.shape
    out = torch.empty(num_tokens, down.num_rows, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    groups = Groups.of(ids, len(down.weights))
    hidden = torch.empty(ids.numel(), sum(m.num_rows for m in gate_up), dtype=x.dtype, device=x.device)
    column = 0
    for part in products[:-1]:
        part.multiply(x, groups, hidden[:, column : column + part.num_rows], top_k)
        column += part.num_rows
    act = activation.silu_and_mul if activation_name == "silu" else activation.gelu_and_mul
    parts = torch.empty(ids.numel(), down.num_rows, dtype=x.dtype, device=x.device)
    products[-1].multiply(act(hidden), groups, parts, 1)
    block = min(1024, power_of_two(down.num_rows))
    combine_kernel[(num_tokens, triton.cdiv(down.num_rows, block))](
        parts, weights.float().contiguous(), out, down.num_rows, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def _unfit(x: Tensor, tables: Sequence[PlainExperts | PackedExperts | str], activation_name: str) -> str | None:
    """Why the kernels do not take these experts, in a few words."""
    if activation_name not in ("silu", "gelu_tanh"):
        return f"the activation {activation_name}"
    for table in tables:
        if isinstance(table, str):
            return table
        if isinstance(table, PlainExperts) and table.dtype != x.dtype:
            return f"experts of {table.dtype} with activations of {x.dtype}"
    return None


def _table(matrix: ExpertMatrix) -> PlainExperts | PackedExperts | str:
    """The experts as the kernels read them, found at first use; or in a few words what they do not read."""
    known = _known.get(matrix)
    if known is None:
        is_plain = matrix.qtype is None and all(isinstance(weight, Tensor) for weight in matrix.weights)
        _known[matrix] = known = _plain_experts(matrix) if is_plain else packed_experts(matrix)
    return known


def _plain_experts(matrix: ExpertMatrix) -> PlainExperts | str:
    dense = [weight for weight in matrix.weights if isinstance(weight, Tensor)]
    if matrix.scales is not None:
        return "plain experts with scales"
    reason = uneven(dense)
    if reason:
        return reason
    first = dense[0]
    addresses = torch.tensor([weight.data_ptr() for weight in dense], device=first.device)
    num_rows, num_columns = first.shape
    return PlainExperts(addresses, num_rows, num_columns, first.stride(0), first.dtype)


def num_warps(rows: int) -> int:
    """Warps for a tile of so many slots. Not measured."""
    return 8 if rows >= 128 else 4


def _ahead(rows: int) -> Ahead:
    pointers = {"x": "*bf16", "addresses": "*i64", "out": "*bf16"}
    indices = dict.fromkeys(("order", "slot_ends", "tile_ends"), "*i64")
    sizes = dict.fromkeys(("num_outputs", "num_inputs", "x_row", "weight_row", "out_row"), "i32:16")
    big = {128: {"sm_80": ("mma.sync",), "sm_90": ("wgmma.mma_async",), "sm_100": ("tcgen05.mma",)}}
    return Ahead(
        f"grouped_{rows}",
        grouped_kernel,
        {**pointers, **indices, **sizes, "num_experts": "i32"},
        {"SLOTS_PER_ROW": 8, "ROWS": rows, "OUTPUTS": OUTPUTS, "INPUTS": INPUTS},
        num_warps=num_warps(rows),
        num_stages=3,
        expects=big.get(rows, {"all": ("mma.sync",)}),
    )


AHEAD = (
    _ahead(16),
    _ahead(128),
    Ahead(
        "combine_experts",
        combine_kernel,
        {"parts": "*bf16", "weights": "*fp32", "out": "*bf16", "width": "i32:16"},
        {"TOP_K": 8, "BLOCK": 1024},
    ),
)

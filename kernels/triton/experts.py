"""A mixture of experts over plain weights: tokens grouped by expert, one grouped product for each layer of the experts.

The tokens of an expert are found on the device, so nothing waits for the host: programs that have no tile return.
"""

from __future__ import annotations

import logging
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

logger = logging.getLogger("vkit.kernels")

OUTPUTS = 128
INPUTS = 64
"""Outputs and inputs of one step of a tile. Not measured."""
ALIGNMENT = 16
"""Bytes; what one load of a thread takes."""
_reported: set[str] = set()
_known_addresses: WeakKeyDictionary[ExpertMatrix, Tensor] = WeakKeyDictionary()


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
    low = tl.zeros([], tl.int32)
    high = low + num_experts
    while low < high:
        middle = (low + high) // 2
        if tl.load(tile_ends + middle) <= tile:
            low = middle + 1
        else:
            high = middle
    expert = low
    if expert >= num_experts:
        return
    before = tl.maximum(expert - 1, 0)
    first_tile = tl.where(expert == 0, 0, tl.load(tile_ends + before))
    first_slot = tl.where(expert == 0, 0, tl.load(slot_ends + before))
    place = first_slot + (tile - first_tile) * ROWS + tl.arange(0, ROWS)
    is_row = place < tl.load(slot_ends + expert)
    slot = tl.load(order + place, mask=is_row, other=0)
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


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[ExpertMatrix],
    down: ExpertMatrix,
    activation_name: str,
) -> Tensor:
    """As the reference of this name; packed experts, and those of another type than x, are left to it."""
    reason = _unfit(x, [*gate_up, down], activation_name)
    if reason:
        if reason not in _reported:
            _reported.add(reason)
            logger.warning("run_experts: no triton kernel for %s; plain torch runs it", reason)
        return reference.run_experts(x, weights, ids, gate_up, down, activation_name)
    num_tokens, top_k = ids.shape
    out = torch.empty(num_tokens, down.num_rows, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    x = x if x.stride(-1) == 1 else x.contiguous()
    groups = _Groups.of(ids, len(down.weights))
    hidden = torch.empty(ids.numel(), sum(m.num_rows for m in gate_up), dtype=x.dtype, device=x.device)
    column = 0
    for matrix in gate_up:
        _multiply(x, matrix, groups, hidden[:, column : column + matrix.num_rows], top_k)
        column += matrix.num_rows
    act = activation.silu_and_mul if activation_name == "silu" else activation.gelu_and_mul
    parts = torch.empty(ids.numel(), down.num_rows, dtype=x.dtype, device=x.device)
    _multiply(act(hidden), down, groups, parts, 1)
    block = min(1024, power_of_two(down.num_rows))
    combine_kernel[(num_tokens, triton.cdiv(down.num_rows, block))](
        parts, weights.float().contiguous(), out, down.num_rows, TOP_K=top_k, BLOCK=block, num_warps=4
    )
    return out


def _unfit(x: Tensor, matrices: Sequence[ExpertMatrix], activation_name: str) -> str | None:
    """Why the kernels do not take these experts, in a few words."""
    if activation_name not in ("silu", "gelu_tanh"):
        return f"the activation {activation_name}"
    for matrix in matrices:
        if matrix.qtype is not None or matrix.scales is not None:
            return "packed experts"
        dense = _dense(matrix)
        if len(dense) < len(matrix.weights):
            return "packed experts"
        for weight in dense:
            if weight.dtype != x.dtype or weight.stride() != dense[0].stride() or weight.stride(1) != 1:
                return f"experts of {weight.dtype} and strides {weight.stride()} with activations of {x.dtype}"
            if weight.data_ptr() % ALIGNMENT:
                return f"experts that do not begin at a multiple of {ALIGNMENT} bytes"
    return None


def _addresses(matrix: ExpertMatrix, device: torch.device) -> Tensor:
    """Where each expert's weights begin, (E,) int64 on the device; they stay where they are as long as the matrix."""
    known = _known_addresses.get(matrix)
    if known is None:
        known = torch.tensor([weight.data_ptr() for weight in _dense(matrix)], device=device)
        _known_addresses[matrix] = known
    return known


def _dense(matrix: ExpertMatrix) -> list[Tensor]:
    return [weight for weight in matrix.weights if isinstance(weight, Tensor)]


@dataclass(frozen=True)
class _Groups:
    """The slots of a step by expert, all on the device."""

    order: Tensor
    slot_ends: Tensor
    tile_ends: Tensor
    rows: int
    most_tiles: int

    @staticmethod
    def of(ids: Tensor, num_experts: int) -> _Groups:
        """Tiles as tall as an expert's share of the slots, within what matrix instructions want."""
        slots = ids.flatten()
        rows = min(128, max(16, power_of_two(slots.numel() // num_experts)))
        counts = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
        counts.scatter_add_(0, slots, torch.ones_like(slots))
        tiles = (counts + rows - 1) // rows
        order = torch.argsort(slots, stable=True)
        most = slots.numel() // rows + min(num_experts, slots.numel())
        return _Groups(order, counts.cumsum(0), tiles.cumsum(0), rows, most)


def _multiply(x: Tensor, matrix: ExpertMatrix, groups: _Groups, out: Tensor, slots_per_row: int) -> None:
    first = _dense(matrix)[0]
    num_outputs, num_inputs = first.shape
    grouped_kernel[(groups.most_tiles, triton.cdiv(num_outputs, OUTPUTS))](
        x, _addresses(matrix, x.device), out, groups.order, groups.slot_ends, groups.tile_ends, len(matrix.weights),
        num_outputs, num_inputs, x.stride(0), first.stride(0), out.stride(0),
        SLOTS_PER_ROW=slots_per_row, ROWS=groups.rows, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
        num_warps=num_warps(groups.rows), num_stages=3,
    )  # fmt: skip


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

"""Ops of mixtures of experts: the choice, and every expert's products over the rows that chose it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels.block_formats import format_of
from vkit.kernels.cpu.base import OpsBase, Pointers, address, collapsed_stride, region
from vkit.kernels.cpu.dtypes import DTYPE_IDS
from vkit.kernels.cpu.library import make_op
from vkit.kernels.cpu.tape import Node
from vkit.kernels.cpu.weights import KIND_FLOATS, KIND_PAIRS, PACKED_FORMATS, block_kind
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.scaled import ScaledMatrix

_BLOCKS, _PAIRS, _FLOATS, _DENSE = 0, 1, 2, 3
_GLU = {"silu": 1, "gelu_tanh": 2}
_RELU2 = 5
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class _Table:
    """One projection of all experts as EXPERT_GEMM reads it."""

    addresses: Tensor
    """(E,) int64"""
    mode: int
    kind: int
    """Of the activations, see `block_kind`."""
    format_id: int
    num_rows: int
    columns: int
    row_stride: int
    scales: Tensor | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """Slots sorted by expert."""

    sorted: Tensor
    num_experts: int
    top_k: int
    num_tokens: int
    rows: int
    factor: int
    """Row count of ops over slots, as the tape has it."""


class ExpertOps(OpsBase):
    """Signatures of the reference ops."""

    def route_experts(self, logits: Tensor, top_k: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
        """Weights and ids of the most probable experts."""
        if logits.ndim != 2 or logits.stride(1) != 1:
            chosen: tuple[Tensor, Tensor] = self._reference["route_experts"](logits, top_k, renormalizes)
            return chosen
        return self._route(logits, None, (top_k, 0, 1, 1, int(renormalizes)), (1.0, 0.0, _TINY))

    def route_scored_experts(
        self,
        logits: Tensor,
        bias: Tensor | None,
        top_k: int,
        scoring: str,
        num_groups: int,
        top_groups: int,
        renormalizes: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Weights and ids of the best experts of the best groups."""
        if logits.ndim != 2 or logits.stride(1) != 1:
            chosen: tuple[Tensor, Tensor] = self._reference["route_scored_experts"](
                logits, bias, top_k, scoring, num_groups, top_groups, renormalizes, scale
            )
            return chosen
        numbers = (top_k, int(scoring == "sigmoid"), num_groups, top_groups, int(renormalizes))
        return self._route(logits, bias, numbers, (scale, 1e-20, 0.0))

    def _route(
        self, logits: Tensor, bias: Tensor | None, rules: tuple[int, ...], floats: tuple[float, ...]
    ) -> tuple[Tensor, Tensor]:
        tape, shape = self.tape, (logits.shape[0], rules[0])
        weights, ids = tape.empty(shape, torch.float32), tape.empty(shape, torch.int64)
        rows, factor = tape.rows(logits.shape[:1])
        numbers = (logits.shape[1], DTYPE_IDS[logits.dtype], logits.stride(0), *rules)
        pointers = (logits.data_ptr(), self._float_constant(bias), weights.data_ptr(), ids.data_ptr())
        op = make_op("ROUTE", rows, pointers, numbers, floats, row_factor=factor)
        tape.put([Node(op, [region(logits, logits.stride(0))], [region(weights), region(ids)])])
        return weights, ids

    def run_experts(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        gate_up: Sequence[ExpertMatrix],
        down: ExpertMatrix,
        activation: str,
    ) -> Tensor:
        """Σ weights · expert(x) over each token's experts."""
        tables = [self._table(matrix) for matrix in (*gate_up, down)]
        contiguous = ids.is_contiguous() and weights.is_contiguous() and weights.dtype is torch.float32
        found = [table for table in tables if table is not None]
        if len(found) < len(tables) or not contiguous or collapsed_stride(x) is None:
            return self._fallback("run_experts", x, weights, ids, gate_up, down, activation)
        rows = self._sorted(ids, len(down.weights))
        hidden = self._first_products(x, found[:-1], rows)
        hidden = self._activated(hidden, activation, rows)
        out = self._empty(rows, found[-1].num_rows, x.dtype)
        taken, node = self._taken(hidden, found[-1], rows, is_sorted=True)
        self.tape.put([node, self._product(taken, found[-1], rows, out)])
        return self._joined(out, weights, rows, x.dtype)

    def _sorted(self, ids: Tensor, num_experts: int) -> _Rows:
        tape, (num_tokens, top_k) = self.tape, ids.shape
        size = 3 * top_k * self._capacity(ids) + 2 * num_experts + 2
        place = tape.blocks(region(ids), -100 - num_experts, 4 * size)[0]
        rows, factor = tape.rows(ids.shape)
        op = make_op("EXPERT_SORT", rows, (ids.data_ptr(), place.data_ptr()), (num_experts,), row_factor=factor)
        tape.put([Node(op, [region(ids)], [region(place)])])
        return _Rows(place, num_experts, top_k, num_tokens, rows, factor)

    def _empty(self, rows: _Rows, width: int, dtype: torch.dtype) -> Tensor:
        return self.tape.empty((rows.num_tokens, rows.top_k * width), dtype)

    def _first_products(self, x: Tensor, tables: list[_Table], rows: _Rows) -> Tensor:
        """Gate and up side by side: rows of slots."""
        width = sum(table.num_rows for table in tables)
        hidden = self._empty(rows, width, x.dtype)
        taken: dict[tuple[int, int], Tensor] = {}
        start = 0
        for table in tables:
            form = table.mode == _DENSE, table.kind
            if form not in taken:
                taken[form], node = self._taken(x, table, rows, is_sorted=False)
                self.tape.put([node])
            self.tape.put([self._product(taken[form], table, rows, hidden, start, width)])
            start += table.num_rows
        return hidden

    def _taken(self, x: Tensor, table: _Table, rows: _Rows, *, is_sorted: bool) -> tuple[Tensor, Node]:
        """Rows of x as the product reads them, expert by expert; x is (T, H), or (T, k * H) sorted already."""
        tape, columns = self.tape, table.columns
        stride = columns if is_sorted else collapsed_stride(x)
        assert stride is not None
        per_row = columns // 32 * self.library.block_bytes if table.kind >= 0 else 4 * columns
        out = tape.empty((rows.num_tokens, rows.top_k * per_row), torch.uint8)
        numbers = (columns, DTYPE_IDS[x.dtype], stride, table.kind, rows.num_experts, 0 if is_sorted else rows.top_k)
        pointers = (x.data_ptr(), out.data_ptr(), rows.sorted.data_ptr())
        op = make_op("EXPERT_ROWS", rows.rows, pointers, numbers, row_factor=rows.factor)
        reads = region(x) if is_sorted else region(x, stride)
        return out, Node(op, [reads, region(rows.sorted)], [region(out)])

    def _product(
        self, taken: Tensor, table: _Table, rows: _Rows, out: Tensor, start: int = 0, width: int | None = None
    ) -> Node:
        """Columns start.. of `out` (T, k * width)."""
        width = table.num_rows if width is None else width
        part = out.view(rows.num_tokens, rows.top_k, width)[..., start : start + table.num_rows]
        numbers = (
            *(table.format_id, table.num_rows, table.columns, DTYPE_IDS[out.dtype], width, table.mode),
            *(rows.num_experts, table.row_stride),
        )
        pointers: Pointers = (
            *(taken.data_ptr(), table.addresses.data_ptr(), part.data_ptr(), rows.sorted.data_ptr()),
            address(table.scales),
        )
        op = make_op("EXPERT_GEMM", rows.rows, pointers, numbers, row_factor=rows.factor)
        return Node(op, [region(taken), region(rows.sorted)], [region(part, width)])

    def _activated(self, hidden: Tensor, activation: str, rows: _Rows) -> Tensor:
        width = hidden.shape[1] // rows.top_k
        dtype = DTYPE_IDS[hidden.dtype]
        if activation == "relu2":
            out = self._empty(rows, width, hidden.dtype)
            numbers, name = (width, dtype, width, width, _RELU2), "UNARY"
        else:
            out = self._empty(rows, width // 2, hidden.dtype)
            numbers, name = (width // 2, dtype, width, width // 2, _GLU[activation]), "GLU"
        op = make_op(name, rows.rows, (hidden.data_ptr(), out.data_ptr()), numbers, row_factor=rows.factor)
        slots = rows.num_tokens * rows.top_k
        reads, writes = region(hidden.view(slots, width)), region(out.view(slots, out.shape[1] // rows.top_k))
        self.tape.put([Node(op, [reads], [writes])])
        return out

    def _joined(self, out: Tensor, weights: Tensor, rows: _Rows, dtype: torch.dtype) -> Tensor:
        tape, width = self.tape, out.shape[1] // rows.top_k
        total = tape.empty((rows.num_tokens, width), dtype)
        count, factor = tape.rows(weights.shape[:1])
        numbers = (width, DTYPE_IDS[out.dtype], rows.top_k, rows.num_experts, DTYPE_IDS[dtype])
        pointers = (out.data_ptr(), weights.data_ptr(), rows.sorted.data_ptr(), total.data_ptr())
        op = make_op("EXPERT_JOIN", count, pointers, numbers, row_factor=factor)
        reads = [region(out), region(weights), region(rows.sorted)]
        tape.put([Node(op, reads, [region(total)])])
        return total

    # ---------------------------------------------------------------------------------------- weights

    def _table(self, matrix: ExpertMatrix) -> _Table | None:
        """The experts' packed weights, made at first use; None for what no kernel reads."""
        key = id(matrix), self.is_exact
        if key not in self._tables:
            with torch._C.DisableTorchFunction():
                self._tables[key] = self._new_table(matrix)
            weakref.finalize(matrix, self._tables.pop, key, None)
        table: _Table | None = self._tables[key]
        return table

    def _new_table(self, matrix: ExpertMatrix) -> _Table | None:
        first = matrix.weights[0]
        if isinstance(first, ScaledMatrix):
            return self._scaled_table(matrix)
        if any(not isinstance(weight, Tensor) or weight.stride(1) != 1 for weight in matrix.weights):
            return None
        weights = [weight for weight in matrix.weights if isinstance(weight, Tensor)]
        scales = None if matrix.scales is None else matrix.scales.to(torch.float32).contiguous()
        if matrix.qtype is not None:
            return self._packed_table(weights, matrix.qtype, scales)
        return self._dense_table(weights, scales)

    def _packed_table(self, weights: list[Tensor], qtype: str, scales: Tensor | None) -> _Table | None:
        block = format_of(qtype, "ExpertMatrix")
        columns = block.num_columns(weights[0].shape[1])
        if qtype not in PACKED_FORMATS or columns % 32:
            return None
        packed = [self.weights.get(weight, qtype, columns) for weight in weights]
        mode, kind = (_FLOATS, KIND_FLOATS) if self.is_exact else (_BLOCKS, block_kind(qtype))
        addresses = torch.tensor([weight.address for weight in packed])
        return _Table(addresses, mode, kind, block.type_id, weights[0].shape[0], columns, 0, scales)

    def _dense_table(self, weights: list[Tensor], scales: Tensor | None) -> _Table | None:
        first = weights[0]
        rows, columns = first.shape
        if any(w.dtype is not first.dtype or w.stride(0) != first.stride(0) for w in weights):
            return None
        if first.dtype is torch.bfloat16 and not self.is_exact and columns % 2 == 0:
            packed = [self.weights.get(weight.view(torch.uint8), "BF16", columns) for weight in weights]
            addresses = torch.tensor([weight.address for weight in packed])
            return _Table(addresses, _PAIRS, KIND_PAIRS, packed[0].format_id, rows, columns, 0, scales)
        if first.dtype not in DTYPE_IDS:
            return None
        addresses = torch.tensor([weight.data_ptr() for weight in weights])
        return _Table(addresses, _DENSE, KIND_FLOATS, DTYPE_IDS[first.dtype], rows, columns, first.stride(0), scales)

    def _scaled_table(self, matrix: ExpertMatrix) -> _Table | None:
        weights = [weight for weight in matrix.weights if isinstance(weight, ScaledMatrix)]
        rounds = any(weight.inputs is not None for weight in weights) and self.is_exact
        if len(weights) < len(matrix.weights) or rounds or any(weight.input_scale is not None for weight in weights):
            return None
        packed = [self.scaled_weights.get(weight) for weight in weights]
        found = [weight for weight in packed if weight is not None]
        if len(found) < len(packed) or len({weight.format_id for weight in found}) != 1:
            return None
        is_floats = self.is_exact or found[0].needs_floats
        mode, kind = (_FLOATS, KIND_FLOATS) if is_floats else (_BLOCKS, block_kind(found[0].qtype))
        addresses = torch.tensor([weight.address for weight in found])
        factors = torch.tensor([weight.factor for weight in found])
        rows, columns = weights[0].shape
        return _Table(addresses, mode, kind, found[0].format_id, rows, columns, 0, factors)

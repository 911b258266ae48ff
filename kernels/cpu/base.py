"""What all ops share: the tape in force, converted activations, constants, and how tensors lie in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vkit.kernels.cpu.dtypes import DTYPE_IDS
from vkit.kernels.cpu.facts import reads_facts
from vkit.kernels.cpu.library import Library, make_op
from vkit.kernels.cpu.scaled import ScaledWeights
from vkit.kernels.cpu.tape import Eager, Node, Region, Tape, current
from vkit.kernels.cpu.weights import KIND_FLOATS, WeightCache

Pointers = Sequence[int | None]


@reads_facts
def collapsed_stride(x: Tensor) -> int | None:
    """Elements from one row of the last dimension to the next, or None where rows are not evenly spaced."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    leading = [pair for pair in zip(x.shape[:-1], x.stride()[:-1], strict=True) if pair[0] != 1]
    for (_, outer), (size, inner) in pairwise(leading):
        if outer != size * inner:
            return None
    return leading[-1][1] if leading else x.shape[-1]


@reads_facts
def row_strides(x: Tensor) -> tuple[int, int, int] | None:
    """(stride, inner rows, their stride) of x (..., C): evenly spaced rows have no inner ones. None: no such form."""
    stride = collapsed_stride(x)
    if stride is not None:
        return stride, 1, 0
    return (x.stride(0), x.shape[1], x.stride(1)) if x.ndim == 3 and x.stride(2) == 1 else None


@reads_facts
def rows_region(x: Tensor) -> Region:
    """The memory of x (..., C) whose rows `row_strides` describes."""
    stride = collapsed_stride(x)
    return heads_region(x) if stride is None else region(x, stride)


@reads_facts
def region(x: Tensor, stride: int | None = None) -> Region:
    """The memory of x (..., C), rows `stride` elements apart."""
    width = x.shape[-1] if x.ndim else 1
    rows = max(1, x.numel() // max(1, width))
    step = (width if stride is None else stride) * x.element_size()
    row_bytes = width * x.element_size()
    return Region(x.data_ptr(), max(step, row_bytes), row_bytes, (rows - 1) * step + row_bytes)


class OpsBase:
    """The library, its packed weights and the tape.

    `is_exact` keeps activations in floating point; `is_deterministic` sums in one order however a prompt is cut.
    """

    def __init__(self, library: Library, reference: dict[str, Callable[..., Any]]) -> None:
        self.library = library
        self.weights = WeightCache(library)
        self.scaled_weights = ScaledWeights(library)
        self.is_exact = False
        self.is_deterministic = False
        self._eager = Eager(library)
        self._reference = reference
        self._constants: dict[int, tuple[object, Tensor]] = {}
        self._largest: Any = None
        self._copies: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Tensor] = {}
        self._tables: dict[tuple[int, bool], Any] = {}
        self._id_lists: dict[tuple[int, ...], Tensor] = {}

    @property
    def tape(self) -> Tape:
        """Where ops go at the moment."""
        return current.get() or self._eager

    @reads_facts
    def _prepared(self, x: Tensor, stride: int, kind: int, bytes_per_row: int) -> tuple[Tensor, list[Node]]:
        """x in the form a product reads, and the op that brings it there unless an earlier one did."""
        tape = self.tape
        where = region(x, stride)
        prepared, is_filled = tape.blocks(where, kind, self._capacity(x) * bytes_per_row)
        if is_filled:
            return prepared, []
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (x.shape[-1], DTYPE_IDS[x.dtype], stride, kind)
        op = make_op("QUANTIZE", rows, (x.data_ptr(), prepared.data_ptr()), numbers, row_factor=factor)
        return prepared, [Node(op, [where], [region(prepared)])]

    def _floats(self, x: Tensor, stride: int) -> tuple[Tensor, list[Node]]:
        """x in float32: itself, or rows side by side."""
        return (x, []) if x.dtype is torch.float32 else self._prepared(x, stride, KIND_FLOATS, 4 * x.shape[-1])

    def _capacity(self, x: Tensor) -> int:
        """Rows that memory derived from x must hold in the largest step."""
        recording = current.get()
        rows = 1
        for size in x.shape[:-1]:
            rows *= size
        return rows if recording is None else rows // x.shape[0] * recording.limit_of(x.shape[0])

    def _fallback(self, name: str, *arguments: Any, **named: Any) -> Tensor:
        """What the reference makes of it (None for ops that work in place)."""
        result: Tensor = self._reference[name](*arguments, **named)
        return result

    def _row_major(self, weight: Tensor) -> Tensor:
        """The weight, or a copy of it kept as long as its storage, with the values of a row side by side."""
        if weight.stride(-1) == 1:
            return weight
        key = weight.data_ptr(), tuple(weight.shape), weight.stride()
        if key not in self._copies:
            with torch._C.DisableTorchFunction():
                self._copies[key] = weight.contiguous()
            weakref.finalize(weight.untyped_storage(), self._copies.pop, key, None)
        return self._copies[key]

    def _float_constant(self, value: Tensor | None) -> int | None:
        """Address of a weight-like vector in float32, converted once if it is of another type."""
        if value is None:
            return None
        if value.dtype is torch.float32 and value.is_contiguous():
            return value.data_ptr()
        known = self._constants.get(id(value))
        if known is None or known[0] is not value:
            with torch._C.DisableTorchFunction():
                known = (value, value.to(torch.float32).contiguous())
            self._constants[id(value)] = known
        return known[1].data_ptr()


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def dtype_id(x: Tensor | None) -> int:
    return 0 if x is None else DTYPE_IDS[x.dtype]


@reads_facts
def is_row(weight: Tensor | None) -> bool:
    return weight is None or (weight.is_contiguous() and weight.dtype in DTYPE_IDS)


@reads_facts
def are_heads(x: Tensor, y: Tensor | None) -> bool:
    return all(part is None or (part.ndim == 3 and part.stride(2) == 1 and part.dtype is x.dtype) for part in (x, y))


@reads_facts
def second_stride(x: Tensor, y: Tensor | None) -> int | None:
    """Row stride of the second operand (0: one row, or a missing one, for all rows); None if it does not fit."""
    if y is None:
        return 0
    if y.ndim and y.shape == x.shape:
        return collapsed_stride(y)
    return 0 if y.ndim == 1 and y.shape[0] == x.shape[-1] and y.stride(0) == 1 else None


@reads_facts
def heads_region(x: Tensor) -> Region:
    """The columns of all heads of x (T, H, D), if heads are adjacent; all between the first and the last else."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    size = x.element_size()
    stride = max(x.stride(0), width) * size
    return Region(x.data_ptr(), stride, width * size, (x.shape[0] - 1) * stride + width * size)


@reads_facts
def whole(x: Tensor) -> Region:
    """From the first element of x to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = (last + 1) * x.element_size()
    return Region(x.data_ptr(), num_bytes, num_bytes, num_bytes)

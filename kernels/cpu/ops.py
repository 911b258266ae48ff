"""The ops as functions of tensors: each lays its arguments out for a kernel, with the signature of the reference op.

What a kernel does not cover (a stride, a dtype, a rare argument) goes to the reference, which during a recording means
that the step is not recordable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cpu.cache import Cache
from vkit.kernels.cpu.dtypes import CACHE_IDS, DTYPE_IDS
from vkit.kernels.cpu.library import ROWS_SEQS, Library, Op, make_op
from vkit.kernels.cpu.tape import Eager, Node, Recording, Region, Tape, current
from vkit.kernels.cpu.weights import KIND_FLOATS, KIND_PAIRS, PACKED_FORMATS, WeightCache, block_kind
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.paged import PagedBatch

EPILOGUES = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
UNARY_IDS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5, "sigmoid": 6, "tanh": 7}
_SOFT_CAP = 8

Pointers = Sequence[int | None]


def collapsed_stride(x: Tensor) -> int | None:
    """Elements from one row of the last dimension to the next, or None where rows are not evenly spaced."""
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        return None
    leading = [pair for pair in zip(x.shape[:-1], x.stride()[:-1], strict=True) if pair[0] != 1]
    for (_, outer), (size, inner) in pairwise(leading):
        if outer != size * inner:
            return None
    return leading[-1][1] if leading else x.shape[-1]


def region(x: Tensor, stride: int | None = None) -> Region:
    """The memory of x (..., C), rows `stride` elements apart."""
    width = x.shape[-1] if x.ndim else 1
    rows = max(1, x.numel() // max(1, width))
    step = (width if stride is None else stride) * x.element_size()
    row_bytes = width * x.element_size()
    return Region(x.data_ptr(), max(step, row_bytes), row_bytes, (rows - 1) * step + row_bytes)


class Operations:
    """All ops over one library. `is_exact` keeps activations in floating point."""

    def __init__(self, library: Library, reference: dict[str, Callable[..., Any]]) -> None:
        self.library = library
        self.weights = WeightCache(library)
        self.is_exact = False
        self._eager = Eager(library)
        self._reference = reference
        self._constants: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def tape(self) -> Tape:
        """Where ops go at the moment."""
        return current.get() or self._eager

    # ---------------------------------------------------------------------------------------- products

    def quantized_linear(self, x: Tensor, data: Tensor, qtype: str, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + bias for a packed weight."""
        stride = collapsed_stride(x)
        if qtype not in PACKED_FORMATS or stride is None or x.shape[-1] % 32 or not data.numel() or data.stride(1) != 1:
            return self._fallback("quantized_linear", x, data, qtype, bias)
        tape, columns = self.tape, x.shape[-1]
        weight = self.weights.get(data, qtype, columns)
        out = tape.empty((*x.shape[:-1], weight.num_rows), x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = [weight.format_id, weight.num_rows, columns, DTYPE_IDS[x.dtype], weight.num_rows, 0, stride]
        if self.is_exact:
            name, (taken, nodes) = "GEMM_EXACT", self._floats(x, stride)
            numbers[6] = stride if taken is x else columns
        else:
            per_row = columns // 32 * self.library.block_bytes
            name, (taken, nodes) = "GEMM", self._prepared(x, stride, block_kind(qtype), per_row)
        pointers = (taken.data_ptr(), weight.address, self._float_constant(bias), out.data_ptr())
        op = make_op(name, rows, pointers, numbers, row_factor=factor)
        reads = region(x, stride) if taken is x else region(taken)
        tape.put([*nodes, Node(op, [reads], [region(out)])])
        return out

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

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + bias for a plain weight."""
        stride = collapsed_stride(x)
        if stride is None or weight.dtype not in DTYPE_IDS or weight.stride(1) != 1 or not weight.numel():
            return self._fallback("linear", x, weight, bias)
        tape, columns, num_rows = self.tape, x.shape[-1], weight.shape[0]
        rows, factor = tape.rows(x.shape[:-1])
        out = tape.empty((*x.shape[:-1], num_rows), x.dtype)
        bias_address, out_id = self._float_constant(bias), DTYPE_IDS[x.dtype]
        if weight.dtype is torch.bfloat16 and not self.is_exact and columns % 2 == 0:
            packed = self.weights.get(weight.view(torch.uint8), "BF16", columns)
            taken, nodes = self._prepared(x, stride, KIND_PAIRS, 4 * columns)
            pointers = (taken.data_ptr(), packed.address, bias_address, out.data_ptr())
            op = make_op(
                "GEMM_PAIRS", rows, pointers, (packed.format_id, num_rows, columns, out_id, num_rows), row_factor=factor
            )
            tape.put([*nodes, Node(op, [region(taken)], [region(out)])])
            return out
        numbers = (
            *(
                DTYPE_IDS[weight.dtype],
                num_rows,
                columns,
                DTYPE_IDS[x.dtype],
                stride,
                weight.stride(0),
                out_id,
                num_rows,
            ),
        )
        op = make_op(
            "DENSE", rows, (x.data_ptr(), weight.data_ptr(), bias_address, out.data_ptr()), numbers, row_factor=factor
        )
        tape.put([Node(op, [region(x, stride)], [region(out)])])
        return out

    # ---------------------------------------------------------------------------------------- look-ups

    def quantized_embedding(
        self, ids: Tensor, data: Tensor, qtype: str, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Rows of a packed table."""
        block = BLOCK_FORMATS[qtype]
        columns = data.shape[1] // block.num_bytes * block.num_elements
        if qtype not in PACKED_FORMATS or dtype not in DTYPE_IDS or not ids.is_contiguous() or data.stride(1) != 1:
            return self._fallback("quantized_embedding", ids, data, qtype, dtype=dtype)
        return self._embed(ids, data, block.type_id, columns, data.stride(0), dtype)

    def embedding(self, ids: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """weight[ids] in `dtype`."""
        if weight.dtype not in DTYPE_IDS or dtype not in DTYPE_IDS or not ids.is_contiguous() or weight.stride(1) != 1:
            return self._fallback("embedding", ids, weight, dtype)
        stride = weight.stride(0) * weight.element_size()
        return self._embed(ids, weight, DTYPE_IDS[weight.dtype], weight.shape[1], stride, dtype)

    def _embed(
        self, ids: Tensor, table: Tensor, format_id: int, columns: int, stride: int, dtype: torch.dtype
    ) -> Tensor:
        tape = self.tape
        recording = current.get()
        num_rows = table.shape[0]
        if recording is None:
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_rows:
                raise IndexError(f"embedding: ids {int(ids.min())}..{int(ids.max())}, expected 0..{num_rows - 1}")
        elif recording.holds(table):
            num_rows = recording.limit_of(num_rows)
        out = tape.empty((*ids.shape, columns), dtype)
        rows, factor = tape.rows(ids.shape)
        numbers = (format_id, ids.element_size(), columns, DTYPE_IDS[dtype], columns, stride, num_rows)
        op = make_op("EMBED", rows, (ids.data_ptr(), table.data_ptr(), out.data_ptr()), numbers, row_factor=factor)
        tape.put([Node(op, [region(ids.view(-1)), region(table)], [region(out)])])
        return out

    # ---------------------------------------------------------------------------------------- norms

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0) -> Tensor:
        """x · rsqrt(mean(x²) + eps) · (offset + weight)."""
        stride = collapsed_stride(x)
        if stride is None or not _is_row(weight):
            return self._fallback("rms_norm", x, weight, eps, offset)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, 0, width, _dtype_id(weight))
        pointers: Pointers = (x.data_ptr(), _address(weight), None, out.data_ptr())
        op = make_op("RMS_NORM", rows, pointers, numbers, (eps, offset), row_factor=factor)
        tape.put([Node(op, [region(x, stride)], [region(out)])])
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        stride, residual_stride = collapsed_stride(x), collapsed_stride(residual)
        if stride is None or residual_stride is None or residual.dtype is not x.dtype or not _is_row(weight):
            pair: tuple[Tensor, Tensor] = self._reference["add_rms_norm"](x, residual, weight, eps, offset)
            return pair
        tape, width = self.tape, x.shape[-1]
        out, total = tape.empty(x.shape, x.dtype), tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, residual_stride, width, _dtype_id(weight), 0, width)
        pointers: Pointers = (x.data_ptr(), _address(weight), residual.data_ptr(), out.data_ptr(), total.data_ptr())
        op = make_op("RMS_NORM", rows, pointers, numbers, (eps, offset), row_factor=factor)
        reads = [region(x, stride), region(residual, residual_stride)]
        tape.put([Node(op, reads, [region(out), region(total)])])
        return out, total

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) · weight + bias."""
        stride = collapsed_stride(x)
        tables = [table for table in (weight, bias) if table is not None]
        table_rows = {table.numel() // x.shape[-1] for table in tables} or {1}
        fits = all(table.is_contiguous() and table.dtype in DTYPE_IDS for table in tables) and len(table_rows) == 1
        if stride is None or not fits:
            return self._fallback("layer_norm", x, weight, bias, eps)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, width, _dtype_id(weight), _dtype_id(bias), *table_rows)
        pointers: Pointers = (x.data_ptr(), _address(weight), _address(bias), out.data_ptr())
        op = make_op("LAYER_NORM", rows, pointers, numbers, (eps,), row_factor=factor)
        tape.put([Node(op, [region(x, stride)], [region(out)])])
        return out

    # ---------------------------------------------------------------------------------------- element by element

    def silu_and_mul(self, x: Tensor) -> Tensor:
        """silu(left half) · right half."""
        return self._gated(x, "silu", "silu_and_mul", x)

    def gelu_and_mul(self, x: Tensor, approximate: str = "tanh") -> Tensor:
        """gelu(left half) · right half."""
        return self._gated(x, "gelu_tanh" if approximate == "tanh" else "gelu", "gelu_and_mul", x, approximate)

    def _gated(self, x: Tensor, kind: str, name: str, *arguments: object) -> Tensor:
        stride = collapsed_stride(x)
        if stride is None:
            return self._fallback(name, *arguments)
        tape, width = self.tape, x.shape[-1] // 2
        out = tape.empty((*x.shape[:-1], width), x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, width, EPILOGUES[kind])
        op = make_op("GLU", rows, (x.data_ptr(), out.data_ptr()), numbers, row_factor=factor)
        tape.put([Node(op, [region(x, stride)], [region(out)])])
        return out

    def unary(self, x: Tensor, kind: str) -> Tensor:
        """f(x) for the named f."""
        if kind not in UNARY_IDS:
            return self._fallback("unary", x, kind)
        return self._unary(x, UNARY_IDS[kind], 0.0, "unary", x, kind)

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap)."""
        return self._unary(x, _SOFT_CAP, cap, "soft_cap", x, cap)

    def _unary(self, x: Tensor, kind: int, value: float, name: str, *arguments: object) -> Tensor:
        stride = collapsed_stride(x) if x.ndim else None
        if stride is None:
            return self._fallback(name, *arguments)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, width, kind)
        op = make_op("UNARY", rows, (x.data_ptr(), out.data_ptr()), numbers, (value,), row_factor=factor)
        tape.put([Node(op, [region(x, stride)], [region(out)])])
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        return self._combined(x, y, 0, 1.0, "add", x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y."""
        return self._combined(x, y, 1, 1.0, "multiply", x, y)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x · factor."""
        return self._combined(x, None, 0, factor, "scale", x, factor)

    def _combined(self, x: Tensor, y: Tensor | None, kind: int, scale: float, name: str, *arguments: object) -> Tensor:
        stride = collapsed_stride(x) if x.ndim else None
        y_stride = _second_stride(x, y)
        if stride is None or y_stride is None or (y is not None and y.dtype not in DTYPE_IDS):
            return self._fallback(name, *arguments)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, y_stride, width, DTYPE_IDS[x.dtype], kind, _dtype_id(y))
        op = make_op("COMBINE", rows, (x.data_ptr(), _address(y), out.data_ptr()), numbers, (scale,), row_factor=factor)
        reads = [region(x, stride)] if y is None else [region(x, stride), region(y, y_stride or None)]
        tape.put([Node(op, reads, [region(out)])])
        return out

    def concat(self, parts: Sequence[Tensor]) -> Tensor:
        """The parts side by side. In a recording the ops that made them write there in the first place."""
        first = parts[0]
        strides = [collapsed_stride(part) for part in parts]
        if any(stride is None or part.dtype is not first.dtype for stride, part in zip(strides, parts, strict=True)):
            return self._fallback("concat", parts)
        tape, width = self.tape, sum(part.shape[-1] for part in parts)
        out = tape.empty((*first.shape[:-1], width), first.dtype)
        rows, factor = tape.rows(first.shape[:-1])
        start = 0
        for part, stride in zip(parts, strides, strict=True):
            assert stride is not None
            piece = out[..., start : start + part.shape[-1]]
            start += part.shape[-1]
            if isinstance(tape, Recording) and tape.redirect(
                region(part, stride), region(piece, width), piece.data_ptr(), width
            ):
                continue
            dtype = DTYPE_IDS[part.dtype]
            numbers = (part.shape[-1], dtype, stride, 0, width, dtype, 0, dtype)
            op = make_op("COMBINE", rows, (part.data_ptr(), None, piece.data_ptr()), numbers, (1.0,), row_factor=factor)
            tape.put([Node(op, [region(part, stride)], [region(piece, width)])])
        return out

    # ---------------------------------------------------------------------------------------- attention

    def rope(self, q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
        """Rotate heads in place."""
        if not _are_heads(q, k) or not (positions.is_contiguous() and cos_sin.is_contiguous()):
            self._fallback("rope", q, k, positions, cos_sin, interleaved)
            return
        self._rope(q, k, None, None, 0.0, 0.0, positions, cos_sin, interleaved)

    def qk_norm_rope(
        self,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor,
        k_weight: Tensor,
        eps: float,
        offset: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool = False,
    ) -> None:
        """Norm heads, then rotate them, in place."""
        fits = _is_row(q_weight) and _is_row(k_weight) and q_weight.dtype is k_weight.dtype and k is not None
        if not fits or not _are_heads(q, k) or not (positions.is_contiguous() and cos_sin.is_contiguous()):
            self._fallback("qk_norm_rope", q, k, q_weight, k_weight, eps, offset, positions, cos_sin, interleaved)
            return
        self._rope(q, k, q_weight, k_weight, eps, offset, positions, cos_sin, interleaved)

    def _rope(
        self,
        q: Tensor,
        k: Tensor | None,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        offset: float,
        positions: Tensor,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> None:
        tape = self.tape
        rows, factor = tape.rows(q.shape[:1])
        numbers = (
            *(q.shape[1], k.shape[1] if k is not None else 0, q.shape[2], cos_sin.shape[1], DTYPE_IDS[q.dtype]),
            *(q.stride(0), k.stride(0) if k is not None else 0, q.stride(1), k.stride(1) if k is not None else 0),
            *(int(interleaved), positions.element_size(), _dtype_id(q_weight)),
        )
        pointers: Pointers = (
            *(q.data_ptr(), _address(k), positions.data_ptr(), cos_sin.data_ptr()),
            *(_address(q_weight), _address(k_weight)),
        )
        touched = [_heads_region(x) for x in (q, k) if x is not None]
        op = make_op("ROPE", rows, pointers, numbers, (eps, offset), row_factor=factor)
        tape.put([Node(op, [*touched, region(positions)], touched)])

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v at their slots."""
        cache = Cache.of(k_cache, v_cache)
        heads = _are_heads(k, None) and _are_heads(v, None) and v.dtype is k.dtype and slot_mapping.is_contiguous()
        if cache is None or not heads:
            if cache is not None and cache.is_tiled:
                raise ValueError(
                    f"write_kv: k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype}, expected rows of heads"
                )
            self._fallback("write_kv", k, v, k_cache, v_cache, slot_mapping)
            return
        tape = self.tape
        rows, factor = tape.rows(k.shape[:1])
        numbers = (
            *(k.shape[1], int(cache.is_tiled), k.shape[2], v.shape[2], DTYPE_IDS[k.dtype]),
            *(k.stride(0), v.stride(0), k.stride(1), v.stride(1)),
            *(CACHE_IDS[k_cache.dtype], cache.block_size, *cache.k_strides, *cache.v_strides),
        )
        pointers = (k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slot_mapping.data_ptr())
        op = make_op("WRITE_KV", rows, pointers, numbers, row_factor=factor)
        writes = [_whole(k_cache), _whole(v_cache)]
        tape.put([Node(op, [_heads_region(k), _heads_region(v), region(slot_mapping)], writes)])

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: PagedBatch,
        scale: float,
        window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(mask(cap(scale · q kᵀ))) v for every query against its own sequence."""
        contiguous = all(x.is_contiguous() for x in (batch.rows, batch.seq_lens, batch.cu_seqlens))
        cache = Cache.of(k_cache, v_cache)
        if cache is None or not contiguous or batch.block_table.stride(1) != 1 or not _are_heads(q, None):
            if cache is not None and cache.is_tiled:
                raise ValueError(f"paged_attention: q {tuple(q.shape)} {q.stride()}, expected rows of heads")
            return self._fallback("paged_attention", q, k_cache, v_cache, batch, scale, window, soft_cap, sinks)
        tape = self.tape
        num_heads, width = q.shape[1], cache.value_dim
        out = tape.empty((q.shape[0], num_heads, width), q.dtype)
        numbers = (
            *(num_heads, cache.num_heads, q.shape[2], width, DTYPE_IDS[q.dtype], q.stride(0), q.stride(1)),
            *(num_heads * width, CACHE_IDS[k_cache.dtype], cache.block_size, *cache.k_strides, *cache.v_strides),
            *(batch.block_table.stride(0), window or 0, int(cache.is_tiled)),
        )
        pointers: Pointers = (
            *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), batch.block_table.data_ptr()),
            *(
                batch.rows.data_ptr(),
                batch.seq_lens.data_ptr(),
                batch.cu_seqlens.data_ptr(),
                self._float_constant(sinks),
            ),
        )
        rows = ROWS_SEQS if isinstance(tape, Recording) else len(batch.host_seq_lens)
        reads = [_heads_region(q), _whole(k_cache), _whole(v_cache)]
        writes = [region(out.flatten(1))]
        attend, join = (
            make_op(name, rows, pointers, numbers, (scale, soft_cap or 0.0)) for name in ("ATTENTION", "ATTENTION_JOIN")
        )
        tape.put([Node(attend, reads, writes), Node(join, writes, writes)])
        return out

    # ---------------------------------------------------------------------------------------- sampling

    def draw(self, logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids and largest logits of rows. Never part of a recorded step, so it runs at once."""
        if logits.stride(1) != 1 or not (rows.is_contiguous() and keys.is_contiguous()):
            drawn: tuple[Tensor, Tensor] = self._reference["draw"](logits, rows, rules, keys)
            return drawn
        ids, largest = torch.empty_like(rows), torch.empty(rows.shape[0])
        inputs = (logits, rows, rules.temperatures, rules.min_p, rules.top_k, rules.top_p, keys, ids, largest)
        pointers = [x.data_ptr() for x in inputs]
        self.library.run_now(make_op("DRAW", rows.shape[0], pointers, (logits.shape[1], logits.stride(0))))
        return ids, largest

    # ---------------------------------------------------------------------------------------- helpers

    def _fallback(self, name: str, *arguments: Any, **named: Any) -> Tensor:
        """What the reference makes of it (None for ops that work in place)."""
        result: Tensor = self._reference[name](*arguments, **named)
        return result

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


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _dtype_id(x: Tensor | None) -> int:
    return 0 if x is None else DTYPE_IDS[x.dtype]


def _is_row(weight: Tensor | None) -> bool:
    return weight is None or (weight.is_contiguous() and weight.dtype in DTYPE_IDS)


def _are_heads(x: Tensor, y: Tensor | None) -> bool:
    return all(part is None or (part.ndim == 3 and part.stride(2) == 1 and part.dtype is x.dtype) for part in (x, y))


def _second_stride(x: Tensor, y: Tensor | None) -> int | None:
    """Row stride of the second operand (0: one row, or a missing one, for all rows); None if it does not fit."""
    if y is None:
        return 0
    if y.ndim and y.shape == x.shape:
        return collapsed_stride(y)
    return 0 if y.ndim == 1 and y.shape[0] == x.shape[-1] and y.stride(0) == 1 else None


def _heads_region(x: Tensor) -> Region:
    """The columns of all heads of x (T, H, D), if heads are adjacent; all between the first and the last else."""
    width = (x.shape[1] - 1) * x.stride(1) + x.shape[2]
    size = x.element_size()
    stride = max(x.stride(0), width) * size
    return Region(x.data_ptr(), stride, width * size, (x.shape[0] - 1) * stride + width * size)


def _whole(x: Tensor) -> Region:
    """From the first element of x to its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    num_bytes = (last + 1) * x.element_size()
    return Region(x.data_ptr(), num_bytes, num_bytes, num_bytes)


__all__ = ["Op", "Operations"]

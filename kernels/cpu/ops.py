"""The ops as functions of tensors: each lays its arguments out for a kernel, with the signature of the reference op.

What a kernel does not cover (a stride, a dtype, a rare argument) goes to the reference, which during a recording means
that the step is not recordable.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from vkit.kernels.block_formats import format_of
from vkit.kernels.cpu.base import (
    Pointers,
    address,
    are_heads,
    collapsed_stride,
    dtype_id,
    heads_region,
    is_row,
    region,
    row_strides,
    rows_region,
    second_stride,
    whole,
)
from vkit.kernels.cpu.cache import Cache
from vkit.kernels.cpu.dtypes import CACHE_IDS, DTYPE_IDS
from vkit.kernels.cpu.experts import ExpertOps
from vkit.kernels.cpu.facts import reads_facts
from vkit.kernels.cpu.library import NO_STEP, ROWS_SEQS, Op, make_op
from vkit.kernels.cpu.recurrent import RecurrentOps
from vkit.kernels.cpu.tape import Node, Recording, current
from vkit.kernels.cpu.weights import KIND_PAIRS, PACKED_FORMATS, PackedWeight, block_kind
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.paged import PagedBatch
from vkit.kernels.scaled import ScaledMatrix

EPILOGUES = {"silu": 1, "gelu_tanh": 2, "gelu": 3}
UNARY_IDS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4, "relu2": 5, "sigmoid": 6, "tanh": 7, "softplus": 9}
_SOFT_CAP = 8


class _Largest:
    """The op that finds largest values, and room for what it finds."""

    def __init__(self, rows: int) -> None:
        self.ids, self.values = (ctypes.c_int64 * rows)(), (ctypes.c_float * rows)()
        pointers = (None, ctypes.addressof(self.ids), ctypes.addressof(self.values))
        self.program = (Op * 1)(make_op("ARGMAX", rows, pointers, ()))


class Operations(RecurrentOps, ExpertOps):
    """All ops over one library."""

    # ---------------------------------------------------------------------------------------- products

    def quantized_linear(self, x: Tensor, data: Tensor, qtype: str, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + bias for a packed weight."""
        stride = collapsed_stride(x)
        if qtype not in PACKED_FORMATS or stride is None or x.shape[-1] % 32 or not data.numel() or data.stride(1) != 1:
            return self._fallback("quantized_linear", x, data, qtype, bias)
        return self._packed_linear(x, stride, self.weights.get(data, qtype, x.shape[-1]), bias)

    def scaled_linear(self, x: Tensor, weight: ScaledMatrix, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias for codes with scales. Only exact products round activations as the weight says."""
        packed = None if self.is_exact and weight.inputs is not None else self.scaled_weights.get(weight)
        if packed is None or (weight.input_scale is not None and collapsed_stride(x) is None):
            return self._fallback("scaled_linear", x, weight, bias)
        if weight.input_scale is not None:
            x = self.multiply(x, weight.input_scale)
        stride = collapsed_stride(x)
        if stride is None:
            return self._fallback("scaled_linear", x, weight, bias)
        return self._packed_linear(x, stride, packed, bias)

    @reads_facts
    def _packed_linear(self, x: Tensor, stride: int, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        tape, columns = self.tape, x.shape[-1]
        out = tape.empty((*x.shape[:-1], weight.num_rows), x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = [weight.format_id, weight.num_rows, columns, DTYPE_IDS[x.dtype], weight.num_rows, 0, stride]
        if self.is_exact or weight.needs_floats:
            name, (taken, nodes) = "GEMM_EXACT", self._floats(x, stride)
            numbers[6] = stride if taken is x else columns
        else:
            per_row = columns // 32 * self.library.block_bytes
            name, (taken, nodes) = "GEMM", self._prepared(x, stride, block_kind(weight.qtype), per_row)
        pointers = (taken.data_ptr(), weight.address, self._float_constant(bias), out.data_ptr())
        op = make_op(name, rows, pointers, numbers, (weight.factor,), row_factor=factor)
        reads = region(x, stride) if taken is x else region(taken)
        tape.put([*nodes, Node(op, [reads], [region(out)])])
        return out

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x Wᵀ + bias for a plain weight."""
        stride = collapsed_stride(x)
        if stride is None or weight.dtype not in DTYPE_IDS or not weight.numel():
            return self._fallback("linear", x, weight, bias)
        weight = self._row_major(weight)
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

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Each head's row times its own matrix."""
        if not are_heads(x, None) or weight.dtype not in DTYPE_IDS:
            return self._fallback("head_linear", x, weight)
        weight = self._row_major(weight)
        tape, (heads, num_rows, columns) = self.tape, weight.shape
        out = tape.empty((x.shape[0], heads, num_rows), x.dtype)
        rows, factor = tape.rows(x.shape[:1])
        dtype = DTYPE_IDS[x.dtype]
        numbers = (
            *(DTYPE_IDS[weight.dtype], num_rows, columns, dtype, x.stride(0), heads, dtype, x.stride(1)),
            *weight.stride()[:2],
        )
        op = make_op("HEAD_DENSE", rows, (x.data_ptr(), weight.data_ptr(), out.data_ptr()), numbers, row_factor=factor)
        tape.put([Node(op, [heads_region(x)], [region(out.flatten(1))])])
        return out

    # ---------------------------------------------------------------------------------------- look-ups

    def replace_ids(self, ids: Tensor, old: Sequence[int], new: int) -> Tensor:
        """ids with `new` in place of every id among `old`."""
        if ids.dtype is not torch.int64 or ids.ndim != 1 or not ids.is_contiguous():
            return self._fallback("replace_ids", ids, old, new)
        tape = self.tape
        out = tape.empty(ids.shape, ids.dtype)
        rows, factor = tape.rows(ids.shape)
        pointers = (ids.data_ptr(), out.data_ptr(), self._id_list(tuple(old)))
        op = make_op("REPLACE_IDS", rows, pointers, (len(old), new), row_factor=factor)
        tape.put([Node(op, [region(ids)], [region(out)])])
        return out

    def _id_list(self, ids: tuple[int, ...]) -> int:
        if ids not in self._id_lists:
            with torch._C.DisableTorchFunction():
                self._id_lists[ids] = torch.tensor(ids or (0,), dtype=torch.int64)
        return self._id_lists[ids].data_ptr()

    def quantized_embedding(
        self, ids: Tensor, data: Tensor, qtype: str, *, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Rows of a packed table."""
        block = format_of(qtype, "quantized_embedding")
        columns = block.num_columns(data.shape[1])
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
        strides = row_strides(x)
        if strides is None or not is_row(weight):
            return self._fallback("rms_norm", x, weight, eps, offset)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        stride, *inner = strides
        numbers = (width, DTYPE_IDS[x.dtype], stride, 0, width, dtype_id(weight), 0, 0, *inner)
        pointers: Pointers = (x.data_ptr(), address(weight), None, out.data_ptr())
        op = make_op("RMS_NORM", rows, pointers, numbers, (eps, offset), row_factor=factor)
        tape.put([Node(op, [rows_region(x)], [region(out)])])
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        stride, residual_stride = collapsed_stride(x), collapsed_stride(residual)
        if stride is None or residual_stride is None or residual.dtype is not x.dtype or not is_row(weight):
            pair: tuple[Tensor, Tensor] = self._reference["add_rms_norm"](x, residual, weight, eps, offset)
            return pair
        tape, width = self.tape, x.shape[-1]
        out, total = tape.empty(x.shape, x.dtype), tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, residual_stride, width, dtype_id(weight), 0, width)
        pointers: Pointers = (x.data_ptr(), address(weight), residual.data_ptr(), out.data_ptr(), total.data_ptr())
        op = make_op("RMS_NORM", rows, pointers, numbers, (eps, offset), row_factor=factor)
        reads = [region(x, stride), region(residual, residual_stride)]
        tape.put([Node(op, reads, [region(out), region(total)])])
        return out, total

    def layer_norm(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) · weight + bias."""
        strides = row_strides(x)
        tables = [table for table in (weight, bias) if table is not None]
        table_rows = {table.numel() // x.shape[-1] for table in tables} or {1}
        fits = all(table.is_contiguous() and table.dtype in DTYPE_IDS for table in tables) and len(table_rows) == 1
        if strides is None or not fits:
            return self._fallback("layer_norm", x, weight, bias, eps)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        stride, *inner = strides
        dtype = DTYPE_IDS[x.dtype]
        numbers = (width, dtype, stride, width, dtype_id(weight), dtype_id(bias), *table_rows, *inner)
        pointers: Pointers = (x.data_ptr(), address(weight), address(bias), out.data_ptr())
        op = make_op("LAYER_NORM", rows, pointers, numbers, (eps,), row_factor=factor)
        tape.put([Node(op, [rows_region(x)], [region(out)])])
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
        strides = row_strides(x) if x.ndim else None
        if strides is None:
            return self._fallback(name, *arguments)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        stride, *inner = strides
        numbers = (width, DTYPE_IDS[x.dtype], stride, width, kind, *inner)
        op = make_op("UNARY", rows, (x.data_ptr(), out.data_ptr()), numbers, (value,), row_factor=factor)
        tape.put([Node(op, [rows_region(x)], [region(out)])])
        return out

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y."""
        return self._combined(x, y, 0, 1.0, "add", x, y)

    def multiply(self, x: Tensor, y: Tensor) -> Tensor:
        """x · y."""
        return self._combined(x, y, 1, 1.0, "multiply", x, y)

    def scale_rows(self, x: Tensor, factors: Tensor) -> Tensor:
        """Each row of x times its own factor."""
        stride = collapsed_stride(x)
        step = collapsed_stride(factors.unsqueeze(-1))
        if stride is None or step is None or factors.dtype not in DTYPE_IDS:
            return self._fallback("scale_rows", x, factors)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, DTYPE_IDS[factors.dtype], step)
        op = make_op("SCALE_ROWS", rows, (x.data_ptr(), factors.data_ptr(), out.data_ptr()), numbers, row_factor=factor)
        tape.put([Node(op, [region(x, stride), region(factors.unsqueeze(-1), step)], [region(out)])])
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        """x · factor."""
        return self._combined(x, None, 0, factor, "scale", x, factor)

    def _combined(self, x: Tensor, y: Tensor | None, kind: int, scale: float, name: str, *arguments: object) -> Tensor:
        stride = collapsed_stride(x) if x.ndim else None
        y_stride = second_stride(x, y)
        if stride is None or y_stride is None or (y is not None and y.dtype not in DTYPE_IDS):
            return self._fallback(name, *arguments)
        tape, width = self.tape, x.shape[-1]
        out = tape.empty(x.shape, x.dtype)
        rows, factor = tape.rows(x.shape[:-1])
        numbers = (width, DTYPE_IDS[x.dtype], stride, y_stride, width, DTYPE_IDS[x.dtype], kind, dtype_id(y))
        op = make_op("COMBINE", rows, (x.data_ptr(), address(y), out.data_ptr()), numbers, (scale,), row_factor=factor)
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
        if not are_heads(q, k) or not (positions.is_contiguous() and cos_sin.is_contiguous()):
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
        fits = is_row(q_weight) and is_row(k_weight) and q_weight.dtype is k_weight.dtype and k is not None
        if not fits or not are_heads(q, k) or not (positions.is_contiguous() and cos_sin.is_contiguous()):
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
            *(int(interleaved), positions.element_size(), dtype_id(q_weight)),
        )
        pointers: Pointers = (
            *(q.data_ptr(), address(k), positions.data_ptr(), cos_sin.data_ptr()),
            *(address(q_weight), address(k_weight)),
        )
        touched = [heads_region(x) for x in (q, k) if x is not None]
        op = make_op("ROPE", rows, pointers, numbers, (eps, offset), row_factor=factor)
        tape.put([Node(op, [*touched, region(positions)], touched)])

    def write_kv(self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v at their slots."""
        cache = Cache.of(k_cache, v_cache)
        heads = are_heads(k, None) and are_heads(v, None) and v.dtype is k.dtype and slot_mapping.is_contiguous()
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
        writes = [whole(k_cache), whole(v_cache)]
        tape.put([Node(op, [heads_region(k), heads_region(v), region(slot_mapping)], writes)])

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
        if cache is None or not contiguous or batch.block_table.stride(1) != 1 or not are_heads(q, None):
            if cache is not None and cache.is_tiled:
                raise ValueError(f"paged_attention: q {tuple(q.shape)} {q.stride()}, expected rows of heads")
            return self._fallback("paged_attention", q, k_cache, v_cache, batch, scale, window, soft_cap, sinks)
        tape = self.tape
        num_heads, width = q.shape[1], cache.value_dim
        out = tape.empty((q.shape[0], num_heads, width), q.dtype)
        numbers = (
            *(num_heads, cache.num_heads, q.shape[2], width, DTYPE_IDS[q.dtype], q.stride(0), q.stride(1)),
            *(num_heads * width, CACHE_IDS[k_cache.dtype], cache.block_size, *cache.k_strides, *cache.v_strides),
            *(batch.block_table.stride(0), window or 0, int(cache.is_tiled), int(self.is_deterministic)),
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
        reads = [heads_region(q), whole(k_cache), whole(v_cache)]
        writes = [region(out.flatten(1))]
        attend, join = (
            make_op(name, rows, pointers, numbers, (scale, soft_cap or 0.0)) for name in ("ATTENTION", "ATTENTION_JOIN")
        )
        tape.put([Node(attend, reads, writes), Node(join, writes, writes)])
        return out

    # ---------------------------------------------------------------------------------------- sampling

    def largest(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Index and value of each row's largest. Never part of a recorded step, so it runs at once."""
        if logits.stride(1) != 1:
            found: tuple[list[int], list[float]] = self._reference["largest"](logits)
            return found
        rows, width = logits.shape
        if self._largest is None or len(self._largest.ids) < rows:
            self._largest = _Largest(rows)
        search = self._largest
        op = search.program[0]
        op.rows, op.p[0], op.n[0], op.n[1] = rows, logits.data_ptr(), width, logits.stride(0)
        self.library.run(search.program, NO_STEP)
        return search.ids[:rows], search.values[:rows]

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

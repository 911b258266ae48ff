"""Arguments on which a kernel is compared with its reference: odd shapes, strides, padding, NaN around all of them.

The same cases judge interpreted kernels in tests and compiled ones on a card.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vkit.kernels import cases_recurrent, cases_sampling
from vkit.kernels.cases_packed import expert_cases, packed_cases
from vkit.kernels.cases_scaled import scaled_cases
from vkit.kernels.dispatch import default_kv_layout
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.narrow_cache import SCALE_BYTES, encode_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
"""Types of a narrow KV cache."""
SLACK = 1e-5
"""What may be added to twice the error of plain torch in the same type."""

IN_PLACE: Mapping[str, tuple[int, ...]] = {
    "causal_conv1d": (3,),
    "gated_delta_net": (5,),
    "mamba2_scan": (5,),
    "mask_tokens": (0,),
    "penalise": (0,),
    "qk_norm_rope": (0, 1),
    "rope": (0, 1),
    "write_kv": (2, 3),
}
"""Op -> the arguments it writes to, beside what it returns."""

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """One call of one op."""

    op: str
    label: str
    make: Callable[[Source], Arguments]
    dtypes: tuple[torch.dtype, ...] = DTYPES
    """Types of activations in which it differs."""


@dataclass(frozen=True)
class Source:
    """Where a case's tensors come from."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal values, the same on every device."""
        return torch.randn(shape, generator=self.generator).to(self.device, dtype or self.dtype)

    def strided(self, *shape: int, gap: int = 8) -> Tensor:
        """Normal values in rows that are `gap` entries of NaN apart."""
        wide = torch.full((*shape[:-1], shape[-1] + gap), math.nan, dtype=self.dtype, device=self.device)
        wide[..., : shape[-1]] = self.normal(*shape)
        return wide[..., : shape[-1]]

    def integers(self, *values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """These numbers."""
        return torch.tensor(values, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Verdict:
    """How far a kernel was off, and how far it might have been."""

    error: float
    tolerance: float

    @property
    def is_good(self) -> bool:
        """Whether the error is a number within the tolerance."""
        return self.error <= self.tolerance


def judge(
    case: Case, dtype: torch.dtype, op: Callable[..., Any], reference: Callable[..., Any], device: torch.device
) -> Verdict:
    """`op` against the reference in float32 on the same rounded inputs, beside the reference in `dtype`.

    Source: the rule of flash-attention's tests: an error of at most twice that of plain torch in the same type.
    """
    arguments = case.make(Source(device, dtype, torch.Generator().manual_seed(len(case.label))))
    exact = outcome(case.op, reference, _widened(arguments, dtype))
    plain = outcome(case.op, reference, _copied(arguments))
    ours = outcome(case.op, op, _copied(arguments))
    for mine, theirs in zip(ours, plain, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise ValueError(
                f"{case.op}: gave {tuple(mine.shape)} of {mine.dtype}, expected {tuple(theirs.shape)} of {theirs.dtype}"
            )
    return Verdict(_distance(ours, exact), 2 * _distance(plain, exact) + SLACK)


def outcome(name: str, op: Callable[..., Any], arguments: Sequence[Any]) -> list[Tensor]:
    """What `op` returns, and all memory of what it wrote to."""
    returned = op(*arguments)
    written = [arguments[index] for index in IN_PLACE.get(name, ())]
    found = list(returned) if isinstance(returned, tuple) else [] if returned is None else [returned]
    found = [value if isinstance(value, Tensor) else torch.tensor(value) for value in found]
    return [*found, *(_all_memory(value) for value in written if value is not None)]


def _distance(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    """The largest difference; infinite where one is NaN or infinite and the other is not the same."""
    worst = 0.0
    for mine, exact in zip(found, wanted, strict=True):
        a, b = mine.double(), exact.double()
        same = (a == b) | (a.isnan() & b.isnan())
        difference = (a - b).abs().masked_fill(same, 0.0).nan_to_num(math.inf, math.inf)
        worst = max(worst, float(difference.max()) if difference.numel() else 0.0)
    return worst


def _all_memory(x: Tensor) -> Tensor:
    count = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((count,), (1,), 0)


def _copied(value: Any, memory: dict[int, Tensor] | None = None) -> Any:
    """A copy with all memory around it, so that what is written beside it shows; what shares memory still does."""
    memory = {} if memory is None else memory
    if isinstance(value, PagedBatch):
        return replace(value, memo={})
    if isinstance(value, tuple):
        return tuple(_copied(item, memory) for item in value)
    if not isinstance(value, Tensor):
        return value  # experts are only read
    copy = memory.setdefault(value.untyped_storage().data_ptr(), _all_memory(value).clone())
    return copy.as_strided(value.shape, value.stride(), value.storage_offset())


def _widened(value: Any, dtype: torch.dtype, memory: dict[int, Tensor] | None = None) -> Any:
    """A copy in float32 of what is of `dtype`; what shares memory still does."""
    memory = {} if memory is None else memory
    if isinstance(value, tuple):
        return tuple(_widened(item, dtype, memory) for item in value)
    if isinstance(value, Tensor) and value.dtype == dtype:
        copy = memory.setdefault(value.untyped_storage().data_ptr(), _all_memory(value).clone().float())
        return copy.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, ExpertMatrix):
        return replace(value, weights=tuple(_widened(weight, dtype) for weight in value.weights))
    if isinstance(value, list):
        return [_widened(item, dtype) for item in value]
    return _copied(value, memory)


def _bind(build: Callable[..., Arguments], *settings: Any) -> Callable[[Source], Arguments]:
    """`build` with what follows the source given now: a loop's variables have other values later."""
    return lambda s: build(s, *settings)


def _norms() -> Iterator[Case]:
    for shape in ((0, 64), (1, 1), (3, 1023), (2, 3, 40), (2, 4096)):
        for offset in (0.0, 1.0):
            label = f"{shape} offset {offset}"
            yield Case(
                "rms_norm", label, _bind(lambda s, n, o: (s.normal(*n), s.normal(n[-1]), 1e-5, o), shape, offset)
            )
    yield Case("rms_norm", "no weight", lambda s: (s.normal(5, 96), None, 1e-6))
    yield Case("rms_norm", "strided heads", lambda s: (s.strided(5, 3, 48), s.normal(48), 1e-6))
    yield Case("rms_norm", "wider than a block", lambda s: (s.normal(1, 20000), s.normal(20000), 1e-6))
    for shape in ((0, 8), (1, 1), (3, 1023), (2, 3, 40)):
        yield Case(
            "add_rms_norm",
            f"{shape}",
            _bind(lambda s, n: (s.normal(*n), s.normal(*n), s.normal(n[-1]), 1e-5, 0.0), shape),
        )
    yield Case("add_rms_norm", "offset", lambda s: (s.normal(3, 72), s.strided(3, 72), s.normal(72), 1e-5, 1.0))
    yield Case(
        "add_rms_norm", "wider than a block", lambda s: (s.normal(1, 20001), s.normal(1, 20001), s.normal(20001), 1e-6)
    )


def _activations() -> Iterator[Case]:
    for op in ("silu_and_mul", "gelu_and_mul"):
        for shape in ((0, 8), (1, 2), (3, 154), (2, 3, 40), (1, 6000)):
            yield Case(op, f"{shape}", _bind(lambda s, n: (s.normal(*n),), shape))
        yield Case(op, "strided", lambda s: (s.strided(4, 34),))
        yield Case(op, "far out", lambda s: (s.normal(3, 64) * 100,))
    yield Case("gelu_and_mul", "erf", lambda s: (s.normal(3, 154), "none"))


def _rope_arguments(s: Source, heads: int, kv_heads: int | None, width: int, turned: int) -> Arguments:
    q = s.strided(5, heads, width)
    k = None if kv_heads is None else s.strided(5, kv_heads, width)
    angles = torch.rand(90, turned // 2, generator=s.generator) * 6.28
    table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(s.device)
    return q, k, s.integers(3, 0, 89, 17, 3), table


def _ropes() -> Iterator[Case]:
    shapes = ((6, 2, 20, 12), (5, 1, 64, 64), (3, 3, 96, 24), (1, 1, 2, 2))
    for heads, kv_heads, width, turned in shapes:
        for interleaved in (False, True):
            label = f"{heads}/{kv_heads} heads of {width}, {turned} turned{', interleaved' * interleaved}"
            sizes = (heads, kv_heads, width, turned)
            yield Case("rope", label, _bind(lambda s, n, i: (*_rope_arguments(s, *n), i), sizes, interleaved))
            for offset in (0.0, 1.0):
                yield Case(
                    "qk_norm_rope",
                    f"{label}, offset {offset}",
                    _bind(lambda s, n, i, o: _norm_rope_arguments(s, n, i, o), sizes, interleaved, offset),
                )
    yield Case("rope", "no keys", lambda s: _rope_arguments(s, 3, None, 16, 16))
    for turned, axes in ((6, (0, 1, 2)), (20, (0, 1, 2, 0, 1, 2, 0, 0, 0, 0))):
        yield Case("axis_table", f"{turned} turned", _bind(lambda s, r, a: _axis_arguments(s, r, a), turned, axes))


def _norm_rope_arguments(s: Source, sizes: tuple[int, int, int, int], interleaved: bool, offset: float) -> Arguments:
    q, k, positions, table = _rope_arguments(s, *sizes)
    return q, k, s.normal(sizes[2]), s.normal(sizes[2]), 1e-5, offset, positions, table, interleaved


def _axis_arguments(s: Source, turned: int, axes: tuple[int, ...]) -> Arguments:
    positions = torch.randint(0, 30, (3, 7), generator=s.generator).to(s.device)
    return s.normal(30, turned, dtype=torch.float32), positions, s.integers(*axes)


def _writes() -> Iterator[Case]:
    for kv_heads, width, value_width, block_size in ((2, 20, 20, 4), (5, 64, 64, 16), (1, 192, 128, 5)):
        sizes = (kv_heads, width, value_width, block_size)
        yield Case(
            "write_kv",
            f"{kv_heads} heads of {width}/{value_width}, blocks of {block_size}",
            _bind(lambda s, n: _write_arguments(s, *n), sizes),
        )

    for dtype in NARROW:
        for kv_heads, width, block_size in ((3, 20, 4), (5, 128, 16)):
            own = (kv_heads, width, block_size)
            yield Case("write_kv", f"{own} in {dtype}", _bind(_narrow_write_arguments, own, dtype))


def _narrow_write_arguments(s: Source, sizes: tuple[int, int, int], dtype: torch.dtype) -> Arguments:
    """Rows of all sizes, zeros, what fp8 cannot hold, and what lies below its smallest normal number."""
    kv_heads, width, block_size = sizes
    row = width + (SCALE_BYTES if dtype is torch.int8 else 0)
    pages = torch.full((4, 2 * block_size * kv_heads * row), 0x55, dtype=torch.uint8, device=s.device)
    caches = default_kv_layout(pages, block_size, kv_heads, (row, row), dtype)
    k, v = s.strided(5, kv_heads, width), s.normal(5, kv_heads, width)
    k[0] *= 1e-4
    v[1] *= 0.0
    k[3, 0, :4] = s.normal(4) * 3e4
    return k, v, *caches, s.integers(-1, 3 * block_size + 1, 0, 4 * block_size - 1, 2)


def _write_arguments(s: Source, kv_heads: int, width: int, value_width: int, block_size: int) -> Arguments:
    k_cache, v_cache = (s.strided(4, block_size, kv_heads, n, gap=4) for n in (width, value_width))
    slots = s.integers(-1, 3 * block_size + 1, 0, 4 * block_size - 1, -1)
    return s.strided(5, kv_heads, width), s.strided(5, kv_heads, value_width), k_cache, v_cache, slots


@dataclass(frozen=True)
class Shape:
    """Sequences in a paged cache and what attends to them."""

    lengths: tuple[tuple[int, int], ...]
    """(queries, tokens in the cache) of each sequence."""
    heads: int
    kv_heads: int
    width: int
    value_width: int
    block_size: int
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


def attention_arguments(s: Source, shape: Shape) -> Arguments:
    """Arguments of `paged_attention`: blocks in random order, NaN where no query may read, wild table ends."""
    cu = [0, *itertools.accumulate(n for n, _ in shape.lengths)]
    counts = [-(-length // shape.block_size) for _, length in shape.lengths]
    order = torch.randperm(sum(counts) + 1, generator=s.generator).add(1).tolist()
    table = torch.full((len(counts) + 1, max(counts) + 2), 10**6, dtype=torch.int32)
    caches = [
        torch.full((len(order) + 2, shape.block_size, shape.kv_heads, width), math.nan, dtype=s.dtype)
        for width in (shape.width, shape.value_width)
    ]
    rows = list(range(len(counts), 0, -1))
    slots: list[int] = []
    for row, count, (num_queries, length) in zip(rows, counts, shape.lengths, strict=True):
        blocks = [order.pop() for _ in range(count)]
        seen = 0 if shape.window is None else max(0, length - num_queries - shape.window + 1)
        first_block = seen // shape.block_size
        table[row, first_block:count] = torch.tensor(blocks[first_block:], dtype=torch.int32)
        places = [
            blocks[t // shape.block_size] * shape.block_size + t % shape.block_size
            for t in range(first_block * shape.block_size, length)
        ]
        for cache in caches:
            cache.flatten(0, 1)[places] = torch.randn(len(places), *cache.shape[2:], generator=s.generator).to(s.dtype)
        slots += places[len(places) - num_queries :]
    lengths = [length for _, length in shape.lengths]
    int32 = torch.int32
    batch = PagedBatch(
        table.to(s.device), s.integers(*rows, dtype=int32), s.integers(*slots), s.integers(*lengths, dtype=int32),
        s.integers(*cu, dtype=int32), rows, lengths, cu,
    )  # fmt: skip
    q = s.strided(cu[-1], shape.heads, shape.width)
    k_cache, v_cache = (cache.to(s.device) for cache in caches)
    sinks = s.normal(shape.heads, dtype=torch.float32) if shape.has_sinks else None
    return q, k_cache, v_cache, batch, shape.width**-0.5, shape.window, shape.soft_cap, sinks


MIXED = ((1, 33), (6, 20), (3, 3), (40, 70))
SHAPES = (
    Shape(((1, 1),), 4, 4, 8, 8, 4),
    Shape(((1, 3), (1, 17), (1, 200)), 6, 2, 20, 20, 16),
    Shape(((1, 1100), (2, 514), (1, 512)), 2, 1, 16, 16, 16),
    Shape(((1, 1100),), 2, 1, 16, 16, 16, window=600, has_sinks=True),
    Shape(((9, 9), (17, 17)), 3, 1, 64, 64, 5),
    Shape(MIXED, 8, 1, 96, 64, 16),
    Shape(MIXED, 3, 3, 24, 24, 8, soft_cap=2.0),
    Shape(MIXED, 6, 2, 20, 20, 4, window=16),
    Shape(MIXED, 6, 2, 20, 20, 4, window=1, has_sinks=True),
    Shape(MIXED, 6, 3, 32, 32, 16, window=7, soft_cap=5.0, has_sinks=True),
    Shape(((70, 90),), 5, 1, 16, 16, 16),
)


def _attentions() -> Iterator[Case]:
    for shape in SHAPES:
        extras = f", window {shape.window}" * (shape.window is not None) + ", capped" * (shape.soft_cap is not None)
        label = f"{len(shape.lengths)} sequences, {shape.heads}/{shape.kv_heads} heads of {shape.width}{extras}"
        yield Case(
            "paged_attention",
            f"{label}{', sinks' * shape.has_sinks}, to {max(length for _, length in shape.lengths)}",
            _bind(lambda s, n: attention_arguments(s, n), shape),
        )

    for shape in SHAPES[1:3] + SHAPES[6:9]:
        for dtype in NARROW:
            label = f"{len(shape.lengths)} sequences, {shape.heads}/{shape.kv_heads} heads of {shape.width}"
            yield Case("paged_attention", f"{label} in {dtype}, {shape.lengths}", _bind(narrow_arguments, shape, dtype))

    for lengths in (((1, 3), (1, 90)), ((1, 1100), (3, 40)), ((20, 50), (1, 7), (9, 9))):
        for heads, rank, turned in ((3, 24, 8), (16, 64, 20)):
            label = f"latent, {heads} heads of {rank} + {turned}, {lengths}"
            yield Case("paged_attention", label, _bind(latent_arguments, lengths, heads, rank, turned))


def latent_arguments(s: Source, lengths: tuple[tuple[int, int], ...], heads: int, rank: int, turned: int) -> Arguments:
    """One key per token for all heads, whose first `rank` columns are the value too."""
    q, cache, _, *rest = attention_arguments(s, Shape(lengths, heads, 1, rank + turned, 1, 16))
    return q, cache, cache[..., :rank], *rest


def narrow_arguments(s: Source, shape: Shape, dtype: torch.dtype) -> Arguments:
    """`attention_arguments` over a cache of `dtype`."""
    q, k_cache, v_cache, *rest = attention_arguments(s, shape)
    return q, *(encode_rows(cache, dtype) for cache in (k_cache, v_cache)), *rest


def _expert_arguments(
    s: Source, num_tokens: int, top_k: int, experts: int, sizes: tuple[int, int], parts: int
) -> Arguments:
    width, hidden = sizes
    ids = torch.stack([torch.randperm(experts, generator=s.generator)[:top_k] for _ in range(num_tokens)])
    weights = torch.rand(num_tokens, top_k, generator=s.generator).to(s.device)
    gate_up = [s.normal(experts, 2 * hidden // parts, width) * width**-0.5 for _ in range(parts)]
    down = s.normal(experts, width, hidden) * hidden**-0.5
    matrices = [ExpertMatrix(tuple(matrix.unbind(0))) for matrix in (*gate_up, down)]
    return s.normal(num_tokens, width), weights, ids.to(s.device), matrices[:-1], matrices[-1]


def _segments() -> Iterator[Case]:
    for lengths, heads, width in (((1,), 1, 8), ((7, 130, 64), 2, 20), ((200,), 3, 72), ((33, 128), 1, 130)):
        yield Case(
            "segment_attention",
            f"{lengths}, {heads} heads of {width}",
            _bind(lambda s, n, h, w: (*(s.strided(sum(n), h, w) for _ in "qkv"), n, w**-0.5), lengths, heads, width),
        )


def _experts() -> Iterator[Case]:
    shapes = ((1, 2, 4, (24, 16), 1), (5, 3, 4, (40, 8), 2), (33, 1, 2, (72, 136), 2), (9, 4, 16, (16, 32), 1))
    for shape in shapes:
        for activation in ("silu", "gelu_tanh"):
            build = _bind(lambda s, n, a: (*_expert_arguments(s, *n), a), shape, activation)
            yield Case("run_experts", f"{shape}, {activation}", build)


def _recurrent() -> Iterator[Case]:
    for op, label, make in cases_recurrent.cases():
        yield Case(op, label, make)


def _sampling() -> Iterator[Case]:
    for op, label, make in cases_sampling.cases():
        yield Case(op, label, make, DTYPES[:1])
    for width in (1, 7, 64, 1000):
        make = _bind(lambda s, n: (cases_sampling.logits_of(s, 8, n, 2.0),), width)
        for op in ("largest", "largest_rows"):
            yield Case(op, f"{width} tokens", make, DTYPES[:1])


CASES: tuple[Case, ...] = (
    *(*_norms(), *_activations(), *_ropes(), *_writes(), *_attentions(), *_segments(), *_experts(), *_recurrent()),
    *(*packed_cases(Case), *scaled_cases(Case), *expert_cases(Case)),
    *_sampling(),
)
"""Every case of every op with a faster kernel."""

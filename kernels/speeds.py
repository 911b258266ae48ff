"""What a card can do at most, and how near each kernel comes to it: bytes and operations that must be, over time taken.

Shares are of ceilings measured in the same run. Inputs are normal values, since zeros run cooler and faster, and rotate
through more memory than any cache holds.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from vkit.kernels import speeds_recurrent
from vkit.kernels.cases_packed import packed_works
from vkit.kernels.cases_scaled import scaled_works
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.narrow_cache import SCALE_BYTES, encode_rows

REPEATS = 20
ROUNDS = 5
WARM_UP_S = 0.2


class Timer(Protocol):
    """Seconds that one call of `run` takes; its argument counts the calls, so that inputs can rotate."""

    def __call__(self, run: Callable[[int], object], /) -> float:
        """The median of several rounds."""


def time_on_card(run: Callable[[int], object]) -> float:
    """Seconds of one call by the card's own clock, after a warm-up."""
    started = time.monotonic()
    while time.monotonic() - started < WARM_UP_S:
        run(0)
        torch.cuda.synchronize()
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for index in range(REPEATS):
            run(index)
        end.record()
        torch.cuda.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return statistics.median(seconds)


def time_on_host(run: Callable[[int], object]) -> float:
    """Seconds of one call by the host's clock: what stands in for a card in tests."""
    started = time.perf_counter()
    run(0)
    return max(time.perf_counter() - started, 1e-9)


@dataclass(frozen=True)
class Sizes:
    """How large the work is."""

    num_tokens: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    batches: tuple[int, ...]
    prompt: int
    matrix: int
    copy_bytes: int
    rotated_bytes: int
    """Inputs rotate through this much: three times the largest second-level cache."""
    vocab: int
    latent: tuple[int, int] = (512, 64)
    """Widths of a latent value and of what is turned beside it."""


CARD = Sizes(8192, 4096, 14336, 32, 8, 128, 8192, (1, 64), 8192, 8192, 1 << 30, 400 << 20, 151_936)
"""The layers of an 8B model."""
SMALL = Sizes(3, 40, 24, 4, 2, 16, 20, (1, 2), 9, 16, 1 << 12, 1 << 12, 70, (24, 8))
"""For the interpreter."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reached in this run."""

    copy_bytes_per_s: float
    """Read and written together."""
    matmul_flop_per_s: float
    """bfloat16, square matrices."""


def measure_ceilings(device: torch.device, sizes: Sizes, timer: Timer) -> Ceilings:
    """The rates of a plain copy and of a plain matrix product."""
    copy_s, product_s = _time_copy(device, sizes, timer), _time_product(device, sizes, timer)
    return Ceilings(2 * sizes.copy_bytes / copy_s, 2 * sizes.matrix**3 / product_s)


def _time_copy(device: torch.device, sizes: Sizes, timer: Timer) -> float:
    source = torch.randn(sizes.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    return timer(lambda _: target.copy_(source))


def _time_product(device: torch.device, sizes: Sizes, timer: Timer) -> float:
    a, b = (torch.randn(sizes.matrix, sizes.matrix, device=device).bfloat16() for _ in range(2))
    return timer(lambda _: a @ b)


@dataclass(frozen=True)
class Work:
    """One op at one shape."""

    op: str
    label: str
    make: Callable[[], tuple[Any, ...]]
    num_bytes: int = 0
    """That must move."""
    num_flop: int = 0
    """Of matrix products; more than zero: the op is bound by them."""


def works(device: torch.device, sizes: Sizes) -> Iterator[Work]:
    """Every op that is timed."""
    s, tokens = sizes, sizes.num_tokens

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    row_bytes = 2 * tokens * s.hidden
    label = f"{tokens} x {s.hidden}"
    yield Work("rms_norm", label, lambda: (normal(tokens, s.hidden), normal(s.hidden), 1e-6), 2 * row_bytes)
    yield Work(
        "add_rms_norm",
        label,
        lambda: (normal(tokens, s.hidden), normal(tokens, s.hidden), normal(s.hidden), 1e-6),
        4 * row_bytes,
    )
    for op in ("silu_and_mul", "gelu_and_mul"):
        label = f"{tokens} x {s.intermediate}"
        yield Work(op, label, lambda: (normal(tokens, 2 * s.intermediate),), 6 * tokens * s.intermediate)
    head_bytes = 2 * tokens * s.head_dim
    label = f"{tokens} tokens, {s.heads}/{s.kv_heads} heads of {s.head_dim}"
    table = torch.rand(tokens, s.head_dim, device=device)
    positions = torch.arange(tokens, device=device)
    rope_bytes = 2 * (s.heads + s.kv_heads) * head_bytes + 2 * head_bytes

    def heads() -> tuple[Tensor, Tensor]:
        return normal(tokens, s.heads, s.head_dim), normal(tokens, s.kv_heads, s.head_dim)

    yield Work("rope", label, lambda: (*heads(), positions, table), rope_bytes)
    yield Work(
        "qk_norm_rope",
        label,
        lambda: (*heads(), normal(s.head_dim), normal(s.head_dim), 1e-6, 0.0, positions, table),
        rope_bytes,
    )
    yield Work("write_kv", label, lambda: _write_arguments(s, normal, device), 4 * s.kv_heads * head_bytes)
    yield _experts_work(s, normal, device)
    yield from packed_works(Work, s, device)
    yield from scaled_works(Work, s, device)
    for batch in s.batches:
        yield _attention(s, normal, device, f"decode, {batch} x {s.context}", batch, 1, s.context)
    yield _attention(s, normal, device, f"prefill, {s.prompt}", 1, s.prompt, s.prompt)
    yield from _other_attention(s, normal, device)
    layer = speeds_recurrent.LayerSizes(s.heads, s.head_dim, s.batches, s.prompt)
    for op, label, make, num_bytes, num_flop in speeds_recurrent.works(device, layer):
        yield Work(op, label, make, num_bytes, num_flop)
    for batch in s.batches:
        yield from _sampling(s, device, batch)


def _other_attention(s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> Iterator[Work]:
    """Over a narrow cache, over one of latent vectors, and over a run without a cache."""
    for batch in s.batches:
        for dtype, extra in ((torch.float8_e4m3fn, 0), (torch.int8, SCALE_BYTES)):
            plain = _attention(
                s, normal, device, f"decode, {batch} x {s.context}, cache of {dtype}", batch, 1, s.context
            )

            def narrow(make: Callable[[], tuple[Any, ...]] = plain.make, dtype: torch.dtype = dtype) -> tuple[Any, ...]:
                q, k_cache, v_cache, *rest = make()
                return q, encode_rows(k_cache, dtype), encode_rows(v_cache, dtype), *rest

            num_bytes = 2 * batch * s.context * s.kv_heads * (s.head_dim + extra) + 4 * batch * s.heads * s.head_dim
            yield Work("paged_attention", plain.label, narrow, num_bytes)
        wide = replace(s, kv_heads=1, head_dim=sum(s.latent))
        latent = _attention(wide, normal, device, f"latent decode, {batch} x {s.context}", batch, 1, s.context)

        def absorbed(make: Callable[[], tuple[Any, ...]] = latent.make) -> tuple[Any, ...]:
            q, cache, _, *rest = make()
            return q, cache, cache[..., : s.latent[0]], *rest

        q_bytes = 2 * batch * s.heads * (sum(s.latent) + s.latent[0])
        yield Work("paged_attention", latent.label, absorbed, 2 * batch * s.context * sum(s.latent) + q_bytes)
    shape, flop = (s.prompt, s.heads, s.head_dim), 4 * s.heads * s.head_dim * s.prompt**2

    def run() -> tuple[Any, ...]:
        return normal(*shape), normal(*shape), normal(*shape), [s.prompt], s.head_dim**-0.5

    yield Work("segment_attention", f"one run of {s.prompt}, {s.heads} heads of {s.head_dim}", run, num_flop=flop)


def _sampling(s: Sizes, device: torch.device, batch: int) -> Iterator[Work]:
    """A row is read once whatever is asked of it; what a search reads again should come from a cache."""

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randn(batch, s.vocab, device=device) * 3, torch.arange(batch, device=device)

    label = f"{batch} x {s.vocab} tokens"
    row_bytes = 4 * batch * s.vocab
    for op in ("largest", "largest_rows"):
        yield Work(op, label, lambda: rows()[:1], row_bytes)
    for name, min_p, top_k, top_p in (
        ("plain", 0.0, 0, 1.0),
        ("top_k 50, top_p 0.95", 0.0, 50, 0.95),
        ("top_p 0.95", 0.0, 0, 0.95),
    ):

        def drawn(rule: tuple[float, int, float] = (min_p, top_k, top_p)) -> tuple[Any, ...]:
            rules = DrawRules.of([0.8] * batch, [rule[0]] * batch, [rule[1]] * batch, [rule[2]] * batch, device)
            return *rows(), rules, torch.arange(batch, device=device)

        yield Work("draw", f"{label}, {name}", drawn, row_bytes)
    words = -(-s.vocab // 32)
    yield Work(
        "mask_tokens",
        f"{label}, all but some forbidden",
        lambda: (*rows(), torch.full((batch, words), 1, dtype=torch.int32, device=device)),
        4 * batch * (words + 31 * words),
    )
    used = min(s.vocab, 1024)

    def penalised() -> tuple[Any, ...]:
        ids = torch.rand(batch, s.vocab, device=device).argsort(1)[:, :used].flatten()
        owners = torch.arange(batch, dtype=torch.int32, device=device).repeat_interleave(used)
        return *rows(), ids, torch.ones(batch * used, device=device), owners, torch.ones(batch, 3, device=device)

    yield Work("penalise", f"{label}, {used} used", penalised, batch * used * (4 + 4 + 8 + 4 + 4))


def _experts_work(s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> Work:
    width = s.intermediate // EXPERTS

    def make() -> tuple[Any, ...]:
        gate_up, down = normal(EXPERTS, 2 * width, s.hidden), normal(EXPERTS, s.hidden, width)
        ids = torch.rand(s.num_tokens, EXPERTS, device=device).argsort(1)[:, :TOP_K].contiguous()
        weights = torch.rand(s.num_tokens, TOP_K, device=device)
        matrices = [ExpertMatrix(tuple(matrix.unbind(0))) for matrix in (gate_up, down)]
        return normal(s.num_tokens, s.hidden), weights, ids, matrices[:1], matrices[1], "silu"

    label = f"{s.num_tokens} tokens, {TOP_K} of {EXPERTS} experts of {s.hidden} x {width}"
    return Work("run_experts", label, make, num_flop=6 * s.num_tokens * TOP_K * s.hidden * width)


EXPERTS = 8
TOP_K = 2
BLOCK_SIZE = 16


def _write_arguments(s: Sizes, normal: Callable[..., Tensor], device: torch.device) -> tuple[Any, ...]:
    num_blocks = -(-s.num_tokens // BLOCK_SIZE)
    k, v = (normal(s.num_tokens, s.kv_heads, s.head_dim) for _ in range(2))
    caches = (torch.zeros(num_blocks, BLOCK_SIZE, *k.shape[1:], dtype=k.dtype, device=device) for _ in range(2))
    return k, v, *caches, torch.randperm(num_blocks * BLOCK_SIZE, device=device)[: s.num_tokens]


def _attention(
    s: Sizes,
    normal: Callable[..., Tensor],
    device: torch.device,
    label: str,
    batch: int,
    num_queries: int,
    length: int,
) -> Work:
    def make() -> tuple[Any, ...]:
        per_sequence = -(-length // BLOCK_SIZE)
        shape = (batch * per_sequence, BLOCK_SIZE, s.kv_heads, s.head_dim)
        table = torch.randperm(batch * per_sequence, device=device, dtype=torch.int32).view(batch, per_sequence)
        rows, lengths = list(range(batch)), [length] * batch
        cu = [num_queries * index for index in range(batch + 1)]
        on_device = [torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, lengths, cu)]
        unused = torch.full((cu[-1],), -1, dtype=torch.int64, device=device)
        paged = PagedBatch(table, on_device[0], unused, on_device[1], on_device[2], rows, lengths, cu)
        return normal(cu[-1], s.heads, s.head_dim), normal(*shape), normal(*shape), paged, s.head_dim**-0.5

    cached_bytes = 4 * batch * length * s.kv_heads * s.head_dim
    if num_queries == 1:
        return Work("paged_attention", label, make, cached_bytes + 4 * batch * s.heads * s.head_dim)
    pairs = num_queries * (length - num_queries) + num_queries * (num_queries + 1) // 2
    return Work("paged_attention", label, make, num_flop=4 * s.heads * s.head_dim * pairs * batch)


def measure(
    work: Work, op: Callable[..., Any], ceilings: Ceilings, sizes: Sizes, timer: Timer
) -> Mapping[str, str | float]:
    """Seconds of one call, what was achieved and its share of the ceiling."""
    count = 1 if work.num_flop else min(16, math.ceil(sizes.rotated_bytes / work.num_bytes))
    inputs = [work.make() for _ in range(count)]
    seconds = timer(lambda index: op(*inputs[index % count]))
    row: dict[str, str | float] = {"op": work.op, "shape": work.label, "seconds": seconds}
    if work.num_flop:
        rate = work.num_flop / seconds
        return {**row, "flop_per_s": rate, "share": rate / ceilings.matmul_flop_per_s}
    rate = work.num_bytes / seconds
    return {**row, "bytes_per_s": rate, "share": rate / ceilings.copy_bytes_per_s}

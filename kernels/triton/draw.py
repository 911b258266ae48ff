"""Drawing tokens without sorting a row: one pass for the maxima and sums of its chunks, then a search for thresholds.

A kept value is one that reaches a threshold. Thresholds are found between two floats, four times closer with every look
at the chunks that reach the lower one, so that a look reads less each time and every search ends. Weights are
exp((x − largest) / temperature). Rules and noise are those of the reference, to float rounding of the weights.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.triton.common import Ahead, power_of_two

CHUNK = tl.constexpr(64)
"""Tokens per chunk: that of the reference, since untruncated rows race between chunks."""
CHUNKS = 32
"""Chunks of one program of the first pass, whose rows are shared out so that few rows fill a card."""
TILE = 2048
"""Tokens of one step of a look. Not measured."""


@triton.jit  # type: ignore[untyped-decorator]
def mixed(bits: tl.tensor) -> tl.tensor:
    """uint32 whose every bit depends on every bit of `bits`. Source: the finaliser of MurmurHash3 (Appleby 2011)."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def unit(number: tl.tensor) -> tl.tensor:
    """(number + 1/2) / 2^32 of uint32."""
    low = (number & 0xFFFF).to(tl.float32) + 0.5
    return (number >> 16).to(tl.float32) * (1.0 / 65536) + low * (1.0 / 4294967296)


@triton.jit  # type: ignore[untyped-decorator]
def noise(key: tl.tensor, number: tl.tensor) -> tl.tensor:
    """Exp(1) noise of int32 numbers under an int64 key: -log u, with 1 - u as exact as u, since small noise wins.

    Source: log(1 + f) = 2 artanh(f / (2 + f)), its series to the ninth power where u is above sqrt(1/2).
    """
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32)
    bits = mixed(mixed((number.to(tl.uint32) * 0x9E3779B1) ^ low) + high) ^ 0x80000000
    u = unit(bits)
    rest = unit(bits ^ 0xFFFFFFFF)
    s = rest / (2.0 - rest)
    z = s * s
    near_one = 2.0 * (s + s * z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9)))))
    return tl.where(u < 0.70710678, -tl.log(u), near_one)


@triton.jit  # type: ignore[untyped-decorator]
def rank_of(x: tl.tensor) -> tl.tensor:
    """An int64 that orders as float32 x does, and has a neighbour for each of its neighbours."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def value_at(rank: tl.tensor) -> tl.tensor:
    """The float32 of a rank."""
    bits = rank.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator]
def scan_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    temperatures: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_SUMS: tl.constexpr,
) -> None:
    """Of each chunk of the given rows: the largest value (NaN if one is), and Σ exp((x − that) / temperature).

    Grid (R, ceil(chunks / CHUNKS)). maxima and sums (R, chunks).
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x_at = logits + tl.load(rows + row) * row_stride
    x = tl.load(x_at + token, mask=token < width, other=-float("inf"))
    has_nan = tl.max((x != x).to(tl.int32), 1) > 0
    largest = tl.where(has_nan, float("nan"), tl.max(x, 1))
    is_chunk = chunk < num_chunks
    tl.store(maxima + row * num_chunks + chunk, largest, mask=is_chunk)
    if HAS_SUMS:
        base = tl.where(largest == -float("inf"), 0.0, largest)
        weight = tl.exp((x - base[:, None]) * (1.0 / tl.load(temperatures + row)))
        tl.store(sums + row * num_chunks + chunk, tl.sum(weight, 1), mask=is_chunk)


@triton.jit  # type: ignore[untyped-decorator]
def listed(peak: tl.tensor, chunk: tl.tensor, is_chunk: tl.tensor, chunks: tl.tensor, floor: tl.tensor) -> tl.tensor:
    """Write the chunks that reach the floor to `chunks`, in order; how many."""
    is_kept = is_chunk & (peak >= floor)
    place = tl.cumsum(is_kept.to(tl.int32), 0)
    tl.debug_barrier()  # the list before is read no longer
    tl.store(chunks + place - 1, chunk, mask=is_kept)
    tl.debug_barrier()
    return tl.sum(is_kept.to(tl.int32), 0)


@triton.jit  # type: ignore[untyped-decorator]
def tile_of(
    x_at: tl.tensor,
    chunks: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(values, tokens) of the listed chunks first .. first + TILE / CHUNK - 1; -inf where there are none."""
    place = first * CHUNK + tl.arange(0, TILE)
    is_there = place < count * CHUNK
    token = tl.load(chunks + place // CHUNK, mask=is_there, other=0) * CHUNK + place % CHUNK
    return tl.load(x_at + token, mask=is_there & (token < width), other=-float("inf")), token


@triton.jit  # type: ignore[untyped-decorator]
def sums_from(
    x_at: tl.tensor,
    chunks: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    low: tl.tensor,
    middle: tl.tensor,
    high: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """How many values (or how much weight) of the listed chunks reach each of three thresholds, float64."""
    from_low = tl.zeros([], tl.float64)
    from_middle = tl.zeros([], tl.float64)
    from_high = tl.zeros([], tl.float64)
    for first in range(0, count, TILE // CHUNK):
        x, _ = tile_of(x_at, chunks, first, count, width, CHUNK, TILE)
        if IS_MASS:  # noqa: SIM108 (chosen while compiling)
            weight = tl.exp((x - top) * inverse)
        else:
            weight = tl.full([TILE], 1.0, tl.float32)
        from_low += tl.sum(tl.where(x >= low, weight, 0.0), 0).to(tl.float64)
        from_middle += tl.sum(tl.where(x >= middle, weight, 0.0), 0).to(tl.float64)
        from_high += tl.sum(tl.where(x >= high, weight, 0.0), 0).to(tl.float64)
    return from_low, from_middle, from_high


@triton.jit  # type: ignore[untyped-decorator]
def threshold(
    x_at: tl.tensor,
    peak: tl.tensor,
    chunk: tl.tensor,
    is_chunk: tl.tensor,
    chunks: tl.tensor,
    floor: tl.tensor,
    wanted: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    IS_MASS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """(the largest value from which on there are `wanted`, or the floor; how much lies above it)."""
    low = rank_of(floor)
    high = rank_of(top) + 1
    above = tl.zeros([], tl.float64)
    while high - low > 1:
        gap = high - low
        a = low + tl.maximum(gap // 4, 1)
        b = low + tl.maximum(gap // 2, 1)
        c = low + tl.maximum(gap * 3 // 4, 1)
        count = listed(peak, chunk, is_chunk, chunks, value_at(low))
        from_a, from_b, from_c = sums_from(
            x_at, chunks, count, width, value_at(a), value_at(b), value_at(c), top, inverse, CHUNK, TILE, IS_MASS
        )
        if from_c >= wanted:
            low = c
        elif from_b >= wanted:
            low = b
            high = c
            above = from_c
        elif from_a >= wanted:
            low = a
            high = b
            above = from_b
        else:
            high = a
            above = from_a
    return value_at(low), above


@triton.jit  # type: ignore[untyped-decorator]
def peak_threshold(peak: tl.tensor, wanted: tl.tensor, top: tl.tensor) -> tl.tensor:
    """The `wanted`-th largest of the chunks' maxima; -inf where there are fewer."""
    low = rank_of(tl.full([], -float("inf"), tl.float32))
    high = rank_of(top) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((peak >= value_at(middle)).to(tl.int32), 0) >= wanted:
            low = middle
        else:
            high = middle
    return value_at(low)


@triton.jit  # type: ignore[untyped-decorator]
def race_between_chunks(
    x_at: tl.tensor,
    peak: tl.tensor,
    chunk: tl.tensor,
    sums: tl.tensor,
    key: tl.tensor,
    width: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """The token drawn from a row of which nothing is dropped: by the chunks' sums, then inside the chunk that won."""
    weight = sums * tl.exp((peak - top) * inverse)
    winner = tl.argmax(weight / noise(key, -1 - chunk), 0)
    base = tl.max(tl.where(chunk == winner, peak, -float("inf")), 0)
    token = winner * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_at + token, mask=token < width, other=-float("inf"))
    return winner * CHUNK + tl.argmax(tl.exp((x - base) * inverse) / noise(key, token), 0)


@triton.jit  # type: ignore[untyped-decorator]
def race(
    x_at: tl.tensor,
    chunks: tl.tensor,
    count: tl.tensor,
    width: tl.tensor,
    key: tl.tensor,
    floor: tl.tensor,
    num_equal: tl.tensor,
    top: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
) -> tl.tensor:
    """The token with the largest weight / noise of those above the floor, and of the first `num_equal` that are it."""
    best = tl.zeros([], tl.float32)
    winner = tl.zeros([], tl.int32)
    seen = tl.zeros([], tl.int32)
    for first in range(0, count, TILE // CHUNK):
        x, token = tile_of(x_at, chunks, first, count, width, CHUNK, TILE)
        is_equal = (x == floor).to(tl.int32)
        place = seen + tl.cumsum(is_equal, 0)
        is_kept = (x > floor) | ((is_equal > 0) & (place <= num_equal))
        score = tl.where(is_kept, tl.exp((x - top) * inverse) / noise(key, token), 0.0)
        own = tl.max(score, 0)
        if own > best:
            best = own
            winner = tl.max(tl.where(token == tl.min(tl.where(score == own, token, 0x7FFFFFFF), 0), token, 0), 0)
        seen += tl.sum(is_equal, 0)
    return winner


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator]
def draw_kernel(
    logits: tl.tensor,
    rows: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    scratch: tl.tensor,
    temperatures: tl.tensor,
    min_ps: tl.tensor,
    top_ks: tl.tensor,
    top_ps: tl.tensor,
    keys: tl.tensor,
    ids: tl.tensor,
    largest: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """ids (R,) int64 and largest (R,) of the rows, from maxima and sums of their chunks. One program per row.

    scratch (R, chunks) int32. The maxima of a row stay in registers; bound by reading the chunks that matter, from the
    second-level cache, and by the latency of a look.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    is_chunk = chunk < num_chunks
    at = row * num_chunks + chunk
    peak = tl.load(maxima + at, mask=is_chunk, other=-float("inf"))
    has_nan = tl.max((peak != peak).to(tl.int32), 0) > 0
    top = tl.where(has_nan, float("nan"), tl.max(peak, 0))
    tl.store(largest + row, top)
    if (top > -float("inf")) & (top < float("inf")):
        x_at = logits + tl.load(rows + row) * row_stride
        chunks = scratch + row * num_chunks
        temperature = tl.load(temperatures + row)
        inverse = 1.0 / temperature
        key = tl.load(keys + row)
        min_p = tl.load(min_ps + row)
        top_k = tl.load(top_ks + row)
        top_p = tl.load(top_ps + row)
        sum_of = tl.load(sums + at, mask=is_chunk, other=0.0)
        if (min_p <= 0.0) & (top_k <= 0) & (top_p >= 1.0):
            winner = race_between_chunks(x_at, peak, chunk, sum_of, key, width, top, inverse, CHUNK)
            tl.store(ids + row, winner.to(tl.int64))
        else:
            floor = tl.zeros([], tl.float32) - float("inf")
            total = tl.sum(sum_of * tl.exp((peak - top) * inverse), 0).to(tl.float64)
            if min_p > 0.0:
                floor = top + temperature * tl.log(min_p.to(tl.float64)).to(tl.float32)
            if top_k > 0:
                if top_k <= num_chunks:
                    floor = tl.maximum(floor, peak_threshold(peak, top_k, top))
                floor, _ = threshold(
                    x_at, peak, chunk, is_chunk, chunks, floor, top_k.to(tl.float64), width, top, inverse,
                    CHUNK, TILE, False,
                )  # fmt: skip
            num_equal = width
            if top_p < 1.0:
                if (top_k > 0) | (min_p > 0.0):
                    count = listed(peak, chunk, is_chunk, chunks, floor)
                    total, _, _ = sums_from(
                        x_at, chunks, count, width, floor, floor, floor, top, inverse, CHUNK, TILE, True
                    )
                # Tokens that weigh less than a mean of what is dropped are dropped; a hair of slack for rounding.
                mean = tl.log(total * (1.0 - top_p) / width).to(tl.float32)
                floor = tl.maximum(floor, tl.minimum(top + temperature * (mean - 1e-3), top))
                limit = top_p * total
                floor, above = threshold(
                    x_at, peak, chunk, is_chunk, chunks, floor, limit, width, top, inverse, CHUNK, TILE, True
                )
                own = tl.exp((floor - top) * inverse).to(tl.float64)
                num_equal = tl.minimum(tl.ceil((limit - above) / own), width.to(tl.float64)).to(tl.int32)
                num_equal = tl.where(above > 0.0, num_equal, tl.maximum(num_equal, 1))
            count = listed(peak, chunk, is_chunk, chunks, floor)
            winner = race(x_at, chunks, count, width, key, floor, num_equal, top, inverse, CHUNK, TILE)
            tl.store(ids + row, winner.to(tl.int64))
    else:
        tl.store(ids + row, tl.zeros([], tl.int64))


@triton.jit(do_not_specialize=["num_chunks"])  # type: ignore[untyped-decorator]
def largest_kernel(
    logits: tl.tensor,
    maxima: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out (R, 2) float64: where each row's largest value is, the first of equals, and that value. A NaN is largest."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    peak = tl.load(maxima + row * num_chunks + chunk, mask=chunk < num_chunks, other=-float("inf"))
    is_nan = peak != peak
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, -float("inf"), peak), 0)
    is_best = tl.where(has_nan, is_nan, peak == top)
    first = tl.min(tl.where(is_best, chunk, BLOCK - 1), 0)
    token = first * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + token, mask=token < width, other=-float("inf"))
    is_best = tl.where(has_nan, x != x, x == top) & (token < width)
    tl.store(out + 2 * row, tl.min(tl.where(is_best, token, 0x7FFFFFFF), 0).to(tl.float64))
    tl.store(out + 2 * row + 1, tl.where(has_nan, float("nan"), top).to(tl.float64))


def draw(logits: Tensor, rows: Tensor, rules: DrawRules, keys: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference of this name."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    num_rows, width = rows.shape[0], logits.shape[1]
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    largest = torch.empty(num_rows, device=logits.device)
    if not num_rows:
        return ids, largest
    maxima, sums = _scan(logits, rows, rules.temperatures)
    num_chunks = maxima.shape[1]
    block = power_of_two(num_chunks)
    draw_kernel[(num_rows,)](
        logits, rows, maxima, sums, torch.empty_like(maxima, dtype=torch.int32), rules.temperatures, rules.min_p,
        rules.top_k, rules.top_p, keys, ids, largest, width, num_chunks, logits.stride(0),
        CHUNK=CHUNK.value, BLOCK=block, TILE=TILE, num_warps=_num_warps(block), num_stages=2,
    )  # fmt: skip
    return ids, largest


def largest(logits: Tensor) -> tuple[list[int], list[float]]:
    """As the reference of this name. Waits for the device once."""
    found = _find_largest(logits).tolist()
    return [int(token) for token, _ in found], [value for _, value in found]


def largest_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """As the reference of this name."""
    found = _find_largest(logits)
    return found[:, 0].to(torch.int64), found[:, 1].float()


def _find_largest(logits: Tensor) -> Tensor:
    """(R, 2) float64 on the device: where each row's largest value is, and that value."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(logits.shape[0], 2, dtype=torch.float64, device=logits.device)
    if not logits.shape[0]:
        return out
    maxima, _ = _scan(logits, torch.arange(logits.shape[0], device=logits.device), None)
    block = power_of_two(maxima.shape[1])
    largest_kernel[(logits.shape[0],)](
        logits, maxima, out, logits.shape[1], maxima.shape[1], logits.stride(0), CHUNK=CHUNK.value, BLOCK=block,
        num_warps=_num_warps(block),
    )  # fmt: skip
    return out


def _scan(logits: Tensor, rows: Tensor, temperatures: Tensor | None) -> tuple[Tensor, Tensor]:
    """Maxima of the rows' chunks, and their sums if there are temperatures (else unused memory)."""
    width = logits.shape[1]
    num_chunks = triton.cdiv(width, CHUNK.value)
    maxima = torch.empty(rows.shape[0], num_chunks, device=logits.device)
    sums = maxima if temperatures is None else torch.empty_like(maxima)
    scan_kernel[(rows.shape[0], triton.cdiv(num_chunks, CHUNKS))](
        logits, rows, maxima if temperatures is None else temperatures, maxima, sums, width, num_chunks,
        logits.stride(0), CHUNK=CHUNK.value, CHUNKS=CHUNKS, HAS_SUMS=temperatures is not None, num_warps=4,
    )  # fmt: skip
    return maxima, sums


def _num_warps(block: int) -> int:
    return 8 if block > 1024 else 4


COMMON = {"width": "i32:16", "num_chunks": "i32"}


def _ahead_draw(block: int) -> Ahead:
    floats = dict.fromkeys(("logits", "maxima", "sums", "temperatures", "min_ps", "largest"), "*fp32")
    integers = dict.fromkeys(("rows", "top_ks", "keys", "ids"), "*i64")
    signature = {**floats, **integers, "scratch": "*i32", "top_ps": "*fp64", **COMMON, "row_stride": "i32:16"}
    constants = {"CHUNK": CHUNK.value, "BLOCK": block, "TILE": TILE}
    return Ahead(f"draw_{block * CHUNK.value}", draw_kernel, signature, constants, num_warps=_num_warps(block))


def _ahead_scan(has_sums: bool) -> Ahead:
    floats = dict.fromkeys(("logits", "temperatures", "maxima", "sums"), "*fp32")
    constants = {"CHUNK": CHUNK.value, "CHUNKS": CHUNKS, "HAS_SUMS": has_sums}
    signature = {**floats, "rows": "*i64", **COMMON, "row_stride": "i32:16"}
    return Ahead(f"draw_scan{'_sums' * has_sums}", scan_kernel, signature, constants)


AHEAD = (
    _ahead_scan(False),
    _ahead_scan(True),
    _ahead_draw(1024),
    _ahead_draw(4096),
    _ahead_draw(8192),
    Ahead(
        "largest_262144",
        largest_kernel,
        {"logits": "*fp32", "maxima": "*fp32", "out": "*fp64", **COMMON, "row_stride": "i32:16"},
        {"CHUNK": CHUNK.value, "BLOCK": 4096},
        num_warps=_num_warps(4096),
    ),
)

"""Attention over the paged cache: one kernel for sequences with few queries, one for the rest, one that merges.

A sequence with few queries is bound by memory: its keys are cut into chunks of a fixed number, one program each, and
the parts merged; how it is cut depends on its own length alone, so its result does not depend on its neighbours. One
with many queries is bound by products: one program per tile of queries. All query heads that share a kv head are rows
of one program, so keys are read once. A narrow cache comes as bytes; the scales of int8 go to scores and weights, not
to codes. Softmax in base 2 with the running maximum clamped where nothing is visible yet.

Source: Dao et al. 2022, algorithm 1; Dao 2023, flash-decoding (merge of partial results by their log-sum-exp).
"""

from __future__ import annotations

import triton
import triton.language as tl

from vkit.kernels.triton.common import LN2, LOG2E, product, rounded
from vkit.kernels.triton.narrow import decoded, scales_behind


@triton.jit  # type: ignore[untyped-decorator]
def visit_keys(
    o: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    q: tl.tensor,
    position: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    blocks: tl.tensor,
    lowest: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(o, total, peak) after keys first .. last - 1, where o is not divided by total yet.

    k_cache and v_cache point at the kv head, blocks at the sequence's row of the table. Keys below `lowest` are seen by
    no row, and their blocks must not be followed. Not IS_MASKED: every key is there and seen by every row.
    """
    column = tl.arange(0, q.shape[1])
    value_column = tl.arange(0, o.shape[1])
    for start in range(first, last, KEYS):
        key = start + tl.arange(0, KEYS)
        if IS_MASKED:
            is_there = (key >= lowest) & (key < last)
            block = tl.load(blocks + key // S, mask=is_there, other=0).to(tl.int64)
            k_at = k_cache + (block * k_block + (key % S) * k_slot)[None, :] + column[:, None]
            v_at = v_cache + (block * v_block + (key % S) * v_slot)[:, None] + value_column[None, :]
            # Zeros and not whatever lies there: a probability of zero times NaN is NaN.
            k = tl.load(k_at, mask=is_there[None, :] & (column < D)[:, None], other=0)
            v = tl.load(v_at, mask=is_there[:, None] & (value_column < DV)[None, :], other=0)
        else:
            block = tl.load(blocks + key // S).to(tl.int64)
            k_at = k_cache + (block * k_block + (key % S) * k_slot)[None, :] + column[:, None]
            v_at = v_cache + (block * v_block + (key % S) * v_slot)[:, None] + value_column[None, :]
            if q.shape[1] == D:  # noqa: SIM108 (chosen while compiling)
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=(column < D)[:, None], other=0)
            if o.shape[1] == DV:  # noqa: SIM108
                v = tl.load(v_at)
            else:
                v = tl.load(v_at, mask=(value_column < DV)[None, :], other=0)
        scores = product(q, decoded(k, q.dtype, FORMAT))
        if FORMAT == 3:
            is_scaled = is_there if IS_MASKED else key >= 0
            scores *= scales_behind(k_cache + block * k_block + (key % S) * k_slot + D, is_scaled)[None, :]
        if HAS_CAP:
            capped = 1.0 - 2.0 / (tl.exp2(scores * (scale / soft_cap * 2.0 * LOG2E)) + 1.0)
            scores = capped * (soft_cap * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        if IS_MASKED:
            is_seen = is_there[None, :] & (key[None, :] <= position[:, None])
            if HAS_WINDOW:
                is_seen = is_seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(is_seen, scores, -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weight = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        if FORMAT == 3:
            weight *= scales_behind(v_cache + block * v_block + (key % S) * v_slot + DV, is_scaled)[None, :]
        o = o * shrink[:, None] + product(rounded(weight, q.dtype), decoded(v, q.dtype, FORMAT))
        peak = new_peak
    return o, total, peak


@triton.jit  # type: ignore[untyped-decorator]
def finished(o: tl.tensor, total: tl.tensor, peak: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(o / total, log-sum-exp of the scores); zero and −inf for a row that saw nothing."""
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    return o / divisor[:, None], tl.where(is_empty, -float("inf"), (peak + tl.log2(divisor)) * LN2)


@triton.jit  # type: ignore[untyped-decorator]
def share_beside(lse: tl.tensor, sink: tl.tensor) -> tl.tensor:
    """e^lse / (e^lse + e^sink): the share of the keys in a softmax whose denominator has a sink too."""
    larger = tl.maximum(lse, sink)
    own = tl.exp2((lse - larger) * LOG2E)
    return own / (own + tl.exp2((sink - larger) * LOG2E))


@triton.jit(do_not_specialize=["num_splits", "table_row"])  # type: ignore[untyped-decorator]
def decode_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    sinks: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    table_row: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """One chunk of one sequence's keys, for the G query heads of one kv head and up to MAX_QUERIES queries.

    Grid (B, K, splits). Row r of a program is query r // G, head r % G of the kv head's. IS_SPLIT: partial results go
    to part (B, splits, MAX_QUERIES, H, DV) and part_lse (B, splits, MAX_QUERIES, H), float32; otherwise there is one
    chunk per sequence and results go to out (T, H, DV). Sequences with more queries are left to `prefill_kernel`.
    """
    sequence = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    start = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - start
    if num_queries > MAX_QUERIES:
        return
    length = tl.load(seq_lens + sequence)
    lowest = tl.zeros([], tl.int32)
    if HAS_WINDOW:
        lowest = tl.maximum(length - num_queries - window + 1, 0)
    chunk = lowest // CHUNK + split
    first = tl.maximum(chunk * CHUNK, lowest // KEYS * KEYS)
    last = tl.minimum((chunk + 1) * CHUNK, length)
    if IS_SPLIT and first >= last:
        return
    num_heads = tl.num_programs(1) * G
    row = tl.arange(0, ROWS)
    query = row // G
    head = kv_head * G + row % G
    is_row = query < num_queries
    position = length - num_queries + query
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_DV)
    q_at = q + (start + query).to(tl.int64) * q_token + head * q_head
    q_tile = tl.load(q_at[:, None] + column[None, :], mask=is_row[:, None] & (column < D)[None, :], other=0.0)
    o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    blocks = table + tl.load(rows + sequence).to(tl.int64) * table_row
    o, total, peak = visit_keys(
        o, total, peak, q_tile, position, k_cache + kv_head * k_head, v_cache + kv_head * v_head, blocks,
        lowest, first, last, scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
        S, D, DV, KEYS, HAS_WINDOW, HAS_CAP, True, FORMAT,
    )  # fmt: skip
    o, lse = finished(o, total, peak)
    is_value = is_row[:, None] & (value_column < DV)[None, :]
    if IS_SPLIT:
        at = ((sequence.to(tl.int64) * num_splits + split) * MAX_QUERIES + query) * num_heads + head
        tl.store(part + at[:, None] * DV + value_column[None, :], o, mask=is_value)
        tl.store(part_lse + at, lse, mask=is_row)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
            o = o * share_beside(lse, sink)[:, None]
        at = (start + query).to(tl.int64) * num_heads + head
        tl.store(out + at[:, None] * DV + value_column[None, :], rounded(o, out.dtype.element_ty), mask=is_value)


@triton.jit(do_not_specialize=["num_splits"])  # type: ignore[untyped-decorator]
def merge_kernel(
    part: tl.tensor,
    part_lse: tl.tensor,
    sinks: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    out: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
) -> None:
    """out of one query and head from its parts, in the order of their keys; the sink is added here, once.

    Grid (B, MAX_QUERIES, H). With one part the result is what the part holds, bit by bit.
    """
    sequence = tl.program_id(0)
    query = tl.program_id(1)
    head = tl.program_id(2)
    num_heads = tl.num_programs(2)
    start = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - start
    if num_queries > MAX_QUERIES or query >= num_queries:
        return
    length = tl.load(seq_lens + sequence)
    lowest = tl.zeros([], tl.int32)
    if HAS_WINDOW:
        lowest = tl.maximum(length - num_queries - window + 1, 0)
    num_chunks = tl.cdiv(length, CHUNK) - lowest // CHUNK
    column = tl.arange(0, BLOCK_DV)
    o = tl.zeros([BLOCK_DV], tl.float32)
    total = tl.zeros([], tl.float32)
    peak = tl.zeros([], tl.float32) - float("inf")
    for split in range(num_chunks):
        at = ((sequence.to(tl.int64) * num_splits + split) * MAX_QUERIES + query) * num_heads + head
        lse = tl.load(part_lse + at)
        new_peak = tl.maximum(peak, lse)
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink = tl.exp2((peak - base) * LOG2E)
        weight = tl.exp2((lse - base) * LOG2E)
        o = o * shrink + weight * tl.load(part + at * DV + column, mask=column < DV, other=0.0)
        total = total * shrink + weight
        peak = new_peak
    is_empty = total == 0.0
    divisor = tl.where(is_empty, 1.0, total)
    o = o / divisor
    if HAS_SINKS:
        lse = tl.where(is_empty, -float("inf"), peak + tl.log2(divisor) * LN2)
        o = o * share_beside(lse, tl.load(sinks + head).to(tl.float32))
    to = out + ((start + query).to(tl.int64) * num_heads + head) * DV
    tl.store(to + column, rounded(o, out.dtype.element_ty), mask=column < DV)


@triton.jit(do_not_specialize=["num_sequences", "table_row"])  # type: ignore[untyped-decorator]
def prefill_kernel(
    q: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    scale: tl.tensor,
    soft_cap: tl.tensor,
    window: tl.tensor,
    num_sequences: tl.tensor,
    table_row: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    G: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    MAX_DECODED: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FORMAT: tl.constexpr,
) -> None:
    """A tile of one sequence's queries, for the G query heads of one kv head, against all keys the tile sees.

    Grid (tiles at most, K): sequence b has its tiles from cu_seqlens[b] // Q + b on, with Q = ROWS // G queries each,
    so that no host needs to know the lengths; tiles too many return. Late tiles, which see most keys, come first.
    Sequences of up to MAX_DECODED queries are left to `decode_kernel`.
    """
    QUERIES: tl.constexpr = ROWS // G
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    low = tl.zeros([], tl.int32)
    high = low + num_sequences
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // QUERIES + middle <= item:
            low = middle + 1
        else:
            high = middle
    sequence = low - 1
    start = tl.load(cu_seqlens + sequence)
    num_queries = tl.load(cu_seqlens + sequence + 1) - start
    tile = tl.cdiv(num_queries, QUERIES) - 1 - (item - start // QUERIES - sequence)
    if num_queries <= MAX_DECODED or tile < 0:
        return
    length = tl.load(seq_lens + sequence)
    num_heads = tl.num_programs(1) * G
    row = tl.arange(0, ROWS)
    query = tile * QUERIES + row // G
    head = kv_head * G + row % G
    is_row = (row < QUERIES * G) & (query < num_queries)
    earliest = length - num_queries + tile * QUERIES
    position = length - num_queries + query
    last = tl.minimum(earliest + QUERIES, length)
    column = tl.arange(0, BLOCK_D)
    value_column = tl.arange(0, BLOCK_DV)
    q_at = q + (start + query).to(tl.int64) * q_token + head * q_head
    q_tile = tl.load(q_at[:, None] + column[None, :], mask=is_row[:, None] & (column < D)[None, :], other=0.0)
    o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    blocks = table + tl.load(rows + sequence).to(tl.int64) * table_row
    k_cache += kv_head * k_head
    v_cache += kv_head * v_head
    if HAS_WINDOW:
        lowest = tl.maximum(earliest - window + 1, 0)
        first = lowest // KEYS * KEYS
    else:
        lowest = tl.zeros([], tl.int32)
        first = (earliest + 1) // KEYS * KEYS
        o, total, peak = visit_keys(
            o, total, peak, q_tile, position, k_cache, v_cache, blocks,
            lowest, lowest, first, scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
            S, D, DV, KEYS, HAS_WINDOW, HAS_CAP, False, FORMAT,
        )  # fmt: skip
    o, total, peak = visit_keys(
        o, total, peak, q_tile, position, k_cache, v_cache, blocks,
        lowest, first, last, scale, soft_cap, window, k_block, k_slot, v_block, v_slot,
        S, D, DV, KEYS, HAS_WINDOW, HAS_CAP, True, FORMAT,
    )  # fmt: skip
    o, lse = finished(o, total, peak)
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32)
        o = o * share_beside(lse, sink)[:, None]
    at = (start + query).to(tl.int64) * num_heads + head
    is_value = is_row[:, None] & (value_column < DV)[None, :]
    tl.store(out + at[:, None] * DV + value_column[None, :], rounded(o, out.dtype.element_ty), mask=is_value)

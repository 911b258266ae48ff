"""Attention to a cache of one vector per token, whose first part is also the value: latent attention, absorbed.

All query heads of all queries of a sequence are rows of one problem, cut into tiles of rows; a vector is read once for
both products. As in `attention.py`, sequences with few queries are cut along their keys, and their parts merged. At 128
heads it is bound by products, at 16 by memory. Source: DeepSeek-AI 2024, DeepSeek-V2, section 2.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

from vkit.kernels.triton.attention import finished
from vkit.kernels.triton.common import LOG2E, Ahead, power_of_two, product, rounded


@triton.jit(do_not_specialize=["num_splits", "num_sequences", "table_row"])  # type: ignore[untyped-decorator]
def latent_kernel(
    q: tl.tensor,
    cache: tl.tensor,
    out: tl.tensor,
    part: tl.tensor,
    part_lse: tl.tensor,
    table: tl.tensor,
    rows: tl.tensor,
    seq_lens: tl.tensor,
    cu_seqlens: tl.tensor,
    scale: tl.tensor,
    num_sequences: tl.tensor,
    num_splits: tl.tensor,
    table_row: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    c_block: tl.tensor,
    c_slot: tl.tensor,
    H: tl.constexpr,
    S: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CHUNK: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    IS_PREFILL: tl.constexpr,
) -> None:
    """A tile of one sequence's rows (query r // H, head r % H) against its keys. q (T, H, DV + DR) -> out (T, H, DV).

    Grid (B, tiles of MAX_QUERIES queries, splits) for sequences of up to MAX_QUERIES queries, whose keys are cut into
    chunks; parts as in `decode_kernel`. IS_PREFILL: grid (tiles at most) for those of more, which see all their keys:
    sequence b has its tiles from cu_seqlens[b] H // ROWS + b on.
    """
    if IS_PREFILL:
        item = tl.program_id(0)
        low = tl.zeros([], tl.int32)
        high = low + num_sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(cu_seqlens + middle) * H // ROWS + middle <= item:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        start = tl.load(cu_seqlens + sequence)
        first_row = (item - start * H // ROWS - sequence) * ROWS
    else:
        sequence = tl.program_id(0)
        start = tl.load(cu_seqlens + sequence)
        first_row = tl.program_id(1) * ROWS
    num_queries = tl.load(cu_seqlens + sequence + 1) - start
    if first_row >= num_queries * H or (num_queries > MAX_QUERIES) != IS_PREFILL:
        return
    length = tl.load(seq_lens + sequence)
    row = first_row + tl.arange(0, ROWS)
    query = row // H
    head = row % H
    is_row = row < num_queries * H
    position = length - num_queries + query
    first = tl.zeros([], tl.int32)
    last = tl.minimum(length - num_queries + (first_row + ROWS - 1) // H + 1, length)
    split = tl.zeros([], tl.int32)
    if not IS_PREFILL:
        split = tl.program_id(2)
        first = split * CHUNK
        last = tl.minimum(first + CHUNK, last)
        if IS_SPLIT and first >= length:
            return
    value = tl.arange(0, BLOCK_DV)
    turned = tl.arange(0, BLOCK_DR)
    q_at = q + (start + query).to(tl.int64) * q_token + head * q_head
    q_value = tl.load(q_at[:, None] + value[None, :], mask=is_row[:, None] & (value < DV)[None, :], other=0.0)
    q_turned = tl.load(q_at[:, None] + DV + turned[None, :], mask=is_row[:, None] & (turned < DR)[None, :], other=0.0)
    o = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    blocks = table + tl.load(rows + sequence).to(tl.int64) * table_row
    for start_key in range(first, last, KEYS):
        key = start_key + tl.arange(0, KEYS)
        is_there = key < last
        block = tl.load(blocks + key // S, mask=is_there, other=0).to(tl.int64)
        at = cache + block * c_block + (key % S) * c_slot
        v = tl.load(at[:, None] + value[None, :], mask=is_there[:, None] & (value < DV)[None, :], other=0.0)
        k = tl.load(at[:, None] + DV + turned[None, :], mask=is_there[:, None] & (turned < DR)[None, :], other=0.0)
        v = v.to(q.dtype.element_ty)
        scores = product(q_value, tl.trans(v)) + product(q_turned, tl.trans(k.to(q.dtype.element_ty)))
        is_seen = is_there[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(is_seen, scores * (scale * LOG2E), -float("inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == -float("inf"), 0.0, new_peak)
        shrink = tl.exp2(peak - base)
        weight = tl.exp2(scores - base[:, None])
        total = total * shrink + tl.sum(weight, 1)
        o = o * shrink[:, None] + product(rounded(weight, q.dtype.element_ty), v)
        peak = new_peak
    o, lse = finished(o, total, peak)
    is_value = is_row[:, None] & (value < DV)[None, :]
    if IS_SPLIT:
        to = ((sequence.to(tl.int64) * num_splits + split) * MAX_QUERIES + query) * H + head
        tl.store(part + to[:, None] * DV + value[None, :], o, mask=is_value)
        tl.store(part_lse + to, lse, mask=is_row)
    else:
        to = (start + query).to(tl.int64) * H + head
        tl.store(out + to[:, None] * DV + value[None, :], rounded(o, out.dtype.element_ty), mask=is_value)


def row_tile(num_rows: int) -> int:
    """Rows of one program. Chosen so that the result of 512 columns stays in registers; not measured."""
    return min(MOST_ROWS, max(16, power_of_two(num_rows)))


def num_warps(rows: int) -> int:
    """Warps of a program of so many rows."""
    return 8 if rows > 16 else 4


MOST_ROWS = 32
KEYS = 32
STAGES = 2
POINTERS = {**dict.fromkeys(("q", "cache", "out"), "*bf16"), "part": "*fp32", "part_lse": "*fp32"}
BATCH = dict.fromkeys(("table", "rows", "seq_lens", "cu_seqlens"), "*i32")
NUMBERS = {"scale": "fp32", **dict.fromkeys(("num_sequences", "num_splits", "table_row"), "i32")}
STRIDES = dict.fromkeys(("q_token", "q_head", "c_block", "c_slot"), "i32:16")


def _ahead(name: str, heads: int, *, is_prefill: bool = False) -> Ahead:
    rows = row_tile(heads)
    constants = {
        "H": heads,
        "S": 16,
        "DV": 512,
        "DR": 64,
        "BLOCK_DV": 512,
        "BLOCK_DR": 64,
        "MAX_QUERIES": 1,
        "ROWS": rows,
        "KEYS": KEYS,
        "CHUNK": 512,
        "IS_SPLIT": not is_prefill,
        "IS_PREFILL": is_prefill,
    }
    return Ahead(
        name,
        latent_kernel,
        {**POINTERS, **BATCH, **NUMBERS, **STRIDES},
        constants,
        num_warps=num_warps(rows),
        num_stages=STAGES,
        expects={"all": ("mma.sync",)},
    )


AHEAD = (
    _ahead("latent_decode_h16", 16),
    _ahead("latent_decode_h128", 128),
    _ahead("latent_prefill_h128", 128, is_prefill=True),
)

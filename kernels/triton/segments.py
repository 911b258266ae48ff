"""Attention inside runs of tokens, every token seeing its whole run: encoders of images, and diffusion transformers.

One program per tile of queries and head; softmax over the keys as they come, so no matrix of queries by keys exists.
Tiles of one head run together, so that its keys and values are read from the second-level cache. Bound by products.
Source: Dao et al. 2022, algorithm 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.attention import finished
from vkit.kernels.triton.common import LOG2E, Ahead, power_of_two, product, rounded


@triton.jit  # type: ignore[untyped-decorator]
def visit(
    o: tl.tensor,
    total: tl.tensor,
    peak: tl.tensor,
    q: tl.tensor,
    k_at: tl.tensor,
    v_at: tl.tensor,
    key: tl.tensor,
    stop: tl.tensor,
    scale: tl.tensor,
    D: tl.constexpr,
    IS_MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """(o, total, peak) after one tile of keys, where o is not divided by total yet. Not IS_MASKED: all are there."""
    column = tl.arange(0, q.shape[1])
    is_there = key < stop
    if IS_MASKED:
        k = tl.load(k_at, mask=is_there[None, :] & (column < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=is_there[:, None] & (column < D)[None, :], other=0.0)
    elif q.shape[1] == D:
        k = tl.load(k_at)
        v = tl.load(v_at)
    else:
        k = tl.load(k_at, mask=(column < D)[:, None], other=0.0)
        v = tl.load(v_at, mask=(column < D)[None, :], other=0.0)
    scores = product(q, k) * scale
    if IS_MASKED:
        scores = tl.where(is_there[None, :], scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    shrink = tl.exp2(peak - new_peak)
    weight = tl.exp2(scores - new_peak[:, None])
    total = total * shrink + tl.sum(weight, 1)
    o = o * shrink[:, None] + product(rounded(weight, q.dtype), v)
    return o, total, new_peak


@triton.jit(do_not_specialize=["num_segments"])  # type: ignore[untyped-decorator]
def segment_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out: tl.tensor,
    cu_seqlens: tl.tensor,
    scale: tl.tensor,
    num_segments: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
) -> None:
    """out (T, H, D) of ROWS queries of one run. Grid (tiles at most, H): run b from cu_seqlens[b] // ROWS + b on."""
    item = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    low = tl.zeros([], tl.int32)
    high = low + num_segments
    while low < high:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle) // ROWS + middle <= item:
            low = middle + 1
        else:
            high = middle
    start = tl.load(cu_seqlens + low - 1)
    stop = tl.load(cu_seqlens + low)
    first = start + (item - start // ROWS - (low - 1)) * ROWS
    if first >= stop:
        return
    token = first + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)
    is_cell = (token < stop)[:, None] & (column < D)[None, :]
    q_at = q + token.to(tl.int64)[:, None] * q_token + head * q_head + column[None, :]
    q_tile = tl.load(q_at, mask=is_cell, other=0.0)
    o = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], -float("inf"), tl.float32)
    k_column = k + head * k_head + column[:, None]
    v_column = v + head * v_head + column[None, :]
    factor = scale * LOG2E
    whole = start
    if BLOCK_D <= 128:  # wider heads leave no registers for a second loop
        whole = start + (stop - start) // KEYS * KEYS
        for begin in range(start, whole, KEYS):
            key = begin + tl.arange(0, KEYS)
            wide = key.to(tl.int64)
            o, total, peak = visit(
                o, total, peak, q_tile, k_column + wide[None, :] * k_token, v_column + wide[:, None] * v_token,
                key, stop, factor, D, False,
            )  # fmt: skip
    for begin in range(whole, stop, KEYS):
        key = begin + tl.arange(0, KEYS)
        wide = key.to(tl.int64)
        o, total, peak = visit(
            o, total, peak, q_tile, k_column + wide[None, :] * k_token, v_column + wide[:, None] * v_token,
            key, stop, factor, D, True,
        )  # fmt: skip
    o, _ = finished(o, total, peak)
    to = out + (token.to(tl.int64)[:, None] * tl.num_programs(1) + head) * D + column[None, :]
    tl.store(to, rounded(o, out.dtype.element_ty), mask=is_cell)


def tiles(width: int, major: int) -> tuple[int, int, int]:
    """(rows, keys, warps) for heads of `width` on cards of capability `major`. Chosen so that none spills."""
    if width > 128:
        return 64, 32, 4 if major == 9 else 8
    if width > 64:
        return 128, 32 if major in (8, 12) else 64, 8
    return 128, 64, 4 if major == 10 else 8


@functools.lru_cache(maxsize=64)
def _bounds(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """Where each run begins, and the end: the same for all layers of a pass."""
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return ends.to(device)


@functools.cache
def _major(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """As the reference of this name."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not out.numel():
        return out
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    block = max(16, power_of_two(q.shape[2]))
    rows, keys, num_warps = tiles(block, _major(q.device))
    segment_kernel[(q.shape[0] // rows + len(lengths), q.shape[1])](
        q, k, v, out, _bounds(tuple(lengths), q.device), float(scale), len(lengths),
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        D=q.shape[2], BLOCK_D=block, ROWS=rows, KEYS=keys, num_warps=num_warps, num_stages=2,
    )  # fmt: skip
    return out


STRIDES = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "v_token", "v_head"), "i32:16")


def _ahead(width: int) -> Iterator[Ahead]:
    block = max(16, power_of_two(width))
    signature = {
        **dict.fromkeys(("q", "k", "v", "out"), "*bf16"),
        "cu_seqlens": "*i32",
        "scale": "fp32",
        "num_segments": "i32",
        **STRIDES,
    }
    for target, major, instruction in (
        ("sm_80", 8, "mma.sync"), ("sm_90", 9, "wgmma.mma_async"), ("sm_100", 10, "tcgen05.mma"),
    ):  # fmt: skip
        rows, keys, num_warps = tiles(block, major)
        yield Ahead(
            f"segment_{width}_{target}",
            segment_kernel,
            signature,
            {"D": width, "BLOCK_D": block, "ROWS": rows, "KEYS": keys},
            num_warps=num_warps,
            num_stages=2,
            targets=(target,),
            expects={target: (instruction,)},
        )


AHEAD = (*_ahead(64), *_ahead(72), *_ahead(128), *_ahead(256))

"""New keys and values scattered into the paged cache. One program per token and group of heads; bound by memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import Ahead, power_of_two, rounded

HEADS = 4
"""Heads one program moves."""


@triton.jit  # type: ignore[untyped-decorator]
def store_heads(
    rows: tl.tensor,
    cache: tl.tensor,
    row_head: tl.tensor,
    cache_head: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Copy heads of one token, in the cache's type."""
    column = tl.arange(0, BLOCK)
    is_value = (head < num_heads)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(rows + head[:, None] * row_head + column[None, :], mask=is_value, other=0.0)
    narrow = rounded(value.to(tl.float32), cache.dtype.element_ty)
    tl.store(cache + head[:, None] * cache_head + column[None, :], narrow, mask=is_value)


@triton.jit(do_not_specialize=["num_heads"])  # type: ignore[untyped-decorator]
def write_kv_kernel(
    k: tl.tensor,
    v: tl.tensor,
    k_cache: tl.tensor,
    v_cache: tl.tensor,
    slots: tl.tensor,
    num_heads: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    k_cache_block: tl.tensor,
    k_cache_slot: tl.tensor,
    k_cache_head: tl.tensor,
    v_cache_block: tl.tensor,
    v_cache_slot: tl.tensor,
    v_cache_head: tl.tensor,
    S: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    HEADS: tl.constexpr,
) -> None:
    """k (T, K, D) and v (T, K, DV) to slots (T,) int64 of caches (N, S, K, ·), all by strides; slot -1: nothing."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    block, inside = slot // S, slot % S
    k_to = k_cache + block * k_cache_block + inside * k_cache_slot
    v_to = v_cache + block * v_cache_block + inside * v_cache_slot
    store_heads(k + token * k_token, k_to, k_head, k_cache_head, head, num_heads, D, BLOCK_D)
    store_heads(v + token * v_token, v_to, v_head, v_cache_head, head, num_heads, DV, BLOCK_DV)


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference of this name, for caches of the plain layout and a floating-point type of 16 bits or more."""
    if not k.numel():
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    num_heads, width, value_width = k.shape[1], k.shape[2], v.shape[2]
    write_kv_kernel[(k.shape[0], triton.cdiv(num_heads, HEADS))](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        num_heads,
        *k.stride()[:2],
        *v.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        S=k_cache.shape[1],
        D=width,
        DV=value_width,
        BLOCK_D=power_of_two(width),
        BLOCK_DV=power_of_two(value_width),
        HEADS=HEADS,
        num_warps=1,
    )


STRIDES = ("k_token", "k_head", "v_token", "v_head")
CACHE_STRIDES = ("k_cache_block", "k_cache_slot", "k_cache_head", "v_cache_block", "v_cache_slot", "v_cache_head")


def _ahead(width: int) -> Ahead:
    pointers = dict.fromkeys(("k", "v", "k_cache", "v_cache"), "*bf16")
    constants = {"S": 16, "D": width, "DV": width, "BLOCK_D": width, "BLOCK_DV": width, "HEADS": HEADS}
    integers = dict.fromkeys((*STRIDES, *CACHE_STRIDES), "i32:16")
    signature = {**pointers, "slots": "*i64", "num_heads": "i32", **integers}
    return Ahead(f"write_kv_{width}", write_kv_kernel, signature, constants, num_warps=1)


AHEAD = (_ahead(64), _ahead(128), _ahead(256))

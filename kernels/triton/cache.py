"""New keys and values scattered into the paged cache. One program per token and group of heads; bound by memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton import narrow
from vkit.kernels.triton.common import Ahead, power_of_two, rounded
from vkit.kernels.triton.narrow import fp8_codes, store_int8

FORMATS: dict[torch.dtype, int] = {
    torch.float8_e4m3fn: narrow.E4M3.value,
    torch.float8_e5m2: narrow.E5M2.value,
    torch.int8: narrow.INT8.value,
}
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
    FORMAT: tl.constexpr,
) -> None:
    """Copy heads of one token, in the cache's type; a narrow cache is bytes."""
    column = tl.arange(0, BLOCK)
    is_value = (head < num_heads)[:, None] & (column < WIDTH)[None, :]
    value = tl.load(rows + head[:, None] * row_head + column[None, :], mask=is_value, other=0.0)
    wide = value.to(tl.float32)
    to = cache + head * cache_head
    if FORMAT == 0:
        tl.store(to[:, None] + column[None, :], rounded(wide, cache.dtype.element_ty), mask=is_value)
    elif FORMAT == 3:
        store_int8(wide, to, is_value, head < num_heads, WIDTH)
    else:
        tl.store(to[:, None] + column[None, :], fp8_codes(wide, FORMAT), mask=is_value)


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
    FORMAT: tl.constexpr,
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
    store_heads(k + token * k_token, k_to, k_head, k_cache_head, head, num_heads, D, BLOCK_D, FORMAT)
    store_heads(v + token * v_token, v_to, v_head, v_cache_head, head, num_heads, DV, BLOCK_DV, FORMAT)


def format_of(dtype: torch.dtype) -> int:
    """How the kernels know a cache of this type."""
    return FORMATS.get(dtype, int(narrow.PLAIN.value))


def as_bytes(cache: Tensor) -> Tensor:
    """A narrow cache as its bytes; any other as it is."""
    return cache.view(torch.uint8) if cache.dtype in FORMATS else cache


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """As the reference of this name, for caches of the plain layout."""
    if not k.numel():
        return
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    num_heads, width, value_width = k.shape[1], k.shape[2], v.shape[2]
    form = format_of(k_cache.dtype)
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
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
        FORMAT=form,
        num_warps=1,
    )


STRIDES = ("k_token", "k_head", "v_token", "v_head")
CACHE_STRIDES = ("k_cache_block", "k_cache_slot", "k_cache_head", "v_cache_block", "v_cache_slot", "v_cache_head")


def _ahead(width: int, dtype: torch.dtype | None = None) -> Ahead:
    cache = "*bf16" if dtype is None else "*u8"
    pointers = {"k": "*bf16", "v": "*bf16", "k_cache": cache, "v_cache": cache}
    form = narrow.PLAIN.value if dtype is None else FORMATS[dtype]
    constants = {"S": 16, "D": width, "DV": width, "BLOCK_D": width, "BLOCK_DV": width, "HEADS": HEADS, "FORMAT": form}
    integers = dict.fromkeys((*STRIDES, *CACHE_STRIDES), "i32:16")
    signature = {**pointers, "slots": "*i64", "num_heads": "i32", **integers}
    name = f"write_kv_{width}" + ("" if dtype is None else f"_{str(dtype).removeprefix('torch.')}")
    return Ahead(name, write_kv_kernel, signature, constants, num_warps=1)


AHEAD = (_ahead(64), _ahead(128), _ahead(256), *(_ahead(128, dtype) for dtype in FORMATS))

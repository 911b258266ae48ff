"""Rotary positions of queries and keys in place, with the norm of each head before it if asked; bound by memory.

One program per token and group of heads, queries and keys in one launch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.triton.common import Ahead, power_of_two, rounded
from vkit.kernels.triton.norm import scaled_row

HEADS = 4
"""Heads one program turns."""


@triton.jit  # type: ignore[untyped-decorator]
def turn_heads(
    x: tl.tensor,
    x_head: tl.tensor,
    head: tl.tensor,
    num_heads: tl.tensor,
    table: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> None:
    """Turn the first R of D entries of some heads of one token; the rest is only normed, or left alone."""
    dtype = x.dtype.element_ty
    pair = tl.arange(0, BLOCK_HALF)
    is_pair = pair < R // 2
    first_column = pair * 2 if IS_INTERLEAVED else pair
    second_column = pair * 2 + 1 if IS_INTERLEAVED else pair + R // 2
    is_value = (head < num_heads)[:, None] & is_pair[None, :]
    x += head[:, None] * x_head
    first = tl.load(x + first_column[None, :], mask=is_value, other=0.0).to(tl.float32)
    second = tl.load(x + second_column[None, :], mask=is_value, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
        rest_column = R + tl.arange(0, BLOCK_REST)
        is_rest_column = rest_column < D
        is_rest = (head < num_heads)[:, None] & is_rest_column[None, :]
        rest = tl.load(x + rest_column[None, :], mask=is_rest, other=0.0).to(tl.float32)
        squares += tl.sum(rest * rest, 1)
        inverse = (1.0 / tl.sqrt_rn(squares / D + eps))[:, None]
        first = scaled_row(
            first, inverse, weight, first_column[None, :], is_pair[None, :], offset, dtype, True, HAS_OFFSET
        ).to(tl.float32)
        second = scaled_row(
            second, inverse, weight, second_column[None, :], is_pair[None, :], offset, dtype, True, HAS_OFFSET
        ).to(tl.float32)
        rest = scaled_row(
            rest, inverse, weight, rest_column[None, :], is_rest_column[None, :], offset, dtype, True, HAS_OFFSET
        )
        tl.store(x + rest_column[None, :], rest, mask=is_rest)
    cos = tl.load(table + pair, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(table + R // 2 + pair, mask=is_pair, other=0.0)[None, :]
    tl.store(x + first_column[None, :], rounded(first * cos - second * sin, dtype), mask=is_value)
    tl.store(x + second_column[None, :], rounded(second * cos + first * sin, dtype), mask=is_value)


@triton.jit(do_not_specialize=["num_q_heads", "num_k_heads"])  # type: ignore[untyped-decorator]
def rope_kernel(
    q: tl.tensor,
    k: tl.tensor,
    positions: tl.tensor,
    cos_sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    num_q_heads: tl.tensor,
    num_k_heads: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    table_row: tl.tensor,
    eps: tl.tensor,
    offset: tl.tensor,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    HEADS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
) -> None:
    """q (T, H, D) and k (T, K, D) by strides; cos_sin (P, R): R/2 cosines, then R/2 sines, of each position."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * table_row
    num_q_groups = tl.cdiv(num_q_heads, HEADS)
    if group < num_q_groups:
        head = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        turn_heads(q + token * q_token, q_head, head, num_q_heads, table, q_weight, eps, offset,
                   D, R, BLOCK_HALF, BLOCK_REST, IS_INTERLEAVED, HAS_NORM, HAS_OFFSET)  # fmt: skip
    else:
        head = ((group - num_q_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        turn_heads(k + token * k_token, k_head, head, num_k_heads, table, k_weight, eps, offset,
                   D, R, BLOCK_HALF, BLOCK_REST, IS_INTERLEAVED, HAS_NORM, HAS_OFFSET)  # fmt: skip


@triton.jit(do_not_specialize=["num_pairs"])  # type: ignore[untyped-decorator]
def axis_table_kernel(
    cos_sin: tl.tensor,
    positions: tl.tensor,
    axes: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    table_row: tl.tensor,
    positions_axis: tl.tensor,
    positions_token: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """out (T, R): cosine and sine of pair i of token t at position positions[axes[i], t]."""
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)
    is_pair = pair < num_pairs
    axis = tl.load(axes + pair, mask=is_pair, other=0)
    position = tl.load(positions + axis * positions_axis + token * positions_token, mask=is_pair, other=0)
    entry = cos_sin + position.to(tl.int64) * table_row + pair
    to = out + token * 2 * num_pairs + pair
    tl.store(to, tl.load(entry, mask=is_pair, other=0.0), mask=is_pair)
    tl.store(to + num_pairs, tl.load(entry + num_pairs, mask=is_pair, other=0.0), mask=is_pair)


def rope(q: Tensor, k: Tensor | None, positions: Tensor, cos_sin: Tensor, interleaved: bool = False) -> None:
    """As the reference of this name."""
    _launch(q, k, None, None, 0.0, 0.0, positions, cos_sin, interleaved)


def qk_norm_rope(
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
    """As the reference of this name."""
    _launch(q, k, q_weight, k_weight, eps, offset, positions, cos_sin, interleaved)


def axis_table(cos_sin: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """As the reference of this name."""
    num_pairs, num_tokens = len(axes), positions.shape[1]
    out = torch.empty(num_tokens, 2 * num_pairs, dtype=cos_sin.dtype, device=cos_sin.device)
    if out.numel():
        axis_table_kernel[(num_tokens,)](
            cos_sin,
            positions,
            axes,
            out,
            num_pairs,
            cos_sin.stride(0),
            *positions.stride(),
            BLOCK=power_of_two(num_pairs),
            num_warps=1,
        )
    return out


def _launch(
    q: Tensor,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    offset: float,
    positions: Tensor,
    cos_sin: Tensor,
    is_interleaved: bool,
) -> None:
    num_k_heads = 0 if k is None else k.shape[1]
    if q.stride(-1) != 1 or (k is not None and k.stride(-1) != 1):
        raise ValueError("rope: the entries of a head must lie next to each other")
    if not q.shape[0]:
        return
    keys = q if k is None else k
    width, turned = q.shape[-1], cos_sin.shape[-1]
    num_groups = triton.cdiv(q.shape[1], HEADS) + triton.cdiv(num_k_heads, HEADS)
    rope_kernel[(q.shape[0], num_groups)](
        q,
        keys,
        positions.contiguous(),
        cos_sin,
        q if q_weight is None else q_weight.contiguous(),
        keys if k_weight is None else k_weight.contiguous(),
        q.shape[1],
        num_k_heads,
        *q.stride()[:2],
        *keys.stride()[:2],
        cos_sin.stride(0),
        eps,
        float(offset),
        D=width,
        R=turned,
        BLOCK_HALF=power_of_two(turned // 2),
        BLOCK_REST=power_of_two(width - turned),
        HEADS=HEADS,
        IS_INTERLEAVED=is_interleaved,
        HAS_NORM=q_weight is not None,
        HAS_OFFSET=bool(offset),
        num_warps=1,
    )


def _ahead(name: str, width: int, turned: int, *, interleaved: bool = False, norm: bool = False) -> Ahead:
    pointers = {"q": "*bf16", "k": "*bf16", "positions": "*i64", "cos_sin": "*fp32"}
    weights = {"q_weight": "*bf16", "k_weight": "*bf16"}
    counts = {"num_q_heads": "i32", "num_k_heads": "i32"}
    strides = dict.fromkeys(("q_token", "q_head", "k_token", "k_head", "table_row"), "i32:16")
    constants = {
        "D": width,
        "R": turned,
        "BLOCK_HALF": power_of_two(turned // 2),
        "BLOCK_REST": power_of_two(width - turned),
        "HEADS": HEADS,
        "IS_INTERLEAVED": interleaved,
        "HAS_NORM": norm,
        "HAS_OFFSET": False,
    }
    signature = {**pointers, **weights, **counts, **strides, "eps": "fp32", "offset": "fp32"}
    return Ahead(name, rope_kernel, signature, constants, num_warps=1)


AHEAD = (
    _ahead("rope_128", 128, 128),
    _ahead("rope_256_of_64", 256, 64),
    _ahead("rope_128_interleaved", 128, 128, interleaved=True),
    _ahead("qk_norm_rope_128", 128, 128, norm=True),
    _ahead("qk_norm_rope_256_of_64", 256, 64, norm=True),
    Ahead(
        "axis_table",
        axis_table_kernel,
        {
            "cos_sin": "*fp32",
            "positions": "*i64",
            "axes": "*i64",
            "out": "*fp32",
            "num_pairs": "i32",
            "table_row": "i32:16",
            "positions_axis": "i32",
            "positions_token": "i32",
        },
        {"BLOCK": 64},
        num_warps=1,
    ),
)

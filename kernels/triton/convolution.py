"""The causal convolution of recurrent layers, and the logarithm of their decay. Bound by memory.

A sequence's state is read by all its outputs, so it is written by a kernel of its own; where every sequence has one
token, one program reads and writes it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vkit.kernels.recurrent import StateBatch
from vkit.kernels.reference import recurrent as reference
from vkit.kernels.triton.common import LOG2E, Ahead, power_of_two, rounded
from vkit.kernels.triton.recurrent import is_stepped, sigmoid, softplus

CHANNELS = 256
TOKENS = 16
"""Channels and tokens of one program. Not measured."""
BLOCK = 1024


@triton.jit(do_not_specialize=["num_tokens", "num_sequences"])  # type: ignore[untyped-decorator]
def convolve_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    state: tl.tensor,
    out: tl.tensor,
    blocks: tl.tensor,
    is_fresh: tl.tensor,
    cu_seqlens: tl.tensor,
    num_tokens: tl.tensor,
    num_sequences: tl.tensor,
    channels: tl.tensor,
    x_token: tl.tensor,
    weight_row: tl.tensor,
    state_row: tl.tensor,
    TAPS: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SHIFTS: tl.constexpr,
) -> None:
    """out (T, C) = silu(Σ_j weight[:, j] x[t − TAPS + 1 + j] + bias), of a tile of tokens and channels.

    Inputs before a sequence's first token are in state (N, C, TAPS − 1). SHIFTS: every sequence has one token, which
    enters its state here.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = (channel < channels)[None, :]
    is_token = token < num_tokens
    if SHIFTS:
        sequence = token
        place = tl.zeros([TOKENS], tl.int32)
    else:
        low = tl.zeros([TOKENS], tl.int32)
        high = low + num_sequences
        steps = num_sequences
        while steps > 0:
            steps = steps // 2
            middle = (low + high) // 2
            is_above = (tl.load(cu_seqlens + middle) <= token) & (low < high)
            high = tl.where(is_above | (low >= high), high, middle)
            low = tl.where(is_above, middle + 1, low)
        sequence = low - 1
        place = token - tl.load(cu_seqlens + sequence, mask=is_token, other=0)
    own = tl.load(blocks + sequence, mask=is_token, other=-1)
    is_known = (own >= 0) & (tl.load(is_fresh + sequence, mask=is_token, other=1) == 0)
    past_at = state + own[:, None] * state_row + channel[None, :] * (TAPS - 1)
    x_at = x + token.to(tl.int64)[:, None] * x_token + channel[None, :]
    total = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=channel < channels, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        is_present = (is_token & (place >= back))[:, None] & is_channel
        value = tl.load(x_at - back * x_token, mask=is_present, other=0.0).to(tl.float32)
        if back > 0:
            is_past = (is_token & is_known & (place < back))[:, None] & is_channel
            at = past_at + (place + tap)[:, None]
            value += tl.load(at, mask=is_past, other=0.0).to(tl.float32)
        if SHIFTS:
            tl.debug_barrier()  # what is written next is read no longer
            if tap > 0:
                kept = rounded(value, state.dtype.element_ty)
                tl.store(past_at + tap - 1, kept, mask=(is_token & (own >= 0))[:, None] & is_channel)
        scale = tl.load(weight + channel * weight_row + tap, mask=channel < channels, other=0.0).to(tl.float32)
        total += value * scale[None, :]
    to = out + token.to(tl.int64)[:, None] * channels + channel[None, :]
    tl.store(to, rounded(total * sigmoid(total), out.dtype.element_ty), mask=is_token[:, None] & is_channel)


@triton.jit  # type: ignore[untyped-decorator]
def keep_kernel(
    x: tl.tensor,
    state: tl.tensor,
    blocks: tl.tensor,
    is_fresh: tl.tensor,
    cu_seqlens: tl.tensor,
    targets: tl.tensor,
    channels: tl.tensor,
    x_token: tl.tensor,
    state_row: tl.tensor,
    TAPS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_TARGETS: tl.constexpr,
) -> None:
    """The last TAPS − 1 inputs of a sequence into its state, or after each token into its own. Grid (B, pieces)."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channel < channels
    start = tl.load(cu_seqlens + sequence)
    count = tl.load(cu_seqlens + sequence + 1) - start
    own = tl.load(blocks + sequence)
    is_known = (own >= 0) & (tl.load(is_fresh + sequence) == 0)
    first = tl.maximum(count - 1, 0)
    is_each = False
    if HAS_TARGETS:
        is_each = is_stepped(targets, start, count, HAS_TARGETS)
        if is_each:
            first = first * 0
    for last in range(first, count):
        to = own
        if HAS_TARGETS:  # noqa: SIM102 (the outer one is chosen while compiling)
            if is_each:
                to = tl.load(targets + start + last)
        # In order of place: what a place takes lies at its own or a later one, so a state may become its own successor.
        for kept in tl.static_range(TAPS - 1):
            place = last - (TAPS - 2) + kept
            x_at = x + (start + place).to(tl.int64) * x_token + channel
            value = tl.load(x_at, mask=is_channel & (place >= 0), other=0.0).to(tl.float32)
            past_at = state + own * state_row + channel * (TAPS - 1) + (place + TAPS - 1)
            value += tl.load(past_at, mask=is_channel & is_known & (place < 0), other=0.0).to(tl.float32)
            at = state + to * state_row + channel * (TAPS - 1) + kept
            tl.debug_barrier()
            tl.store(at, rounded(value, state.dtype.element_ty), mask=is_channel & (to >= 0))


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def log_decay_kernel(
    x: tl.tensor,
    rate: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    columns: tl.tensor,
    x_row: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """out = −exp(rate) softplus(x + bias), float32; rows of `columns` values, WIDTH for each entry of rate."""
    cell = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = cell // columns, cell % columns
    is_cell = row < num_rows
    value = tl.load(x + row * x_row + column, mask=is_cell, other=0.0).to(tl.float32)
    value += tl.load(bias + column, mask=is_cell, other=0.0).to(tl.float32)
    speed = tl.exp2(tl.load(rate + column // WIDTH, mask=is_cell, other=0.0).to(tl.float32) * LOG2E)
    tl.store(out + cell, -speed * softplus(value), mask=is_cell)


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, batch: StateBatch) -> Tensor:
    """As the reference of this name."""
    channels, taps = weight.shape
    if taps < 2 or (batch.verified and state.dtype is not x.dtype):  # then states round what the inputs are not
        return reference.causal_conv1d(x, weight, bias, state, batch)
    x = x if x.stride(-1) == 1 else x.contiguous()
    weight = weight if weight.stride(-1) == 1 else weight.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_tokens, num_sequences = x.shape[0], len(batch.host_cu_seqlens) - 1
    if not out.numel():
        return out
    if state.stride(1) != taps - 1 or state.stride(2) != 1:
        raise ValueError(f"causal_conv1d: state of strides {state.stride()}, expected the inputs of a channel together")
    shifts = num_tokens == num_sequences and all(
        after - before == 1 for before, after in zip(batch.host_cu_seqlens, batch.host_cu_seqlens[1:], strict=False)
    )
    shifts = shifts and batch.targets is None
    tiles: dict[str, Any] = {"TAPS": taps, "CHANNELS": min(CHANNELS, power_of_two(channels)), "num_warps": 4}
    pieces = triton.cdiv(channels, tiles["CHANNELS"])
    tokens = 1 if shifts else TOKENS
    convolve_kernel[(triton.cdiv(num_tokens, tokens), pieces)](
        x, weight, weight if bias is None else bias, state, out, batch.blocks, batch.is_fresh, batch.cu_seqlens,
        num_tokens, num_sequences, channels, x.stride(0), weight.stride(0), state.stride(0),
        TOKENS=tokens, HAS_BIAS=bias is not None, SHIFTS=shifts, **tiles,
    )  # fmt: skip
    if not shifts:
        keep_kernel[(num_sequences, pieces)](
            x, state, batch.blocks, batch.is_fresh, batch.cu_seqlens,
            batch.blocks if batch.targets is None else batch.targets, channels, x.stride(0), state.stride(0),
            HAS_TARGETS=batch.targets is not None, num_stages=2, **tiles,
        )  # fmt: skip
    return out


def log_decay(x: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
    """As the reference of this name."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if not out.numel():
        return out
    columns = out[0].numel()
    flat = x if x.ndim == 2 else x.flatten(1)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    log_decay_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        flat, rate.contiguous(), bias.contiguous(), out, out.shape[0], columns, flat.stride(0),
        WIDTH=columns // rate.shape[0], BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


BATCH = {"blocks": "*i64", "is_fresh": "*i1", "cu_seqlens": "*i32"}
STRIDES = dict.fromkeys(("channels", "x_token", "state_row"), "i32:16")


def _ahead_convolve(shifts: bool) -> Ahead:
    pointers = dict.fromkeys(("x", "weight", "bias", "state", "out"), "*bf16")
    numbers = {"num_tokens": "i32", "num_sequences": "i32", **STRIDES, "weight_row": "i32"}
    constants = {"TAPS": 4, "TOKENS": 1 if shifts else TOKENS, "CHANNELS": CHANNELS, "HAS_BIAS": True, "SHIFTS": shifts}
    name = f"causal_conv1d{'_step' * shifts}"
    return Ahead(name, convolve_kernel, {**pointers, **BATCH, **numbers}, constants)


AHEAD = (
    _ahead_convolve(False),
    _ahead_convolve(True),
    Ahead(
        "causal_conv1d_keep",
        keep_kernel,
        {"x": "*bf16", "state": "*bf16", **BATCH, "targets": "*i64", **STRIDES},
        {"TAPS": 4, "CHANNELS": CHANNELS, "HAS_TARGETS": True},
    ),
    Ahead(
        "log_decay",
        log_decay_kernel,
        {
            "x": "*bf16",
            "rate": "*fp32",
            "bias": "*fp32",
            "out": "*fp32",
            "num_rows": "i32",
            "columns": "i32",
            "x_row": "i32",
        },
        {"WIDTH": 1, "BLOCK": BLOCK},
    ),
)

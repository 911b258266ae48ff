"""What the ops that keep a state must move and multiply, at the sizes of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkit.kernels.recurrent import ScanConstants, StateBatch

TAPS = 4
CHUNK = 64
"""Tokens per chunk in the count of operations."""


@dataclass(frozen=True)
class LayerSizes:
    """Value heads and the width of each; half as many key heads."""

    heads: int
    width: int
    batches: tuple[int, ...]
    """Sequences that decode together."""
    prompt: int


Item = tuple[str, str, Callable[[], tuple[Any, ...]], int, int]
"""Op, label, arguments, bytes that must move, operations of products (0: the op is bound by the bytes)."""


def works(device: torch.device, s: LayerSizes) -> Iterator[Item]:
    """Decoding at each batch, and one prompt."""
    for batch in s.batches:
        yield from _items(device, s, batch, 1, f"decode, {batch} x 1")
    yield from _items(device, s, 1, s.prompt, f"prefill, {s.prompt}")


def _items(device: torch.device, s: LayerSizes, batch: int, length: int, label: str) -> Iterator[Item]:
    tokens, heads, width, key_heads = batch * length, s.heads, s.width, max(1, s.heads // 2)
    channels = (2 * key_heads + heads) * width

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def states(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, StateBatch]:
        cu = list(range(0, tokens + 1, length))
        on_device = torch.tensor(cu, dtype=torch.int32, device=device)
        is_fresh = torch.zeros(batch, dtype=torch.bool, device=device)
        return normal(batch, *shape, dtype=dtype), StateBatch(
            torch.randperm(batch, device=device), is_fresh, on_device, cu
        )

    def convolution() -> tuple[Any, ...]:
        state, steps = states(channels, TAPS - 1, dtype=torch.bfloat16)
        return normal(tokens, channels), normal(channels, TAPS), None, state, steps

    moved = 4 * tokens * channels + 4 * batch * channels * (TAPS - 1)
    yield "causal_conv1d", f"{label}, {channels} channels", convolution, moved, 0

    float32 = torch.float32
    scalars = (normal(heads, dtype=float32), normal(heads, dtype=float32))
    yield "log_decay", f"{label}, {heads} heads", lambda: (normal(tokens, heads), *scalars), 6 * tokens * heads, 0

    def delta(has_channels: bool) -> Callable[[], tuple[Any, ...]]:
        def make() -> tuple[Any, ...]:
            decay = -normal(tokens, heads, *[width] * has_channels, dtype=float32).square()
            q, k, v = (normal(tokens, count, width) for count in (key_heads, key_heads, heads))
            return q, k, v, decay, normal(tokens, heads), *states(heads, width, width)

        return make

    matrices = 8 * batch * heads * width * width
    flop = tokens * heads * (6 * width * width + 10 * CHUNK * width) if length > 1 else 0
    sizes = f"{heads} heads of {width} x {width}"
    yield "gated_delta_net", f"{label}, {sizes}", delta(False), matrices, flop
    yield "gated_delta_net", f"{label}, {sizes}, a decay per channel", delta(True), matrices, flop

    narrow = max(1, width // 2)

    def scan() -> tuple[Any, ...]:
        rate, skip, bias = (normal(heads, dtype=float32) for _ in range(3))
        constants = ScanConstants(rate, skip, bias, 0.01)
        state, steps = states(heads, width, narrow)
        b, c = normal(tokens, 1, width), normal(tokens, 1, width)
        return normal(tokens, heads, narrow), normal(tokens, heads), b, c, constants, state, steps

    flop = tokens * heads * (4 * width * narrow + 2 * CHUNK * (width + narrow)) if length > 1 else 0
    yield "mamba2_scan", f"{label}, {heads} heads of {width} x {narrow}", scan, matrices // 2, flop

"""Native recurrent ops against the reference at every level, and the same bits however a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.recurrent import ScanConstants, StateBatch
from vkit.kernels.reference import OPS

COUNTS = [5, 1, 70, 1]
BLOCKS = [4, 0, 2, 5]
FRESH = [True, False, False, True]

Op = Callable[[Any, Tensor, StateBatch, slice], Tensor]
"""(ops, state, batch, tokens) -> output"""


@pytest.fixture
def native(library: Library) -> Operations:
    """Without a reference to fall back on."""
    return Operations(library, {})


def batch_of(counts: list[int], blocks: list[int], fresh: list[bool]) -> StateBatch:
    cu = [0, *torch.tensor(counts).cumsum(0).tolist()]
    return StateBatch(torch.tensor(blocks), torch.tensor(fresh), torch.tensor(cu, dtype=torch.int32), cu)


class ByName:
    def __getattr__(self, name: str) -> Callable[..., Tensor]:
        return OPS[name]


CUTS = (1, 40, 29)
CHUNK = 16
"""Tokens that the native delta rule takes together: a prompt cut at a multiple of them gives the same bits."""


def check(native: Operations, op: Op, state: Tensor, tolerance: float, cuts: tuple[int, ...] = CUTS) -> None:
    states = state.clone(), state.clone()
    batch, all_tokens = batch_of(COUNTS, BLOCKS, FRESH), slice(0, sum(COUNTS))
    got = op(native, states[0], batch, all_tokens)
    expected = op(ByName(), states[1], batch, all_tokens)
    assert got.dtype is expected.dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(states[0], states[1], atol=tolerance, rtol=tolerance)
    assert torch.equal(states[0][[1, 3]], state[[1, 3]])
    # The third sequence alone, in three steps: the same bits.
    alone, start, first = state.clone(), 6, True
    pieces = []
    for count in cuts:
        step = batch_of([count], [2], [first and FRESH[2]])
        pieces.append(op(native, alone, step, slice(start, start + count)))
        start, first = start + count, False
    assert torch.equal(torch.cat(pieces), got[6:76])
    assert torch.equal(alone[2], states[0][2])


@pytest.mark.parametrize("channels", [5, 16, 100])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_convolution(channels: int, state_dtype: torch.dtype, level: str, num_threads: int, native: Operations) -> None:
    x = torch.randn(sum(COUNTS), channels + 4).to(state_dtype).float()[:, 1 : channels + 1]
    weight, bias = torch.randn(channels, 4), torch.randn(channels).bfloat16()
    state = torch.randn(6, channels, 3).to(state_dtype)

    def op(ops: Any, state: Tensor, batch: StateBatch, tokens: slice) -> Tensor:
        result: Tensor = ops.causal_conv1d(x[tokens], weight, bias, state, batch)
        return result

    check(native, op, state, 2e-6)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize(("key_dim", "value_dim", "is_tiled"), [(16, 32, False), (24, 40, True), (128, 7, False)])
def test_delta_rule(
    key_dim: int, value_dim: int, is_tiled: bool, per_channel: bool, level: str, num_threads: int, native: Operations
) -> None:
    total = sum(COUNTS)
    mixed = torch.randn(total, 2 * 2 * key_dim + 4 * value_dim + 3)
    q, k, v, _ = mixed.split([2 * key_dim, 2 * key_dim, 4 * value_dim, 3], dim=1)
    q, k, v = q.unflatten(1, (2, key_dim)), k.unflatten(1, (2, key_dim)), v.unflatten(1, (4, value_dim))
    decay = -torch.rand(total, 4, *([key_dim] if per_channel else []))
    write = torch.randn(total, 9)[:, 2:6]

    def op(ops: Any, state: Tensor, batch: StateBatch, tokens: slice) -> Tensor:
        parts = (x[tokens] for x in (q, k, v, decay, write))
        result: Tensor = ops.gated_delta_net(*parts, state, batch, is_tiled)
        return result

    state = torch.randn(6, 4, key_dim, value_dim)
    check(native, op, state, 1e-5, (CHUNK, 2 * CHUNK, 70 - 3 * CHUNK))
    # Cut elsewhere: other chunks, the same values. One token after the other is the recurrence itself.
    whole = native.gated_delta_net(q, k, v, decay, write, state.clone(), batch_of(COUNTS, BLOCKS, FRESH), is_tiled)
    for cuts in (CUTS, (1,) * 70):
        start, pieces, alone = 6, [], state.clone()
        for count in cuts:
            pieces.append(op(native, alone, batch_of([count], [2], [False]), slice(start, start + count)))
            start += count
        torch.testing.assert_close(torch.cat(pieces), whole[6:76], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("speed", [1e-6, 1.0, 30.0, 3000.0])
def test_delta_rule_at_any_decay(per_channel: bool, speed: float, level: str, native: Operations) -> None:
    """Nothing overflows when a chunk forgets more than a float's range; keys that are all alike are the hard system."""
    q, v = torch.randn(64, 2, 32), torch.randn(64, 2, 40)
    k = torch.randn(1, 2, 32) + 1e-3 * torch.randn(64, 2, 32)
    decay = -speed * torch.rand(64, 2, *([32] if per_channel else []))
    write = 3 + torch.randn(64, 2)
    states = torch.randn(1, 2, 32, 40), torch.zeros(1, 2, 32, 40)
    states[1].copy_(states[0])
    got, expected = (
        ops.gated_delta_net(q, k, v, decay, write, state, batch_of([64], [0], [False]), False)
        for ops, state in zip((native, ByName()), states, strict=True)
    )
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(*states, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("state_size", "head_dim"), [(16, 32), (128, 20)])
def test_scan(state_size: int, head_dim: int, level: str, num_threads: int, native: Operations) -> None:
    total = sum(COUNTS)
    x, step = torch.randn(total, 4, head_dim), torch.randn(total, 4)
    b, c = (torch.randn(total, 2, state_size) / 8 for _ in range(2))
    constants = ScanConstants(torch.randn(4), torch.randn(4), torch.randn(4), 0.05)

    def op(ops: Any, state: Tensor, batch: StateBatch, tokens: slice) -> Tensor:
        parts = (value[tokens] for value in (x, step, b, c))
        result: Tensor = ops.mamba2_scan(*parts, constants, state, batch)
        return result

    check(native, op, torch.randn(6, 4, state_size, head_dim), 2e-5)


@pytest.mark.parametrize("width", [(), (7,), (32,)])
def test_decay(width: tuple[int, ...], level: str, native: Operations) -> None:
    x, rate, bias = 8 * torch.randn(9, 3, *width), torch.randn(3), torch.randn(3, *width)
    x[0, 0] = 100.0
    torch.testing.assert_close(native.log_decay(x, rate, bias), OPS["log_decay"](x, rate, bias), atol=1e-6, rtol=2e-6)


def test_strange_sequences_leave_the_past_alone(level: str, native: Operations) -> None:
    """A sequence that begins does not see a state of NaN."""
    state = torch.full((2, 16, 3), float("nan"))
    out = native.causal_conv1d(torch.ones(2, 16), torch.ones(16, 4), None, state, batch_of([2], [1], [True]))
    torch.testing.assert_close(out, torch.nn.functional.silu(torch.tensor([1.0, 2.0])).unsqueeze(1).expand(2, 16))
    assert state[0].isnan().all()
    assert torch.equal(state[1], torch.tensor([0.0, 1.0, 1.0]).expand(16, 3))

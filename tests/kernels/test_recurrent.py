"""Recurrent ops against loops over tokens in double precision, however the tokens are cut into steps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vkit import kernels
from vkit.kernels import ScanConstants, StateBatch

CUTS = [[[1, 1]], [[5, 3]], [[1, 4], [6, 1], [1, 1]], [[100, 1], [1, 30]], [[70, 129]]]
"""Steps, each with the tokens of two sequences."""


def batches(cut: list[list[int]]) -> list[StateBatch]:
    """The steps of two sequences that live in rows 3 and 1; both are fresh in the first."""
    steps = []
    for index, (first, second) in enumerate(cut):
        cu = [0, first, first + second]
        is_fresh = torch.tensor([index == 0] * 2)
        steps.append(StateBatch(torch.tensor([3, 1]), is_fresh, torch.tensor(cu, dtype=torch.int32), cu))
    return steps


def split(cut: list[list[int]], sequences: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Each step's tokens, both sequences' one after the other."""
    parts = [value.split([step[b] for step in cut]) for b, value in enumerate(sequences)]
    return [torch.cat(pair) for pair in zip(*parts, strict=True)]


def joined(cut: list[list[int]], outs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The inverse of `split`."""
    pairs = [out.split(step) for out, step in zip(outs, cut, strict=True)]
    return torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])


def nan_state(*shape: int) -> Tensor:
    return torch.full((5, *shape), float("nan"))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("backend")
def test_convolution(cut: list[list[int]], has_bias: bool) -> None:
    totals = [sum(step[b] for step in cut) for b in (0, 1)]
    sequences = torch.randn(totals[0], 6), torch.randn(totals[1], 6)
    weight, bias = torch.randn(6, 4), torch.randn(6) if has_bias else None
    state = nan_state(6, 3)
    steps = zip(split(cut, sequences), batches(cut), strict=True)
    outs = joined(cut, [kernels.causal_conv1d(x, weight, bias, state, batch) for x, batch in steps])
    for x, out, row in zip(sequences, outs, (3, 1), strict=True):
        padded = torch.cat([torch.zeros(3, 6), x])
        expected = torch.stack([(padded[t : t + 4] * weight.T).sum(0) for t in range(len(x))])
        expected = torch.nn.functional.silu(expected if bias is None else expected + bias)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state[row], padded[-3:].T)
    assert state[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize(("per_channel", "is_tiled"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("backend")
def test_delta_rule(cut: list[list[int]], per_channel: bool, is_tiled: bool) -> None:
    totals = [sum(step[b] for step in cut) for b in (0, 1)]
    shapes = {"q": (2, 8), "k": (2, 8), "v": (4, 6), "decay": (4, 8) if per_channel else (4,), "write": (4,)}
    sequences = {name: tuple(torch.randn(total, *shape) for total in totals) for name, shape in shapes.items()}
    sequences["decay"] = tuple(-3 * value.square() for value in sequences["decay"])  # some forget at once
    state = nan_state(4, 8, 6)
    outs = []
    arguments = [split(cut, (pair[0], pair[1])) for pair in sequences.values()]
    for index, batch in enumerate(batches(cut)):
        q, k, v, decay, write = (values[index] for values in arguments)
        outs.append(kernels.gated_delta_net(q, k, v, decay, write, state, batch, is_tiled))
    for b, (out, row) in enumerate(zip(joined(cut, outs), (3, 1), strict=True)):
        q, k, v, decay, write = (pair[b].double() for pair in sequences.values())
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        matrix = torch.zeros(4, 8, 6, dtype=torch.float64)
        for t in range(len(v)):
            for head in range(4):
                source = head % 2 if is_tiled else head // 2
                fade = decay[t, head].exp()
                old = matrix[head] * (fade.unsqueeze(1) if per_channel else fade)
                error = v[t, head] - old.T @ k[t, source]
                matrix[head] = old + torch.outer(k[t, source], error * write[t, head].sigmoid())
                expected = matrix[head].T @ q[t, source] * 8**-0.5
                torch.testing.assert_close(out[t, head].double(), expected, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(state[row].double(), matrix, atol=2e-5, rtol=1e-4)
    assert state[[0, 2, 4]].isnan().all()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.usefixtures("backend")
def test_state_space(cut: list[list[int]]) -> None:
    totals = [sum(step[b] for step in cut) for b in (0, 1)]
    shapes = {"x": (4, 6), "step": (4,), "b": (2, 8), "c": (2, 8)}
    sequences = {name: tuple(torch.randn(total, *shape) for total in totals) for name, shape in shapes.items()}
    constants = ScanConstants(torch.randn(4), torch.randn(4), torch.randn(4), 0.5)
    state = nan_state(4, 8, 6)
    outs = []
    arguments = [split(cut, (pair[0], pair[1])) for pair in sequences.values()]
    for index, batch in enumerate(batches(cut)):
        x, step, b, c = (values[index] for values in arguments)
        outs.append(kernels.mamba2_scan(x, step, b, c, constants, state, batch))
    for index, (out, row) in enumerate(zip(joined(cut, outs), (3, 1), strict=True)):
        x, step, b, c = (pair[index].double() for pair in sequences.values())
        size = torch.nn.functional.softplus(step + constants.step_bias).clamp_min(0.5)
        matrix = torch.zeros(4, 8, 6, dtype=torch.float64)
        for t in range(len(x)):
            for head in range(4):
                fade = (-constants.rate[head].exp() * size[t, head]).exp()
                matrix[head] = matrix[head] * fade + size[t, head] * torch.outer(b[t, head // 2], x[t, head])
                expected = matrix[head].T @ c[t, head // 2] + constants.skip[head] * x[t, head]
                torch.testing.assert_close(out[t, head].double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(state[row].double(), matrix, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("backend")
def test_decay() -> None:
    x, rate, bias = torch.tensor([[[1.0, -30.0], [2.0, 30.0]]]), torch.tensor([0.5, -1.0]), torch.zeros(2, 2)
    out = kernels.log_decay(x, rate, bias)
    expected = -rate.exp().view(1, 2, 1) * torch.log1p(x.double().exp()).float()
    torch.testing.assert_close(out, expected)
    assert kernels.log_decay(x[..., 0].bfloat16(), rate, bias[0]).dtype is torch.float32


@pytest.mark.parametrize("op", ["convolution", "delta rule", "state space"])
@pytest.mark.usefixtures("backend")
def test_a_verification_leaves_the_state_after_each_token(op: str) -> None:
    """One sequence of four tokens under verification beside one that goes on as ever: as in steps of their own."""
    tokens = 4 + 2
    x, q, k, v = torch.randn(tokens, 6), *torch.randn(2, tokens, 2, 8), torch.randn(tokens, 4, 6)
    b, c, decay, write = *torch.randn(2, tokens, 2, 8), -torch.rand(tokens, 4), torch.randn(tokens, 4)
    weight, constants = torch.randn(6, 4), ScanConstants(*torch.rand(3, 4), 0.01)

    def run(rows: slice, state: Tensor, batch: StateBatch) -> Tensor:
        if op == "convolution":
            return kernels.causal_conv1d(x[rows], weight, None, state, batch)
        if op == "delta rule":
            return kernels.gated_delta_net(q[rows], k[rows], v[rows], decay[rows], write[rows], state, batch)
        return kernels.mamba2_scan(v[rows], write[rows], b[rows], c[rows], constants, state, batch)

    def steps(count: int, row: int) -> StateBatch:
        cu = [0, count]
        return StateBatch(torch.tensor([row]), torch.tensor([False]), torch.tensor(cu, dtype=torch.int32), cu)

    shape = (6, 3) if op == "convolution" else (4, 8, 6)
    before = torch.randn(8, *shape)
    state, expected = before.clone(), before.clone()
    cu, targets = [0, 4, 6], torch.tensor([4, 5, 6, 3, -1, 1])
    batch = StateBatch(
        torch.tensor([3, 1]), torch.tensor([False] * 2), torch.tensor(cu, dtype=torch.int32), cu, targets, [0]
    )
    out = run(slice(0, 6), state, batch)
    outs = []
    for token, target in enumerate([4, 5, 6, 3]):
        outs.append(run(slice(token, token + 1), expected, steps(1, 3)))
        if target != 3:
            expected[target] = expected[3]
    outs.append(run(slice(4, 6), expected, steps(2, 1)))
    torch.testing.assert_close(out, torch.cat(outs), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(state[[0, 2, 7]], before[[0, 2, 7]])


def test_errors_name_op_argument_got_and_wanted() -> None:
    (batch,) = batches([[1, 1]])
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"causal_conv1d: state \(5, 4, 2\), expected \(N, 4, 3\)"):
        kernels.causal_conv1d(x, torch.zeros(4, 4), None, torch.zeros(5, 4, 2), batch)
    heads, scalars = torch.zeros(2, 3, 4), torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"gated_delta_net: state \(5, 3, 4\), expected \(N, 3, 4, 4\)"):
        kernels.gated_delta_net(heads, heads, heads, scalars, scalars, torch.zeros(5, 3, 4), batch)
    with pytest.raises(ValueError, match=r"log_decay: rate \(2,\)"):
        kernels.log_decay(scalars, torch.zeros(2), torch.zeros(3))
    constants = ScanConstants(torch.zeros(3), torch.zeros(3), torch.zeros(3), 0.0)
    with pytest.raises(ValueError, match=r"mamba2_scan: step \(2, 4\), expected \(2, 3\)"):
        kernels.mamba2_scan(heads, x, heads, heads, constants, torch.zeros(5, 3, 4, 4), batch)

"""Native experts at every level: the choice, products of every kind of weight, and independence of the other tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vkit.kernels.cpu.library import Library
from vkit.kernels.cpu.ops import Operations
from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.reference import OPS
from vkit.kernels.scaled import ScaledMatrix

NUM_EXPERTS, TOP_K, HIDDEN, INNER = 5, 2, 64, 48
KINDS = ["Q8_0", "Q4_0", "bfloat16", "float16", "float32", "scaled"]


@pytest.fixture
def native(library: Library) -> Operations:
    """Without a reference to fall back on."""
    return Operations(library, {})


def matrix_of(kind: str, rows: int, columns: int, golden: dict[str, Tensor]) -> ExpertMatrix:
    scales = torch.rand(NUM_EXPERTS) + 0.5
    if kind in ("Q8_0", "Q4_0"):
        raw, values = golden[f"{kind}.raw"], golden[f"{kind}.values"]
        raw = raw[values.isfinite().all(1) & (values.abs().amax(1) < 4)]
        index = torch.randint(0, len(raw), (NUM_EXPERTS, rows, columns // 32))
        return ExpertMatrix(tuple(raw[index].flatten(2).unbind(0)), kind, scales)
    if kind == "scaled":
        codes = torch.randint(-(1 << 31), 1 << 31, (NUM_EXPERTS, rows, columns // 8)).int()
        return ExpertMatrix(
            tuple(
                ScaledMatrix("words", part, torch.rand(rows, 1) / 8, (rows, columns), (1, columns), bits=4, zero=8)
                for part in codes
            )
        )
    return ExpertMatrix(tuple((torch.randn(NUM_EXPERTS, rows, columns) / 8).to(getattr(torch, kind)).unbind(0)))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_experts(
    kind: str,
    is_exact: bool,
    activation: str,
    level: str,
    num_threads: int,
    native: Operations,
    golden_blocks: dict[str, Tensor],
) -> None:
    native.is_exact = is_exact
    inner = 64 if kind in ("Q8_0", "Q4_0", "scaled") else INNER
    shapes = (
        [(inner, HIDDEN)] if activation == "relu2" else [(2 * inner, HIDDEN)] if is_exact else 2 * [(inner, HIDDEN)]
    )
    gate_up = [matrix_of(kind, *shape, golden_blocks) for shape in shapes]
    down = matrix_of(kind, HIDDEN, inner, golden_blocks)
    x = torch.randn(37, HIDDEN)
    weights, ids = torch.rand(37, TOP_K), torch.randint(0, NUM_EXPERTS - 1, (37, TOP_K))  # the last stays idle
    got = native.run_experts(x, weights, ids, gate_up, down, activation)
    expected = OPS["run_experts"](x, weights, ids, gate_up, down, activation)
    error = (got - expected).double().square().mean().sqrt() / expected.double().square().mean().sqrt()
    assert error < (1e-5 if is_exact or kind in ("float16", "float32") else 0.03)
    for tokens in (slice(0, 1), slice(3, 20)):
        alone = native.run_experts(x[tokens], weights[tokens], ids[tokens], gate_up, down, activation)
        assert torch.equal(alone, got[tokens])


def test_no_tokens_and_unknown_experts(level: str, native: Operations) -> None:
    matrix = ExpertMatrix(tuple(torch.randn(3, 16, 16).unbind(0)))
    none = native.run_experts(torch.ones(0, 16), torch.ones(0, 2), torch.zeros(0, 2).long(), [matrix], matrix, "relu2")
    assert none.shape == (0, 16)
    ids = torch.tensor([[0, 3], [1, 2], [-1, 0]])
    out = native.run_experts(torch.ones(3, 16), torch.ones(3, 2), ids, [matrix], matrix, "relu2")
    assert out[[0, 2]].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2), (16, 3)])
@pytest.mark.parametrize("renormalizes", [False, True])
def test_route(
    scoring: str, has_bias: bool, groups: int, kept: int, renormalizes: bool, level: str, native: Operations
) -> None:
    logits = torch.randn(33, 16)
    logits[0] = 1.0
    logits[1, 3] = float("nan")
    logits[2, 5] = float("inf")
    bias = torch.randn(16) if has_bias else None
    arguments = (logits, bias, 3, scoring, groups, kept, renormalizes, 2.5)
    for got, expected in zip(
        native.route_scored_experts(*arguments), OPS["route_scored_experts"](*arguments), strict=True
    ):
        torch.testing.assert_close(got, expected)
    for got, expected in zip(
        native.route_experts(logits, 4, renormalizes), OPS["route_experts"](logits, 4, renormalizes), strict=True
    ):
        torch.testing.assert_close(got, expected)

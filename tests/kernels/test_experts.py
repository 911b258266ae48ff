"""Experts against a loop over tokens."""

from __future__ import annotations

import pytest
import torch

from vkit import kernels
from vkit.kernels import ExpertMatrix


@pytest.mark.parametrize("renormalizes", [False, True])
@pytest.mark.usefixtures("backend")
def test_route(renormalizes: bool) -> None:
    logits = torch.randn(9, 7)
    weights, ids = kernels.route_experts(logits, 3, renormalizes)
    assert weights.dtype == torch.float32
    for row, row_weights, row_ids in zip(logits, weights, ids, strict=True):
        probabilities = row.double().softmax(-1).tolist()
        best = sorted(range(7), key=lambda e: -probabilities[e])[:3]
        total = sum(probabilities[e] for e in best) if renormalizes else 1.0
        assert row_ids.tolist() == best
        assert row_weights.tolist() == pytest.approx([probabilities[e] / total for e in best], abs=1e-6)


@pytest.mark.usefixtures("backend")
def test_route_ties_and_non_finite() -> None:
    weights, ids = kernels.route_experts(torch.zeros(1, 5), 2, True)
    assert ids.tolist() == [[0, 1]]
    assert weights.tolist() == [[0.5, 0.5]]
    weights, _ = kernels.route_experts(torch.tensor([[float("nan"), 1.0, 2.0]]), 2, True)
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [0, 1, 11])
@pytest.mark.usefixtures("backend")
def test_experts(num_tokens: int, activation: str, is_fused: bool) -> None:
    x = torch.randn(num_tokens, 12)
    gate, up, down = torch.randn(6, 10, 12), torch.randn(6, 10, 12), torch.randn(6, 12, 10)
    weights, ids = torch.rand(num_tokens, 2), torch.randint(0, 5, (num_tokens, 2))  # expert 5 stays idle
    parts = [torch.cat([gate, up], dim=1)] if is_fused else [gate, up]
    matrices = [ExpertMatrix(tuple(part.unbind(0))) for part in parts]
    scales = torch.rand(6)
    out = kernels.run_experts(x, weights, ids, matrices, ExpertMatrix(tuple(down.unbind(0)), None, scales), activation)
    act = torch.nn.functional.silu if activation == "silu" else lambda v: kernels.unary(v, "gelu_tanh")
    for token in range(num_tokens):
        expected = torch.zeros(12)
        for weight, e in zip(weights[token], ids[token].tolist(), strict=True):
            expected += weight * scales[e] * (down[e] @ (act(gate[e] @ x[token]) * (up[e] @ x[token])))
        torch.testing.assert_close(out[token], expected, atol=1e-4, rtol=1e-4)


def test_errors_name_op_argument_got_and_wanted() -> None:
    x, matrix = torch.randn(2, 4), ExpertMatrix((torch.randn(6, 4),))
    one, ids = torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"route_experts: top_k 5, expected 1..4"):
        kernels.route_experts(x, 5, True)
    with pytest.raises(ValueError, match=r"run_experts: activation 'relu'"):
        kernels.run_experts(x, one, ids, [matrix], matrix, "relu")
    with pytest.raises(ValueError, match=r"run_experts: weights \(1, 1\) and ids \(2, 1\), expected \(2, k\) both"):
        kernels.run_experts(x, one[:1], ids, [matrix], matrix)
    with pytest.raises(ValueError, match=r"run_experts: 0 gate_up matrices"):
        kernels.run_experts(x, one, ids, [], matrix)
    with pytest.raises(ValueError, match=r"ExpertMatrix: weights .* expected matrices of one shape"):
        ExpertMatrix((torch.ones(2, 3), torch.ones(3, 2)))
    with pytest.raises(ValueError, match=r"ExpertMatrix: qtype 'Q9'"):
        ExpertMatrix((torch.ones(2, 3),), "Q9")


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_groups", "top_groups"), [(1, 1), (4, 2), (4, 4)])
@pytest.mark.usefixtures("backend")
def test_route_by_score(num_groups: int, top_groups: int, has_bias: bool, scoring: kernels.Scoring) -> None:
    logits, bias = torch.randn(20, 12), torch.randn(12) - 3 if has_bias else None  # choices may be negative
    weights, ids = kernels.route_scored_experts(
        logits, bias, 3, scoring=scoring, num_groups=num_groups, top_groups=top_groups, renormalizes=True, scale=2.5
    )
    for row, row_weights, row_ids in zip(logits.double(), weights, ids.tolist(), strict=True):
        scores = (row.softmax(-1) if scoring == "softmax" else row.sigmoid()).tolist()
        choice = [score + (float(bias[e]) if bias is not None else 0.0) for e, score in enumerate(scores)]
        size = 12 // num_groups
        groups = [list(range(start, start + size)) for start in range(0, 12, size)]
        best_two = 2 if bias is not None else 1
        groups.sort(key=lambda group: -sum(sorted((choice[e] for e in group), reverse=True)[:best_two]))
        allowed = sorted(e for group in groups[:top_groups] for e in group)
        best = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert row_ids == best
        total = sum(scores[e] for e in best)
        assert row_weights.tolist() == pytest.approx([2.5 * scores[e] / total for e in best], abs=1e-5)


@pytest.mark.usefixtures("backend")
def test_experts_without_a_gate() -> None:
    x, up, down = torch.randn(5, 12), torch.randn(4, 10, 12), torch.randn(4, 12, 10)
    weights, ids = torch.rand(5, 2), torch.randint(0, 4, (5, 2))
    matrices = [ExpertMatrix(tuple(up.unbind(0)))]
    out = kernels.run_experts(x, weights, ids, matrices, ExpertMatrix(tuple(down.unbind(0))), "relu2")
    for token in range(5):
        parts = [
            w * (down[e] @ (up[e] @ x[token]).relu().square()) for w, e in zip(weights[token], ids[token], strict=True)
        ]
        torch.testing.assert_close(out[token], parts[0] + parts[1], atol=1e-3, rtol=1e-4)
    with pytest.raises(ValueError, match="2 gate_up matrices"):
        kernels.run_experts(x, weights, ids, matrices * 2, ExpertMatrix(tuple(down.unbind(0))), "relu2")

"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from vkit.kernels.block_formats import format_of
from vkit.kernels.dispatch import ops
from vkit.kernels.scaled import ScaledMatrix

EXPERT_ACTIVATIONS = ("silu", "gelu_tanh", "relu2")
Scoring = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class ExpertMatrix:
    """One projection of every expert: dense (rows, columns) each, packed uint8 (rows, row_bytes) of type `qtype`, or
    codes with scales."""

    weights: tuple[Tensor | ScaledMatrix, ...]
    qtype: str | None = None
    scales: Tensor | None = None
    """(E,) float32, multiplied into each expert's product."""

    def __post_init__(self) -> None:
        if not self.weights:
            raise ValueError("ExpertMatrix: no weights, expected one per expert")
        shapes = {tuple(weight.shape) for weight in self.weights}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            raise ValueError(f"ExpertMatrix: weights {sorted(shapes)}, expected matrices of one shape")
        if self.qtype is not None:
            format_of(self.qtype, "ExpertMatrix")

    @property
    def num_rows(self) -> int:
        """Outputs of each expert's product."""
        return self.weights[0].shape[0]


def route_experts(logits: Tensor, top_k: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Each token's experts. logits (T, E) -> weights (T, k) float32, ids (T, k) int64, most probable first.

    Softmax over all experts in float32; weights are the k largest probabilities, divided by their sum on request.
    Ties go to the lower id; probabilities that are not finite count as 0.

    Raises:
        ValueError: top_k outside 1..E.
    Source: Fedus et al. 2021, eq. 1; Jiang et al. 2024, section 2.1.
    """
    if not 1 <= top_k <= logits.shape[-1]:
        raise ValueError(f"route_experts: top_k {top_k}, expected 1..{logits.shape[-1]}")
    out: tuple[Tensor, Tensor] = ops(logits).route_experts(logits, top_k, renormalizes)
    return out


def route_scored_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    *,
    scoring: Scoring,
    num_groups: int = 1,
    top_groups: int = 1,
    renormalizes: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Each token's experts from the best groups. logits (T, E) -> weights (T, k) float32, ids (T, k) int64.

    Scores are softmax or sigmoid of the logits, in float32. With a bias (E,) the choice is made by score + bias, and a
    group counts as its two best experts together; without, a group counts as its best expert. Weights are the scores
    without bias, divided by their sum on request, times `scale`. Ties go to the lower id.

    Raises:
        ValueError: settings that do not fit.
    Source: DeepSeek-AI 2024a, section 2.2; DeepSeek-AI 2024b, eq. 12-16.
    """
    num_experts = logits.shape[-1]
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"route_scored_experts: scoring {scoring!r}, expected softmax or sigmoid")
    if num_groups < 1 or num_experts % num_groups or not 1 <= top_groups <= num_groups:
        raise ValueError(
            f"route_scored_experts: {top_groups} of {num_groups} groups, expected equal groups of {num_experts}"
        )
    available = num_experts // num_groups * top_groups
    if not 1 <= top_k <= available:
        raise ValueError(f"route_scored_experts: top_k {top_k}, expected 1..{available}")
    if bias is not None and bias.shape != (num_experts,):
        raise ValueError(f"route_scored_experts: bias {tuple(bias.shape)}, expected ({num_experts},)")
    out: tuple[Tensor, Tensor] = ops(logits).route_scored_experts(
        logits, bias, top_k, scoring, num_groups, top_groups, renormalizes, scale
    )
    return out


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[ExpertMatrix],
    down: ExpertMatrix,
    activation: str = "silu",
) -> Tensor:
    """Σ weights · down(act(gate x) · up x) over each token's experts. x (T, H), weights and ids (T, k) -> (T, H).

    `gate_up` is one matrix with the gate's rows first, or two matrices; with relu2 it is the one matrix `up`, and
    there is no gate. The sum is float32, in slot order, so that a
    token's result does not depend on the others.

    Raises:
        ValueError: shapes or activation that do not fit.
    """
    if activation not in EXPERT_ACTIVATIONS:
        raise ValueError(f"run_experts: activation {activation!r}, expected one of {', '.join(EXPERT_ACTIVATIONS)}")
    if ids.ndim != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"run_experts: weights {tuple(weights.shape)} and ids {tuple(ids.shape)}, expected ({x.shape[0]}, k) both"
        )
    if len(gate_up) not in ((1,) if activation == "relu2" else (1, 2)):
        raise ValueError(f"run_experts: {len(gate_up)} gate_up matrices, expected one, or two with a gate")
    out: Tensor = ops(x).run_experts(x, weights, ids, gate_up, down, activation)
    return out

"""Mixtures of experts: choosing, and running each expert once over the tokens that chose it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vkit.kernels.experts import ExpertMatrix
from vkit.kernels.reference.activation import gelu_and_mul, silu_and_mul, unary
from vkit.kernels.reference.linear import linear
from vkit.kernels.reference.quantized_linear import quantized_linear
from vkit.kernels.reference.scaled_linear import scaled_linear
from vkit.kernels.scaled import ScaledMatrix


def route_experts(logits: Tensor, top_k: int, renormalizes: bool) -> tuple[Tensor, Tensor]:
    """Weights (T, k) float32 and ids (T, k) int64 of the most probable experts; ties go to the lower id."""
    probabilities = torch.softmax(logits.float(), dim=-1).nan_to_num(0.0, 0.0, 0.0)
    values, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    weights, ids = values[:, :top_k], order[:, :top_k]
    if renormalizes:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return weights, ids


def route_scored_experts(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    scoring: str,
    num_groups: int,
    top_groups: int,
    renormalizes: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights (T, k) float32 and ids (T, k) int64 of the best experts of the best groups."""
    scores = torch.softmax(logits.float(), dim=-1) if scoring == "softmax" else torch.sigmoid(logits.float())
    scores = scores.nan_to_num(0.0, 0.0, 0.0)
    choice = scores if bias is None else scores + bias.float()
    if top_groups < num_groups:
        grouped = choice.unflatten(-1, (num_groups, -1))
        strength = grouped.amax(-1) if bias is None else grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
        best = torch.sort(strength, dim=-1, descending=True, stable=True).indices[:, :top_groups]
        is_out = torch.ones_like(strength, dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)
    ids = torch.sort(choice, dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if renormalizes:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids


def run_experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Sequence[ExpertMatrix],
    down: ExpertMatrix,
    activation: str,
) -> Tensor:
    """Σ weights · expert(x) over each token's experts, summed in float32 in slot order."""
    num_tokens, top_k = ids.shape
    order = torch.argsort(ids.flatten(), stable=True)
    counts = torch.bincount(ids.flatten(), minlength=len(down.weights)).tolist()
    outputs = x.new_empty(num_tokens * top_k, down.num_rows)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            slots = order[start : start + count]
            outputs[slots] = _run_expert(x[slots // top_k], expert, gate_up, down, activation)
            start += count
    by_slot = outputs.view(num_tokens, top_k, down.num_rows)
    summed = x.new_zeros((num_tokens, down.num_rows), dtype=torch.float32)
    for slot in range(top_k):  # one after the other: the order of a sum over a dimension is torch's own affair
        summed += by_slot[:, slot].float() * weights[:, slot : slot + 1]
    return summed.to(x.dtype)


def _run_expert(x: Tensor, expert: int, gate_up: Sequence[ExpertMatrix], down: ExpertMatrix, activation: str) -> Tensor:
    hidden = torch.cat([_product(x, matrix, expert) for matrix in gate_up], dim=-1)
    return _product(_activated(hidden, activation), down, expert)


def _activated(hidden: Tensor, activation: str) -> Tensor:
    if activation == "relu2":
        return unary(hidden, "relu2")
    return silu_and_mul(hidden) if activation == "silu" else gelu_and_mul(hidden, "tanh")


def _product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    weight = matrix.weights[expert]
    if isinstance(weight, ScaledMatrix):
        return scaled_linear(x, weight, None)
    out = linear(x, weight) if matrix.qtype is None else quantized_linear(x, weight, matrix.qtype, None)
    return out if matrix.scales is None else (out * matrix.scales[expert]).to(x.dtype)

"""Mixtures of experts: the router and the experts, however a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vkit import kernels
from vkit.distributed import ALONE, Ranks
from vkit.errors import ModelLoadError
from vkit.layers.linear import Activation, Linear
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.streaming import ByteRange, ExpertCache, FileReader, StoredMatrix, run_streamed
from vkit.quantization import QuantizedTensor, ScaledMatrix, Weight
from vkit.quantization.cutting import can_take_columns, index_of, take_columns, take_rows

_FUSED = "gate_up_proj"


class Experts(Module):
    """E gated MLPs. Stored one by one (`3.gate_proj.weight`), or stacked (E, out, in), gate and up apart or fused.

    With the activation relu2 there is no gate: down( relu(up x)² ).
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    ) -> None:
        self._num_experts = num_experts
        self._activation = activation
        gate, up, down = projections
        inner, outer = (intermediate_size, hidden_size), (hidden_size, intermediate_size)
        self._shapes = {up: inner, down: outer} if activation == "relu2" else {gate: inner, up: inner, down: outer}
        self._down = down
        self._suffix = ".weight"
        self._is_stacked = False
        self._gate_up: list[kernels.ExpertMatrix]
        self._down_matrix: kernels.ExpertMatrix
        self._cache: ExpertCache | None = None
        self._width = intermediate_size
        self._ranks = ALONE
        self._first: int | None = None
        """The first of this rank's experts, where ranks have whole ones; None: a part of each."""

    def shard(self, ranks: Ranks) -> None:
        """A part of every expert's width; or some of the experts, where packed weights cannot be cut so."""
        if self._width % ranks.size:
            ranks.split("experts", self._num_experts)
        self._ranks = ranks

    @property
    def num_experts(self) -> int:
        """Experts to choose from."""
        return self._num_experts

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """Stacked or one by one; gate and up fused or apart; with or without the suffix `.weight`."""
        for suffix in (".weight", ""):
            if is_stored(f"{self._down}{suffix}"):
                self._is_stacked, self._suffix = True, suffix
        if self._is_stacked and is_stored(f"{_FUSED}{self._suffix}"):
            outer = self._shapes[self._down]
            self._shapes = {_FUSED: (2 * outer[1], outer[0]), self._down: outer}

    def slots(self) -> list[TensorSlot]:
        """The tensors of the form chosen."""
        if self._is_stacked:
            return [
                TensorSlot(f"{name}{self._suffix}", (self._num_experts, *shape)) for name, shape in self._shapes.items()
            ]
        return [
            TensorSlot(f"{expert}.{name}.weight", shape)
            for expert in range(self._num_experts)
            for name, shape in self._shapes.items()
        ]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take every expert's weights as they are stored."""
        if self._ranks.size > 1:
            tensors = self._shares(tensors)
        matrices = {name: self._matrix(name, tensors, placement) for name in self._shapes}
        self._down_matrix = matrices.pop(self._down)
        self._gate_up = list(matrices.values())

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x (T, H), weights and ids (T, k) -> (T, H)."""
        if self._cache is not None:
            return run_streamed(self._cache, x, weights, ids, self._activation)
        if self._first is not None:
            own = ids - self._first
            is_elsewhere = (own < 0) | (own >= self._num_here)
            ids, weights = own.masked_fill(is_elsewhere, 0), weights.masked_fill(is_elsewhere, 0.0)
        out = kernels.run_experts(x, weights, ids, self._gate_up, self._down_matrix, self._activation)
        return self._ranks.sum(out)

    @property
    def _num_here(self) -> int:
        """Experts of which this rank has something."""
        return self._num_experts if self._first is None else self._num_experts // self._ranks.size

    def _shares(self, tensors: Mapping[str, Weight]) -> Mapping[str, Weight]:
        """This rank's parts: of every expert, if all ranks' parts can be cut out of all of them; else whole experts.

        Raises:
            CannotShare: neither is possible.
        """
        ranks, width = self._ranks, self._width
        downs = [tensors[name] for name in self._names(self._down)]
        spans = [] if width % ranks.size else ranks.each(lambda rank: [ranks.split("columns", width, rank)])
        if not spans or not all(can_take_columns(weight, own) for weight in downs for own in spans):
            return self._whole_experts(tensors)
        own = spans[ranks.rank]
        rows = index_of(own)
        shares: dict[str, Weight] = {}
        for projection in self._shapes:
            index = torch.cat([rows, rows + width]) if projection == _FUSED and self._is_stacked else rows
            for name in self._names(projection):
                weight = tensors[name]
                shares[name] = take_columns(weight, own) if projection == self._down else take_rows(weight, index)
        return shares

    def _whole_experts(self, tensors: Mapping[str, Weight]) -> Mapping[str, Weight]:
        first, stop = self._ranks.split("experts (their packed widths cannot be cut)", self._num_experts)
        self._first = first
        if not self._is_stacked:
            renamed = [(f"{expert}.{name}.weight", f"{expert - first}.{name}.weight")
                       for expert in range(first, stop) for name in self._shapes]  # fmt: skip
            return {here: tensors[stored] for stored, here in renamed}
        return {name: _experts_of(weight, first, stop) for name, weight in tensors.items()}

    def _names(self, projection: str) -> list[str]:
        """The tensors of a projection."""
        if self._is_stacked:
            return [f"{projection}{self._suffix}"]
        return [f"{expert}.{projection}.weight" for expert in range(self._num_here)]

    def stream(self, num_slots: int, reader: FileReader, locate: Callable[[Tensor], ByteRange | None]) -> None:
        """Keep at most `num_slots` experts in memory from now on; `locate` says where a tensor lies in its file.

        Raises:
            ModelLoadError: weights that are not in the file as they are used.
        """
        stored = [_stored(matrix, locate) for matrix in (*self._gate_up, self._down_matrix)]
        self._cache = ExpertCache(stored, num_slots, reader)
        del self._gate_up, self._down_matrix

    @property
    def cache(self) -> ExpertCache | None:
        """The places of streamed experts."""
        return self._cache

    def _matrix(self, name: str, tensors: Mapping[str, Weight], placement: Placement) -> kernels.ExpertMatrix:
        if self._is_stacked:
            weight = placement.matrix(tensors[f"{name}{self._suffix}"])
            assert not isinstance(weight, ScaledMatrix), "such weights have two dimensions"
            if isinstance(weight, torch.Tensor):
                return kernels.ExpertMatrix(tuple(weight.unbind(0)))
            scales = None if weight.scale is None else weight.scale.expand(self._num_here)
            return kernels.ExpertMatrix(tuple(weight.data.unbind(0)), weight.qtype, scales)
        return _joined(name, [placement.matrix(tensors[stored]) for stored in self._names(name)])


def _experts_of(weight: Weight, first: int, stop: int) -> Weight:
    """Some of the stacked experts."""
    if isinstance(weight, torch.Tensor):
        return weight[first:stop].clone()
    assert isinstance(weight, QuantizedTensor), "stacked weights are dense or in blocks"
    scale = weight.scale if weight.scale is None or not weight.scale.ndim else weight.scale[first:stop]
    return replace(weight, data=weight.data[first:stop].clone(), shape=(stop - first, *weight.shape[1:]), scale=scale)


def _stored(matrix: kernels.ExpertMatrix, locate: Callable[[Tensor], ByteRange | None]) -> StoredMatrix:
    """Where a matrix's experts lie.

    Raises:
        ModelLoadError: they are not in the file as they are used.
    """
    ranges: list[ByteRange] = []
    for weight in matrix.weights:
        found = locate(weight) if isinstance(weight, Tensor) and weight.is_contiguous() else None
        if found is None:
            raise ModelLoadError(
                "--moe-expert-cache: this model's experts are not in the file as they are used",
                remedy="GGUF files and plain safetensors can be streamed; not with --no-mmap or --gguf-dequantize",
            )
        ranges.append(found)
    first = matrix.weights[0]
    assert isinstance(first, Tensor)
    return StoredMatrix(tuple(ranges), (first.shape[0], first.shape[1]), first.dtype, matrix.qtype, matrix.scales)


def _joined(name: str, weights: list[Weight]) -> kernels.ExpertMatrix:
    """Separate experts as one matrix; those of one projection share a type in every published file."""
    scaled = [weight for weight in weights if not isinstance(weight, QuantizedTensor)]
    if any(isinstance(weight, ScaledMatrix) for weight in scaled) and len(scaled) == len(weights):
        return kernels.ExpertMatrix(tuple(scaled))
    dense = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    packed = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    if len(dense) == len(weights):
        return kernels.ExpertMatrix(tuple(dense))
    types = {weight.qtype for weight in packed}
    if dense or len(types) != 1 or any(weight.scale is not None for weight in packed):
        raise ValueError(f"experts' {name}: mixed storage types {sorted(types)}, expected one")
    return kernels.ExpertMatrix(tuple(weight.data for weight in packed), packed[0].qtype)


class MoE(Module):
    """Σ over the k most probable experts; the router is called `gate`."""

    def __init__(self, hidden_size: int, experts: Experts, num_experts: int, top_k: int, *, renormalizes: bool) -> None:
        self.gate = Linear(hidden_size, num_experts)
        self.experts = experts
        self._top_k = top_k
        self._renormalizes = renormalizes

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        weights, ids = kernels.route_experts(self.gate(x), self._top_k, self._renormalizes)
        return self.experts(x, weights, ids)


@dataclass(frozen=True, slots=True)
class Routing:
    """How a router chooses (see `kernels.route_scored_experts`)."""

    num_experts: int
    top_k: int
    scoring: kernels.Scoring
    renormalizes: bool
    has_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    logit_cap: float | None = None


class Router(Module):
    """Logits of the experts, then the choice. The correction bias takes part in the choice alone."""

    def __init__(self, hidden_size: int, routing: Routing) -> None:
        self.logits = _RouterLinear(hidden_size, routing.num_experts)
        self.routing = routing
        self._bias: Tensor | None = None

    def slots(self) -> list[TensorSlot]:
        """e_score_correction_bias, if there is one."""
        shape = (self.routing.num_experts,)
        return [TensorSlot("e_score_correction_bias", shape)] if self.routing.has_bias else []

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the bias, in float32 as the scores are."""
        if self.routing.has_bias:
            self._bias = placement.vector(tensors["e_score_correction_bias"], torch.float32)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H) -> weights (T, k) float32 and ids (T, k)."""
        routing, logits = self.routing, self.logits(x)
        if routing.logit_cap is not None:
            logits = kernels.soft_cap(logits, routing.logit_cap)
        return kernels.route_scored_experts(
            logits,
            self._bias,
            routing.top_k,
            scoring=routing.scoring,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            renormalizes=routing.renormalizes,
            scale=routing.scale,
        )


class _RouterLinear(Linear):
    """The router's own weight."""

    is_inline = True


class SharedExpertMoE(Module):
    """Routed experts beside one that sees every token, optionally through a gate of its own.

    With a latent pair (`fc1_latent_proj`, `fc2_latent_proj`) the routed experts work in a narrower space.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        shared_experts: Callable[[Tensor], Tensor] | None,
        *,
        shared_expert_gate: Linear | None = None,
        latent: tuple[Linear, Linear] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or {}
        self.gate = gate
        self.experts = experts
        self.shared_experts = shared_experts
        self.shared_expert_gate = shared_expert_gate
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if latent is not None:
            self.fc1_latent_proj, self.fc2_latent_proj = latent

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        weights, ids = self.gate(x)
        narrow = x if self.fc1_latent_proj is None else self.fc1_latent_proj(x)
        routed = self.experts(narrow, weights, ids)
        if self.fc2_latent_proj is not None:
            routed = self.fc2_latent_proj(routed)
        if self.shared_experts is None:
            return routed
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            factors = kernels.unary(self.shared_expert_gate(x), "sigmoid")
            shared = kernels.scale_rows(shared, factors[:, 0])
        return kernels.add(routed, shared)

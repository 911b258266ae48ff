"""Linear layers: which tensors they take, and how several projections of one input become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from vkit import kernels
from vkit.distributed import Ranks
from vkit.errors import ModelLoadError
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.layers.sharded import Reduction, reduction_of
from vkit.quantization import LinearMethod, ScaledMatrix, StackedLinear, Weight, concat, linear_method_for
from vkit.quantization.cutting import Span, index_of, take_rows

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
"""Names in config files -> ours."""


class Linear(Module):
    """y = x Wᵀ + b. `is_transposed`: the checkpoint keeps W as (in, out)."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, is_transposed: bool = False) -> None:
        self._shape = (in_features, out_features) if is_transposed else (out_features, in_features)
        self._is_transposed = is_transposed
        self._has_bias = bias
        self._bias: Tensor | None = None
        self._method: LinearMethod
        self._kept: Tensor | None = None
        """The outputs that this rank has; None: all."""
        self._reduction: Reduction | None = None

    row_order: Tensor | None = None
    """Outputs are in the stored order."""

    def shard_outputs(self, *parts: Sequence[Span]) -> None:
        """Keep the outputs of these spans, in their order."""
        self._kept = index_of([span for part in parts for span in part])

    def shard_inputs(self, ranks: Ranks, columns: Sequence[Sequence[Span]]) -> None:
        """Take the inputs of these spans, by rank, and give the sum over all ranks."""
        self._reduction = Reduction(ranks, columns)

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self._shape[0 if self._is_transposed else 1]

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self._shape[1 if self._is_transposed else 0]

    def projections(self) -> list[tuple[str, int]]:
        """Itself, under its own name."""
        return [("", self.out_features)]

    def wrap_method(self, wrap: Callable[[LinearMethod], LinearMethod]) -> None:
        """Multiply by what `wrap` makes of the method so far."""
        self._method = wrap(self._method)

    def slots(self) -> list[TensorSlot]:
        """weight, and bias if there is one."""
        bias = [TensorSlot("bias", (self._shape[0 if not self._is_transposed else 1],))] if self._has_bias else []
        return [TensorSlot("weight", self._shape), *bias]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight as it is stored."""
        weight, bias = tensors["weight"], tensors.get("bias")
        if self._is_transposed:
            if isinstance(weight, ScaledMatrix):
                raise ModelLoadError("a quantised layer that keeps its weight as (in, out) has no loader")
            weight = weight.t()
        if self._kept is not None:
            weight, bias = take_rows(weight, self._kept), None if bias is None else take_rows(bias, self._kept)
        if bias is not None:
            self._bias = placement.vector(bias)
        if self._reduction is not None:
            self._method = reduction_of(self._reduction, weight, placement.matrix)
        else:
            self._method = linear_method_for(placement.matrix(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, in) -> (T, out)."""
        return self._method.apply(x, self._bias)


class MergedLinear(Module):
    """Several projections of one input, outputs side by side.

    `parts` maps the checkpoint's name of each projection to its width; a checkpoint may instead hold all of them as one
    tensor called `fused`. On a host the parts stay apart, as views of the
    mapped file; on a card, where they are copied anyway, the rows of parts of one type are joined into one product.
    """

    is_inline = True

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        *,
        bias: bool = False,
        fused: str | None = None,
        row_order: Tensor | None = None,
    ) -> None:
        self._in_features = in_features
        self._parts = dict(parts)
        self._has_bias = bias
        self._fused = fused
        self._row_order = row_order
        """The stored row that each output takes, for checkpoints that interleave projections."""
        self._kept: list[Tensor] | None = None
        """By part, the outputs that this rank has; None: all."""
        self._bias: Tensor | None = None
        self._method: LinearMethod

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self._in_features

    @property
    def out_features(self) -> int:
        """Widths of all parts together."""
        return sum(self._parts.values())

    @property
    def row_order(self) -> Tensor | None:
        """The stored row that each output takes; None: they are in order."""
        return self._row_order

    def projections(self) -> list[tuple[str, int]]:
        """Name and width of each part, in the order of the outputs."""
        return list(self._parts.items())

    def wrap_method(self, wrap: Callable[[LinearMethod], LinearMethod]) -> None:
        """Multiply by what `wrap` makes of the method so far."""
        self._method = wrap(self._method)

    def shard_outputs(self, *parts: Sequence[Span]) -> None:
        """Keep the outputs of these spans of each part, counted from the part's first; in their order."""
        assert len(parts) == len(self._parts), "as many parts as projections"
        self._kept = [index_of(spans) for spans in parts]

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """One fused tensor, if that is what the checkpoint holds."""
        if self._fused is not None and is_stored(f"{self._fused}.weight"):
            if self._kept is not None:
                self._kept = [_side_by_side(self._kept, list(self._parts.values()))]
            self._parts = {self._fused: sum(self._parts.values())}

    def slots(self) -> list[TensorSlot]:
        """A weight, and a bias if there is one, per part."""
        weights = [TensorSlot(f"{name}.weight", (width, self._in_features)) for name, width in self._parts.items()]
        biases = [TensorSlot(f"{name}.bias", (width,)) for name, width in self._parts.items() if self._has_bias]
        return weights + biases

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weights of all parts."""
        indices = self._rows_taken()
        weights = [
            placement.matrix(_picked(tensors[f"{name}.weight"], index))
            for name, index in zip(self._parts, indices, strict=True)
        ]
        if placement.device.type == "cpu" and len(weights) > 1:
            self._method = StackedLinear(tuple(linear_method_for(weight) for weight in weights))
        else:
            self._method = concat(weights)
        if self._has_bias:
            self._bias = torch.cat(
                [
                    placement.vector(_picked(tensors[f"{name}.bias"], index))
                    for name, index in zip(self._parts, indices, strict=True)
                ]
            )

    def _rows_taken(self) -> list[Tensor | None]:
        """By part, the stored row that each output takes; None: they are all there, in order."""
        if self._row_order is None:
            return [None] * len(self._parts) if self._kept is None else list(self._kept)
        if self._kept is None:
            return [self._row_order]
        return [self._row_order[self._kept[0]]]

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, in) -> (T, sum of widths)."""
        return self._method.apply(x, self._bias)


def shard_pair(ranks: Ranks, width: int, first: Linear, second: Linear) -> None:
    """Share the `width` between two linear layers.

    Raises:
        CannotShare: the ranks do not divide it.
    """
    first.shard_outputs([ranks.split("MLP columns", width)])
    second.shard_inputs(ranks, ranks.each(lambda rank: [ranks.split("MLP columns", width, rank)]))


def _picked(weight: Weight, index: Tensor | None) -> Weight:
    return weight if index is None else take_rows(weight, index)


def _side_by_side(indices: list[Tensor], widths: list[int]) -> Tensor:
    """Indices into parts as indices into the parts side by side."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return torch.cat([index + start for index, start in zip(indices, starts, strict=True)])


class GatedMLP(Module):
    """down( act(gate x) · up x )."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation = "silu",
        bias: bool = False,
        gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        if activation not in ("silu", "gelu", "gelu_tanh"):
            raise ValueError(f"GatedMLP: activation {activation!r}, expected silu, gelu or gelu_tanh")
        self.names = {"down_proj": down}
        parts = dict.fromkeys(gate_up, intermediate_size)
        self.gate_up_proj = MergedLinear(hidden_size, parts, bias=bias, fused="gate_up_proj")
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias)
        self._width = intermediate_size
        self._activation = activation

    def shard(self, ranks: Ranks) -> None:
        """A part of the width between the projections."""
        own = [ranks.split("MLP columns", self._width)]
        self.gate_up_proj.shard_outputs(own, own)
        self.down_proj.shard_inputs(ranks, ranks.each(lambda rank: [ranks.split("MLP columns", self._width, rank)]))

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        gate_up = self.gate_up_proj(x)
        if self._activation == "silu":
            return self.down_proj(kernels.silu_and_mul(gate_up))
        return self.down_proj(kernels.gelu_and_mul(gate_up, "tanh" if self._activation == "gelu_tanh" else "none"))


class PlainMLP(Module):
    """fc2( act(fc1 x) ), with biases."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        bias: bool = True,
        names: tuple[str, str] = ("fc1", "fc2"),
        is_transposed: bool = False,
        out_features: int | None = None,
    ) -> None:
        """`out_features`: the width of the result, where it is not `hidden_size`."""
        self.names = {"fc1": names[0], "fc2": names[1]}
        self.fc1 = Linear(hidden_size, intermediate_size, bias=bias, is_transposed=is_transposed)
        out = hidden_size if out_features is None else out_features
        self.fc2 = Linear(intermediate_size, out, bias=bias, is_transposed=is_transposed)
        self._width = intermediate_size
        self._activation = activation

    def shard(self, ranks: Ranks) -> None:
        """A part of the width between the projections."""
        shard_pair(ranks, self._width, self.fc1, self.fc2)

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        return self.fc2(kernels.unary(self.fc1(x), self._activation))

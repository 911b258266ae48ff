"""Linear layers: which tensors they take, and how several projections of one input become one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import LinearMethod, ScaledMatrix, StackedLinear, Weight, concat, linear_method_for

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

    row_order: Tensor | None = None
    """Outputs are in the stored order."""

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
        weight = placement.matrix(tensors["weight"])
        if self._is_transposed:
            if isinstance(weight, ScaledMatrix):
                raise ModelLoadError("a quantised layer that keeps its weight as (in, out) has no loader")
            weight = weight.t()
        self._method = linear_method_for(weight)
        if self._has_bias:
            self._bias = placement.vector(tensors["bias"])

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

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """One fused tensor, if that is what the checkpoint holds."""
        if self._fused is not None and is_stored(f"{self._fused}.weight"):
            self._parts = {self._fused: sum(self._parts.values())}

    def slots(self) -> list[TensorSlot]:
        """A weight, and a bias if there is one, per part."""
        weights = [TensorSlot(f"{name}.weight", (width, self._in_features)) for name, width in self._parts.items()]
        biases = [TensorSlot(f"{name}.bias", (width,)) for name, width in self._parts.items() if self._has_bias]
        return weights + biases

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weights of all parts."""
        weights = [self._ordered(placement.matrix(tensors[f"{name}.weight"])) for name in self._parts]
        if placement.device.type == "cpu" and len(weights) > 1:
            self._method = StackedLinear(tuple(linear_method_for(weight) for weight in weights))
        else:
            self._method = concat(weights)
        if self._has_bias:
            bias = torch.cat([placement.vector(tensors[f"{name}.bias"]) for name in self._parts])
            self._bias = bias if self._row_order is None else bias[self._row_order]

    def _ordered(self, weight: Weight) -> Weight:
        if self._row_order is None:
            return weight
        return weight[self._row_order] if isinstance(weight, Tensor) else weight.rows(self._row_order)

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, in) -> (T, sum of widths)."""
        return self._method.apply(x, self._bias)


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
        self._activation = activation

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
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        """x (T, H) -> (T, H)."""
        return self.fc2(kernels.unary(self.fc1(x), self._activation))

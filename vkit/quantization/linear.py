"""How a linear layer multiplies by its weight, dense or packed. Chosen once per layer, at load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Generic, Protocol, TypeVar

import torch

from vkit import kernels
from vkit.kernels import ScaledMatrix
from vkit.quantization.tensor import QuantizedTensor, Weight, concat_rows


class LinearMethod(Protocol):
    """y = x Wᵀ + bias for one weight W (out_features, in_features), however W is stored."""

    @property
    def in_features(self) -> int:
        """Columns of the weight."""

    @property
    def out_features(self) -> int:
        """Rows of the weight."""

    @property
    def nbytes(self) -> int:
        """Bytes the weight occupies as stored."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""


class _Stored(Protocol):
    """A weight (out_features, in_features), however it is stored."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...


W = TypeVar("W", bound=_Stored)


@dataclass(frozen=True, slots=True, eq=False)
class _OfOneWeight(Generic[W]):
    """What methods with one weight say of it."""

    weight: W

    @property
    def in_features(self) -> int:
        """Columns of the weight."""
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        """Rows of the weight."""
        return self.weight.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes the weight occupies as stored."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class DenseLinear(_OfOneWeight[torch.Tensor]):
    """Multiplies by an ordinary tensor `weight` (out_features, in_features).

    A float16 or bfloat16 weight under activations of another type is widened a few rows at a time, so that it can stay
    as small as the file has it.
    """

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""
        return kernels.linear(x, self.weight, bias)


@dataclass(frozen=True, slots=True, eq=False)
class GGUFLinear(_OfOneWeight[QuantizedTensor]):
    """Multiplies by a packed weight without keeping a dense copy of it."""

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or self.weight.is_transposed:
            raise ValueError(
                f"GGUFLinear: weight {self.weight.shape}, is_transposed={self.weight.is_transposed}; "
                "expected (out_features, in_features) with blocks along in_features"
            )

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""
        weight = self.weight
        if weight.scale is None:
            return kernels.quantized_linear(x, weight.data, weight.qtype, bias)
        y = kernels.multiply(kernels.quantized_linear(x, weight.data, weight.qtype, None), weight.scale)
        return y if bias is None else kernels.add(y, bias)


@dataclass(frozen=True, slots=True, eq=False)
class ScaledLinear(_OfOneWeight[ScaledMatrix]):
    """Multiplies by codes and scales, after rounding the activations as the checkpoint wants."""

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""
        return kernels.scaled_linear(x, self.weight, bias)


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Several linear methods over one input, outputs side by side: a fused projection whose parts cannot be joined."""

    parts: tuple[LinearMethod, ...]

    def __post_init__(self) -> None:
        widths = {part.in_features for part in self.parts}
        if len(widths) != 1:
            raise ValueError(f"StackedLinear: parts with in_features {sorted(widths)}, expected one width")

    @property
    def in_features(self) -> int:
        """Columns of every part."""
        return self.parts[0].in_features

    @property
    def out_features(self) -> int:
        """Rows of all parts together."""
        return sum(part.out_features for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts together."""
        return sum(part.nbytes for part in self.parts)

    def apply(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in_features), bias (out_features,) -> (..., out_features) in x.dtype."""
        sizes = [part.out_features for part in self.parts]
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        return kernels.concat([part.apply(x, piece) for part, piece in zip(self.parts, biases, strict=True)])


def linear_method_for(weight: Weight) -> LinearMethod:
    """The method that multiplies by `weight` (out_features, in_features) as it is stored."""
    if isinstance(weight, QuantizedTensor):
        return GGUFLinear(weight)
    if isinstance(weight, ScaledMatrix):
        return ScaledLinear(weight)
    if weight.ndim != 2:
        raise ValueError(f"linear_method_for: weight {tuple(weight.shape)}, expected (out_features, in_features)")
    return DenseLinear(weight)


def concat(weights: Sequence[Weight]) -> LinearMethod:
    """One method for a fused projection: the rows of all `weights`, in order.

    Neighbours of the same kind are joined into one weight (a copy), but for codes with scales, whose parts may have
    scales of their own and stay apart; where kinds differ (say Q4_K, Q4_K, Q6_K) the
    result is a `StackedLinear` of the joined runs.
    """
    methods = [_join(list(run)) for _, run in groupby(weights, key=_Kind)]
    return methods[0] if len(methods) == 1 else StackedLinear(tuple(methods))


class _Kind:
    """Equality of weights for grouping: equal when their rows can be joined."""

    def __init__(self, weight: Weight) -> None:
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Kind):
            return NotImplemented
        one, two = self.weight, other.weight
        if isinstance(one, QuantizedTensor) and isinstance(two, QuantizedTensor):
            return one.can_join(two)
        if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
            return one.dtype == two.dtype and one.device == two.device and one.shape[1:] == two.shape[1:]
        return False

    __hash__ = None  # type: ignore[assignment]


def _join(run: list[Weight]) -> LinearMethod:
    packed = [weight for weight in run if isinstance(weight, QuantizedTensor)]
    if packed:
        return linear_method_for(concat_rows(packed))
    if isinstance(run[0], ScaledMatrix):
        return linear_method_for(run[0])
    dense = [weight for weight in run if isinstance(weight, torch.Tensor)]
    return linear_method_for(dense[0] if len(dense) == 1 else torch.cat(dense))

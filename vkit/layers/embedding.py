"""Token and position tables, and the head that shares or does not share the first of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import LinearMethod, QuantizedTensor, ScaledMatrix, Weight, linear_method_for


class Embedding(Module):
    """Rows of a table by id, in the activations' type."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.shape = (num_rows, width)
        self.weight: Tensor | QuantizedTensor
        self._dtype: torch.dtype

    def slots(self) -> list[TensorSlot]:
        """weight."""
        return [TensorSlot("weight", self.shape)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the table as it is stored."""
        weight = placement.matrix(tensors["weight"])
        if isinstance(weight, ScaledMatrix):
            raise ModelLoadError("a quantised embedding has no loader: only linear layers may be quantised")
        self.weight = weight
        self._dtype = placement.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids (T,) -> (T, C)."""
        weight = self.weight
        if isinstance(weight, QuantizedTensor):
            return self._scaled(kernels.quantized_embedding(ids, weight.data, weight.qtype, dtype=self._dtype), weight)
        return kernels.embedding(ids, weight, self._dtype)

    @staticmethod
    def _scaled(rows: Tensor, weight: QuantizedTensor) -> Tensor:
        return rows if weight.scale is None else kernels.multiply(rows, weight.scale)


class PositionEmbedding(Embedding):
    """Learned positions. The first `offset` rows of the table belong to none."""

    def __init__(self, num_rows: int, width: int, *, offset: int = 0) -> None:
        super().__init__(num_rows, width)
        self._offset = offset

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the table from row `offset` on."""
        super().set_tensors(tensors, placement)
        start = self._offset
        weight = self.weight
        self.weight = weight.rows(slice(start, None)) if isinstance(weight, QuantizedTensor) else weight[start:]


class LMHead(Module):
    """Hidden states to logits. With `tied_to`, multiplies by that embedding and expects no tensor of its own."""

    def __init__(
        self, hidden_size: int, vocab_size: int, *, tied_to: Embedding | None = None, bias: bool = False
    ) -> None:
        self._shape = (vocab_size, hidden_size)
        self._tied_to = tied_to
        self._has_bias = bias
        self._bias: Tensor | None = None
        self._method: LinearMethod | None = None

    @property
    def is_tied(self) -> bool:
        """Whether the weight is the embedding's."""
        return self._tied_to is not None

    @property
    def tied_weight(self) -> Weight:
        """The embedding's weight; only for a tied head."""
        assert self._tied_to is not None
        return self._tied_to.weight

    def slots(self) -> list[TensorSlot]:
        """weight unless tied, and bias if there is one."""
        bias = [TensorSlot("bias", self._shape[:1])] if self._has_bias else []
        return bias if self.is_tied else [TensorSlot("weight", self._shape), *bias]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight, or the embedding's (the embedding comes before the head in every model)."""
        weight = self._tied_to.weight if self._tied_to is not None else placement.matrix(tensors["weight"])
        self._method = linear_method_for(weight)
        if self._has_bias:
            self._bias = placement.vector(tensors["bias"])

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> (R, V), in hidden's type."""
        assert self._method is not None
        return self._method.apply(hidden, self._bias)

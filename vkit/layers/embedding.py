"""Token and position tables, and the head that shares or does not share the first of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vkit import kernels
from vkit.distributed import ALONE, Ranks
from vkit.errors import ModelLoadError
from vkit.layers.module import Module, Placement, TensorSlot
from vkit.quantization import LinearMethod, QuantizedTensor, ScaledMatrix, Weight, linear_method_for
from vkit.quantization.cutting import take_rows


class Embedding(Module):
    """Rows of a table by id, in the activations' type."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.shape = (num_rows, width)
        self.weight: Tensor | QuantizedTensor
        self._dtype: torch.dtype
        self._ranks = ALONE
        self._finish: Callable[[Tensor, Tensor], Tensor] | None = None

    def finish_with(self, finish: Callable[[Tensor, Tensor], Tensor]) -> None:
        """Give what `finish` makes of the rows (T, C) and their ids (T,)."""
        self._finish = finish

    def shard(self, ranks: Ranks) -> None:
        """Some of the rows; the last ranks may have fewer, or none."""
        self._ranks = ranks

    def share_of(self, weight: Weight) -> Weight:
        """This rank's rows of the whole table."""
        if self._ranks.size == 1:
            return weight
        first, stop, _ = self._ranks.split_rows(self.shape[0])
        return take_rows(weight, torch.arange(first, stop))

    def slots(self) -> list[TensorSlot]:
        """weight."""
        return [TensorSlot("weight", self.shape)]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the table as it is stored."""
        weight = placement.matrix(self.share_of(tensors["weight"]))
        if isinstance(weight, ScaledMatrix):
            raise ModelLoadError("a quantised embedding has no loader: only linear layers may be quantised")
        self.weight = weight
        self._dtype = placement.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        """ids (T,) -> (T, C)."""
        if self._ranks.size == 1:
            rows = self._rows(ids)
            return rows if self._finish is None else self._finish(rows, ids)
        first, stop, _ = self._ranks.split_rows(self.shape[0])
        own = ids - first
        is_elsewhere = (own < 0) | (own >= stop - first)
        if first == stop:
            rows = torch.zeros((len(ids), self.shape[1]), dtype=self._dtype, device=ids.device)
        else:
            rows = self._rows(own.masked_fill(is_elsewhere, 0)).masked_fill(is_elsewhere.unsqueeze(1), 0)
        return self._ranks.sum(rows)

    def _rows(self, ids: Tensor) -> Tensor:
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

    def shard(self, ranks: Ranks) -> None:
        """All of it on every rank: it is small."""

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
        self.shape = (vocab_size, hidden_size)
        self._tied_to = tied_to
        self._has_bias = bias
        self._bias: Tensor | None = None
        self._method: LinearMethod | None = None
        self._ranks = ALONE

    def wrap_method(self, wrap: Callable[[LinearMethod], LinearMethod]) -> None:
        """Multiply by what `wrap` makes of the method so far."""
        assert self._method is not None, "asked of a head with its weight"
        self._method = wrap(self._method)

    def shard(self, ranks: Ranks) -> None:
        """Some of the vocabulary, as an embedding has it; the logits are gathered."""
        self._ranks = ranks

    def share_of(self, weight: Weight) -> Weight:
        """This rank's rows of a whole weight or bias."""
        if self._ranks.size == 1:
            return weight
        first, stop, _ = self._ranks.split_rows(self.shape[0])
        return take_rows(weight, torch.arange(first, stop))

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
        bias = [TensorSlot("bias", self.shape[:1])] if self._has_bias else []
        return bias if self.is_tied else [TensorSlot("weight", self.shape), *bias]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the weight, or the embedding's (the embedding comes before the head in every model)."""
        if self._tied_to is not None:
            weight: Weight = self._tied_to.weight
        else:
            weight = placement.matrix(self.share_of(tensors["weight"]))
        self._method = linear_method_for(weight)
        if self._has_bias:
            self._bias = placement.vector(self.share_of(tensors["bias"]))

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden (R, H) -> (R, V), in hidden's type."""
        assert self._method is not None
        if self._ranks.size == 1:
            return self._method.apply(hidden, self._bias)
        vocab_size = self.shape[0]
        first, stop, per_rank = self._ranks.split_rows(vocab_size)
        own = self._method.apply(hidden, self._bias) if stop > first else hidden[:, :0]
        padded = torch.nn.functional.pad(own, (0, per_rank - own.shape[-1]))
        return self._ranks.gather(padded)[:, :vocab_size]  # what is cut off belongs to no token

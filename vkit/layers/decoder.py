"""Decoder blocks by their shape of residual, and the stack of them.

Every block takes (hidden, residual) and returns the same: the stream is their sum, left unadded so that the next norm
can add it. A residual of None means that hidden is the whole stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from vkit import kernels
from vkit.layers.embedding import Embedding, PositionEmbedding
from vkit.layers.module import Module
from vkit.layers.norm import Norm

if TYPE_CHECKING:
    from vkit.batch import Batch

Stream = tuple[Tensor, Tensor | None]


class FeedForward(Protocol):
    """Anything from (T, H) to (T, H): an MLP or a mixture of experts."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """x (T, H) -> (T, H)."""


class Mixer(Protocol):
    """Anything that mixes tokens: attention, or a recurrent layer."""

    def __call__(self, x: Tensor, batch: Batch, /) -> Tensor:
        """x (T, H) -> (T, H)."""


def with_media(hidden: Tensor, batch: Batch) -> Tensor:
    """The stream before the first block, with a tower's rows at their places."""
    media = batch.media
    return hidden if media is None else kernels.put_rows(hidden, media.rows, media.embeddings)


class DecoderLayer(Module):
    """A block of the stack."""

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        raise NotImplementedError


class PreNormLayer(DecoderLayer):
    """h += m · attn(norm h); h += m · mlp(norm h), with a constant m."""

    def __init__(
        self,
        self_attn: Mixer,
        mlp: FeedForward,
        input_layernorm: Norm,
        post_attention_layernorm: Norm,
        *,
        residual_multiplier: float = 1.0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or {}
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self._multiplier = residual_multiplier

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        hidden = self._scaled(self.self_attn(normed, batch))
        normed, residual = self.post_attention_layernorm.add(hidden, residual)
        return self._scaled(self.mlp(normed)), residual

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self._multiplier == 1.0 else kernels.scale(x, self._multiplier)


class SandwichLayer(DecoderLayer):
    """h += norm(attn(norm h)); h += norm(mlp(norm h)). Attribute names are Gemma's."""

    def __init__(
        self,
        self_attn: Mixer,
        mlp: FeedForward,
        input_layernorm: Norm,
        post_attention_layernorm: Norm,
        pre_feedforward_layernorm: Norm,
        post_feedforward_layernorm: Norm,
        *,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or {}
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.pre_feedforward_layernorm = pre_feedforward_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.post_attention_layernorm(self.self_attn(normed, batch))
        normed, residual = self.pre_feedforward_layernorm.add(hidden, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual


class PostNormLayer(DecoderLayer):
    """h += norm(attn(h)); h += norm(mlp(h))."""

    def __init__(
        self, self_attn: Mixer, mlp: FeedForward, post_attention_layernorm: Norm, post_feedforward_layernorm: Norm
    ) -> None:
        self.self_attn = self_attn
        self.post_attention_layernorm = post_attention_layernorm
        self.mlp = mlp
        self.post_feedforward_layernorm = post_feedforward_layernorm

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        if residual is not None:
            hidden = kernels.add(hidden, residual)
        hidden = kernels.add(hidden, self.post_attention_layernorm(self.self_attn(hidden, batch)))
        return self.post_feedforward_layernorm(self.mlp(hidden)), hidden


class ParallelLayer(DecoderLayer):
    """h += attn(n) + mlp(n) with n = norm h."""

    def __init__(self, self_attn: Mixer, mlp: FeedForward, input_layernorm: Norm) -> None:
        self.input_layernorm = input_layernorm
        self.self_attn = self_attn
        self.mlp = mlp

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        return kernels.add(self.self_attn(normed, batch), self.mlp(normed)), residual


class Decoder(Module):
    """Embedding (of tokens, and of positions where a model learns them), blocks, final norm."""

    def __init__(
        self,
        embed_tokens: Embedding,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        *,
        embed_positions: PositionEmbedding | None = None,
        embedding_multiplier: float = 1.0,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.names = names or {}
        self.embed_tokens = embed_tokens
        self.embed_positions = embed_positions
        self.layers = list(layers)
        self.norm = norm
        self._embedding_multiplier = embedding_multiplier

    def embed(self, batch: Batch) -> Tensor:
        """The stream before the first block (T, H)."""
        hidden = self.embed_tokens(batch.token_ids)
        if self.embed_positions is not None:
            hidden = kernels.add(hidden, self.embed_positions(batch.positions))
        if self._embedding_multiplier != 1.0:
            hidden = kernels.scale(hidden, self._embedding_multiplier)
        return with_media(hidden, batch)

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states (T, H) after the final norm."""
        hidden, residual = self.embed(batch), None
        features = batch.media.features if batch.media is not None else ()
        for index, layer in enumerate(self.layers):
            hidden, residual = layer(hidden, residual, batch)
            if index < len(features):
                assert batch.media is not None
                hidden = kernels.add_rows(hidden, batch.media.rows, features[index])
            if batch.taps is not None and index in batch.taps:
                batch.taps[index] = hidden if residual is None else kernels.add(hidden, residual)
        return self.norm.add(hidden, residual)[0]

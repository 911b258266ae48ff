"""Granite: Llama with four scalars. Source: IBM Granite Team 2024."""

from __future__ import annotations

from vkit.layers import Attention, Decoder, DecoderLayer, Embedding, PreNormLayer
from vkit.models.llama import LlamaForCausalLM


class GraniteForCausalLM(LlamaForCausalLM):
    """Multipliers on embeddings, scores and residuals, a divisor on logits."""

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack."""
        self._logits_multiplier = 1.0 / self.config.number("logits_scaling", default=1.0)
        return Decoder(
            Embedding(self.vocab_size, self.hidden_size),
            layers,
            self.make_norm(self.hidden_size),
            embedding_multiplier=self.config.number("embedding_multiplier", default=1.0),
        )

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        multiplier = self.config.number("residual_multiplier", default=1.0)
        return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), *norms, residual_multiplier=multiplier)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        bias = self.config.flag("attention_bias", default=False)
        scale = self.config.number("attention_multiplier", default=1.0)
        return Attention(layer, *self.attention_shape, rotary=self.rotary, bias=bias, output_bias=bias, scale=scale)

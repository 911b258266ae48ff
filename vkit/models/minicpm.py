"""MiniCPM: Llama with scaled embeddings, residuals and head, tied. Source: Hu et al. 2024."""

from __future__ import annotations

from vkit.layers import Decoder, DecoderLayer, Embedding, PreNormLayer
from vkit.models.llama import LlamaForCausalLM


class MiniCPMForCausalLM(LlamaForCausalLM):
    """MiniCPM 1 and 2."""

    is_tied_by_default = True

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack; dividing the hidden states before the head equals multiplying the logits."""
        config = self.config
        if "dim_model_base" in config:
            self._logits_multiplier = config.number("dim_model_base") / self.hidden_size
        return Decoder(
            Embedding(self.vocab_size, self.hidden_size),
            layers,
            self.make_norm(self.hidden_size),
            embedding_multiplier=config.number("scale_emb", default=1.0),
        )

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PreNormLayer(
            self.make_attention(layer), self.make_mlp(layer), *norms, residual_multiplier=self.residual_multiplier
        )

    @property
    def residual_multiplier(self) -> float:
        """The factor on what each half of a block adds."""
        return self.config.number("scale_depth") / self.num_layers**0.5 if "scale_depth" in self.config else 1.0

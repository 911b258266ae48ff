"""Gemma 1, 2 and 3, text: zero-centred norms, GeGLU, embeddings scaled by the root of their width, tied.

Source: Gemma Team 2024a, 2024b, 2025 (technical reports).
"""

from __future__ import annotations

import torch

from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    FeedForward,
    GatedMLP,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    SandwichLayer,
)
from vkit.models.llama import LlamaForCausalLM


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma 1: Llama's blocks."""

    is_tied_by_default = True

    def make_norm(self, width: int) -> RMSNorm:
        """A norm of this family."""
        return RMSNorm(width, self.config.number("rms_norm_eps", default=1e-6), is_zero_centred=True)

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack; the multiplier is rounded to the activations' type, as in the published code."""
        multiplier = torch.tensor(self.hidden_size**0.5, dtype=self.dtype).item()
        embedding = Embedding(self.vocab_size, self.hidden_size)
        return Decoder(embedding, layers, self.make_norm(self.hidden_size), embedding_multiplier=multiplier)

    def make_mlp(self, layer: int) -> FeedForward:
        """The MLP of one block; the first files say gelu and mean its tanh form."""
        activation = self.config.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh")
        return GatedMLP(
            self.hidden_size,
            self.config.integer("intermediate_size"),
            activation="gelu_tanh" if activation == "gelu" else activation,
        )


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Four norms per block, soft caps on scores and logits, a window on every other layer."""

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = (self.make_norm(self.hidden_size) for _ in range(4))
        self._logits_cap = self.config.optional_number("final_logit_softcapping")
        return SandwichLayer(self.make_attention(layer), self.make_mlp(layer), *norms)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        is_full = self.is_full(layer, default_pattern=2)
        return Attention(
            layer,
            *self.attention_shape,
            rotary=self.rotary,
            bias=config.flag("attention_bias", default=False),
            output_bias=config.flag("attention_bias", default=False),
            scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            window=None if is_full else config.integer("sliding_window"),
            soft_cap=config.optional_number("attn_logit_softcapping"),
        )

    def is_full(self, layer: int, *, default_pattern: int) -> bool:
        """Whether a layer sees everything: as listed, or the last of every `sliding_window_pattern`."""
        types = self.config.layer_types(self.num_layers)
        if types:
            return types[layer] == "full_attention"
        pattern = self.config.integer("sliding_window_pattern", "_sliding_window_pattern", default=default_pattern)
        return (layer + 1) % pattern == 0


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Norms on query and key heads; local layers have a rope of their own."""

    def make_rotary(self) -> None:
        """A rope for full layers, and one without scaling for local ones."""
        length = self.options.max_model_len
        full = self.config.rope(length, layer_type="full_attention", default_base=1e6)
        self.rotary = RotaryEmbedding(full)
        if "sliding_attention" in self.config.mapping("rope_parameters"):
            local = self.config.rope(length, layer_type="sliding_attention")
        else:
            base = self.config.number("rope_local_base_freq", default=10000.0)
            local = RopeSpec(full.head_dim, full.width, base, full.max_position_embeddings, length)
        self.local_rotary = RotaryEmbedding(local)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        is_full = self.is_full(layer, default_pattern=6)
        return Attention(
            layer,
            *self.attention_shape,
            rotary=self.rotary if is_full else self.local_rotary,
            bias=config.flag("attention_bias", default=False),
            output_bias=config.flag("attention_bias", default=False),
            scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            window=None if is_full else config.integer("sliding_window"),
            soft_cap=config.optional_number("attn_logit_softcapping"),
            q_norm=self.make_norm(config.head_dim),
            k_norm=self.make_norm(config.head_dim),
        )

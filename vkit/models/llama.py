"""Llama; and Mistral, which is Llama with an optional sliding window.

Source: Touvron et al. 2023; Jiang et al. 2023.
"""

from __future__ import annotations

from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    GatedMLP,
    LMHead,
    PreNormLayer,
    RMSNorm,
    RotaryEmbedding,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig


class LlamaForCausalLM(CausalLM):
    """Pre-norm decoder with grouped-query attention, SwiGLU and half-split rope."""

    is_tied_by_default = False

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.rotary = RotaryEmbedding(config.rope(options.max_model_len))
        self.model = Decoder(
            Embedding(vocab_size, hidden_size),
            [self.make_layer(layer) for layer in range(self.num_layers)],
            self.make_norm(),
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=self.is_tied_by_default) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to)

    def make_norm(self) -> RMSNorm:
        """A norm over the residual stream."""
        return RMSNorm(self.config.integer("hidden_size"), self.config.number("rms_norm_eps", default=1e-6))

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), self.make_norm(), self.make_norm())

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        bias = config.flag("attention_bias", default=False)
        return Attention(
            layer,
            config.integer("hidden_size"),
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            config.head_dim,
            rotary=self.rotary,
            bias=bias,
            output_bias=bias,
        )

    def make_mlp(self, layer: int) -> GatedMLP:
        """The MLP of one block."""
        config = self.config
        return GatedMLP(
            config.integer("hidden_size"),
            config.integer("intermediate_size"),
            activation=config.activation("hidden_act", default="silu"),
            bias=config.flag("mlp_bias", default=False),
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a window on every layer, if the configuration gives one."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        return Attention(
            layer,
            config.integer("hidden_size"),
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            config.head_dim,
            rotary=self.rotary,
            window=config.optional_integer("sliding_window"),
        )

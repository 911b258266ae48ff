"""Llama; Mistral, which is Llama with an optional sliding window; InternLM 3, which is Llama with biases.

Source: Touvron et al. 2023; Jiang et al. 2023.
"""

from __future__ import annotations

from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    FeedForward,
    GatedMLP,
    LMHead,
    PreNormLayer,
    RMSNorm,
    RotaryEmbedding,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig


class LlamaForCausalLM(CausalLM):
    """Pre-norm decoder with grouped-query attention, SwiGLU and half-split rope.

    Relatives override the `make_` methods of what they do differently.
    """

    is_tied_by_default = False

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        self.hidden_size, self.vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.attention_shape = (
            self.hidden_size,
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            config.head_dim,
        )
        self.make_rotary()
        self.model = self.make_decoder([self.make_layer(layer) for layer in range(self.num_layers)])
        tied_to = self.model.embed_tokens if config.is_tied(default=self.is_tied_by_default) else None
        self.lm_head = LMHead(self.hidden_size, self.vocab_size, tied_to=tied_to)

    def make_rotary(self) -> None:
        """The rope that layers share."""
        self.rotary = RotaryEmbedding(self.config.rope(self.options.max_model_len))

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack."""
        return Decoder(Embedding(self.vocab_size, self.hidden_size), layers, self.make_norm(self.hidden_size))

    def make_norm(self, width: int) -> RMSNorm:
        """A norm of this family."""
        return RMSNorm(width, self.config.number("rms_norm_eps", default=1e-6))

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norm = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), *norm)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        bias = self.config.flag("attention_bias", default=False)
        return Attention(layer, *self.attention_shape, rotary=self.rotary, bias=bias, output_bias=bias)

    def make_mlp(self, layer: int) -> FeedForward:
        """The feed-forward part of one block."""
        return GatedMLP(
            self.hidden_size,
            self.config.integer("intermediate_size"),
            activation=self.config.activation("hidden_act", default="silu"),
            bias=self.config.flag("mlp_bias", default=False),
        )


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a window on every layer, if the configuration gives one."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        window = self.config.optional_integer("sliding_window")
        return Attention(layer, *self.attention_shape, rotary=self.rotary, window=window)


class InternLM3ForCausalLM(LlamaForCausalLM):
    """Llama whose attention has biases with `qkv_bias`, and whose MLP has them with `bias`."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        bias = self.config.flag("qkv_bias", "attention_bias", default=False)
        return Attention(layer, *self.attention_shape, rotary=self.rotary, bias=bias, output_bias=bias)

    def make_mlp(self, layer: int) -> FeedForward:
        """The feed-forward part of one block."""
        return GatedMLP(
            self.hidden_size,
            self.config.integer("intermediate_size"),
            activation=self.config.activation("hidden_act", default="silu"),
            bias=self.config.flag("bias", default=False),
        )

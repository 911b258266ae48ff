"""Gemma 3, text: sandwich norms, head norms, local layers with a window and a rope of their own.

Source: Gemma Team 2025, Gemma 3 Technical Report.
"""

from __future__ import annotations

import torch

from vkit.layers import (
    Attention,
    Decoder,
    Embedding,
    GatedMLP,
    LMHead,
    RMSNorm,
    RopeSpec,
    RotaryEmbedding,
    SandwichLayer,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig


class Gemma3ForCausalLM(CausalLM):
    """All norms zero-centred; embeddings scaled by the root of their width; tied."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.full_rotary = RotaryEmbedding(
            config.rope(options.max_model_len, layer_type="full_attention", default_base=1e6)
        )
        self.local_rotary = RotaryEmbedding(self._local_rope())
        self.model = Decoder(
            Embedding(vocab_size, hidden_size),
            [self.make_layer(layer) for layer in range(self.num_layers)],
            self._norm(hidden_size),
            embedding_multiplier=torch.tensor(hidden_size**0.5, dtype=self.dtype).item(),
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=True) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to)
        self._logits_cap = config.optional_number("final_logit_softcapping")

    def make_layer(self, layer: int) -> SandwichLayer:
        """One block."""
        config = self.config
        hidden_size, head_dim = config.integer("hidden_size"), config.integer("head_dim", default=256)
        is_full = self._is_full(layer)
        attention = Attention(
            layer,
            hidden_size,
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            head_dim,
            rotary=self.full_rotary if is_full else self.local_rotary,
            bias=config.flag("attention_bias", default=False),
            output_bias=config.flag("attention_bias", default=False),
            scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
            window=None if is_full else config.integer("sliding_window"),
            soft_cap=config.optional_number("attn_logit_softcapping"),
            q_norm=self._norm(head_dim),
            k_norm=self._norm(head_dim),
        )
        mlp = GatedMLP(
            hidden_size,
            config.integer("intermediate_size"),
            activation=config.activation("hidden_activation", default="gelu_pytorch_tanh"),
        )
        return SandwichLayer(attention, mlp, *(self._norm(hidden_size) for _ in range(4)))

    def _norm(self, width: int) -> RMSNorm:
        return RMSNorm(width, self.config.number("rms_norm_eps", default=1e-6), is_zero_centred=True)

    def _is_full(self, layer: int) -> bool:
        types = self.config.layer_types(self.num_layers)
        if types:
            return types[layer] == "full_attention"
        pattern = self.config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        return (layer + 1) % pattern == 0

    def _local_rope(self) -> RopeSpec:
        """The rope of sliding layers: never scaled, base from a key of its own in older files."""
        config, length = self.config, self.options.max_model_len
        if "sliding_attention" in config.mapping("rope_parameters"):
            return config.rope(length, layer_type="sliding_attention")
        full = self.full_rotary.spec
        base = config.number("rope_local_base_freq", default=10000.0)
        return RopeSpec(full.head_dim, full.width, base, full.max_position_embeddings, length)

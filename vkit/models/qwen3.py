"""Qwen3: Llama with a norm over every query and key head."""

from __future__ import annotations

from vkit.layers import Attention, RMSNorm
from vkit.models.llama import LlamaForCausalLM
from vkit.models.qwen2 import window_of


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, dense."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        head_dim, eps = config.head_dim, config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        return Attention(
            layer,
            config.integer("hidden_size"),
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            head_dim,
            rotary=self.rotary,
            bias=bias,
            output_bias=bias,
            window=window_of(config, layer),
            q_norm=RMSNorm(head_dim, eps),
            k_norm=RMSNorm(head_dim, eps),
        )

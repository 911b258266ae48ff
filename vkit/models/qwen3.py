"""Qwen3: Llama with a norm over every query and key head; the larger ones with experts.

Source: Yang et al. 2025, Qwen3 Technical Report.
"""

from __future__ import annotations

from vkit.layers import Attention, Experts, FeedForward, MoE
from vkit.models.llama import LlamaForCausalLM
from vkit.models.qwen2 import window_of


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3, dense."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        bias = config.flag("attention_bias", default=False)
        return Attention(
            layer,
            *self.attention_shape,
            rotary=self.rotary,
            bias=bias,
            output_bias=bias,
            window=window_of(config, layer),
            q_norm=self.make_norm(config.head_dim),
            k_norm=self.make_norm(config.head_dim),
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with experts in the layers that the configuration names."""

    def make_mlp(self, layer: int) -> FeedForward:
        """Experts, or an ordinary MLP."""
        config = self.config
        dense_layers = config.values.get("mlp_only_layers") or []
        if layer in dense_layers or (layer + 1) % config.integer("decoder_sparse_step", default=1):
            return super().make_mlp(layer)
        num_experts = config.num_experts
        experts = Experts(
            num_experts,
            self.hidden_size,
            config.integer("moe_intermediate_size"),
            activation=config.activation("hidden_act", default="silu"),
        )
        return MoE(
            self.hidden_size,
            experts,
            num_experts,
            config.integer("num_experts_per_tok"),
            renormalizes=config.flag("norm_topk_prob", default=False),
        )

"""Mixtral: Mistral with a mixture of experts in every layer. Source: Jiang et al. 2024."""

from __future__ import annotations

from vkit.layers import DecoderLayer, Experts, FeedForward, MoE, PreNormLayer
from vkit.models.llama import MistralForCausalLM


class MixtralForCausalLM(MistralForCausalLM):
    """Softmax over all experts, the chosen ones always renormalised."""

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        names = {"mlp": "block_sparse_moe"}
        return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), *norms, names=names)

    def make_mlp(self, layer: int) -> FeedForward:
        """The experts of one block."""
        config = self.config
        num_experts = config.num_experts
        experts = Experts(
            num_experts,
            self.hidden_size,
            config.integer("intermediate_size"),
            activation=config.activation("hidden_act", default="silu"),
            projections=("w1", "w3", "w2"),
        )
        return MoE(self.hidden_size, experts, num_experts, config.integer("num_experts_per_tok"), renormalizes=True)

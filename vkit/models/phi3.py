"""Phi-3 and Phi-4-mini: Llama with fused projections, partial rope and longrope. Source: Abdin et al. 2024."""

from __future__ import annotations

from vkit.layers import Attention
from vkit.models.llama import LlamaForCausalLM


class Phi3ForCausalLM(LlamaForCausalLM):
    """The fused tensors are recognised by the shared layers."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        window = self.config.optional_integer("sliding_window")
        return Attention(layer, *self.attention_shape, rotary=self.rotary, window=window)

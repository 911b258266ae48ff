"""GLM-4: sandwich norms, interleaved rope on half of each head. Source: GLM Team 2024."""

from __future__ import annotations

from vkit.layers import Attention, DecoderLayer, RotaryEmbedding, SandwichLayer
from vkit.models.llama import LlamaForCausalLM

_NAMES = {
    "post_attention_layernorm": "post_self_attn_layernorm",
    "pre_feedforward_layernorm": "post_attention_layernorm",
    "post_feedforward_layernorm": "post_mlp_layernorm",
}


class Glm4ForCausalLM(LlamaForCausalLM):
    """GLM-4-0414."""

    def make_rotary(self) -> None:
        """The rope that layers share."""
        spec = self.config.rope(self.options.max_model_len, default_partial=0.5, is_interleaved=True)
        self.rotary = RotaryEmbedding(spec)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = (self.make_norm(self.hidden_size) for _ in range(4))
        return SandwichLayer(self.make_attention(layer), self.make_mlp(layer), *norms, names=_NAMES)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        bias = self.config.flag("attention_bias", default=False)
        return Attention(layer, *self.attention_shape, rotary=self.rotary, bias=bias)

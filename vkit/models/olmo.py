"""OLMo 2 and 3: norms after each part only, and over whole query and key projections.

Source: OLMo Team 2024, 2 OLMo 2 Furious; 2025, OLMo 3.
"""

from __future__ import annotations

from vkit.layers import Attention, DecoderLayer, PostNormLayer, RopeSpec, RotaryEmbedding
from vkit.models.llama import LlamaForCausalLM


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Every layer sees everything."""

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PostNormLayer(self.make_attention(layer), self.make_mlp(layer), *norms)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        return self.attention(layer, self.rotary, None)

    def attention(self, layer: int, rotary: RotaryEmbedding, window: int | None) -> Attention:
        """Attention with this family's norms and biases."""
        _, num_heads, num_kv_heads, head_dim = self.attention_shape
        bias = self.config.flag("attention_bias", default=False)
        return Attention(
            layer,
            *self.attention_shape,
            rotary=rotary,
            bias=bias,
            output_bias=bias,
            window=window,
            q_norm=self.make_norm(num_heads * head_dim),
            k_norm=self.make_norm(num_kv_heads * head_dim),
            norms_whole_projection=True,
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three of four layers have a window; only the others stretch their rope."""

    def make_rotary(self) -> None:
        """A rope for full layers, and the same without scaling for sliding ones."""
        length = self.options.max_model_len
        spec = self.config.rope(length, layer_type="full_attention")
        self.rotary = RotaryEmbedding(spec)
        plain = RopeSpec(spec.head_dim, spec.width, spec.base, spec.max_position_embeddings, spec.max_model_len)
        if "sliding_attention" in self.config.mapping("rope_parameters"):
            plain = self.config.rope(length, layer_type="sliding_attention")
        self.sliding_rotary = RotaryEmbedding(plain)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        types = self.config.layer_types(self.num_layers)
        is_full = types[layer] == "full_attention" if types else (layer + 1) % 4 == 0
        if is_full:
            return self.attention(layer, self.rotary, None)
        return self.attention(layer, self.sliding_rotary, self.config.integer("sliding_window"))

"""Command-R (Cohere) and Command-R7B (Cohere 2): parallel block, weight-only LayerNorm, interleaved rope, tied.

Source: Cohere 2024, 2025 (Command A technical report).
"""

from __future__ import annotations

from vkit.layers import Attention, Decoder, Embedding, GatedMLP, LayerNorm, LMHead, ParallelLayer, RotaryEmbedding
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig


class CohereForCausalLM(CausalLM):
    """Optionally a norm with its own weights for each query and key head."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.rotary = RotaryEmbedding(config.rope(options.max_model_len, is_interleaved=True))
        layers = [self.make_layer(layer) for layer in range(self.num_layers)]
        self.model = Decoder(Embedding(vocab_size, hidden_size), layers, self.make_norm(hidden_size))
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=self.model.embed_tokens)
        self._logits_multiplier = config.number("logit_scale", default=0.0625)

    def make_layer(self, layer: int) -> ParallelLayer:
        """One block."""
        config = self.config
        hidden_size = config.integer("hidden_size")
        mlp = GatedMLP(
            hidden_size,
            config.integer("intermediate_size"),
            activation=config.activation("hidden_act", default="silu"),
        )
        return ParallelLayer(self.make_attention(layer), mlp, self.make_norm(hidden_size))

    def make_norm(self, width: int, heads: int | None = None) -> LayerNorm:
        """A norm of this family."""
        return LayerNorm(width, self.config.number("layer_norm_eps", default=1e-5), bias=False, heads=heads)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        has_head_norms = self.config.flag("use_qk_norm", default=False)
        return self.attention(layer, rotary=self.rotary, window=None, has_head_norms=has_head_norms)

    def attention(
        self, layer: int, *, rotary: RotaryEmbedding | None, window: int | None, has_head_norms: bool
    ) -> Attention:
        """Attention with this family's shapes and biases."""
        config = self.config
        num_heads, head_dim = config.integer("num_attention_heads"), config.head_dim
        bias = config.flag("attention_bias", default=False)
        return Attention(
            layer,
            config.integer("hidden_size"),
            num_heads,
            config.num_kv_heads,
            head_dim,
            rotary=rotary,
            bias=bias,
            output_bias=bias,
            window=window,
            q_norm=self.make_norm(head_dim, num_heads) if has_head_norms else None,
            k_norm=self.make_norm(head_dim, config.num_kv_heads) if has_head_norms else None,
        )


class Cohere2ForCausalLM(CohereForCausalLM):
    """Sliding layers with rope, and every fourth layer full and without positions."""

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        types = self.config.layer_types(self.num_layers)
        pattern = self.config.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
        is_full = types[layer] == "full_attention" if types else (layer + 1) % pattern == 0
        if is_full:
            return self.attention(layer, rotary=None, window=None, has_head_norms=False)
        window = self.config.integer("sliding_window")
        return self.attention(layer, rotary=self.rotary, window=window, has_head_norms=False)

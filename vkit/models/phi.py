"""Phi-1.5 and Phi-2: parallel block with one LayerNorm, partial rope, biases everywhere. Source: Li et al. 2023."""

from __future__ import annotations

from vkit.layers import (
    Attention,
    Decoder,
    Embedding,
    LayerNorm,
    LMHead,
    ParallelLayer,
    PlainMLP,
    RotaryEmbedding,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig


class PhiForCausalLM(CausalLM):
    """h += attention(n) + mlp(n) with n = norm(h)."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.rotary = RotaryEmbedding(config.rope(options.max_model_len, default_partial=0.5))
        self.model = Decoder(
            Embedding(vocab_size, hidden_size),
            [self.make_layer(layer) for layer in range(self.num_layers)],
            self._norm(hidden_size),
            names={"norm": "final_layernorm"},
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=False) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to, bias=True)

    def make_layer(self, layer: int) -> ParallelLayer:
        """One block."""
        config = self.config
        hidden_size, head_dim = config.integer("hidden_size"), config.head_dim
        has_head_norms = config.flag("qk_layernorm", default=False)
        attention = Attention(
            layer,
            hidden_size,
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            head_dim,
            rotary=self.rotary,
            bias=True,
            output_bias=True,
            q_norm=self._norm(head_dim) if has_head_norms else None,
            k_norm=self._norm(head_dim) if has_head_norms else None,
            names={"o_proj": "dense", "q_norm": "q_layernorm", "k_norm": "k_layernorm"},
        )
        activation = config.activation("hidden_act", default="gelu_new")
        mlp = PlainMLP(hidden_size, config.integer("intermediate_size"), activation=activation)
        return ParallelLayer(attention, mlp, self._norm(hidden_size))

    def _norm(self, width: int) -> LayerNorm:
        return LayerNorm(width, self.config.number("layer_norm_eps", default=1e-5))

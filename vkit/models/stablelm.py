"""StableLM: LayerNorm, SwiGLU, rope on a quarter of each head. Source: Bellagente et al. 2024."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    GatedMLP,
    LayerNorm,
    LMHead,
    ParallelLayer,
    Placement,
    PreNormLayer,
    RotaryEmbedding,
    TensorSlot,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.quantization import Weight


class StableLmForCausalLM(CausalLM):
    """Sequential or parallel blocks, by `use_parallel_residual`."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        self.rotary = RotaryEmbedding(config.rope(options.max_model_len, default_partial=0.25))
        layers = [self.make_layer(layer) for layer in range(self.num_layers)]
        self.model = Decoder(Embedding(vocab_size, hidden_size), layers, self._norm())
        tied_to = self.model.embed_tokens if config.is_tied(default=False) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        config = self.config
        mlp = GatedMLP(
            config.integer("hidden_size"),
            config.integer("intermediate_size"),
            activation=config.activation("hidden_act", default="silu"),
        )
        attention = self._attention(layer)
        if config.flag("use_parallel_residual", default=False):
            return ParallelLayer(attention, mlp, self._norm())
        return PreNormLayer(attention, mlp, self._norm(), self._norm())

    def _attention(self, layer: int) -> Attention:
        config = self.config
        num_heads, num_kv_heads = config.integer("num_attention_heads"), config.num_kv_heads
        has_head_norms = config.flag("qk_layernorm", default=False)
        eps = config.number("layer_norm_eps", default=1e-5)
        return Attention(
            layer,
            config.integer("hidden_size"),
            num_heads,
            num_kv_heads,
            config.head_dim,
            rotary=self.rotary,
            bias=config.flag("use_qkv_bias", default=False),
            q_norm=HeadNorms(num_heads, config.head_dim, eps) if has_head_norms else None,
            k_norm=HeadNorms(num_kv_heads, config.head_dim, eps) if has_head_norms else None,
            names={"q_norm": "q_layernorm", "k_norm": "k_layernorm"},
        )

    def _norm(self) -> LayerNorm:
        return LayerNorm(self.config.integer("hidden_size"), self.config.number("layer_norm_eps", default=1e-5))


class HeadNorms(LayerNorm):
    """A weight-only LayerNorm per head; stored head by head, or (in GGUF) as one matrix."""

    def __init__(self, num_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(head_dim, eps, bias=False, heads=num_heads)
        self._is_stacked = False

    def choose_form(self, is_stored: Callable[[str], bool]) -> None:
        """One matrix, if that is what the checkpoint holds."""
        self._is_stacked = is_stored("weight")

    def slots(self) -> list[TensorSlot]:
        """`weight`, or `norms.{head}.weight`."""
        if self._is_stacked:
            return super().slots()
        return [TensorSlot(f"norms.{head}.weight", self.shape[1:]) for head in range(self.shape[0])]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Stack the heads' weights."""
        if not self._is_stacked:
            tensors = {"weight": torch.stack([placement.vector(tensors[slot.name]) for slot in self.slots()])}
        super().set_tensors(tensors, placement)

"""InternLM 2: Llama under other names, with queries, keys and values interleaved in one weight.

Source: Cai et al. 2024.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    FeedForward,
    GatedMLP,
    Linear,
    MergedLinear,
    PreNormLayer,
)
from vkit.models.llama import LlamaForCausalLM

_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "self_attn": "attention",
    "post_attention_layernorm": "ffn_norm",
    "mlp": "feed_forward",
}


class InternLM2ForCausalLM(LlamaForCausalLM):
    """InternLM 2 and 2.5."""

    names: Mapping[str, str] = {"lm_head": "output"}

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack."""
        embedding = Embedding(self.vocab_size, self.hidden_size)
        names = {"embed_tokens": "tok_embeddings"}
        return Decoder(embedding, layers, self.make_norm(self.hidden_size), names=names)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), *norms, names=_LAYER_NAMES)

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        hidden_size, num_heads, num_kv_heads, head_dim = self.attention_shape
        bias = self.config.flag("bias", default=False)
        order = split_order(num_heads, num_kv_heads, head_dim)
        return Attention(
            layer,
            *self.attention_shape,
            rotary=self.rotary,
            qkv_proj=MergedLinear(hidden_size, {"wqkv": len(order)}, bias=bias, row_order=order),
            o_proj=Linear(num_heads * head_dim, hidden_size, bias=bias),
            names={"o_proj": "wo"},
        )

    def make_mlp(self, layer: int) -> FeedForward:
        """The MLP of one block."""
        return GatedMLP(
            self.hidden_size,
            self.config.integer("intermediate_size"),
            activation=self.config.activation("hidden_act", default="silu"),
            gate_up=("w1", "w3"),
            down="w2",
        )


def split_order(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Stored row of each row of [queries | keys | values]: stored per kv head as its queries, its key, its value."""
    per_group = num_heads // num_kv_heads
    stored = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(num_kv_heads, per_group + 2, head_dim)
    return torch.cat(
        [stored[:, :per_group].flatten(), stored[:, per_group].flatten(), stored[:, per_group + 1].flatten()]
    )

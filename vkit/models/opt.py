"""OPT: learned positions, LayerNorm, ReLU, biases everywhere, tied. Source: Zhang et al. 2022."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.distributed import Ranks
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    PositionEmbedding,
    Stream,
)
from vkit.layers.linear import shard_pair
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig

_POSITION_OFFSET = 2
"""Rows of the position table before that of position 0."""


class OPTLayer(DecoderLayer):
    """Pre-norm block whose MLP is two linear layers of the block itself."""

    names: Mapping[str, str] = {"input_layernorm": "self_attn_layer_norm"}

    def __init__(self, self_attn: Attention, config: HFConfig) -> None:
        hidden_size, width = config.integer("hidden_size"), config.integer("ffn_dim")
        bias = config.flag("enable_bias", default=True)
        self.input_layernorm = _norm(config)
        self.self_attn = self_attn
        self.final_layer_norm = _norm(config)
        self.fc1 = Linear(hidden_size, width, bias=bias)
        self.fc2 = Linear(width, hidden_size, bias=bias)
        self._width = width
        self._activation = config.activation("activation_function", default="relu")

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads, and a part of the width between the linear layers."""
        self.self_attn.shard(ranks)
        shard_pair(ranks, self._width, self.fc1, self.fc2)

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(normed, batch)
        normed, residual = self.final_layer_norm.add(hidden, residual)
        return self.fc2(kernels.unary(self.fc1(normed), self._activation)), residual


class OPTForCausalLM(CausalLM):
    """OPT of any size but 350m, whose norms come after each part."""

    names: Mapping[str, str] = {"model": "model.decoder"}

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("num_hidden_layers")
        num_positions = config.integer("max_position_embeddings")
        self._check_settings(hidden_size, num_positions)
        self.model = Decoder(
            Embedding(vocab_size, hidden_size),
            [self.make_layer(layer) for layer in range(self.num_layers)],
            _norm(config),
            embed_positions=PositionEmbedding(num_positions + _POSITION_OFFSET, hidden_size, offset=_POSITION_OFFSET),
            names={"norm": "final_layer_norm"},
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=True) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to)

    def make_layer(self, layer: int) -> OPTLayer:
        """One block."""
        config = self.config
        hidden_size, num_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        bias = config.flag("enable_bias", default=True)
        attention = Attention(
            layer,
            hidden_size,
            num_heads,
            num_heads,
            hidden_size // num_heads,
            bias=bias,
            output_bias=bias,
            names={"o_proj": "out_proj"},
        )
        return OPTLayer(attention, config)

    def _check_settings(self, hidden_size: int, num_positions: int) -> None:
        config = self.config
        if config.integer("word_embed_proj_dim", default=hidden_size) != hidden_size:
            raise ModelLoadError("config.json: word_embed_proj_dim other than hidden_size is not supported (OPT-350m)")
        if not config.flag("do_layer_norm_before", default=True):
            raise ModelLoadError("config.json: do_layer_norm_before false is not supported (OPT-350m)")
        if self.options.max_model_len > num_positions:
            raise ModelLoadError(f"max_model_len {self.options.max_model_len} is above the {num_positions} positions")


def _norm(config: HFConfig) -> LayerNorm:
    return LayerNorm(config.integer("hidden_size"), 1e-5)

"""GPT-2: learned positions, LayerNorm, plain MLP, weights stored as (in, out). Source: Radford et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping, Set

from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    Embedding,
    LayerNorm,
    Linear,
    LMHead,
    PlainMLP,
    PositionEmbedding,
    PreNormLayer,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig

_LAYER_NAMES = {"input_layernorm": "ln_1", "self_attn": "attn", "post_attention_layernorm": "ln_2"}
_DECODER_NAMES = {"embed_tokens": "wte", "embed_positions": "wpe", "layers": "h", "norm": "ln_f"}
_PREFIX = "transformer."


class GPT2LMHeadModel(CausalLM):
    """GPT-2 of any size; published files name tensors with or without the prefix `transformer.`."""

    names: Mapping[str, str] = {"model": "transformer"}
    ignored_tensors = (r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",)

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        self._check_settings()
        hidden_size, vocab_size = config.integer("n_embd", "hidden_size"), config.integer("vocab_size")
        self.num_layers = config.integer("n_layer", "num_hidden_layers")
        self.model = Decoder(
            Embedding(vocab_size, hidden_size),
            [self.make_layer(layer) for layer in range(self.num_layers)],
            self._norm(),
            embed_positions=PositionEmbedding(config.integer("n_positions", "max_position_embeddings"), hidden_size),
            names=_DECODER_NAMES,
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=True) else None
        self.lm_head = LMHead(hidden_size, vocab_size, tied_to=tied_to)

    def make_layer(self, layer: int) -> PreNormLayer:
        """One block."""
        config = self.config
        hidden_size = config.integer("n_embd", "hidden_size")
        num_heads = config.integer("n_head", "num_attention_heads")
        head_dim = hidden_size // num_heads
        scale = head_dim**-0.5 if config.flag("scale_attn_weights", default=True) else 1.0
        if config.flag("scale_attn_by_inverse_layer_idx", default=False):
            scale /= layer + 1
        attention = Attention(
            layer,
            hidden_size,
            num_heads,
            num_heads,
            head_dim,
            scale=scale,
            qkv_proj=Linear(hidden_size, 3 * hidden_size, bias=True, is_transposed=True),
            o_proj=Linear(hidden_size, hidden_size, bias=True, is_transposed=True),
            names={"qkv_proj": "c_attn", "o_proj": "c_proj"},
        )
        mlp = PlainMLP(
            hidden_size,
            config.integer("n_inner", "intermediate_size", default=4 * hidden_size),
            activation=config.activation("activation_function", default="gelu_new"),
            names=("c_fc", "c_proj"),
            is_transposed=True,
        )
        return PreNormLayer(attention, mlp, self._norm(), self._norm(), names=_LAYER_NAMES)

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """`name`, without its prefix if the file has none."""
        bare = name.removeprefix(_PREFIX)
        return bare if bare in stored else name

    def _norm(self) -> LayerNorm:
        config = self.config
        return LayerNorm(config.integer("n_embd", "hidden_size"), config.number("layer_norm_epsilon", default=1e-5))

    def _check_settings(self) -> None:
        if self.config.flag("add_cross_attention", default=False):
            raise ModelLoadError("config.json: add_cross_attention is not supported for GPT2LMHeadModel")
        limit = self.config.integer("n_positions", "max_position_embeddings")
        if self.options.max_model_len > limit:
            raise ModelLoadError(f"max_model_len {self.options.max_model_len} is above the {limit} learned positions")

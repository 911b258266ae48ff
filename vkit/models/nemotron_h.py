"""Nemotron-H: layers of one part each: Mamba-2, attention without positions, squared-ReLU MLP, or experts.

Source: NVIDIA 2025, Nemotron-H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vkit.batch import Batch
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    Experts,
    FeedForward,
    Linear,
    LMHead,
    Mamba2,
    MambaShape,
    Mixer,
    PlainMLP,
    RMSNorm,
    Router,
    Routing,
    SharedExpertMoE,
    Stream,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig

_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_SYNONYMS = {"linear_attention": "mamba", "full_attention": "attention"}


class MixingLayer(DecoderLayer):
    """h += part(norm h), for a part that sees other tokens."""

    def __init__(self, norm: RMSNorm, mixer: Mixer) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.norm.add(hidden, residual)
        return self.mixer(normed, batch), residual


class TokenwiseLayer(DecoderLayer):
    """h += part(norm h), for a part that sees one token at a time."""

    def __init__(self, norm: RMSNorm, mixer: FeedForward) -> None:
        self.norm = norm
        self.mixer = mixer

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block."""
        normed, residual = self.norm.add(hidden, residual)
        return self.mixer(normed), residual


class NemotronHForCausalLM(CausalLM):
    """The stack that the pattern of letters, or the list of block types, spells."""

    names: Mapping[str, str] = {"model": "backbone"}

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        self.hidden_size, vocab_size = config.integer("hidden_size"), config.integer("vocab_size")
        kinds = block_kinds(config)
        self.num_layers = len(kinds)
        self.eps = config.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5)
        self.model = Decoder(
            Embedding(vocab_size, self.hidden_size),
            [self.make_layer(layer, kind) for layer, kind in enumerate(kinds)],
            RMSNorm(self.hidden_size, self.eps),
            names={"embed_tokens": "embeddings", "norm": "norm_f"},
        )
        tied_to = self.model.embed_tokens if config.is_tied(default=False) else None
        self.lm_head = LMHead(self.hidden_size, vocab_size, tied_to=tied_to)

    def make_layer(self, layer: int, kind: str) -> DecoderLayer:
        """One block."""
        norm = RMSNorm(self.hidden_size, self.eps)
        if kind == "mamba":
            return MixingLayer(norm, self.make_mamba(layer))
        if kind == "attention":
            return MixingLayer(norm, self.make_attention(layer))
        make: Callable[[], FeedForward] = self.make_mlp if kind == "mlp" else self.make_experts
        return TokenwiseLayer(norm, make())

    def make_mamba(self, layer: int) -> Mamba2:
        """A recurrent part."""
        config = self.config
        limits = config.values.get("time_step_limit")
        spelled = [0.0, {"__float__": "Infinity"}]  # JSON has no infinity; newer files write it so
        if limits is not None and list(limits) not in ([0.0, math.inf], spelled):
            raise ModelLoadError(f"config.json: time_step_limit {limits!r} is not supported (known: [0.0, Infinity])")
        activation = config.activation("mamba_hidden_act", default="silu")
        if activation != "silu":
            raise ModelLoadError(f"config.json: mamba_hidden_act {activation!r} is not supported (known: silu)")
        shape = MambaShape(
            config.integer("mamba_num_heads"),
            config.integer("mamba_head_dim"),
            config.integer("n_groups"),
            config.integer("ssm_state_size"),
            config.integer("conv_kernel", default=4),
        )
        return Mamba2(
            layer,
            self.hidden_size,
            shape,
            eps=self.eps,
            least_step=config.number("time_step_min", default=0.001),
            bias=config.flag("use_bias", "mamba_proj_bias", default=False),
            conv_bias=config.flag("use_conv_bias", default=True),
            dtype=self.dtype,
            state_dtype=self.state_dtype,
        )

    @property
    def state_dtype(self) -> torch.dtype:
        """Type of the heads' matrices between steps."""
        return self.config.float_type("mamba_ssm_cache_dtype", default="float32")

    def make_attention(self, layer: int) -> Attention:
        """An attention part; it has no biases and no positions."""
        config = self.config
        return Attention(
            layer,
            self.hidden_size,
            config.integer("num_attention_heads"),
            config.num_kv_heads,
            config.head_dim,
            window=config.optional_integer("sliding_window"),
        )

    def make_mlp(self) -> FeedForward:
        """An MLP part."""
        return self.plain_mlp(self.config.integer("intermediate_size"))

    def plain_mlp(self, width: int) -> PlainMLP:
        """down( relu(up x)² )."""
        config = self.config
        activation = config.activation("mlp_hidden_act", default="relu2")
        bias = config.flag("mlp_bias", default=False)
        return PlainMLP(self.hidden_size, width, activation=activation, bias=bias, names=("up_proj", "down_proj"))

    def make_experts(self) -> FeedForward:
        """An experts' part; they may work in a narrower space than the router and the shared expert."""
        config, hidden_size = self.config, self.hidden_size
        activation = config.activation("mlp_hidden_act", default="relu2")
        if activation != "relu2":
            raise ModelLoadError(
                f"config.json: mlp_hidden_act {activation!r} of experts is not supported (known: relu2)"
            )
        routing = Routing(
            config.num_experts,
            config.integer("num_experts_per_tok"),
            "sigmoid",
            renormalizes=config.flag("norm_topk_prob", default=True),
            has_bias=True,
            num_groups=config.integer("n_group", default=1),
            top_groups=config.integer("topk_group", default=1),
            scale=config.number("routed_scaling_factor", default=1.0),
        )
        narrow, bias = config.optional_integer("moe_latent_size"), config.flag("mlp_bias", default=False)
        latent = (
            None if narrow is None else (Linear(hidden_size, narrow, bias=bias), Linear(narrow, hidden_size, bias=bias))
        )
        width = config.integer("moe_intermediate_size")
        num_shared = config.integer("n_shared_experts", default=1)
        shared_width = config.integer("moe_shared_expert_intermediate_size", default=num_shared * width)
        return SharedExpertMoE(
            Router(hidden_size, routing),
            Experts(config.num_experts, narrow or hidden_size, width, activation="relu2"),
            self.plain_mlp(shared_width) if num_shared else None,
            latent=latent,
        )


def block_kinds(config: HFConfig) -> list[str]:
    """The kind of every block: mamba, attention, mlp or moe.

    Raises:
        ModelLoadError: neither key is set, or it holds something else.
    """
    key = "layers_block_type" if "layers_block_type" in config else "hybrid_override_pattern"
    listed = config.values.get(key)
    if not isinstance(listed, str | list):
        raise ModelLoadError(f"config.json: {key} must spell the blocks, got {listed!r}")
    kinds = [_LETTERS.get(item, _SYNONYMS.get(item, item)) for item in map(str, listed)]
    unknown = sorted(set(kinds) - set(_LETTERS.values()))
    if unknown:
        known = ", ".join(_LETTERS.values())
        raise ModelLoadError(f"config.json: {key}: {', '.join(unknown)} is not supported (known: {known})")
    return kinds

"""Kimi Linear: Kimi delta attention, every few layers latent attention without positions, and experts.

Source: Kimi Team 2025, Kimi Linear.
"""

from __future__ import annotations

from typing import Any

from vkit.errors import ModelLoadError
from vkit.layers import (
    DecoderLayer,
    DeltaShape,
    Experts,
    FeedForward,
    GatedMLP,
    KimiDeltaAttention,
    LatentAttention,
    Mixer,
    PreNormLayer,
    Router,
    Routing,
    SharedExpertMoE,
)
from vkit.models.deepseek import latent_scale, latent_shape
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM


class KimiLinearForCausalLM(LlamaForCausalLM):
    """No layer rotates anything: positions are what the recurrent layers make of order."""

    def make_rotary(self) -> None:
        """None; a file that wants one is refused."""
        if not self.config.flag("mla_use_nope", default=True):
            raise ModelLoadError("config.json: mla_use_nope false is not supported")
        self.linear = HFConfig(self.config.mapping("linear_attn_config"))

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block; experts go by another name than the dense layers' MLP."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        names = {} if self.is_dense(layer) else {"mlp": "block_sparse_moe"}
        return PreNormLayer(self.make_mixer(layer), self.make_mlp(layer), *norms, names=names)

    def make_mixer(self, layer: int) -> Mixer:
        """The layer's attention; the lists count from one."""
        if layer + 1 in self.listed("full_attn_layers"):
            shape = latent_shape(self.config)
            return LatentAttention(layer, self.hidden_size, shape, rotary=None, scale=latent_scale(shape))
        if layer + 1 not in self.listed("kda_layers"):
            raise ModelLoadError(f"config.json: linear_attn_config names no kind for layer {layer + 1}")
        num_heads, width = self.linear.integer("num_heads"), self.linear.integer("head_dim")
        conv_width = self.linear.integer("short_conv_kernel_size", default=4)
        return KimiDeltaAttention(
            layer,
            self.hidden_size,
            DeltaShape(num_heads, num_heads, width, width, conv_width),
            eps=self.config.number("rms_norm_eps", default=1e-5),
            dtype=self.dtype,
            state_dtype=self.config.float_type("mamba_ssm_dtype", default="float32"),
        )

    def listed(self, key: str) -> list[Any]:
        """The layers under `key`, counted from one."""
        value = self.linear.values.get(key)
        if not isinstance(value, list):
            raise ModelLoadError(f"config.json: linear_attn_config.{key} must be a list of layers, got {value!r}")
        return value

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has an ordinary MLP."""
        config = self.config
        is_first = layer < config.integer("first_k_dense_replace", default=0)
        return is_first or layer % config.integer("moe_layer_freq", default=1) != 0

    def make_mlp(self, layer: int) -> FeedForward:
        """An MLP, or experts beside shared ones."""
        config, hidden_size = self.config, self.hidden_size
        if self.is_dense(layer):
            return super().make_mlp(layer)
        width, activation = config.integer("moe_intermediate_size"), config.activation("hidden_act", default="silu")
        scoring = config.text("moe_router_activation_func", default="sigmoid")
        if scoring not in ("sigmoid", "softmax"):
            raise ModelLoadError(
                f"config.json: moe_router_activation_func {scoring!r} is not supported (known: sigmoid, softmax)"
            )
        is_grouped = config.flag("use_grouped_topk", default=True)
        routing = Routing(
            config.num_experts,
            config.integer("num_experts_per_token", "num_experts_per_tok"),
            "sigmoid" if scoring == "sigmoid" else "softmax",
            renormalizes=config.flag("moe_renormalize", default=True),
            has_bias=True,
            num_groups=config.integer("num_expert_group", default=1) if is_grouped else 1,
            top_groups=config.integer("topk_group", default=1) if is_grouped else 1,
            scale=config.number("routed_scaling_factor", default=1.0),
        )
        num_shared = config.integer("num_shared_experts", default=0)
        shared = GatedMLP(hidden_size, num_shared * width, activation=activation) if num_shared else None
        experts = Experts(config.num_experts, hidden_size, width, activation=activation, projections=("w1", "w3", "w2"))
        return SharedExpertMoE(Router(hidden_size, routing), experts, shared)

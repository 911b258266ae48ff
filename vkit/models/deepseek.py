"""DeepSeek-V2 and V3, and GLM-4.7-Flash: latent attention, many small experts beside shared ones, dense first layers.

Source: DeepSeek-AI 2024a (V2), 2024b (V3); Zhipu AI 2025 (GLM-4.5).
"""

from __future__ import annotations

from vkit.errors import ModelLoadError
from vkit.layers import (
    DecoderLayer,
    Experts,
    FeedForward,
    GatedMLP,
    LatentAttention,
    LatentShape,
    PreNormLayer,
    RopeSpec,
    RotaryEmbedding,
    Router,
    Routing,
    SharedExpertMoE,
    yarn_mscale,
)
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM


def latent_shape(config: HFConfig) -> LatentShape:
    """The widths that a configuration gives latent attention."""
    return LatentShape(
        num_heads=config.integer("num_attention_heads"),
        kv_rank=config.integer("kv_lora_rank"),
        q_rank=config.optional_integer("q_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )


def latent_scale(shape: LatentShape, spec: RopeSpec | None = None) -> float:
    """The factor on scores; a yarn that names `mscale_all_dim` grows it with the stretch of the context."""
    scale = float(shape.query_dim**-0.5)
    if spec is None or spec.kind != "yarn" or not spec.scaling.get("mscale_all_dim"):
        return scale
    return scale * yarn_mscale(float(spec.scaling["factor"]), float(spec.scaling["mscale_all_dim"])) ** 2


class DeepseekV2ForCausalLM(LlamaForCausalLM):
    """DeepSeek-V2: softmax router, optionally limited to the best groups."""

    default_method = "greedy"

    def make_rotary(self) -> None:
        """The rope of the rotating parts."""
        self.shape = latent_shape(self.config)
        is_interleaved = self.config.flag("rope_interleave", default=True)
        spec = self.config.rope(self.options.max_model_len, is_interleaved=is_interleaved, head_dim=self.shape.rope_dim)
        self.rotary = RotaryEmbedding(spec)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        attention = LatentAttention(
            layer,
            self.hidden_size,
            self.shape,
            rotary=self.rotary,
            scale=latent_scale(self.shape, self.rotary.spec),
            bias=self.config.flag("attention_bias", default=False),
        )
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        return PreNormLayer(attention, self.make_mlp(layer), *norms)

    def make_mlp(self, layer: int) -> FeedForward:
        """Experts, after the first layers."""
        config = self.config
        if layer < config.integer("first_k_dense_replace", default=0) or layer % config.integer(
            "moe_layer_freq", default=1
        ):
            return super().make_mlp(layer)
        width = config.integer("moe_intermediate_size")
        activation = config.activation("hidden_act", default="silu")
        num_shared = config.integer("n_shared_experts", default=0)
        shared = GatedMLP(self.hidden_size, num_shared * width, activation=activation) if num_shared else None
        experts = Experts(config.num_experts, self.hidden_size, width, activation=activation)
        return SharedExpertMoE(Router(self.hidden_size, self.routing()), experts, shared)

    def routing(self) -> Routing:
        """How experts are chosen."""
        config = self.config
        method = config.text("topk_method", default=self.default_method)
        if method not in ("greedy", "group_limited_greedy", "noaux_tc"):
            raise ModelLoadError(
                f"config.json: topk_method {method!r} is not supported (known: greedy, group_limited_greedy, noaux_tc)"
            )
        is_corrected, is_grouped = method == "noaux_tc", method != "greedy"
        scoring = config.text("scoring_func", default="sigmoid" if is_corrected else "softmax")
        if scoring not in ("softmax", "sigmoid"):
            raise ModelLoadError(f"config.json: scoring_func {scoring!r} is not supported (known: softmax, sigmoid)")
        return Routing(
            config.num_experts,
            config.integer("num_experts_per_tok"),
            "sigmoid" if scoring == "sigmoid" else "softmax",
            renormalizes=config.flag("norm_topk_prob", default=False),
            has_bias=is_corrected,
            num_groups=config.integer("n_group", default=1) if is_grouped else 1,
            top_groups=config.integer("topk_group", default=1) if is_grouped else 1,
            scale=config.number("routed_scaling_factor", default=1.0),
        )


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek-V3: sigmoid router with a correction bias."""

    default_method = "noaux_tc"


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash: DeepSeek-V3's blocks; draft layers at the end of the file are left out."""

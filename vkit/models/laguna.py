"""Laguna: gated attention with its own number of heads per layer, and experts chosen by capped sigmoid scores.

Source: Poolside 2026 (published configuration and weights of Laguna).
"""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.distributed import Ranks
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Experts,
    FeedForward,
    GatedMLP,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    Router,
    Routing,
    SharedExpertMoE,
)
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM

_OTHER_NAMES = {
    "mlp.gate.e_score_correction_bias": "mlp.experts.e_score_correction_bias",
    "mlp.shared_expert.": "mlp.shared_experts.",
}
"""Parts of names that files spell in one of two ways."""


class LagunaAttention(Attention):
    """Attention times softplus of a projection of its input, one number per head or per element."""

    def __init__(
        self, layer: int, config: HFConfig, num_heads: int, norms: tuple[RMSNorm, RMSNorm], rotary: RotaryEmbedding
    ) -> None:
        gating = config.values.get("gating", True)
        if gating not in (True, "per-head", "per-element"):
            raise ModelLoadError(
                f"config.json: gating {gating!r} is not supported (known: true, per-head, per-element)"
            )
        hidden_size, head_dim = config.integer("hidden_size"), config.head_dim
        types = config.layer_types(config.integer("num_hidden_layers"))
        is_sliding = types is not None and types[layer] == "sliding_attention"
        bias = config.flag("attention_bias", default=False)
        super().__init__(
            layer,
            hidden_size,
            num_heads,
            config.num_kv_heads,
            head_dim,
            rotary=rotary,
            bias=bias,
            output_bias=bias,
            window=config.integer("sliding_window") if is_sliding else None,
            q_norm=norms[0],
            k_norm=norms[1],
        )
        self._is_per_element = gating == "per-element"
        self.g_proj = Linear(hidden_size, num_heads * head_dim if self._is_per_element else num_heads)

    def shard(self, ranks: Ranks) -> None:
        """The gates of the heads that this rank has."""
        first, stop = ranks.split("attention heads", self._num_heads)
        self.g_proj.shard_outputs(self._query_rows(first, stop) if self._is_per_element else [(first, stop)])
        super().shard(ranks)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        gate = kernels.unary(self.g_proj(x), "softplus")
        out = self.attend(*self.project(x), batch)
        gated = kernels.multiply(out.flatten(1), gate) if self._is_per_element else kernels.scale_rows(out, gate)
        return self.o_proj(gated.flatten(1))


class LagunaForCausalLM(LlamaForCausalLM):
    """Llama's blocks with these parts."""

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """The other spelling, where the file has that."""
        for ours, theirs in _OTHER_NAMES.items():
            if name not in stored and name.replace(ours, theirs) in stored:
                return name.replace(ours, theirs)
        return name

    def make_rotary(self) -> None:
        """A rope for each kind of layer."""
        length = self.options.max_model_len
        self.rotary = RotaryEmbedding(self.config.rope(length, layer_type="full_attention"))
        self.sliding_rotary = RotaryEmbedding(self.config.rope(length, layer_type="sliding_attention"))

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        counts = self.config.values.get("num_attention_heads_per_layer")
        if counts is not None and (not isinstance(counts, list) or len(counts) < self.num_layers):
            raise ModelLoadError(
                f"config.json: num_attention_heads_per_layer must list {self.num_layers} layers, got {counts!r}"
            )
        num_heads = int(counts[layer]) if counts else self.config.integer("num_attention_heads")
        types = self.config.layer_types(self.num_layers)
        is_sliding = types is not None and types[layer] == "sliding_attention"
        norms = self.make_norm(self.config.head_dim), self.make_norm(self.config.head_dim)
        return LagunaAttention(layer, self.config, num_heads, norms, self.sliding_rotary if is_sliding else self.rotary)

    def make_mlp(self, layer: int) -> FeedForward:
        """An MLP, or experts beside a shared one."""
        config, hidden_size = self.config, self.hidden_size
        types = config.values.get("mlp_layer_types")
        is_sparse = types[layer] == "sparse" if isinstance(types, list) and len(types) > layer else layer > 0
        if not is_sparse:
            return super().make_mlp(layer)
        if config.flag("moe_apply_router_weight_on_input", default=False):
            raise ModelLoadError("config.json: moe_apply_router_weight_on_input true is not supported")
        activation = config.activation("hidden_act", default="silu")
        cap = config.number("moe_router_logit_softcapping", default=0.0)
        routing = Routing(
            config.num_experts,
            config.integer("num_experts_per_tok"),
            "sigmoid",
            renormalizes=True,
            has_bias=True,
            scale=config.number("moe_routed_scaling_factor", default=1.0),
            logit_cap=cap if cap > 0 else None,
        )
        return SharedExpertMoE(
            Router(hidden_size, routing),
            Experts(config.num_experts, hidden_size, config.integer("moe_intermediate_size"), activation=activation),
            GatedMLP(hidden_size, config.integer("shared_expert_intermediate_size"), activation=activation),
            names={"shared_experts": "shared_expert"},
        )

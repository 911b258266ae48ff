"""Qwen3.5 and 3.6: three layers of gated delta net, then one of gated attention; the larger ones with experts.

Source: Qwen Team 2025, Qwen3-Next; Yang et al. 2024, Gated Delta Networks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    DeltaShape,
    Embedding,
    Experts,
    FeedForward,
    GatedDeltaNet,
    GatedMLP,
    Linear,
    MergedLinear,
    Module,
    PreNormLayer,
    RMSNorm,
    Router,
    Routing,
    SharedExpertMoE,
)
from vkit.models.base import ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM
from vkit.models.qwen_vision import WithQwenTower
from vkit.quantization.cutting import Span


class GatedAttention(Attention):
    """Attention whose output is gated; the query projection holds, per head, the query and then the gate."""

    def _query_rows(self, first: int, stop: int) -> list[Span]:
        """Queries and gates of some heads, which lie together."""
        return [(2 * first * self._head_dim, 2 * stop * self._head_dim)]

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        queries, keys, values = self._widths
        q_gate, k, v = torch.split(self.qkv_proj(x), [2 * queries, keys, values], dim=-1)
        q, gate = q_gate.unflatten(-1, (-1, 2 * self._head_dim)).chunk(2, dim=-1)
        out = self.attend(q, k, v, batch)
        return self.o_proj(kernels.multiply(out, kernels.unary(gate, "sigmoid")).flatten(1))


class MTPHead(Module):
    """One more block, of attention, over the next token's embedding and the hidden state before it, both normed.

    Source: DeepSeek-AI 2024b, DeepSeek-V3, section 2.2.
    """

    def __init__(
        self, embed_tokens: Embedding, fc: Linear, norms: tuple[RMSNorm, RMSNorm, RMSNorm], layers: list[DecoderLayer]
    ) -> None:
        self._embed = embed_tokens  # the model's own, and no part of this tree
        self.fc = fc
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = norms
        self.layers = layers

    def __call__(self, hidden: Tensor, batch: Batch, /) -> Tensor:
        """hidden (T, H) at each position, batch.token_ids (T,) of the tokens after -> (T, H)."""
        embedded = self.pre_fc_norm_embedding(self._embed(batch.token_ids))
        x, residual = self.fc(kernels.concat([embedded, self.pre_fc_norm_hidden(hidden)])), None
        for layer in self.layers:
            x, residual = layer(x, residual, batch)
        return self.norm.add(x, residual)[0]


class Qwen3_5ForCausalLM(LlamaForCausalLM):
    """The dense model."""

    decoder_name = "model"

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        self.names = {"model": self.decoder_name}
        super().__init__(config, options)

    def make_norm(self, width: int) -> RMSNorm:
        """A norm of this family."""
        return RMSNorm(width, self.config.number("rms_norm_eps", default=1e-6), is_zero_centred=True)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        norms = self.make_norm(self.hidden_size), self.make_norm(self.hidden_size)
        if self.is_full(layer):
            return PreNormLayer(self.make_attention(layer), self.make_mlp(layer), *norms)
        return PreNormLayer(
            self.make_delta_net(layer), self.make_mlp(layer), *norms, names={"self_attn": "linear_attn"}
        )

    def add_draft_head(self) -> None:
        """The head for multi-token prediction: one block of full attention."""
        config, width = self.config, self.hidden_size
        num_layers = config.optional_integer("mtp_num_hidden_layers") or 0
        if num_layers != 1 or config.flag("mtp_use_dedicated_embeddings", default=False):
            what = "no MTP head" if not num_layers else "an MTP head of a kind that is not computed here"
            raise ModelLoadError(f"config.json: {what} (mtp_num_hidden_layers {num_layers}, expected 1)")
        norms = self.make_norm(width), self.make_norm(width)
        place = self.num_layers
        block = PreNormLayer(self.make_attention(place), self.make_mlp(place), *norms)
        head_norms = self.make_norm(width), self.make_norm(width), self.make_norm(width)
        assert isinstance(self.model, Decoder), "this family's stack"
        self.mtp = MTPHead(self.model.embed_tokens, Linear(2 * width, width), head_norms, [block])
        self.num_head_layers = 1

    def is_full(self, layer: int) -> bool:
        """Whether a layer is attention: as listed, or the last of every `full_attention_interval`."""
        types = self.config.layer_types(self.num_layers)
        if types:
            return types[layer] == "full_attention"
        return (layer + 1) % self.config.integer("full_attention_interval", default=4) == 0

    def make_delta_net(self, layer: int) -> GatedDeltaNet:
        """The recurrent layer of one block."""
        config = self.config
        gate = config.text("output_gate_type", default="silu")
        if gate not in ("silu", "swish", "sigmoid"):
            raise ModelLoadError(
                f"config.json: output_gate_type {gate!r} is not supported (known: silu, swish, sigmoid)"
            )
        order = config.text("linear_value_head_order", default="grouped")
        if order not in ("grouped", "tiled"):
            raise ModelLoadError(
                f"config.json: linear_value_head_order {order!r} is not supported (known: grouped, tiled)"
            )
        return GatedDeltaNet(
            layer,
            self.hidden_size,
            DeltaShape(
                config.integer("linear_num_key_heads"),
                config.integer("linear_num_value_heads"),
                config.integer("linear_key_head_dim"),
                config.integer("linear_value_head_dim"),
                config.integer("linear_conv_kernel_dim", default=4),
                is_tiled=order == "tiled",
            ),
            eps=config.number("rms_norm_eps", default=1e-6),
            gate="sigmoid" if gate == "sigmoid" else "silu",
            dtype=self.dtype,
            state_dtype=config.float_type("mamba_ssm_dtype", default="float32"),
        )

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block."""
        config = self.config
        _, num_heads, num_kv_heads, head_dim = self.attention_shape
        bias = config.flag("attention_bias", default=False)
        is_gated = config.flag("attn_output_gate", default=True)
        kind = GatedAttention if is_gated else Attention
        parts = {"q_proj": (1 + is_gated) * num_heads * head_dim}
        parts |= dict.fromkeys(("k_proj", "v_proj"), num_kv_heads * head_dim)
        return kind(
            layer,
            *self.attention_shape,
            rotary=self.rotary,
            output_bias=bias,
            q_norm=self.make_norm(head_dim),
            k_norm=self.make_norm(head_dim),
            qkv_proj=MergedLinear(self.hidden_size, parts, bias=bias),
        )


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """Experts in every layer, and one for all tokens behind a gate of its own."""

    def make_mlp(self, layer: int) -> FeedForward:
        """The experts of one block."""
        config, hidden_size = self.config, self.hidden_size
        activation = config.activation("hidden_act", default="silu")
        routing = Routing(config.num_experts, config.integer("num_experts_per_tok"), "softmax", renormalizes=True)
        return SharedExpertMoE(
            Router(hidden_size, routing),
            Experts(config.num_experts, hidden_size, config.integer("moe_intermediate_size"), activation=activation),
            GatedMLP(hidden_size, config.integer("shared_expert_intermediate_size"), activation=activation),
            shared_expert_gate=Linear(hidden_size, 1),
            names={"shared_experts": "shared_expert"},
        )


class Qwen3_5ForConditionalGeneration(WithQwenTower, Qwen3_5ForCausalLM):
    """The dense model beside a vision tower."""

    default_sections = (11, 11, 10)
    decoder_name = "model.language_model"


class Qwen3_5MoeForConditionalGeneration(WithQwenTower, Qwen3_5MoeForCausalLM):
    """The model with experts beside a vision tower."""

    default_sections = (11, 11, 10)
    decoder_name = "model.language_model"

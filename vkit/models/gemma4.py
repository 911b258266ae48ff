"""Gemma 4, text: two head widths, keys shared between layers, inputs of each layer's own, experts beside the MLP.

Checkpoints with towers answer text requests; the towers' tensors are left in the file.
Source: Gemma Team 2026 (published configuration and weights of Gemma 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    Experts,
    FeedForward,
    GatedMLP,
    Linear,
    LMHead,
    MergedLinear,
    Mixer,
    Module,
    Placement,
    RMSNorm,
    RotaryEmbedding,
    Stream,
    TensorSlot,
)
from vkit.models.base import CausalLM, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.quantization import Weight

FULL = "full_attention"


class Gemma4Attention(Attention):
    """Head norms on q, k and v (v's without weight), scores unscaled; values may be the unnormed keys."""

    v_norm: RMSNorm

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        queries, keys, _ = self._widths
        projected = self.qkv_proj(x)
        q, k = projected[:, :queries], projected[:, queries : queries + keys]
        v = projected[:, -keys:]  # the keys themselves, where no values are projected
        v = self.v_norm(v.unflatten(-1, (-1, self._head_dim)))
        return self.o_proj(self.attend(q, k, v, batch).flatten(1))


class BorrowingAttention(Module):
    """Queries of its own over the keys and values of an earlier layer."""

    def __init__(
        self,
        source: int,
        hidden_size: int,
        num_heads: int,
        q_norm: RMSNorm,
        rotary: RotaryEmbedding,
        window: int | None,
    ) -> None:
        self._source = source
        self._window = window
        self.q_proj = Linear(hidden_size, num_heads * q_norm.width)
        self.q_norm = q_norm
        self.o_proj = Linear(num_heads * q_norm.width, hidden_size)
        self.rotary = rotary

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.q_norm.width)))
        kernels.rope(q, None, batch.positions, self.rotary.cos_sin)
        k_cache, v_cache, paged = batch.kv(self._source)
        out = kernels.paged_attention(q, k_cache, v_cache, paged, 1.0, self._window)
        return self.o_proj(out.flatten(1))


class Gemma4Router(Module):
    """The most probable experts of a layer, with a factor for each."""

    def __init__(self, hidden_size: int, num_experts: int, top_k: int, eps: float) -> None:
        self.proj = Linear(hidden_size, num_experts)
        self._shapes = {"scale": (hidden_size,), "per_expert_scale": (num_experts,)}
        self._norm = RMSNorm(hidden_size, eps, has_weight=False)
        self._top_k = top_k
        self._scale: Tensor
        self._factors: Tensor

    def slots(self) -> list[TensorSlot]:
        """scale and per_expert_scale."""
        return [TensorSlot(name, shape) for name, shape in self._shapes.items()]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take both, the constant 1 / sqrt(H) included in the first."""
        scale = placement.vector(tensors["scale"], torch.float32)
        self._scale = (scale * len(scale) ** -0.5).to(placement.dtype)
        self._factors = placement.vector(tensors["per_expert_scale"], torch.float32).unsqueeze(1)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, H) -> weights (T, k) float32 and ids (T, k)."""
        logits = self.proj(kernels.multiply(self._norm(x), self._scale))
        weights, ids = kernels.route_experts(logits, self._top_k, True)
        factors = kernels.embedding(ids.flatten(), self._factors).view(ids.shape)
        return kernels.multiply(weights, factors), ids


class Gemma4Layer(DecoderLayer):
    """A block with a norm before and after each part, optionally experts beside the MLP, and a factor on the stream."""

    def __init__(self, attention: Mixer, mlp: FeedForward, config: HFConfig) -> None:
        width, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.pre_feedforward_layernorm = RMSNorm(width, eps)
        self.mlp = mlp
        self.post_feedforward_layernorm = RMSNorm(width, eps)
        self._has_experts = config.flag("enable_moe_block", default=False)
        if self._has_experts:
            num_experts, top_k = config.num_experts, config.integer("top_k_experts")
            inner = config.integer("moe_intermediate_size")
            self.router = Gemma4Router(width, num_experts, top_k, eps)
            self.experts = Experts(num_experts, width, inner, activation="gelu_tanh")
            self.pre_feedforward_layernorm_2 = RMSNorm(width, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(width, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(width, eps)
        input_width = config.integer("hidden_size_per_layer_input", default=0)
        if input_width:
            self.per_layer_input_gate = Linear(width, input_width)
            self.per_layer_projection = Linear(input_width, width)
            self.post_per_layer_input_norm = RMSNorm(width, eps)
        self._factor = 1.0

    def slots(self) -> list[TensorSlot]:
        """layer_scalar."""
        return [TensorSlot("layer_scalar", (1,))]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take the factor."""
        self._factor = placement.vector(tensors["layer_scalar"]).item()

    def __call__(self, hidden: Tensor, residual: Tensor | None, batch: Batch) -> Stream:
        """The stream after this block, in a model without inputs per layer."""
        return self.run(hidden, None, batch), None

    def run(self, hidden: Tensor, inputs: Tensor | None, batch: Batch) -> Tensor:
        """The stream (T, H) after this block, given the layer's own inputs (T, d)."""
        attended = self.post_attention_layernorm(self.self_attn(self.input_layernorm(hidden), batch))
        normed, hidden = self.pre_feedforward_layernorm.add(attended, hidden)
        out = self.mlp(normed)
        if self._has_experts:
            weights, ids = self.router(hidden)
            routed = self.experts(self.pre_feedforward_layernorm_2(hidden), weights, ids)
            out = kernels.add(self.post_feedforward_layernorm_1(out), self.post_feedforward_layernorm_2(routed))
        hidden = kernels.add(hidden, self.post_feedforward_layernorm(out))
        if inputs is not None:
            gate = kernels.unary(self.per_layer_input_gate(hidden), "gelu_tanh")
            projected = self.per_layer_projection(kernels.multiply(gate, inputs))
            hidden = kernels.add(hidden, self.post_per_layer_input_norm(projected))
        return kernels.scale(hidden, self._factor)


class Gemma4Decoder(Decoder):
    """The stack; a media placeholder that arrives as a token counts as padding."""

    def __init__(self, config: HFConfig, layers: list[Gemma4Layer], dtype: torch.dtype) -> None:
        width, eps = config.integer("hidden_size"), config.number("rms_norm_eps", default=1e-6)
        multiplier = torch.tensor(width**0.5, dtype=dtype).item()
        embedding = Embedding(config.integer("vocab_size"), width)
        super().__init__(embedding, layers, RMSNorm(width, eps), embedding_multiplier=multiplier)
        self._blocks = layers
        self._placeholders = config.placeholder_ids()
        self._pad = config.integer("pad_token_id", default=0)
        self._input_width = config.integer("hidden_size_per_layer_input", default=0)
        if self._input_width:
            total = len(layers) * self._input_width
            num_rows = config.integer("vocab_size_per_layer_input", "vocab_size")
            self._input_multiplier = torch.tensor(self._input_width**0.5, dtype=dtype).item()
            self.embed_tokens_per_layer = Embedding(num_rows, total)
            self.per_layer_model_projection = Linear(width, total)
            self.per_layer_projection_norm = RMSNorm(self._input_width, eps)

    def __call__(self, batch: Batch) -> Tensor:
        """Hidden states (T, H) after the final norm."""
        ids = kernels.replace_ids(batch.token_ids, self._placeholders, self._pad)
        hidden = kernels.scale(self.embed_tokens(ids), self._embedding_multiplier)
        inputs = self._inputs(ids, hidden) if self._input_width else None
        for index, layer in enumerate(self._blocks):
            hidden = layer.run(hidden, None if inputs is None else inputs[:, index], batch)
        return self.norm(hidden)

    def _inputs(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """What every layer reads beside the stream (T, layers, d)."""
        own = kernels.scale(self.embed_tokens_per_layer(ids), self._input_multiplier)
        projected = kernels.scale(self.per_layer_model_projection(hidden), hidden.shape[-1] ** -0.5)
        normed = self.per_layer_projection_norm(projected.unflatten(-1, (-1, self._input_width)))
        return kernels.scale(kernels.add(own.unflatten(-1, (-1, self._input_width)), normed), 2**-0.5)


class Gemma4ForConditionalGeneration(CausalLM):
    """Gemma 4 of any size, for text."""

    names: Mapping[str, str] = {"model": "model.language_model"}
    ignored_tensors = (r"model\.(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder)\..*",)

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        self.num_layers = config.integer("num_hidden_layers")
        types = config.layer_types(self.num_layers)
        if types is None:
            raise ModelLoadError("config.json: layer_types is missing")
        self.types = types
        self._full = full_layer_keys(config, types)
        self.num_own = self.num_layers - config.integer("num_kv_shared_layers", default=0)
        borrowing = "|".join(str(layer) for layer in range(self.num_own, self.num_layers))
        if borrowing:  # some files hold keys and values that nobody reads
            unread = rf"model\.language_model\.layers\.({borrowing})\.self_attn\.(k_proj|v_proj|k_norm)\..*"
            self.ignored_tensors = (*self.ignored_tensors, unread)
        self.rotary = {
            kind: RotaryEmbedding(
                config.rope(options.max_model_len, layer_type=kind, head_dim=self.head_dim(kind == FULL))
            )
            for kind in sorted(set(types))
        }
        layers = [self.make_layer(layer) for layer in range(self.num_layers)]
        self.model = decoder = Gemma4Decoder(config, layers, self.dtype)
        tied_to = decoder.embed_tokens if config.is_tied(default=True) else None
        self.lm_head = LMHead(config.integer("hidden_size"), config.integer("vocab_size"), tied_to=tied_to)
        self._logits_cap = config.optional_number("final_logit_softcapping")

    def head_dim(self, is_full: bool) -> int:
        """Width of a head."""
        return self._full.integer("head_dim", default=512) if is_full else self.config.head_dim

    def make_layer(self, layer: int) -> Gemma4Layer:
        """One block; those that borrow keys may have an MLP twice as wide."""
        config = self.config
        borrows = layer >= self.num_own
        is_wide = borrows and config.flag("use_double_wide_mlp", default=False)
        activation = config.activation("hidden_activation", default="gelu_pytorch_tanh")
        width = config.integer("intermediate_size") * (2 if is_wide else 1)
        mlp = GatedMLP(config.integer("hidden_size"), width, activation=activation)
        attention = self.borrowing_attention(layer) if borrows else self.own_attention(layer)
        return Gemma4Layer(attention, mlp, config)

    def own_attention(self, layer: int) -> Gemma4Attention:
        """Attention with keys of its own."""
        config, is_full = self.config, self.types[layer] == FULL
        num_heads, num_kv_heads, head_dim = self.heads(is_full)
        keys_are_values = is_full and config.flag("attention_k_eq_v", default=False)
        parts = {"q_proj": num_heads * head_dim, "k_proj": num_kv_heads * head_dim}
        if not keys_are_values:
            parts["v_proj"] = num_kv_heads * head_dim
        eps = config.number("rms_norm_eps", default=1e-6)
        bias = config.flag("attention_bias", default=False)
        attention = Gemma4Attention(
            layer,
            config.integer("hidden_size"),
            num_heads,
            num_kv_heads,
            head_dim,
            rotary=self.rotary[self.types[layer]],
            output_bias=bias,
            scale=1.0,
            window=self.window(layer),
            q_norm=RMSNorm(head_dim, eps),
            k_norm=RMSNorm(head_dim, eps),
            qkv_proj=MergedLinear(config.integer("hidden_size"), parts, bias=bias),
        )
        attention.v_norm = RMSNorm(head_dim, eps, has_weight=False)
        return attention

    def borrowing_attention(self, layer: int) -> BorrowingAttention:
        """Attention over the keys of the last layer of this kind that has some."""
        config, kind = self.config, self.types[layer]
        sources = [index for index in range(self.num_own) if self.types[index] == kind]
        if not sources:
            raise ModelLoadError(f"config.json: layer {layer} shares keys, and no earlier {kind} layer has any")
        num_heads, _, head_dim = self.heads(kind == FULL)
        q_norm = RMSNorm(head_dim, config.number("rms_norm_eps", default=1e-6))
        width = config.integer("hidden_size")
        return BorrowingAttention(sources[-1], width, num_heads, q_norm, self.rotary[kind], self.window(layer))

    def heads(self, is_full: bool) -> tuple[int, int, int]:
        """Query heads, key heads and their width."""
        config = self.config
        num_kv_heads = config.num_kv_heads
        if is_full and config.flag("attention_k_eq_v", default=False):
            num_kv_heads = self._full.integer("num_key_value_heads", default=num_kv_heads)
        return config.integer("num_attention_heads"), num_kv_heads, self.head_dim(is_full)

    def window(self, layer: int) -> int | None:
        """Tokens that a layer sees."""
        return None if self.types[layer] == FULL else self.config.integer("sliding_window")


def full_layer_keys(config: HFConfig, types: Sequence[str]) -> HFConfig:
    """What is said of full layers alone, `head_dim` and `num_key_value_heads`: by layer in newer files.

    Raises:
        ModelLoadError: it differs between layers of one kind.
    """
    by_layer = config.mapping("per_layer_config")
    own = [value for layer, value in sorted(by_layer.items()) if types[int(layer)] == FULL]
    if by_layer and (len(own) != len(by_layer) or any(value != own[0] for value in own)):
        raise ModelLoadError("config.json: per_layer_config differs between layers of one kind")
    older = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
    return HFConfig(own[0] if own else {key: config.values.get(name) for key, name in older.items()})


class Gemma4UnifiedForConditionalGeneration(Gemma4ForConditionalGeneration):
    """The unified export, for text: the same blocks."""

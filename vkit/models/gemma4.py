"""Gemma 4: two head widths, keys shared between layers, inputs of each layer's own, experts beside the MLP.

Images are seen; sound is heard by the unified export alone: the other's audio tower stays in the file.
Source: Gemma Team 2026 (published configuration and weights of Gemma 4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.distributed import Ranks
from vkit.errors import ModelLoadError
from vkit.kernels import PagedBatch
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
    attention_with_runs,
    with_media,
)
from vkit.media import MediaInput, MediaProcessor
from vkit.media.gemma4 import GemmaMarks, GemmaMedia
from vkit.models.base import CausalLM, EncodedMedia, ModelConfig
from vkit.models.gemma4_vision import GemmaVisionTower, SoftTokens, UnifiedPixels
from vkit.models.hf_config import HFConfig
from vkit.models.media_context import MediaContext
from vkit.quantization import Weight
from vkit.quantization.cutting import Span, widened

FULL = "full_attention"


class Gemma4Attention(Attention):
    """Head norms on q, k and v (v's without weight), scores unscaled; values may be the unnormed keys."""

    takes_cache_scales = False  # layers that borrow these keys would have to know
    v_norm: RMSNorm
    sight: Sight

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        queries, keys, _ = self._widths
        projected = self.qkv_proj(x)
        q, k = projected[:, :queries], projected[:, queries : queries + keys]
        v = projected[:, -keys:]  # the keys themselves, where no values are projected
        v = self.v_norm(v.unflatten(-1, (-1, self._head_dim)))
        return self.o_proj(self.attend(q, k, v, batch).flatten(1))

    def look_up(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, paged: PagedBatch) -> Tensor:
        """Queries (T, heads, D) against what the cache holds -> (T, heads, D)."""
        return self.sight.attend(q, k_cache, v_cache, batch, paged, self.window)


@dataclass(frozen=True, slots=True)
class Sight:
    """Which tokens of a picture see each other: none, those of a window's layers, or all."""

    has_runs: bool
    reaches_run: bool

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch, paged: PagedBatch, window: int | None
    ) -> Tensor:
        """Queries (T, heads, D) against what the cache holds -> (T, heads, D)."""
        if batch.spans is None or not self.has_runs:
            return kernels.paged_attention(q, k_cache, v_cache, paged, 1.0, window)
        return attention_with_runs(q, k_cache, v_cache, paged, batch.spans, 1.0, window, reaches_run=self.reaches_run)


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
        sight: Sight,
    ) -> None:
        self._source = source
        self._window = window
        self._sight = sight
        self.q_proj = Linear(hidden_size, num_heads * q_norm.width)
        self.q_norm = q_norm
        self.o_proj = Linear(num_heads * q_norm.width, hidden_size)
        self._num_heads = num_heads
        self.rotary = rotary

    def shard(self, ranks: Ranks) -> None:
        """Some of the heads, over the keys that the earlier layer has here."""

        def spans(rank: int) -> list[Span]:
            return widened([ranks.split("attention heads", self._num_heads, rank)], self.q_norm.width)

        self.q_proj.shard_outputs(spans(ranks.rank))
        self.o_proj.shard_inputs(ranks, ranks.each(spans))

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.q_norm.width)))
        kernels.rope(q, None, batch.positions, self.rotary.cos_sin)
        k_cache, v_cache, paged = batch.kv(self._source)
        out = self._sight.attend(q, k_cache, v_cache, batch, paged, self._window)
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
        hidden = with_media(kernels.scale(self.embed_tokens(ids), self._embedding_multiplier), batch)
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
    """Gemma 4 of any size; it sees images if the file has a vision tower."""

    names: Mapping[str, str] = {
        "model": "model.language_model",
        "vision_tower": "model.vision_tower",
        "vision_embedder": "model.vision_embedder",
        "embed_vision": "model.embed_vision",
        "embed_audio": "model.embed_audio",
    }
    sees_across_windows = False
    """Whether tokens of a picture see all of it on every layer, rather than on those with a window."""

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        direction = config.values.get("use_bidirectional_attention")
        if direction not in (None, "vision"):
            raise ModelLoadError(f"config.json: use_bidirectional_attention {direction!r} is not supported")
        self.sees_itself = direction == "vision"
        self.make_towers()
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
        attention.sight = self.sight(layer)
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
        return BorrowingAttention(
            sources[-1], width, num_heads, q_norm, self.rotary[kind], self.window(layer), self.sight(layer)
        )

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

    def sight(self, layer: int) -> Sight:
        """Which tokens of a picture see each other in a layer."""
        reaches = self.sees_itself and self.sees_across_windows
        return Sight(self.sees_itself and (reaches or self.window(layer) is not None), reaches)

    # Media

    def make_towers(self) -> None:
        """The vision tower, if the configuration has one."""
        vision = self.config.mapping("vision_config")
        self.vision_tower = GemmaVisionTower(HFConfig(vision)) if vision else None
        if self.vision_tower is not None:
            self.embed_vision = self.soft_tokens(self.vision_tower.width, vision)
        kept = r"model\.(audio_tower|embed_audio)\..*"
        self.ignored_tensors = (kept,) if vision else (kept, r"model\.(vision_tower|embed_vision)\..*")

    def soft_tokens(self, width: int, config: Mapping[str, Any]) -> SoftTokens:
        """From a tower's width to the stream's."""
        eps = HFConfig(config).number("rms_norm_eps", default=1e-6)
        return SoftTokens(width, self.config.integer("hidden_size"), eps)

    def media_processor(self, context: MediaContext) -> MediaProcessor | None:
        """Patches for the tower."""
        tower = self.vision_tower
        if tower is None:
            return None
        media = self.gemma_media(context, tower.patch_size, tower.pooling_size)
        return replace(media, max_side=tower.num_positions)

    def gemma_media(self, context: MediaContext, patch_size: int, pooling_size: int) -> GemmaMedia:
        """How images are prepared."""
        config, own = self.config, HFConfig(context.image_config)
        if own.integer("patch_size", default=patch_size) != patch_size:
            raise ModelLoadError(
                f"preprocessor_config.json: patch_size {own.integer('patch_size')}, but config.json has {patch_size}"
            )
        marks = GemmaMarks(
            config.integer("image_token_id"),
            config.optional_integer("audio_token_id"),
            (self.mark("boi_token_id"), self.mark("eoi_token_id")),
            (self.mark("boa_token_id"), self.mark("eoa_token_id", "eoa_token_index")),
        )
        soft_tokens = own.integer("max_soft_tokens", default=280)
        return GemmaMedia(
            marks, context.token_text, patch_size, pooling_size, soft_tokens, sees_itself=self.sees_itself
        )

    def mark(self, *keys: str) -> int | None:
        """The id under one of the keys, if the vocabulary has it."""
        found = self.config.optional_integer(*keys)
        return found if found is not None and found < self.config.integer("vocab_size") else None

    def encode_media(self, item: MediaInput) -> EncodedMedia:
        """The tower's rows of one image."""
        assert self.vision_tower is not None, "a model without a tower has no media processor"
        return EncodedMedia(self.embed_vision(self.vision_tower.encode(torch.from_numpy(item.features), item.grid)))


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
    """The unified export: the same blocks over pixels and samples that no tower has seen."""

    sees_across_windows = True

    def make_towers(self) -> None:
        """Embeddings of pixels and of sound, as far as the configuration has them."""
        vision, audio = self.config.mapping("vision_config"), self.config.mapping("audio_config")
        self.vision_embedder = UnifiedPixels(HFConfig(vision)) if vision else None
        if self.vision_embedder is not None:
            self.embed_vision = self.soft_tokens(self.vision_embedder.width, vision)
        self.audio_width = HFConfig(audio).integer("audio_embed_dim", default=640) if audio else None
        if self.audio_width is not None:
            self.embed_audio = self.soft_tokens(self.audio_width, audio)
        absent = [name for name, part in (("vision_embedder|embed_vision", vision), ("embed_audio", audio)) if not part]
        self.ignored_tensors = (rf"model\.({'|'.join(absent)})\..*",) if absent else ()

    def media_processor(self, context: MediaContext) -> MediaProcessor | None:
        """Pixels of soft tokens, and frames of samples."""
        pixels = self.vision_embedder
        if pixels is None:
            return None
        media = self.gemma_media(context, pixels.patch_size, pixels.pooling_size)
        return replace(media, merges_pixels=True, samples_per_token=self.audio_width, max_side=pixels.num_positions)

    def encode_media(self, item: MediaInput) -> EncodedMedia:
        """Rows of one image or recording."""
        features = torch.from_numpy(item.features)
        if item.kind == "audio":
            return EncodedMedia(self.embed_audio(features))
        assert self.vision_embedder is not None, "a model without pixels has no media processor"
        return EncodedMedia(self.embed_vision(self.vision_embedder.encode(features, item.grid)))

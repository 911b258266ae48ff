"""Muse Glimmer: normed embeddings, weightless head norms, gated attention, a rope base per layer.

Source: published configuration and weights of Muse Glimmer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import torch
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
    Linear,
    PlainMLP,
    RMSNorm,
    RotaryEmbedding,
    SandwichLayer,
    with_media,
)
from vkit.media import MediaInput, MediaProcessor
from vkit.media.muse import MuseMarks, MuseMedia
from vkit.models.base import EncodedMedia, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM
from vkit.models.media_context import MediaContext
from vkit.models.muse_vision import MuseVisionTower

_FULL_EVERY = 4
_QK_SCALE = 3.87
_OUTPUT_MULTIPLIER = 0.19611613513818404
_LOGITS_CAP = 20.0
"""What the published configuration says, where a file leaves the key out."""


class ElementGatedAttention(Attention):
    """Attention times the sigmoid of `gate_proj` of its input, element by element."""

    gate_proj: Linear

    def shard(self, ranks: Ranks) -> None:
        """The gates of the heads that this rank has."""
        self.gate_proj.shard_outputs(self._query_rows(*ranks.split("attention heads", self._num_heads)))
        super().shard(ranks)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """x (T, H) -> (T, H)."""
        gate = kernels.unary(self.gate_proj(x), "sigmoid")
        out = self.attend(*self.project(x), batch)
        return self.o_proj(kernels.multiply(out.flatten(1), gate))


class NormedDecoder(Decoder):
    """The stack, over embeddings divided by their root mean square; a media placeholder counts as padding."""

    def __init__(
        self, config: HFConfig, embed_tokens: Embedding, layers: list[DecoderLayer], norm: RMSNorm, width: int
    ) -> None:
        super().__init__(embed_tokens, layers, norm)
        self._embedding_norm = RMSNorm(width, norm.eps, has_weight=False)
        self._placeholders = config.placeholder_ids()
        self._pad = config.integer("pad_token_id", default=0)

    def embed(self, batch: Batch) -> Tensor:
        """The stream before the first block (T, H)."""
        ids = kernels.replace_ids(batch.token_ids, self._placeholders, self._pad)
        return with_media(self._embedding_norm(self.embed_tokens(ids)), batch)


class MuseGlimmerForCausalLM(LlamaForCausalLM):
    """Four zero-centred norms per block; every fourth layer, counted from the end, is full and without positions."""

    names: Mapping[str, str] = {"model": "model.language_model"}
    ignored_tensors: tuple[str, ...] = (r"model\.vision_.*",)

    def stored_name(self, name: str, stored: Set[str]) -> str:
        """Without the prefix of the text part, where a file has no other."""
        plain = name.replace("model.language_model.", "model.")
        return plain if name not in stored and plain in stored else name

    def make_rotary(self) -> None:
        """A rope for every base that occurs; layers without positions have none."""
        spec = self.config.rope(self.options.max_model_len)
        bases = self.config.values.get("layer_rope_theta")
        if bases is None:
            bases = [0.0 if self.is_full(layer) else spec.base for layer in range(self.num_layers)]
        if not isinstance(bases, list) or len(bases) < self.num_layers:
            raise ModelLoadError(f"config.json: layer_rope_theta must list {self.num_layers} layers, got {bases!r}")
        tables = {float(base): RotaryEmbedding(replace(spec, base=float(base))) for base in bases if base}
        self.layer_rotary = [tables[float(base)] if base else None for base in bases]

    def make_decoder(self, layers: list[DecoderLayer]) -> Decoder:
        """The stack, and the scale and cap of its logits."""
        config = self.config
        self._logits_multiplier = config.number("output_multiplier", default=_OUTPUT_MULTIPLIER)
        self._logits_cap = config.number("final_logit_softcapping", default=_LOGITS_CAP)
        norm = RMSNorm(self.hidden_size, config.number("rms_norm_eps", default=1e-5))
        return NormedDecoder(config, Embedding(self.vocab_size, self.hidden_size), layers, norm, self.hidden_size)

    def make_layer(self, layer: int) -> DecoderLayer:
        """One block."""
        config, width = self.config, self.hidden_size
        eps, post_eps = config.number("rms_norm_eps", default=1e-5), config.number("post_norm_eps", default=1e-8)
        norms = (RMSNorm(width, value, is_zero_centred=True) for value in (eps, post_eps, eps, post_eps))
        return SandwichLayer(self.make_attention(layer), self.make_mlp(layer), *norms)

    def is_full(self, layer: int) -> bool:
        """Whether a layer sees everything."""
        types = self.config.layer_types(self.num_layers)
        return types[layer] == "full_attention" if types else (self.num_layers - 1 - layer) % _FULL_EVERY == 0

    def make_attention(self, layer: int) -> Attention:
        """The attention of one block; the factor on queries is part of the scale."""
        config = self.config
        _, num_heads, _, head_dim = self.attention_shape
        eps = config.number("rms_norm_eps", default=1e-5)
        bias = config.flag("attention_bias", default=False)
        attention = ElementGatedAttention(
            layer,
            *self.attention_shape,
            rotary=self.layer_rotary[layer],
            bias=bias,
            output_bias=bias,
            scale=head_dim**-0.5 * config.number("qk_scale_factor", default=_QK_SCALE),
            window=None if self.is_full(layer) else config.integer("sliding_window"),
            q_norm=RMSNorm(head_dim, eps, has_weight=False),
            k_norm=RMSNorm(head_dim, eps, has_weight=False),
        )
        attention.gate_proj = Linear(self.hidden_size, num_heads * head_dim, bias=bias)
        return attention


class MuseGlimmerForConditionalGeneration(MuseGlimmerForCausalLM):
    """The same beside a vision tower; a file without vision_config is text only."""

    names: Mapping[str, str] = {
        "model": "model.language_model",
        "vision_tower": "model.vision_tower",
        "vision_adapter": "model.vision_adapter",
        "vision_projection": "model.vision_projection",
    }

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        vision = config.mapping("vision_config")
        self.vision_tower = tower = MuseVisionTower(HFConfig(vision)) if vision else None
        if tower is None:
            return
        self.ignored_tensors = ()
        activation = config.text("projector_hidden_act", default="gelu")
        if activation != "gelu":
            raise ModelLoadError(f"config.json: projector_hidden_act {activation!r} is not supported (known: gelu)")
        inner = config.integer("projector_hidden_size")
        self.vision_adapter = PlainMLP(tower.out_width, inner, activation="gelu", bias=False, out_features=inner)
        self.vision_projection = Linear(inner, self.hidden_size)
        self._media_norm = RMSNorm(self.hidden_size, config.number("rms_norm_eps", default=1e-5), has_weight=False)

    def media_processor(self, context: MediaContext) -> MediaProcessor | None:
        """Patches for the tower."""
        tower = self.vision_tower
        if tower is None:
            return None
        image, video, named = HFConfig(context.image_config), HFConfig(context.video_config), context.special_id
        if image.integer("patch_size", default=tower.patch_size) != tower.patch_size:
            raise ModelLoadError(
                f"preprocessor_config.json: patch_size {image.integer('patch_size')}, but config.json has"
                f" {tower.patch_size}"
            )
        marks = MuseMarks(
            self.config.integer("image_token_id"),
            self.config.integer("video_token_id"),
            (named("<|image_start|>"), named("<|image_end|>")),
            (named("<|vid_start|>"), named("<|vid_end|>")),
            named("<|vid_frame_separator|>"),
        )
        return MuseMedia(
            marks,
            context.token_text,
            context.encode,
            patch_size=tower.patch_size,
            merge_size=tower.merge_size,
            temporal_patch_size=tower.temporal_patch_size,
            max_image_tokens=image.integer("max_image_tokens", default=4096),
            max_frame_tokens=video.integer("max_video_frame_tokens", default=144),
            fps=video.number("fps", default=2.0),
            max_frames=video.integer("num_frames", default=96),
        )

    def encode_media(self, item: MediaInput) -> EncodedMedia:
        """The tower's rows of one item, as the stream has embeddings."""
        assert self.vision_tower is not None, "a model without a tower has no media processor"
        rows = self.vision_tower.encode(torch.from_numpy(item.features), item.grid)
        adapted = kernels.unary(self.vision_adapter(rows), "gelu")
        return EncodedMedia(self._media_norm(self.vision_projection(adapted)))

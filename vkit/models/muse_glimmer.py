"""Muse Glimmer, text: normed embeddings, weightless head norms, gated attention, a rope base per layer.

Checkpoints with a vision tower answer text requests; the tower's tensors are left in the file.
Source: published configuration and weights of Muse Glimmer.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

from torch import Tensor

from vkit import kernels
from vkit.batch import Batch
from vkit.errors import ModelLoadError
from vkit.layers import (
    Attention,
    Decoder,
    DecoderLayer,
    Embedding,
    Linear,
    RMSNorm,
    RotaryEmbedding,
    SandwichLayer,
)
from vkit.models.hf_config import HFConfig
from vkit.models.llama import LlamaForCausalLM

_FULL_EVERY = 4
_QK_SCALE = 3.87
_OUTPUT_MULTIPLIER = 0.19611613513818404
_LOGITS_CAP = 20.0
"""What the published configuration says, where a file leaves the key out."""


class ElementGatedAttention(Attention):
    """Attention times the sigmoid of `gate_proj` of its input, element by element."""

    gate_proj: Linear

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
        return self._embedding_norm(self.embed_tokens(ids))


class MuseGlimmerForCausalLM(LlamaForCausalLM):
    """Four zero-centred norms per block; every fourth layer, counted from the end, is full and without positions."""

    names: Mapping[str, str] = {"model": "model.language_model"}
    ignored_tensors = (r"model\.vision_.*",)

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
    """The same beside a vision tower, for text."""

"""Typed reading of a checkpoint's config.json: what is missing or of the wrong type is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vkit.errors import ModelLoadError
from vkit.layers import ACTIVATIONS, Activation, RopeSpec

_MISSING = object()

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
"""Names that families give the context limit."""

_AT_LEAST_ONE = frozenset(
    (
        *CONTEXT_KEYS,
        *("num_hidden_layers", "n_layer", "hidden_size", "n_embd", "vocab_size"),
        *("num_attention_heads", "n_head", "num_key_value_heads"),
    )
)
"""Sizes of which no model has none."""


class HFConfig:
    """The keys of one config, text part first: `text_config` is read before the top level."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        text = values.get("text_config")
        self.values: dict[str, Any] = {**values, **text} if isinstance(text, Mapping) else dict(values)

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """The first of `keys` that is set.

        Raises:
            ModelLoadError: none is set and there is no default, it is no integer, or a size below 1.
        """
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelLoadError(f"config.json: {keys[0]} must be an integer, got {value!r}")
        key = next((key for key in keys if key in self), None)
        if key in _AT_LEAST_ONE and value < 1:
            raise ModelLoadError(f"config.json: {key} must be at least 1, got {value}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        """The first of `keys` that is set, as a float (errors as `integer`)."""
        value = self._first(keys, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: {keys[0]} must be a number, got {value!r}")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        """The first of `keys` that is set (errors as `integer`)."""
        value = self._first(keys, default)
        if not isinstance(value, bool):
            raise ModelLoadError(f"config.json: {keys[0]} must be true or false, got {value!r}")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        """The first of `keys` that is set (errors as `integer`)."""
        value = self._first(keys, default)
        if not isinstance(value, str):
            raise ModelLoadError(f"config.json: {keys[0]} must be a string, got {value!r}")
        return value

    def optional_integer(self, *keys: str) -> int | None:
        """The first of `keys` that is set, or None."""
        return self.integer(*keys) if any(key in self for key in keys) else None

    def optional_number(self, *keys: str) -> float | None:
        """The first of `keys` that is set, or None."""
        return self.number(*keys) if any(key in self for key in keys) else None

    def activation(self, *keys: str, default: str | None = None) -> Activation:
        """The activation function that the first of `keys` names.

        Raises:
            ModelLoadError: an unknown one.
        """
        name = self.text(*keys, default=default)
        if name not in ACTIVATIONS:
            raise ModelLoadError(f"config.json: {keys[0]} {name!r} is not supported (known: {', '.join(ACTIVATIONS)})")
        return ACTIVATIONS[name]

    def float_type(self, key: str, default: str) -> torch.dtype:
        """The floating type that `key` names.

        Raises:
            ModelLoadError: another kind of type.
        """
        name = self.text(key, default=default)
        if name not in ("float32", "float16", "bfloat16"):
            raise ModelLoadError(f"config.json: {key} must be float32, float16 or bfloat16, got {name!r}")
        dtype: torch.dtype = getattr(torch, name)
        return dtype

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The object under `key`, empty if it is not set."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"config.json: {key} must be an object, got {value!r}")
        return value

    def layer_types(self, num_layers: int) -> list[str] | None:
        """`layer_types`, one string per layer, or None if it is not set."""
        value = self.values.get("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise ModelLoadError(f"config.json: layer_types must list {num_layers} layers, got {value!r}")
        return [str(item) for item in value[:num_layers]]

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        given = self.optional_integer("head_dim")
        return given or self.integer("hidden_size") // self.integer("num_attention_heads")

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.integer("num_key_value_heads", default=self.integer("num_attention_heads"))

    @property
    def num_experts(self) -> int:
        """Routed experts, under whichever name the family gives them."""
        return self.integer("num_experts", "num_local_experts", "n_routed_experts")

    def placeholder_ids(self) -> tuple[int, ...]:
        """Ids that stand for an image, a video or sound in a prompt."""
        keys = ("image_token_id", "video_token_id", "audio_token_id")
        return tuple(self.integer(key) for key in keys if key in self)

    def is_tied(self, *, default: bool) -> bool:
        """Whether the head is the embedding."""
        return self.flag("tie_word_embeddings", default=default)

    def rope(
        self,
        max_model_len: int,
        *,
        layer_type: str | None = None,
        default_base: float = 10000.0,
        default_partial: float = 1.0,
        is_interleaved: bool = False,
        head_dim: int | None = None,
    ) -> RopeSpec:
        """The rope of a layer type, from the older keys (rope_theta, rope_scaling) or the newer (rope_parameters).

        `head_dim`: the width of what rotates, where that is not the configuration's `head_dim`.
        """
        head_dim = head_dim or self.head_dim
        newer = self.mapping("rope_parameters")
        if layer_type is not None and isinstance(newer.get(layer_type), Mapping):
            newer = newer[layer_type]
        elif by_type := sorted(key for key, value in newer.items() if isinstance(value, Mapping)):
            raise ModelLoadError(
                f"config.json: rope_parameters has a rope for each of {', '.join(by_type)}; "
                f"{'one for all layers' if layer_type is None else layer_type} was expected"
            )
        scaling = {**self.mapping("rope_scaling"), **newer}
        if "original_max_position_embeddings" not in scaling and "original_max_position_embeddings" in self:
            scaling["original_max_position_embeddings"] = self.integer("original_max_position_embeddings")
        base = scaling.get("rope_theta", self.number("rope_theta", default=default_base))
        partial = scaling.get(
            "partial_rotary_factor", self.number("partial_rotary_factor", "rotary_pct", default=default_partial)
        )
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        width = head_dim if kind == "proportional" else int(head_dim * float(partial) + 1e-6)
        return RopeSpec(
            head_dim=head_dim,
            width=width,
            base=float(base),
            max_position_embeddings=self.integer("max_position_embeddings", default=max_model_len),
            max_model_len=max_model_len,
            kind="longrope" if kind == "su" else kind,
            scaling=scaling,
            is_interleaved=is_interleaved,
        )

    def _first(self, keys: tuple[str, ...], default: Any) -> Any:
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), _MISSING)
        if value is not _MISSING:
            return value
        if default is None:
            raise ModelLoadError(f"config.json: {' or '.join(keys)} is missing")
        return default

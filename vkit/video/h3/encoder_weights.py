"""The text conditioner's tensors: a Qwen3-VL's first layers, as the release spells them or as a GGUF file does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.tensors import open_tensors
from vkit.quantization import QuantizedTensor
from vkit.video.h3.config_files import numbers, read_config
from vkit.video.h3.weights import BlockWeight, Layer, dense

NUM_LAYERS = 50
"""Decoder layers whose output conditions the video; a file of the whole model has more."""
RELEASED_WIDTH = 5120
TEXT_PREFIXES = ("model.language_model.", "model.")
VISION_PREFIXES = ("model.visual.", "visual.")
LAYER_TENSORS = {
    "input_norm": "input_layernorm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
NORMS = frozenset({"input_norm", "post_norm", "q_norm", "k_norm"})
RELEASED_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": RELEASED_WIDTH,
    "deepstack_visual_indexes": [8, 16, 24],
}


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Sizes from the tensors, the rest from config.json or the released values."""

    num_layers: int
    """Layers that are run."""
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    vision: Mapping[str, Any] = field(default_factory=dict)
    """Keys of vision_config."""


class EncoderWeights:
    """The opened files of the conditioner."""

    def __init__(self, path: Path, *, max_layers: int | None = None) -> None:
        """Open `path`: a directory with config.json, or a `.gguf` or `.safetensors` file; config.json beside it counts.

        Raises:
            CheckpointError, ModelLoadError: a tensor is missing or misshapen, or the names are another tool's.
        """
        self.path = path
        self.files = open_tensors(path)
        names = self.files.names()
        if any(name.startswith("blk.") for name in names):
            raise ModelLoadError(
                f"{path}: tensors are named as llama.cpp does (blk.N...)",
                remedy="use the conditioner's own file, whose tensors are named model.layers.N...",
            )
        self._text = _prefix(names, TEXT_PREFIXES, "embed_tokens.weight", path)
        self._vision = next((prefix for prefix in VISION_PREFIXES if f"{prefix}pos_embed.weight" in names), None)
        folder = path if path.is_dir() else path.parent
        given = read_config(folder / "config.json") if (folder / "config.json").is_file() else {}
        if "text_config" not in given:
            given = {}  # the configuration of something else in the same folder
        self.config = self._derive(given, max_layers)
        self._check()

    @property
    def has_vision(self) -> bool:
        """Whether the vision tower's tensors are there."""
        return self._vision is not None

    @property
    def is_packed(self) -> bool:
        """Whether the matrices are packed."""
        return self.files.info(self._name(0, "gate")).is_packed

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        """Type of the matrices, None if packed."""
        return self.files.info(self._name(0, "gate")).dtype

    def layer(self, index: int) -> Layer:
        """One decoder layer by short names; norms float32."""
        layer: Layer = {}
        for short in LAYER_TENSORS:
            weight = self.files.load(self._name(index, short))
            layer[short] = dense(weight, torch.float32) if short in NORMS else weight
        return layer

    def release_layer(self, index: int) -> None:
        """Let the pages of one layer go."""
        for short in LAYER_TENSORS:
            self.files.release(self._name(index, short))

    def embed(self, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the token table (L, H)."""
        table = self.files.load(f"{self._text}embed_tokens.weight")
        if isinstance(table, QuantizedTensor):
            rows = table.rows(token_ids).dequantize(dtype)
        else:
            rows = table.index_select(0, token_ids).to(dtype)
        self.files.release(f"{self._text}embed_tokens.weight")
        return rows

    def layer_bytes(self) -> int:
        """Bytes of one layer as stored."""
        return sum(self.files.info(self._name(0, short)).nbytes for short in LAYER_TENSORS)

    def vision_tensor(self, name: str, shape: tuple[int, ...]) -> BlockWeight:
        """A tensor of the tower by its name below `visual.`."""
        return self.files.load(f"{self._vision}{name}", shape)

    def vision_names(self) -> set[str]:
        """Names below `visual.`."""
        prefix = self._vision
        return (
            {name.removeprefix(prefix) for name in self.files.names() if name.startswith(prefix)} if prefix else set()
        )

    def vision_bytes(self) -> int:
        """Bytes of the tower as stored."""
        return sum(self.files.info(f"{self._vision}{name}").nbytes for name in self.vision_names())

    def release_vision(self) -> None:
        """Let the tower's pages go."""
        for name in self.vision_names():
            self.files.release(f"{self._vision}{name}")

    def close(self) -> None:
        """End loading."""
        self.files.close()

    def _name(self, index: int, short: str) -> str:
        return f"{self._text}layers.{index}.{LAYER_TENSORS[short]}"

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.files.info(name).shape

    def _derive(self, given: Mapping[str, Any], max_layers: int | None) -> EncoderConfig:
        source = str(self.path)
        pattern = re.compile(re.escape(self._text) + r"layers\.(\d+)\.")
        found = {int(match[1]) for match in map(pattern.match, self.files.names()) if match}
        available = max(found, default=-1) + 1
        vocab_size, hidden = self._shape(f"{self._text}embed_tokens.weight")
        if available < 1 or (hidden == RELEASED_WIDTH and available < NUM_LAYERS):
            raise CheckpointError(f"{source}: {available} decoder layers, expected at least {NUM_LAYERS}")
        head_dim = self._shape(self._name(0, "q_norm"))[0]
        text = given.get("text_config", {})
        scaling = text.get("rope_scaling") or text.get("rope_parameters") or {}
        read, rope, top = numbers(source, text), numbers(source, scaling), numbers(source, given)
        section = rope.integers("mrope_section", (24, 20, 20))
        if sum(section) != head_dim // 2 or len(section) != 3:
            raise CheckpointError(
                f"{source}: mrope_section {list(section)} for heads of {head_dim}",
                remedy="put the model's config.json beside the file",
            )
        return EncoderConfig(
            num_layers=min(available, NUM_LAYERS if max_layers is None else max_layers),
            hidden_size=hidden,
            num_heads=self._shape(self._name(0, "q"))[0] // head_dim,
            num_kv_heads=self._shape(self._name(0, "k"))[0] // head_dim,
            head_dim=head_dim,
            intermediate_size=self._shape(self._name(0, "gate"))[0],
            vocab_size=vocab_size,
            norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=read.number("rope_theta", rope.number("rope_theta", 5e6)),
            mrope_section=section,
            image_token_id=top.integer("image_token_id", 151655),
            video_token_id=top.integer("video_token_id", 151656),
            vision_start_token_id=top.integer("vision_start_token_id", 151652),
            vision_end_token_id=top.integer("vision_end_token_id", 151653),
            vision=given.get("vision_config") or RELEASED_VISION,
        )

    def _check(self) -> None:
        c = self.config
        queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_norm": (c.hidden_size,),
            "post_norm": (c.hidden_size,),
            "q": (queries, c.hidden_size),
            "k": (keys, c.hidden_size),
            "v": (keys, c.hidden_size),
            "o": (c.hidden_size, queries),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
            "gate": (c.intermediate_size, c.hidden_size),
            "up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
        }
        if c.num_kv_heads < 1 or c.num_heads % c.num_kv_heads:
            raise CheckpointError(f"{self.path}: {c.num_heads} heads over {c.num_kv_heads} key heads")
        for index in range(c.num_layers):
            for short, shape in shapes.items():
                name = self._name(index, short)
                if name not in self.files.names():
                    raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
                if self._shape(name) != shape:
                    raise CheckpointError(
                        f"{self.path}: tensor {name!r} is {list(self._shape(name))}, expected {list(shape)}"
                    )


def _prefix(names: set[str], prefixes: tuple[str, ...], tensor: str, path: Path) -> str:
    for prefix in prefixes:
        if prefix + tensor in names:
            return prefix
    raise CheckpointError(
        f"{path}: tensor {prefixes[0] + tensor!r} is missing", remedy="is this the Qwen3-VL conditioner?"
    )

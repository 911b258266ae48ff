"""A GGUF language model and the GGUF file of its vision tower, as one checkpoint under Hugging Face names.

Source: GGUF files of architecture "clip" with projector type "qwen3vl_merger" (see vkit.models.qwen_vision).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.loaders.checkpoint import Checkpoint, TensorInfo
from vkit.loaders.gguf import GGUFTensors
from vkit.loaders.gguf_config import Config, MetadataReader
from vkit.loaders.gguf_header import GGUFMetadata
from vkit.quantization import Weight

SEEING = {
    "Qwen3ForCausalLM": "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForCausalLM": "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForConditionalGeneration",
}
"""Language models that a projector of this kind goes with -> what the two together are."""

PROJECTOR = "qwen3vl_merger"
_MARKS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_PATCHES = ("v.patch_embd.weight", "v.patch_embd.weight.1")
"""The convolution's two temporal slices."""

_TOP = {
    "v.patch_embd.bias": "patch_embed.proj.bias",
    "v.position_embd.weight": "pos_embed.weight",
    **{f"v.post_ln.{kind}": f"merger.norm.{kind}" for kind in ("weight", "bias")},
    **{f"mm.0.{kind}": f"merger.linear_fc1.{kind}" for kind in ("weight", "bias")},
    **{f"mm.2.{kind}": f"merger.linear_fc2.{kind}" for kind in ("weight", "bias")},
}
_BLOCK = {
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ln1": "norm1",
    "ln2": "norm2",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}
_DEEPSTACK = {"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"}
_PREFIX = "model.visual."


class ProjectedCheckpoint(Checkpoint):
    """A language model's file with its tower's beside it. Takes over the first and closes both."""

    format: Literal["safetensors", "gguf"] = "gguf"

    def __init__(self, text: Checkpoint, path: Path, *, use_mmap: bool = True) -> None:
        """Open the projector at `path` for a language model that is open.

        Raises:
            UsageError: the language model is no GGUF file, or one that no such projector goes with.
            CheckpointError: a file is missing or damaged, or the two do not belong together.
            ModelLoadError: a projector of a kind that cannot be computed.
        """
        whole = SEEING.get(text.architecture)
        if text.format != "gguf":
            raise UsageError(f"--mmproj: {text.name} is a {text.format} checkpoint, which brings its tower along")
        if whole is None:
            raise UsageError(
                f"--mmproj: no projector is computed for {text.architecture}", remedy=f"known: {', '.join(SEEING)}"
            )
        self._text = text
        self.path, self.name = text.path, text.name
        self.generation_config = text.generation_config
        self.gguf_metadata, self.quantization = text.gguf_metadata, text.quantization
        self._tower = GGUFTensors(path, use_mmap=use_mmap)
        self.weight_files = (*text.weight_files, *self._tower.weight_files)
        metadata = self._tower.metadata
        assert isinstance(metadata, GGUFMetadata), "a GGUF file's keys"
        reader = MetadataReader(path, "clip", metadata, self._tower.entries, self._vector)
        _check_kind(reader, path)
        self._layers = _deepstack_layers(reader)
        self._names = {hf: name for name in self._tower.names() for hf in [self._renamed(name)] if hf is not None}
        self._preprocessor = _preprocessor(reader)
        self.config = _joined_config(text, reader, whole, self._tower, self._layers)

    def tensor_names(self) -> set[str]:
        """Those of both files; a tensor of the projector that has no Hugging Face name keeps its own."""
        return {_with_prefix(name) for name in self._text.tensor_names()} | set(self._names)

    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size of a tensor."""
        own = self._names.get(name)
        if own is None:
            return replace(self._text.tensor_info(_without_prefix(name)), name=name)
        if own != _PATCHES[0]:
            return replace(self._tower.info(own), name=name)
        info = self._tower.info(own)
        out, channels, rows, columns = info.shape
        return TensorInfo(name, (out, channels, 2, rows, columns), info.dtype, info.qtype, 2 * info.nbytes)

    def load(self, name: str) -> Weight:
        """The tensor in Hugging Face layout."""
        own = self._names.get(name)
        if own is None:
            return self._text.load(_without_prefix(name))
        if own != _PATCHES[0]:
            return self._tower.load(own)
        slices = [self._tower.load(part) for part in _PATCHES]
        dense = [part if isinstance(part, torch.Tensor) else part.dequantize() for part in slices]
        return torch.stack(dense, dim=2)

    def preprocessor_config(self, kind: Literal["image", "video"]) -> Mapping[str, Any]:
        """What the projector's file says about pixels."""
        return self._preprocessor

    def release_pages(self) -> None:
        """Let the operating system take back the memory of everything mapped so far."""
        self._text.release_pages()
        self._tower.release_pages()

    def close(self) -> None:
        """End loading. Tensors already loaded stay valid."""
        self._text.close()
        self._tower.close()

    def _vector(self, name: str) -> list[float]:
        weight = self._tower.load(name)
        dense = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
        values: list[float] = dense.float().flatten().tolist()
        return values

    def _renamed(self, name: str) -> str | None:
        """The Hugging Face name; None for the second slice of the patch embedding, which the first brings along."""
        if name in _PATCHES:
            return f"{_PREFIX}patch_embed.proj.weight" if name == _PATCHES[0] else None
        if name in _TOP:
            return _PREFIX + _TOP[name]
        block = re.fullmatch(r"v\.blk\.(\d+)\.(\w+)\.(weight|bias)", name)
        if block is not None and block[2] in _BLOCK:
            return f"{_PREFIX}blocks.{block[1]}.{_BLOCK[block[2]]}.{block[3]}"
        deeper = re.fullmatch(r"v\.deepstack\.(\d+)\.(\w+)\.(weight|bias)", name)
        if deeper is not None and deeper[2] in _DEEPSTACK and int(deeper[1]) in self._layers:
            place = self._layers.index(int(deeper[1]))
            return f"{_PREFIX}deepstack_merger_list.{place}.{_DEEPSTACK[deeper[2]]}.{deeper[3]}"
        return name


def _with_prefix(name: str) -> str:
    return "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name


def _without_prefix(name: str) -> str:
    return name.replace("model.language_model.", "model.", 1)


def _check_kind(reader: MetadataReader, path: Path) -> None:
    architecture = reader.metadata.get("general.architecture")
    if architecture != "clip":
        raise ModelLoadError(f"{path}: GGUF architecture {architecture!r:.80}, expected 'clip': this is no projector")
    if reader.metadata.get("clip.has_vision_encoder") is not True:
        raise ModelLoadError(f"{path}: the projector has no vision encoder (clip.has_vision_encoder)")
    if reader.metadata.get("clip.has_audio_encoder") is True:
        raise ModelLoadError(f"{path}: projectors with an audio encoder cannot be computed")
    kind = reader.optional_text("vision.projector_type") or reader.optional_text("projector_type")
    if kind != PROJECTOR:
        raise ModelLoadError(f"{path}: projector type {kind!r:.80} is not supported (known: {PROJECTOR})")


def _deepstack_layers(reader: MetadataReader) -> list[int]:
    """The blocks after which deeper features are taken, by the flags and by the tensors, which must agree."""
    flags = reader.metadata.get("clip.vision.is_deepstack_layers")
    found = {re.match(r"v\.deepstack\.(\d+)\.", name) for name in reader.tensors}
    layers = sorted({int(match[1]) for match in found if match is not None})
    if flags is not None:
        listed = [index for index, flag in enumerate(np.asarray(flags).tolist()) if flag]
        if listed != layers:
            reader.refuse(f"clip.vision.is_deepstack_layers names the blocks {listed}, the tensors {layers}")
    return layers


def _joined_config(
    text: Checkpoint, reader: MetadataReader, whole: str, tower: GGUFTensors, deepstack: list[int]
) -> Config:
    """The language model's configuration with what the tower adds."""
    config = dict(text.config)
    missing = [name for name in _PATCHES if name not in reader.tensors]
    if missing or "v.position_embd.weight" not in reader.tensors:
        reader.refuse(f"missing tensors: {', '.join(missing or ['v.position_embd.weight'])}")
    out_width = reader.integer("vision.projection_dim")
    if out_width != config["hidden_size"]:
        raise CheckpointError(
            f"{reader.path}: makes rows of {out_width}, but {text.name} has a width of {config['hidden_size']}",
            remedy="pass the projector that was made with this language model",
        )
    config["architectures"] = [whole]
    config["vision_config"] = {
        "depth": reader.integer("vision.block_count"),
        "hidden_size": reader.integer("vision.embedding_length"),
        "intermediate_size": reader.integer("vision.feed_forward_length"),
        "num_heads": reader.integer("vision.attention.head_count"),
        "patch_size": reader.integer("vision.patch_size"),
        "spatial_merge_size": reader.optional_integer("vision.spatial_merge_size", minimum=1) or 2,
        "temporal_patch_size": len(_PATCHES),
        "num_position_embeddings": tower.info("v.position_embd.weight").shape[0],
        "out_hidden_size": out_width,
        "hidden_act": _activation(reader),
        "deepstack_visual_indexes": deepstack,
    }
    sections = (text.gguf_metadata or {}).get(f"{_architecture(text)}.rope.dimension_sections")
    rope = {**(config.get("rope_scaling") or {}), "mrope_interleaved": True}
    if sections is not None:
        rope["mrope_section"] = [int(value) for value in np.asarray(sections).tolist()[:3]]
    config["rope_scaling"] = rope
    return config | _token_ids(text)


def _architecture(text: Checkpoint) -> str:
    return str((text.gguf_metadata or {}).get("general.architecture"))


def _activation(reader: MetadataReader) -> str:
    """The tower's activation, by the flags that such files have."""
    for flag, name in (("use_gelu", "gelu_pytorch_tanh"), ("use_silu", "silu")):
        if reader.metadata.get(f"clip.{flag}") is True:
            return name
    return reader.unsupported("a tower whose activation is neither clip.use_gelu nor clip.use_silu")


def _token_ids(text: Checkpoint) -> Config:
    tokens = (text.gguf_metadata or {}).get("tokenizer.ggml.tokens")
    places = {token: index for index, token in enumerate(tokens or ())}
    missing = [token for token in _MARKS.values() if token not in places]
    if missing:
        raise CheckpointError(f"{text.path}: the vocabulary lacks {', '.join(missing)}, by which prompts show media")
    return {key: places[token] for key, token in _MARKS.items()}


def _preprocessor(reader: MetadataReader) -> dict[str, Any]:
    """The keys of a preprocessor configuration, as far as the file has them."""
    found: dict[str, Any] = {}
    for key in ("image_mean", "image_std"):
        values = reader.metadata.get(f"clip.vision.{key}")
        if values is not None:
            found[key] = [float(value) for value in np.asarray(values).tolist()]
    for key, name in (("min_pixels", "vision.image_min_pixels"), ("max_pixels", "vision.image_max_pixels")):
        value = reader.optional_integer(name, minimum=1)
        if value is not None:
            found[key] = value
    return found

"""A checkpoint as one GGUF file: names, value transforms, metadata, tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from vkit.conversion.gguf_file import gguf_header
from vkit.conversion.metadata import ARCHITECTURE_OF, Described, describe
from vkit.conversion.metadata_mixed import block_letters
from vkit.conversion.tensors import SourceTensor, source_tensors
from vkit.conversion.tokenizer_to_gguf import tokenizer_metadata
from vkit.conversion.types import FILE_TYPES, tensor_type
from vkit.conversion.value_heads import reordered
from vkit.conversion.writing import ConversionError, DataFile, OutputTensor
from vkit.loaders import Checkpoint
from vkit.loaders.gguf_architectures import ARCHITECTURES, GGUFArchitecture
from vkit.models.hf_config import HFConfig

QUANTIZATION_VERSION = 2
WITH_SPLIT_LATENT = frozenset({"deepseek2", "kimi-linear"})
"""Architectures whose files keep the matrices to keys and to values apart."""


def gguf_file(checkpoint: Checkpoint, wanted: str) -> tuple[DataFile, list[str]]:
    """The file of type `wanted` that the checkpoint becomes, and notes on what gets lost. Reads no weights.

    Raises:
        ConversionError: an architecture without a GGUF name, or a tensor without one.
        ModelLoadError: the configuration says something the format has no key for.
    """
    name = ARCHITECTURE_OF.get(checkpoint.architecture)
    if name == "nemotron_h" and "n_routed_experts" in checkpoint.config and "E" in block_letters(checkpoint.config):
        name = "nemotron_h_moe"
    if name is None:
        raise ConversionError(
            f"{checkpoint.architecture or 'a model without an architecture name'} cannot be written as GGUF",
            remedy=f"it can be for {', '.join(sorted(ARCHITECTURE_OF))}",
        )
    config = _flat_config(checkpoint)
    found, left_out = source_tensors(checkpoint, config)
    notes = [f"{len(left_out)} tensors of towers and draft layers are left out"] if left_out else []
    described = describe(name, HFConfig(config), found.keys())
    tensors = _planned(found, name, config, wanted)
    for vector, values in described.vectors.items():
        tensors.append(_vector(f"{vector}.weight", values))
    text, text_notes = tokenizer_metadata(checkpoint, config)
    metadata = _metadata(checkpoint, name, described, wanted) | text
    header, offsets = gguf_header(metadata, [(tensor.name, tensor.shape, tensor.type) for tensor in tensors])
    return DataFile(header, tensors, offsets), notes + described.notes + text_notes


def _flat_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The text model's keys, defaults of transforms filled in."""
    config = dict(HFConfig(checkpoint.config).values)
    if "num_attention_heads" in config:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
        config["num_key_value_heads"] = config["num_key_value_heads"] or config["num_attention_heads"]
    config["architectures"] = [checkpoint.architecture]
    return config


def _metadata(checkpoint: Checkpoint, name: str, described: Described, wanted: str) -> dict[str, Any]:
    general = {
        "general.architecture": name,
        "general.type": "model",
        "general.name": checkpoint.name,
        "general.file_type": FILE_TYPES[wanted],
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    return general | {f"{name}.{key}": value for key, value in described.keys.items()}


def _vector(name: str, values: list[float]) -> OutputTensor:
    return OutputTensor(name, (len(values),), "F32", lambda: torch.tensor(values, dtype=torch.float32))


def _planned(
    found: Mapping[str, SourceTensor], arch: str, config: Mapping[str, Any], wanted: str
) -> list[OutputTensor]:
    """Every tensor of the file, embedding first, then by layer."""
    architecture = ARCHITECTURES[arch]
    num_layers = int(config.get("num_hidden_layers") or config["n_layer"])
    is_tied = not any(name in found for name in ("lm_head.weight", "output.weight", "head.weight"))
    planned: list[OutputTensor] = []
    for source in found.values():
        if arch in WITH_SPLIT_LATENT and source.name.endswith(".kv_b_proj.weight"):
            planned += _latent_halves(source, architecture, config, wanted)
            continue
        named = architecture.names.gguf_name(source.name)
        if named is None:
            raise ConversionError(f"tensor {source.name!r} has no name in a GGUF file of architecture {arch!r}")
        name, base = named
        load = _forward(source, architecture, base, config)
        transform = architecture.transforms.get(base)
        shape = source.shape if transform is None else transform.forward_shape(source.shape, config)
        kind = tensor_type(wanted, base, name, shape, num_layers, is_tied=is_tied) if source.is_float else "I32"
        planned.append(OutputTensor(name, shape, kind, load))
    return sorted(planned, key=lambda tensor: _place(tensor.name))


def _latent_halves(
    source: SourceTensor, architecture: GGUFArchitecture, config: Mapping[str, Any], wanted: str
) -> list[OutputTensor]:
    """Each head's matrices to keys, transposed as absorption wants them, and to values, as newer files have them."""
    heads, key_dim, rank = config["num_attention_heads"], config["qk_nope_head_dim"], source.shape[1]
    value_dim = source.shape[0] // heads - key_dim
    named = architecture.names.gguf_name(source.name)
    assert named is not None, "architectures that split it have a name for it"
    layer = named[0].removesuffix("attn_kv_b.weight")

    def stacked() -> Tensor:
        weight = source.load()
        return weight.reshape(heads, -1, *weight.shape[1:])

    shapes = {"attn_k_b": (heads, rank, key_dim), "attn_v_b": (heads, value_dim, rank)}
    loads = {
        "attn_k_b": lambda: stacked()[:, :key_dim].transpose(1, 2),
        "attn_v_b": lambda: stacked()[:, key_dim:],
    }
    return [
        OutputTensor(
            f"{layer}{base}.weight", shape, tensor_type(wanted, base, layer, shape, 0, is_tied=False), loads[base]
        )
        for base, shape in shapes.items()
    ]


def _place(name: str) -> tuple[int, int, str]:
    parts = name.split(".")
    return (1, int(parts[1]), name) if parts[0] == "blk" else (0 if name.startswith("token_embd") else 2, 0, name)


def _forward(
    source: SourceTensor, architecture: GGUFArchitecture, base: str, config: Mapping[str, Any]
) -> Callable[[], Tensor]:
    transform = architecture.transforms.get(base)
    is_grouped = "linear_num_value_heads" in config and config.get("linear_value_head_order") != "tiled"

    def load() -> Tensor:
        weight = source.load()
        if is_grouped:
            weight = reordered(base, weight, config, to_tiled=True)
        return weight if transform is None else transform.forward(weight, config)

    return load

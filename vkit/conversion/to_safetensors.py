"""A checkpoint as a Hugging Face directory: config.json, one safetensors file, tokenizer and template."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit.conversion.tensors import dense
from vkit.conversion.value_heads import reordered
from vkit.conversion.writing import DataFile, OutputTensor
from vkit.layers.rotary import RopeSpec, frequencies_of
from vkit.loaders import Checkpoint, TensorInfo
from vkit.loaders.gguf_architectures import ARCHITECTURES
from vkit.text.to_json import tokenizer_files

DATA_FILE = "model.safetensors"
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.int64: "I64"}
CONFIG_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
UNPACKED_TYPE = "BF16"
"""What weights of blocks become unless a type is asked for."""
TEXT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "vocab.json"),
    *("merges.txt", "added_tokens.json", "chat_template.jinja", "chat_template.json"),
)
PUBLISHED_LLAMA3 = ((1.0, 4.0, 8192),)
"""(low_freq_factor, high_freq_factor, original length) of published models with rope scaling `llama3`."""


def safetensors_file(checkpoint: Checkpoint, wanted: str | None) -> DataFile:
    """The data file that the checkpoint becomes; `wanted` None keeps the types of what is not packed."""
    tensors: list[OutputTensor] = []
    for name in sorted(checkpoint.tensor_names()):
        tensors += _outputs(checkpoint, name, wanted)
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position, starts = 0, []
    for tensor in tensors:
        starts.append(position)
        stop = position + tensor.num_bytes
        entries[tensor.name] = {
            "dtype": tensor.type,
            "shape": list(tensor.shape),
            "data_offsets": [position, stop],
        }
        position = stop
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return DataFile(header, tensors, [len(header) + start for start in starts])


def write_companions(checkpoint: Checkpoint, folder: Path, wanted: str | None) -> list[str]:
    """Write everything but the weights into `folder`; returns notes on what is missing."""
    _write_json(folder / "config.json", hugging_face_config(checkpoint, wanted))
    if checkpoint.generation_config:
        _write_json(folder / "generation_config.json", checkpoint.generation_config)
    if checkpoint.gguf_metadata is None:
        source = Path(checkpoint.path)
        present = [name for name in TEXT_FILES if (source / name).is_file()]
        for name in present:
            shutil.copyfile(source / name, folder / name)
        return [] if "tokenizer.json" in present else ["there is no tokenizer.json, so the folder gets no tokenizer"]
    metadata = checkpoint.gguf_metadata
    if "tokenizer.ggml.model" not in metadata:
        return ["the file holds no tokenizer, so the folder gets none"]
    architecture = str(metadata.get("general.architecture"))
    content, settings = tokenizer_files(metadata, architecture=architecture, origin=str(checkpoint.path))
    _write_json(folder / "tokenizer.json", content)
    _write_json(folder / "tokenizer_config.json", settings)
    return []


def hugging_face_config(checkpoint: Checkpoint, wanted: str | None) -> dict[str, Any]:
    """config.json of the new folder."""
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    config.pop("linear_value_head_order", None)
    config["dtype"] = CONFIG_NAMES[wanted or _matrix_type(checkpoint)]
    config.pop("torch_dtype", None)
    scaling = config.get("rope_scaling")
    if isinstance(scaling, Mapping) and scaling.get("rope_type") == "frequency_divisors":
        config["rope_scaling"] = _published_scaling(config, scaling) or dict(scaling)
    return config


def _published_scaling(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `llama3` scaling whose divisors these are, if they are one's of a published model."""
    divisors = torch.tensor(scaling["divisors"])
    head_dim = config["head_dim"]
    plain = RopeSpec(head_dim, 2 * len(divisors), config["rope_theta"], 1, 1)
    for low, high, original in PUBLISHED_LLAMA3:
        llama3 = {
            "rope_type": "llama3",
            "factor": float(divisors.max()),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        spec = RopeSpec(head_dim, plain.width, plain.base, 1, 1, kind="llama3", scaling=llama3)
        if torch.allclose(frequencies_of(plain)[0] / frequencies_of(spec)[0], divisors, rtol=1e-5):
            return llama3
    return None


def _matrix_type(checkpoint: Checkpoint) -> str:
    """The type of most weight bytes as they will be written."""
    sizes: dict[str, int] = {}
    for name in checkpoint.tensor_names():
        info = checkpoint.tensor_info(name)
        kind = _type(info, None)
        if len(info.shape) >= 2 and kind in CONFIG_NAMES:
            sizes[kind] = sizes.get(kind, 0) + info.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="F32")


def _type(info: TensorInfo, wanted: str | None) -> str:
    if info.dtype is None:
        return wanted or UNPACKED_TYPE
    if info.dtype.is_floating_point:
        return wanted or TYPES.get(info.dtype, "F32")
    return TYPES.get(info.dtype, "I64")


def _outputs(checkpoint: Checkpoint, name: str, wanted: str | None) -> list[OutputTensor]:
    """One tensor, or one for each expert of a stack that the format of the source made."""
    info = checkpoint.tensor_info(name)
    kind = _type(info, wanted)
    load = _ordered(checkpoint, name)
    if checkpoint.format != "gguf" or len(info.shape) != 3 or ".experts." not in name:
        return [OutputTensor(name, info.shape, kind, load)]
    if _is_stacked_when_published(checkpoint, name):
        return [OutputTensor(name.removesuffix(".weight"), info.shape, kind, load)]
    before, _, after = name.partition(".experts.")

    def expert(number: int) -> Callable[[], Tensor]:
        def part() -> Tensor:
            weight = checkpoint.load(name)
            return weight[number] if isinstance(weight, Tensor) else weight.expert(number).dequantize()  # type: ignore[union-attr]

        return part

    return [
        OutputTensor(f"{before}.experts.{number}.{after}", info.shape[1:], kind, expert(number))
        for number in range(info.shape[0])
    ]


def _is_stacked_when_published(checkpoint: Checkpoint, name: str) -> bool:
    """Whether checkpoints of the family keep this stack whole, under a name without `.weight`."""
    return checkpoint.architecture.startswith("Gemma4") or name.endswith(".gate_up_proj.weight")


def _ordered(checkpoint: Checkpoint, name: str) -> Callable[[], Tensor]:
    """Reads a tensor, with value heads in the order of Hugging Face checkpoints."""
    if checkpoint.config.get("linear_value_head_order") != "tiled" or checkpoint.gguf_metadata is None:
        return lambda: dense(checkpoint, name)
    names = ARCHITECTURES[str(checkpoint.gguf_metadata["general.architecture"])].names
    named = names.gguf_name(name)
    base = "" if named is None else named[1]
    return lambda: reordered(base, dense(checkpoint, name), checkpoint.config, to_tiled=False)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")

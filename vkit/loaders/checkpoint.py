"""What a checkpoint promises, whatever its format, and the check that a model took exactly what it holds."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from vkit.errors import CheckpointError
from vkit.quantization import Weight

MAX_NAMES_SHOWN = 8
"""Names listed in one message before the rest is counted."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint knows about a tensor without reading it.

    `shape` is the shape `load` returns. `dtype` is the dtype `load` returns, or None when the tensor is packed; then
    `qtype` names its GGUF block type, or the format of a quantised safetensors layer. `nbytes` is its size in the file,
    scales included.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    qtype: str | None
    nbytes: int

    @property
    def is_packed(self) -> bool:
        """Whether `load` returns a QuantizedTensor or a ScaledMatrix."""
        return self.qtype is not None


class Checkpoint(ABC):
    """A model on disk: configuration and tensors, under Hugging Face names.

    Opening reads headers only and makes every check that needs no weights. Tensors that `load` returns are on the CPU;
    they may be views of a read-only file mapping, so they must never be written in place, and they stay valid after
    `close()` (the mapping goes with its last tensor). The files must not be changed while they are mapped.
    """

    path: Path
    """The directory or the `.gguf` file the checkpoint was opened from."""
    weight_files: tuple[Path, ...]
    """Every file whose bytes decide what `load` returns, config.json excepted: shards, parts, a projector."""
    name: str
    """Name to serve the model under: the directory's, or the file's without suffix and part number."""
    format: Literal["safetensors", "gguf"]
    config: dict[str, Any]
    """Hugging Face config.json keys."""
    generation_config: dict[str, Any]
    """generation_config.json; empty when there is none."""
    quantization: str | None
    """What the weights are stored as: the declared scheme of a directory, "gguf", or None for plain weights."""
    gguf_metadata: Mapping[str, Any] | None
    """Every key of a GGUF file, decoded on first access; None for directories."""

    @property
    def architecture(self) -> str:
        """The Hugging Face class name, or an empty string when the configuration names none."""
        names = self.config.get("architectures")
        return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(self.tensor_info(name).nbytes for name in self.tensor_names())

    @abstractmethod
    def tensor_names(self) -> set[str]:
        """Names of all tensors that can be loaded."""

    @abstractmethod
    def tensor_info(self, name: str) -> TensorInfo:
        """Shape, type and size of a tensor; reads no weight bytes.

        Raises:
            CheckpointError: there is no tensor of that name.
        """

    @abstractmethod
    def load(self, name: str) -> Weight:
        """The tensor, with every transform of the file format undone.

        Linear weights are (out_features, in_features), except where the Hugging Face checkpoint of the architecture
        itself stores them the other way round (GPT-2).

        Raises:
            CheckpointError: there is no tensor of that name, or its shape contradicts the configuration.
        """

    def preprocessor_config(self, kind: Literal["image", "video"]) -> Mapping[str, Any]:
        """How media are to be prepared, by the file beside the weights; empty where there is none.

        Raises:
            CheckpointError: a file that is no JSON object.
        """
        path = self.path / {"image": "preprocessor_config.json", "video": "video_preprocessor_config.json"}[kind]
        if not path.is_file():
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: expected a JSON object, got {type(values).__name__}")
        return values

    @abstractmethod
    def release_pages(self) -> None:
        """Let the operating system take back the memory of everything mapped so far.

        Tensors stay valid: what is used again is read again. Call it after copying weights (joining, moving to a
        device), so that the copy and its source do not both count.
        """

    @abstractmethod
    def close(self) -> None:
        """End loading. Tensors already loaded stay valid."""


def some_names(names: set[str]) -> str:
    """The first names in order, and how many more there are."""
    shown = ", ".join(sorted(names)[:MAX_NAMES_SHOWN])
    rest = len(names) - MAX_NAMES_SHOWN
    return f"{shown} and {rest} more" if rest > 0 else shown

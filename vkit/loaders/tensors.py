"""Tensors of a file or a directory of shards under their own names: for models that are no language model.

No configuration is read and no architecture looked up: whoever opens the files knows what belongs in them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vkit.errors import CheckpointError
from vkit.loaders.checkpoint import TensorInfo
from vkit.quantization import BlockWeight

SINGLE_NAMES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
INDEX_NAMES = tuple(f"{name}.index.json" for name in SINGLE_NAMES)


class TensorFiles(ABC):
    """Lazily mapped tensors. Never write into one: it may be a view of the file. Headers are checked on opening."""

    path: Path
    format: Literal["safetensors", "gguf"]
    is_sharded: bool
    """A directory whose index names several files."""
    metadata: Mapping[str, Any]
    """Keys of a GGUF file; empty for safetensors."""

    @abstractmethod
    def names(self) -> set[str]:
        """All tensors."""

    @abstractmethod
    def info(self, name: str) -> TensorInfo:
        """Shape, type and size; reads no weight bytes.

        Raises:
            CheckpointError: there is no such tensor.
        """

    @abstractmethod
    def load(self, name: str, shape: Sequence[int] | None = None) -> BlockWeight:
        """The tensor, in `shape` if given.

        A packed tensor that must be reshaped was only re-blocked to whole blocks, and comes dequantised (float32).

        Raises:
            CheckpointError: there is no such tensor, or it has another number of elements.
        """

    @abstractmethod
    def release(self, name: str) -> None:
        """Let the operating system take back the pages of one tensor; it is read again when touched again."""

    @abstractmethod
    def close(self) -> None:
        """End loading. Tensors already loaded stay valid."""


def open_tensors(path: Path) -> TensorFiles:
    """The tensors at `path`: a `.gguf` or `.safetensors` file, or a directory of one or of indexed files.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    from vkit.loaders.gguf import GGUFTensors
    from vkit.loaders.safetensors import SafetensorsTensors

    if path.is_dir():
        return SafetensorsTensors(path, *_directory_files(path))
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if not path.is_file():
        raise CheckpointError(f"{path}: neither a directory nor a file")
    if path.suffix == ".gguf":
        return GGUFTensors(path)
    if path.suffix == ".safetensors":
        return SafetensorsTensors(path, [path], None)
    raise CheckpointError(f"{path}: expected a .safetensors or .gguf file, or a directory of shards")


def _directory_files(path: Path) -> tuple[list[Path], Path | None]:
    """The files of a directory, and the index that names them."""
    from vkit.loaders.safetensors import read_shards

    for name in INDEX_NAMES:
        if (path / name).exists():
            return read_shards(path / name), path / name
    single = [path / name for name in SINGLE_NAMES if (path / name).exists()] or sorted(path.glob("*.safetensors"))
    if len(single) == 1:
        return single, None
    found = ", ".join(file.name for file in single) or "none"
    raise CheckpointError(
        f"{path}: expected one .safetensors file or an index ({' or '.join(INDEX_NAMES)}), found {found}",
        remedy="pass the file itself",
    )

"""Checkpoints: one view of model files, whatever their format."""

from __future__ import annotations

import stat
from pathlib import Path

from vkit.errors import CheckpointError
from vkit.loaders.checkpoint import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint"]


def open_checkpoint(path: Path, *, use_mmap: bool = True) -> Checkpoint:
    """The model at `path`: a directory with config.json, or a GGUF file (any part of a split one).

    Reads headers only. With `use_mmap=False` every tensor is read into memory of its own when it is loaded.

    Raises:
        CheckpointError: a file is missing or damaged.
        ModelLoadError: the format, architecture or quantisation scheme cannot be loaded.
    """
    mode = _file_mode(path)
    if stat.S_ISDIR(mode):
        from vkit.loaders.safetensors import SafetensorsCheckpoint

        return SafetensorsCheckpoint(path, use_mmap=use_mmap)
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path}: neither a directory nor a file")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: one file of a checkpoint", remedy="pass the folder holding config.json")
    from vkit.loaders.gguf import GGUFCheckpoint

    return GGUFCheckpoint(path, use_mmap=use_mmap)


def _file_mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file or directory") from None
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise CheckpointError(f"{path}: cannot be opened: {error}") from error

"""Which of the two sets of weights a file holds: nothing in its tensors tells, and the wrong one renders a lattice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vkit.errors import CheckpointError, UsageError
from vkit.video.h3.config_files import read_config
from vkit.video.h3.request import Partition


def read_model_index(path: Path) -> dict[str, Any]:
    """What `model_index.json` says of the model, beside the weights or one folder above; empty if nothing."""
    folder = path if path.is_dir() else path.parent
    for place in (folder, folder.parent):
        index = place / "model_index.json"
        if index.is_file():
            value = read_config(index).get("_minimax_h3", {})
            if not isinstance(value, dict):
                raise CheckpointError(f"{index}: _minimax_h3 is {value!r:.60}, expected an object")
            return value
    return {}


def resolve_partition(path: Path, declared: Partition | None) -> Partition | None:
    """The partition: what the index says, else the name of file or directory, else what was declared; None if untold.

    Raises:
        UsageError: the declaration contradicts the index or the name.
    """
    told: Partition | None = None
    source = ""
    in_index = read_model_index(path).get("partition")
    if in_index is not None:
        if in_index not in ("fl2va", "ref2va"):
            raise CheckpointError(f"{path}: model_index.json says partition {in_index!r:.60}, expected fl2va or ref2va")
        told, source = in_index, "model_index.json"
    else:
        name = path.name.lower()
        spelled: list[Partition] = [part for part in ("fl2va", "ref2va") if part in name]
        if len(spelled) == 1:
            told, source = spelled[0], "the file name"
        elif path.is_dir() and name in ("transformer", "transformer_ref"):
            told, source = ("ref2va" if name.endswith("_ref") else "fl2va"), "the folder's name"
    if declared is not None and told is not None and declared != told:
        raise UsageError(f"--partition {declared}: {source} of {path} says {told}")
    return declared or told

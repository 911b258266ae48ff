"""Checkpoints into another format: safetensors folders to GGUF files and back, quantising on the way.

Nothing bears its final name before it has been read back and found right.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vkit import __version__
from vkit.conversion.to_gguf import gguf_file
from vkit.conversion.to_safetensors import DATA_FILE, safetensors_file, write_companions
from vkit.conversion.types import FLOATS, GGUF_TYPES
from vkit.conversion.writing import ConversionError, DataFile, Progress, WriteReport, finish, write_data_file
from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.loaders import Checkpoint, open_checkpoint
from vkit.models import check_tensors, create_model
from vkit.models.hf_config import CONTEXT_KEYS, HFConfig

__all__ = ["ConversionError", "ConversionReport", "convert"]

GGUF_SUFFIX = ".gguf"


@dataclass(slots=True)
class ConversionReport:
    """What a conversion made, and how near it is to its source."""

    source: Path
    target: Path
    type: str
    num_source_bytes: int
    num_bytes: int
    num_tensors: int
    num_resumed: int
    seconds: float
    types: dict[str, dict[str, Any]]
    """Type -> number of tensors, bytes, mean and largest error (root mean square over that of the source)."""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON values."""
        return {
            "source": str(self.source),
            "target": str(self.target),
            "type": self.type,
            "num_source_bytes": self.num_source_bytes,
            "num_bytes": self.num_bytes,
            "num_tensors": self.num_tensors,
            "num_resumed": self.num_resumed,
            "seconds": round(self.seconds, 1),
            "types": self.types,
            "notes": self.notes,
        }


def convert(
    source: Path, target: Path, *, type: str | None = None, progress: Progress = lambda what, done, total: None
) -> ConversionReport:
    """Write the model at `source` as `target`: a GGUF file if it is named so, else a safetensors folder.

    `type`: what weights are stored as; None keeps floating types and expands blocks to bfloat16. A run that was
    stopped goes on where it was when it is started again with the same arguments.

    Raises:
        UsageError: a target that exists, or a type its format does not have.
        ConversionError: the target cannot hold the model, or does not hold what was written.
        ModelLoadError: the source cannot be read.
    """
    begin = time.perf_counter()
    if target.exists():
        raise UsageError(f"{target}: exists already", remedy="remove it, or give another name")
    if not target.parent.is_dir():
        raise UsageError(f"{target.parent}: no such directory")
    is_gguf = target.suffix == GGUF_SUFFIX
    known = GGUF_TYPES if is_gguf else FLOATS
    if type is not None and type not in known:
        raise UsageError(
            f"--type: a {'GGUF file' if is_gguf else 'safetensors folder'} has {', '.join(known)}; got {type!r}"
        )
    checkpoint = open_checkpoint(source)
    mark = _source_mark(source, type)
    if is_gguf:
        wanted = type or _float_type(checkpoint)
        file, notes = gguf_file(checkpoint, wanted)
        written = _write_gguf(file, target, mark, progress)
    else:
        wanted = type or "as stored"
        file = safetensors_file(checkpoint, type)
        written, notes = _write_folder(checkpoint, file, target, type, mark, progress)
    return ConversionReport(
        source=source,
        target=target,
        type=wanted,
        num_source_bytes=checkpoint.num_weight_bytes,
        num_bytes=written.num_bytes,
        num_tensors=len(file.tensors),
        num_resumed=written.num_resumed,
        seconds=time.perf_counter() - begin,
        types=_by_type(file, written),
        notes=notes,
    )


def _write_gguf(file: DataFile, target: Path, mark: str, progress: Progress) -> WriteReport:
    part = target.with_name(target.name + ".part")
    report = write_data_file(file, part, mark, progress)
    _check_loads(part)
    finish(part, target)
    return report


def _write_folder(
    checkpoint: Checkpoint, file: DataFile, target: Path, type: str | None, mark: str, progress: Progress
) -> tuple[WriteReport, list[str]]:
    folder = target.with_name(target.name + ".part")
    folder.mkdir(exist_ok=True)
    unfinished = folder / (DATA_FILE + ".part")
    final = folder / DATA_FILE
    if final.exists():  # an earlier run came as far as this and was stopped: check it again from its bytes
        os.replace(final, unfinished)
    report = write_data_file(file, unfinished, mark, progress)
    notes = write_companions(checkpoint, folder, type)
    finish(unfinished, final)
    _check_loads(folder)
    os.replace(folder, target)
    return report, notes


@dataclass(frozen=True, slots=True)
class _Shape:
    """Enough of a configuration to list a model's tensors."""

    max_model_len: int
    device: str = "cpu"
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"


def _check_loads(path: Path) -> None:
    """Refuse a result that could not be opened and built as a model."""
    try:
        checkpoint = open_checkpoint(path)
        length = HFConfig(checkpoint.config).integer(*CONTEXT_KEYS, default=1)
        check_tensors(create_model(checkpoint, _Shape(length)), checkpoint)
        checkpoint.close()
    except CheckpointError as error:
        raise ConversionError(f"the result cannot be loaded: {error}") from error
    except ModelLoadError:
        return  # nothing here computes the architecture, so nothing more can be checked


def _float_type(checkpoint: Checkpoint) -> str:
    """The floating type that most weight bytes have; bfloat16 for packed ones."""
    names = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
    sizes: dict[str, int] = {}
    for name in checkpoint.tensor_names():
        info = checkpoint.tensor_info(name)
        kind = names.get(str(info.dtype).removeprefix("torch."), "BF16")
        sizes[kind] = sizes.get(kind, 0) + info.nbytes
    return max(sizes, key=lambda kind: sizes[kind], default="F32")


def _source_mark(source: Path, type: str | None) -> str:
    """Changes whenever the source's files or the settings do."""
    files = (
        sorted(source.iterdir()) if source.is_dir() else sorted(source.parent.glob(source.name.split("-0000")[0] + "*"))
    )
    stamps = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    return repr((str(source.resolve()), type, __version__, stamps if source.is_dir() else _own(stamps, source)))


def _own(stamps: Sequence[tuple[str, int, int]], source: Path) -> list[tuple[str, int, int]]:
    """The file's own stamp, or those of all parts of a split one; not those of what is being written beside it."""
    return [stamp for stamp in stamps if stamp[0] == source.name or "-of-" in stamp[0]]


def _by_type(file: DataFile, report: WriteReport) -> dict[str, dict[str, Any]]:
    types: dict[str, dict[str, Any]] = {}
    for tensor in file.tensors:
        entry = types.setdefault(tensor.type, {"num_tensors": 0, "num_bytes": 0, "mean_error": 0.0, "max_error": 0.0})
        error = report.errors[tensor.name]
        entry["num_tensors"] += 1
        entry["num_bytes"] += tensor.num_bytes
        entry["mean_error"] += error
        if error >= entry["max_error"]:
            entry |= {"max_error": error, "max_error_tensor": tensor.name}
    for entry in types.values():
        entry["mean_error"] /= entry["num_tensors"]
    return dict(sorted(types.items(), key=lambda item: -item[1]["num_bytes"]))

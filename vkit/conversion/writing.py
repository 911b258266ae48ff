"""One data file written tensor by tensor: resumable, with a checksum for each, and read again before it gets its name.

A journal beside the unfinished file lists what is done, so that a run that was killed goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit.errors import VkitError
from vkit.quantization import BLOCK_FORMATS, QuantizedTensor
from vkit.quantization.quantize import quantize

Progress = Callable[[str, int, int], None]
"""(what is going on, bytes done, bytes in all)"""

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "I64": torch.int64}
ERROR_LIMITS = {
    "F32": 1e-6, "F16": 1e-3, "BF16": 4e-3, "I32": 0.0, "I64": 0.0, "Q8_0": 0.02, "Q6_K": 0.06, "Q5_K": 0.12,
    "Q5_1": 0.12, "Q5_0": 0.12, "Q4_K": 0.25, "Q4_1": 0.25, "Q4_0": 0.25,
}  # fmt: skip
"""Largest error of a tensor, root mean square over root mean square, before a conversion counts as failed.

Two to four times what Gaussian weights give; a mixed-up layout gives about 1.
"""
FREE_SPACE_MARGIN = 1 << 20


class ConversionError(VkitError):
    """A conversion that cannot be made, or whose result is not what was meant."""


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """One tensor of the new file. `load` gives the dense values in the file's layout."""

    name: str
    shape: tuple[int, ...]
    type: str
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        block = BLOCK_FORMATS[self.type]
        num_elements = 1
        for size in self.shape:
            num_elements *= size
        return num_elements // block.num_elements * block.num_bytes

    def encode(self) -> Tensor:
        """The bytes, uint8 (num_bytes,).

        Raises:
            ConversionError: values that are not finite, or of another shape than planned.
        """
        values = self.values()
        if self.type not in PLAIN:
            return quantize(values, self.type).reshape(-1)
        narrow = values.to(PLAIN[self.type]).contiguous()
        if narrow.is_floating_point() and not bool(narrow.isfinite().all()):
            raise ConversionError(f"tensor {self.name!r}: values do not fit in {self.type}", remedy="take BF16 or F32")
        return narrow.reshape(-1).view(torch.uint8)

    def values(self) -> Tensor:
        """The dense values, checked."""
        values = self.load()
        if tuple(values.shape) != self.shape:
            raise ConversionError(f"tensor {self.name!r}: shape {tuple(values.shape)}, expected {self.shape}")
        if values.is_floating_point() and not bool(values.isfinite().all()):
            raise ConversionError(f"tensor {self.name!r} holds values that are not finite: the checkpoint is damaged")
        return values

    def error(self, data: Tensor) -> float:
        """How far the bytes are from the source: root mean square of the difference over that of the source."""
        source = self.values().to(torch.float32)
        if self.type in PLAIN:
            written = data.view(PLAIN[self.type]).reshape(self.shape).to(torch.float32)
        else:
            columns = self.shape[-1]
            rows = QuantizedTensor(data.reshape(-1, BLOCK_FORMATS[self.type].row_bytes(columns)), self.type,
                                   (source.numel() // columns, columns))  # fmt: skip
            written = rows.dequantize().reshape(self.shape)
        size = float(source.square().mean().sqrt())
        return float((written - source).square().mean().sqrt()) / size if size else float(written.abs().amax())


@dataclass(frozen=True, slots=True)
class DataFile:
    """A header, and tensors at fixed offsets after it."""

    header: bytes
    tensors: Sequence[OutputTensor]
    offsets: Sequence[int]
    """Of each tensor, from the start of the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the whole file."""
        ends = [offset + tensor.num_bytes for tensor, offset in zip(self.tensors, self.offsets, strict=True)]
        return max([len(self.header), *ends])


@dataclass(slots=True)
class WriteReport:
    """What came of it."""

    num_bytes: int
    num_resumed: int = 0
    """Tensors that an earlier run had finished."""
    errors: dict[str, float] = field(default_factory=dict)
    """Per tensor: `OutputTensor.error` of the bytes read back."""


def write_data_file(file: DataFile, path: Path, source_mark: str, progress: Progress) -> WriteReport:
    """Write `file` at `path`, an unfinished file's place, and check it; goes on with what an earlier run left.

    `source_mark` changes whenever the source or the settings do; what was written under another mark starts again.

    Raises:
        ConversionError: no room, or what was read back is not what was written.
    """
    journal = _Journal(path.with_name(path.name + ".journal"), _mark(file, source_mark))
    _check_space(path, file.num_bytes)
    report = WriteReport(file.num_bytes)
    with open(path, "r+b", opener=_open_or_create) as data:
        _lock(data)
        done = _still_there(file, data, journal.read())
        journal.begin(done)
        report.num_resumed = len(done)
        data.seek(0)
        data.write(file.header)
        written = 0
        for tensor, offset in zip(file.tensors, file.offsets, strict=True):
            if tensor.name not in done:
                payload = tensor.encode().numpy().tobytes()
                data.seek(offset)
                data.write(payload)
                data.flush()
                done[tensor.name] = zlib.crc32(payload)
                journal.add(tensor.name, done[tensor.name])
            written += tensor.num_bytes
            progress("writing", written, file.num_bytes)
        data.truncate(file.num_bytes)
        data.flush()
        os.fsync(data.fileno())
        _verify(file, data, done, report, progress)
    return report


def finish(path: Path, target: Path) -> None:
    """Give the checked file its name; the journal goes."""
    os.replace(path, target)
    path.with_name(path.name + ".journal").unlink(missing_ok=True)


def _open_or_create(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o644)


def _lock(data: Any) -> None:
    """Keep a second conversion to the same place out for as long as the file is open."""
    try:
        fcntl.flock(data, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConversionError(f"{data.name}: another conversion is writing this file") from None


def _verify(file: DataFile, data: Any, checksums: dict[str, int], report: WriteReport, progress: Progress) -> None:
    """Read everything again: bytes as written, values near the source."""
    data.seek(0)
    if data.read(len(file.header)) != file.header:
        raise ConversionError(f"{data.name}: the header read back is not the one written: the disk is at fault")
    checked = 0
    for tensor, offset in zip(file.tensors, file.offsets, strict=True):
        payload = _read(data, offset, tensor.num_bytes)
        if zlib.crc32(payload) != checksums[tensor.name]:
            raise ConversionError(f"{data.name}: tensor {tensor.name!r} reads back otherwise: the disk is at fault")
        error = tensor.error(torch.frombuffer(payload, dtype=torch.uint8))
        if not error <= ERROR_LIMITS[tensor.type]:
            raise ConversionError(
                f"tensor {tensor.name!r}: error {error:.3g} as {tensor.type}, more than {ERROR_LIMITS[tensor.type]:g}",
                remedy="take a wider type",
            )
        report.errors[tensor.name] = error
        checked += tensor.num_bytes
        progress("checking", checked, file.num_bytes)


def _still_there(file: DataFile, data: Any, done: dict[str, int]) -> dict[str, int]:
    """Of the tensors a journal lists, those whose bytes are in the file."""
    return {
        tensor.name: done[tensor.name]
        for tensor, offset in zip(file.tensors, file.offsets, strict=True)
        if tensor.name in done and zlib.crc32(_read(data, offset, tensor.num_bytes)) == done[tensor.name]
    }


def _read(data: Any, offset: int, num_bytes: int) -> bytearray:
    payload = bytearray(num_bytes)
    data.seek(offset)
    count = data.readinto(payload)
    return payload if count == num_bytes else payload[: count or 0]


def _mark(file: DataFile, source_mark: str) -> str:
    return hashlib.sha256(file.header + source_mark.encode()).hexdigest()


def _check_space(path: Path, num_bytes: int) -> None:
    there = path.stat().st_size if path.exists() else 0
    usage = os.statvfs(path.parent)
    free, needed = usage.f_bavail * usage.f_frsize, num_bytes - there + FREE_SPACE_MARGIN
    if needed > free:
        raise ConversionError(
            f"{path.parent}: {needed} bytes are needed, {free} are free", remedy="make room, or write elsewhere"
        )


class _Journal:
    """Which tensors are in the unfinished file: one JSON line each, after a line that says of which conversion."""

    def __init__(self, path: Path, mark: str) -> None:
        self._path = path
        self._mark = mark

    def read(self) -> dict[str, int]:
        """Checksums of finished tensors; nothing if there is no journal, or it is of another conversion."""
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        records = [record for line in lines if (record := _record(line)) is not None]
        if not records or records[0].get("mark") != self._mark:
            return {}
        return {record["tensor"]: record["crc32"] for record in records[1:] if "tensor" in record}

    def begin(self, done: dict[str, int]) -> None:
        """Start the file anew with what is done already."""
        lines = [{"mark": self._mark}, *({"tensor": name, "crc32": checksum} for name, checksum in done.items())]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def add(self, name: str, checksum: int) -> None:
        """Note a finished tensor."""
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"tensor": name, "crc32": checksum}) + "\n")


def _record(line: str) -> dict[str, Any] | None:
    """A line of a journal; None for one that was cut short."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None

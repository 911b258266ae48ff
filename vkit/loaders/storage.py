"""Bytes of a file as tensors: mapped into memory, or read piece by piece. Knows nothing of formats."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from pathlib import Path
from typing import Protocol

import torch

from vkit.errors import CheckpointError

_mappings: weakref.WeakSet[MappedFile] = weakref.WeakSet()


def file_range(tensor: torch.Tensor) -> tuple[Path, int, int] | None:
    """(file, offset, bytes) of a contiguous view of an open mapped file; None for any other tensor."""
    start, size = tensor.data_ptr(), tensor.nbytes
    for mapped in list(_mappings):
        offset = start - mapped.address
        if size and offset >= 0 and offset + size <= mapped.size:
            return mapped.path, offset, size
    return None


class Storage(Protocol):
    """A file whose size was known when it was opened."""

    path: Path
    size: int

    def header(self, num_bytes: int) -> memoryview:
        """The first `num_bytes` bytes, or all of them when the file is mapped."""

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the file as uint8 (num_bytes,). The caller has checked that they lie within the file."""

    def release_pages(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Let go of the physical memory behind a range; nothing to do where each tensor owns its bytes."""

    def close(self) -> None:
        """Give the file back once no tensor uses it."""


def open_storage(path: Path, *, use_mmap: bool = True) -> Storage:
    """The file at `path`, opened for reading.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return MappedFile(path) if use_mmap else ReadFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class MappedFile:
    """A read-only mapping; tensors are views of it and keep it alive."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            # An empty file cannot be mapped; its reader will refuse it for what it lacks.
            self._mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.size else None
        self.address = self.tensor(0, 1).data_ptr() if self.size else 0
        _mappings.add(self)

    def header(self, num_bytes: int) -> memoryview:
        """All bytes of the file; no copy."""
        return memoryview(self._mapping or b"")

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """A view of the mapping: writing to it is a memory fault."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        if self._mapping is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        with warnings.catch_warnings():
            # torch has no read-only tensors and warns about every one; Checkpoint documents that nobody may write.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=offset)

    def release_pages(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Drop the range's pages from this process; they come back from the file when touched."""
        if self._mapping is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        end = self.size if num_bytes is None else offset + num_bytes
        start = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages only: the edges may belong to a neighbour
        stop = end if end == self.size else end // mmap.PAGESIZE * mmap.PAGESIZE
        if stop > start:
            self._mapping.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        """Forget the mapping; the last tensor that views it unmaps it."""
        self._mapping = None
        _mappings.discard(self)  # another file may come to lie at this address


class ReadFile:
    """A file read on demand; every tensor owns its bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("rb", buffering=0)
        self.size = os.fstat(self._file.fileno()).st_size

    def header(self, num_bytes: int) -> memoryview:
        """The first bytes of the file, read anew."""
        num_bytes = min(num_bytes, self.size)
        return self.tensor(0, num_bytes).numpy().data.toreadonly()

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        """A fresh tensor.

        Raises:
            CheckpointError: the file has become shorter, or cannot be read.
        """
        if self._file.closed:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        tensor = torch.empty(num_bytes, dtype=torch.uint8)
        target = tensor.numpy().data
        done = 0
        while done < num_bytes:
            try:
                count = os.preadv(self._file.fileno(), [target[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self.path}: has become shorter since it was opened")
            done += count
        return tensor

    def release_pages(self, offset: int = 0, num_bytes: int | None = None) -> None:
        """Nothing to do: no page of the file is mapped."""

    def close(self) -> None:
        """Close the file."""
        self._file.close()

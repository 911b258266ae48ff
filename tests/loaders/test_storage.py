"""Bytes of a file as tensors, mapped or read."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from vkit.errors import CheckpointError
from vkit.loaders.storage import MappedFile, ReadFile, open_storage


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 64)
    return path


@pytest.mark.parametrize("use_mmap", [True, False])
def test_bytes(path: Path, use_mmap: bool) -> None:
    storage = open_storage(path, use_mmap=use_mmap)
    assert isinstance(storage, MappedFile if use_mmap else ReadFile)
    assert storage.size == 16384
    assert storage.tensor(250, 10).tolist() == [250, 251, 252, 253, 254, 255, 0, 1, 2, 3]
    assert storage.tensor(0, 0).shape == (0,)
    assert bytes(storage.header(4)[:4]) == b"\0\1\2\3"


def test_mapped_tensors_are_views_without_a_warning(path: Path) -> None:
    storage = open_storage(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = storage.tensor(0, 100), storage.tensor(50, 50)
    assert two.data_ptr() == one.data_ptr() + 50


@pytest.mark.parametrize("use_mmap", [True, False])
def test_tensors_outlive_the_storage(path: Path, use_mmap: bool) -> None:
    storage = open_storage(path, use_mmap=use_mmap)
    tensor = storage.tensor(0, 16384)
    storage.release_pages()
    storage.release_pages(5000, 3)
    storage.close()
    assert torch.equal(tensor, torch.arange(16384).to(torch.uint8))
    with pytest.raises(CheckpointError, match="is closed"):
        storage.tensor(0, 1)


def test_empty_file(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    for use_mmap in (True, False):
        storage = open_storage(tmp_path / "empty", use_mmap=use_mmap)
        assert storage.size == 0
        assert bytes(storage.header(10)) == b""
        storage.release_pages()


def test_file_that_becomes_shorter_is_named(path: Path) -> None:
    storage = open_storage(path, use_mmap=False)
    path.write_bytes(b"short")
    with pytest.raises(CheckpointError, match="file: has become shorter"):
        storage.tensor(0, 100)


def test_unreadable(tmp_path: Path) -> None:
    for use_mmap in (True, False):
        with pytest.raises(CheckpointError, match="cannot be read"):
            open_storage(tmp_path / "absent", use_mmap=use_mmap)

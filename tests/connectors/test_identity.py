"""What entries are named by: whatever changes a key or a value changes the name; every byte of the weights counts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vkit.config import EngineArgs
from vkit.connectors import cache_identity, file_digest
from vkit.errors import CheckpointError
from vkit.loading import check_model

MODELS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


def identity(model: Path, **settings: Any) -> dict[str, str]:
    keywords = {"tokenizer": str(MODELS / "byte_tokenizer"), "max_model_len": 64, "dtype": "float32", "device": "cpu"}
    checked = check_model(EngineArgs(model=str(model), **{**keywords, **settings}))
    try:
        return cache_identity(checked.config, checked.checkpoint, checked.cache_specs)
    finally:
        checked.checkpoint.close()


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, set()),
        ({"max_num_seqs": 3, "max_model_len": 48, "threads": 1, "no_mmap": True, "seed": 5}, set()),
        ({"quantization": "fp8"}, {"quantization"}),
        ({"cpu_precision": "exact"}, {"cpu_precision"}),
        ({"deterministic": True}, {"deterministic"}),
        ({"dtype": "bfloat16"}, {"dtype", "kv_cache_dtype", "page_layout"}),
        ({"kv_cache_dtype": "int8"}, {"kv_cache_dtype", "page_layout"}),
        ({"hf_overrides": {"rms_norm_eps": 0.5}}, {"config"}),
        ({"hf_overrides": {"rope_theta": 77.0}}, {"config", "rope"}),
        ({"block_size": 16}, {"block_size", "page_layout"}),
        ({"prefix_caching_hash_algo": "sha256_cbor"}, {"hash_algorithm"}),
    ],
)
def test_settings_that_change_entries_change_the_identity(settings: dict[str, Any], names: set[str]) -> None:
    assert differing(identity(MODELS / "llama"), identity(MODELS / "llama", **settings)) == names


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
        {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4},
    ],
)
def test_angles_that_depend_on_the_context_limit(scaling: dict[str, Any]) -> None:
    settings = {"hf_overrides": {"rope_parameters": scaling, "rope_scaling": scaling}}
    one = identity(MODELS / "llama", **settings)
    assert differing(one, identity(MODELS / "llama", **settings, max_model_len=48)) == {"rope"}


def test_expanding_gguf_blocks_changes_the_identity() -> None:
    file = MODELS / "llama" / "model-q8_0.gguf"
    assert differing(identity(file), identity(file, gguf_dequantize=True)) == {"quantization"}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the tiny model that may be changed."""
    shutil.copytree(MODELS / "llama", tmp_path / "llama")
    for path in (tmp_path / "llama").iterdir():
        path.chmod(0o644)
    return tmp_path / "llama"


def weights_of(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_one_byte_anywhere_in_the_weights_changes_the_identity(copied: Path) -> None:
    before = identity(copied)
    file = weights_of(copied)
    data = bytearray(file.read_bytes())
    first = 8 + struct.unpack("<Q", data[:8])[0]
    for place in (first, (first + len(data)) // 2 + 1, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        file.write_bytes(changed)
        assert differing(before, identity(copied)) == {"weights"}
    file.write_bytes(data)
    assert identity(copied) == before


def test_media_settings_and_declarations_beside_the_weights_count(copied: Path) -> None:
    before = identity(copied)
    (copied / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')
    assert differing(before, identity(copied)) == {"media"}
    (copied / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "x"}}))
    assert differing(before, identity(copied)) == {"media", "weights"}


# Digests of files


def test_a_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(os.urandom(300_001))
    expected = hashlib.blake2b(file.read_bytes()).hexdigest()
    assert file_digest.file_digest(file) == expected
    link = tmp_path / "link"
    link.symlink_to(file)
    assert file_digest.file_digest(link) == expected
    with pytest.raises(CheckpointError, match="cannot be read"):
        file_digest.file_digest(tmp_path / "absent")


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose bytes have been digested."""
    files: list[str] = []
    real = hashlib.file_digest

    def digest(stream: Any, name: str) -> Any:
        files.append(stream.name.name if isinstance(stream.name, Path) else os.path.basename(stream.name))
        return real(stream, name)

    monkeypatch.setattr(hashlib, "file_digest", digest)
    return files


def test_an_unchanged_file_is_read_once(tmp_path: Path, read_files: list[str]) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a" * 1000)
    first = file_digest.file_digest(file)
    assert file_digest.file_digest(file) == first
    assert read_files == ["weights"]
    state = file.stat()
    file.write_bytes(b"b" * 1000)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # as a copy that keeps times does
    assert file_digest.file_digest(file) == hashlib.blake2b(b"b" * 1000).hexdigest()
    assert read_files == ["weights"] * 2


def test_a_damaged_or_unwritable_cache_costs_a_read_only(
    tmp_path: Path, read_files: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    first = file_digest.file_digest(file)
    (kept,) = (path for path in file_digest.digest_folder().iterdir() if path.read_text() == first)
    kept.write_text(first[:-1])
    assert file_digest.file_digest(file) == first
    (tmp_path / "taken").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    assert file_digest.file_digest(file) == first
    assert "digests of weights cannot be kept" in caplog.text
    assert len(read_files) == 3


def test_a_file_that_changes_meanwhile_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "weights"
    file.write_bytes(b"a")
    real: Callable[..., Any] = hashlib.file_digest

    def digest(stream: Any, name: str) -> Any:
        found = real(stream, name)
        file.write_bytes(b"longer")
        return found

    monkeypatch.setattr(hashlib, "file_digest", digest)
    file_digest.file_digest(file)
    monkeypatch.setattr(hashlib, "file_digest", real)
    assert file_digest.file_digest(file) == hashlib.blake2b(b"longer").hexdigest()

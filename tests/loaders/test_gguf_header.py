"""The header parser accepts what the format allows and refuses everything else with one line, at once."""

from __future__ import annotations

import random
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vkit.errors import CheckpointError
from vkit.loaders import gguf_header
from vkit.loaders.gguf_header import GGUFHeader, read_header
from vkit.loaders.storage import open_storage

Write = Callable[..., bytes]
MAX_SECONDS = 60.0
MAX_ALLOCATED = 4 << 20


def parse(path: Path, data: bytes, *, use_mmap: bool = True) -> GGUFHeader:
    path.write_bytes(data)
    return read_header(open_storage(path, use_mmap=use_mmap))


class InMemory:
    """A file that is no file, for tests that parse thousands."""

    def __init__(self, data: bytes) -> None:
        self.path = Path("model.gguf")
        self.size = len(data)
        self.data = data

    def header(self, num_bytes: int) -> memoryview:
        return memoryview(self.data)

    def tensor(self, offset: int, num_bytes: int) -> torch.Tensor:
        raise AssertionError("the header parser reads no tensors")

    def release_pages(self, offset: int = 0, num_bytes: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def refusal(path: Path, data: bytes) -> str:
    """The message of the refusal; it is one line, names the file, and costs neither time nor memory."""
    path.write_bytes(data)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError) as caught:
            read_header(open_storage(path))
        assert tracemalloc.get_traced_memory()[1] < MAX_ALLOCATED
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < MAX_SECONDS
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


SMALL_KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "b": True,
    "f": 0.1,
    "big": 2**40,
    "names": ["x", "", "ü"],
    "numbers": np.array([1, -2, 3], np.int32),
    "flags": np.array([True, False]),
    "nested": [np.array([1, 2], np.int32), np.array([3], np.int32)],
}
SMALL_TENSORS = {
    "first": ((3, 32), "Q8_0", bytes(range(102))),
    "second": ((2, 2, 2), "F32", bytes(32)),
    "scalar": ((), "F32", b"\0\0\x80\x3f"),
}


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("version", [2, 3])
def test_small_file(path: Path, gguf_file: Write, use_mmap: bool, version: int) -> None:
    header = parse(path, gguf_file(SMALL_KEYS, SMALL_TENSORS, version=version), use_mmap=use_mmap)
    metadata = header.metadata
    assert list(metadata) == list(SMALL_KEYS)
    assert (header.version, metadata["general.architecture"], metadata["b"], metadata["big"]) == (
        version,
        "llama",
        True,
        2**40,
    )
    assert metadata["f"] == 0.1  # the shortest decimal, not the float32's expansion
    assert metadata.array_length("names") == 3
    assert metadata["names"] == ["x", "", "ü"]
    assert metadata["numbers"].tolist() == [1, -2, 3]
    assert metadata["flags"].tolist() == [True, False]
    assert [inner.tolist() for inner in metadata["nested"]] == [[1, 2], [3]]
    assert metadata.array_length("names") == 3
    assert metadata.array_length("b") is None
    assert metadata.array_length("absent") is None
    first, second, scalar = header.tensors.values()
    assert (first.shape, first.block.name, first.num_bytes, first.offset % 32) == ((3, 32), "Q8_0", 102, 0)
    assert (second.shape, second.offset - first.offset, second.num_bytes) == ((2, 2, 2), 128, 32)
    assert (scalar.shape, scalar.num_bytes) == ((), 4)


def test_file_of_the_gguf_package(path: Path) -> None:
    from gguf import GGUFValueType, GGUFWriter

    values = {
        GGUFValueType.UINT8: 200,
        GGUFValueType.INT8: -100,
        GGUFValueType.UINT16: 60000,
        GGUFValueType.INT16: -30000,
        GGUFValueType.UINT32: 4_000_000_000,
        GGUFValueType.INT32: -2_000_000_000,
        GGUFValueType.FLOAT32: 0.25,
        GGUFValueType.BOOL: True,
        GGUFValueType.STRING: "text ü",
        GGUFValueType.UINT64: 2**63,
        GGUFValueType.INT64: -(2**60),
        GGUFValueType.FLOAT64: 1e300,
    }
    writer = GGUFWriter(path, "llama")
    for kind, value in values.items():
        writer.add_key_value(f"scalar.{kind.name}", value, kind)
        writer.add_key_value(f"array.{kind.name}", [value, value], GGUFValueType.ARRAY, kind)
    tensor = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    writer.add_tensor("t", tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    storage = open_storage(path)
    header = read_header(storage)
    for kind, value in values.items():
        assert header.metadata[f"scalar.{kind.name}"] == value
        assert list(header.metadata[f"array.{kind.name}"]) == [value, value]
    entry = header.tensors["t"]
    assert entry.shape == (2, 3, 4)
    assert storage.tensor(entry.offset, entry.num_bytes).numpy().tobytes() == tensor.tobytes()


def test_broken_token_texts_stay_different(path: Path, gguf_file: Write) -> None:
    tokens = [b"\xff", b"\xfe", b"\xc3", b"\xc3\xbc", "ü".encode("utf-16"), b""]
    decoded = parse(path, gguf_file({"tokens": tokens}, {})).metadata["tokens"]
    assert len(set(decoded)) == len(tokens)
    assert [text.encode("utf-8", "surrogateescape") for text in decoded] == tokens


def test_alignment(path: Path, gguf_file: Write) -> None:
    for alignment in (1, 2, 8, 4096):
        data = gguf_file({"general.alignment": alignment}, SMALL_TENSORS, alignment=alignment)
        entries = parse(path, data).tensors
        assert {entry.offset % alignment for entry in entries.values()} == {0}
        second = entries["second"].offset
        assert data[second - (-102 % alignment) - 1 : second - (-102 % alignment)] == b"\x65"


def test_header_longer_than_the_first_read(path: Path, gguf_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gguf_file(SMALL_KEYS | {"many": [f"token {i}" for i in range(500)]}, SMALL_TENSORS)
    mapped = parse(path, data)
    for first in (1, 30, 100, 1000):
        monkeypatch.setattr(gguf_header, "FIRST_READ_BYTES", first)
        read = parse(path, data, use_mmap=False)
        assert read.tensors == mapped.tensors
        assert read.metadata["many"] == mapped.metadata["many"]


def head(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def key(name: bytes, rest: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + rest


def tensor(
    name: bytes = b"t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, num_dims: int | None = None
) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    return key(name, struct.pack("<I", count) + b"".join(struct.pack("<Q", d) for d in dims)) + struct.pack(
        "<IQ", kind, offset
    )


NUMBER = struct.pack("<II", 4, 1)
ROOM = bytes(4096)

DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the file is empty"),
    "wrong magic": (b"GGJT" + bytes(100), r"not a GGUF file: starts with b'GGJT'"),
    "one wrong byte": (b"X", "not a GGUF file"),
    "six bytes": (b"GGUF\3\0", "6 bytes long, shorter than a GGUF header"),
    "version 1": (head(0, 0, version=1), "GGUF version 1, expected 2 or 3"),
    "version 4": (head(0, 0, version=4), "GGUF version 4"),
    "big-endian 3": (head(0, 0, version=0x03000000), "big-endian file"),
    "big-endian 2": (head(0, 0, version=0x02000000), "big-endian file"),
    "2^60 tensors": (head(2**60, 0, ROOM), "1152921504606846976 tensors cannot fit"),
    "2^40 keys": (head(0, 2**40, ROOM), "1099511627776 metadata keys cannot fit"),
    "2^64-1 keys": (head(0, 2**64 - 1, ROOM), "metadata keys cannot fit"),
    "empty key": (head(0, 1, key(b"", NUMBER) + ROOM), "key 1 of 1 is an empty string"),
    "key of 2^62 bytes": (head(0, 1, struct.pack("<Q", 2**62) + ROOM), "takes 4611686018427387904 bytes"),
    "key not UTF-8": (head(0, 1, key(b"\xff", NUMBER)), "not valid UTF-8"),
    "key twice": (head(0, 2, key(b"a", NUMBER) * 2), "metadata key 'a' occurs twice"),
    "value type 13": (head(0, 1, key(b"a", struct.pack("<II", 13, 1))), "metadata key 'a' has unknown value type 13"),
    "element type 13": (head(0, 1, key(b"a", struct.pack("<IIQ", 9, 13, 0))), "unknown element type 13"),
    "string past the end": (head(0, 1, key(b"a", struct.pack("<IQ", 8, 2**62)) + ROOM), "takes 46116"),
    "array past the end": (
        head(0, 1, key(b"a", struct.pack("<IIQ", 9, 4, 2**61)) + ROOM),
        "2305843009213693952 elements of metadata key 'a' cannot fit",
    ),
    "strings past the end": (head(0, 1, key(b"a", struct.pack("<IIQ", 9, 8, 2**61)) + ROOM), "cannot fit"),
    "long string in an array": (
        head(0, 1, key(b"a", struct.pack("<IIQQ", 9, 8, 2, 2**62)) + ROOM),
        "metadata key 'a' takes",
    ),
    "arrays past the end": (head(0, 1, key(b"a", struct.pack("<IIQ", 9, 9, 2**61)) + ROOM), "cannot fit"),
    "nested too deep": (
        head(0, 1, key(b"a", struct.pack("<IIQIQIQ", 9, 9, 1, 9, 1, 4, 0))),
        "nested more than 2 deep",
    ),
    "alignment 0": (
        head(0, 1, key(b"general.alignment", struct.pack("<II", 4, 0))),
        "alignment is 0, expected a power",
    ),
    "alignment 48": (head(0, 1, key(b"general.alignment", struct.pack("<II", 4, 48))), "alignment is 48"),
    "alignment text": (
        head(0, 1, key(b"general.alignment", struct.pack("<IQ", 8, 2) + b"32")),
        "alignment is a str, expected a power of two",
    ),
    "five dimensions": (head(1, 0, tensor(dims=(1,) * 5) + ROOM), "'t' has 5 dimensions, expected at most 4"),
    "2^31 dimensions": (head(1, 0, tensor(num_dims=2**31) + ROOM), "dimensions, expected at most 4"),
    "dimension 0": (head(1, 0, tensor(dims=(32, 0)) + ROOM), r"'t' has a dimension of 0: \[0, 32\]"),
    "overflowing size": (head(1, 0, tensor(dims=(2**40, 2**40)) + ROOM), "more than 2"),
    "64-bit wrap": (head(1, 0, tensor(dims=(2**32, 2**32, 1, 1)) + ROOM), "more than 2"),
    "past the end": (head(1, 0, tensor(dims=(4096,)) + ROOM), r"'t' ends at byte \d+, past the end of the file"),
    "offset past the end": (head(1, 0, tensor(offset=2**63) + ROOM), "past the end of the file"),
    "offset not aligned": (head(1, 0, tensor(offset=8) + ROOM), "at offset 8, expected a multiple of 32"),
    "tensor twice": (head(2, 0, tensor() * 2 + ROOM), "tensor 't' occurs twice"),
    "tensor without name": (head(1, 0, tensor(name=b"") + ROOM), "name of tensor 1 of 1 is an empty string"),
    "tensor name not UTF-8": (head(1, 0, tensor(name=b"\xff") + ROOM), "not valid UTF-8"),
    "half a block": (head(1, 0, tensor(dims=(48, 2), kind=8) + ROOM), "rows of 48 elements, expected a multiple of 32"),
    "scalar of blocks": (head(1, 0, tensor(dims=(), kind=8) + ROOM), "rows of 1 elements"),
    "type 99": (head(1, 0, tensor(kind=99) + ROOM), "'t' has unknown type 99"),
    "type 4, removed": (head(1, 0, tensor(kind=4) + ROOM), "'t' has unknown type 4"),
    "activation type": (head(1, 0, tensor(kind=15) + ROOM), "type Q8_K, which is not a type of stored weights"),
    "absurdly long name": (head(1, 0, tensor(name=b"n" * 5000, kind=99) + ROOM), "n'… has unknown type 99"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_refused(path: Path, damage: str) -> None:
    data, expected = DAMAGED[damage]
    message = refusal(path, data)
    assert re.search(expected, message), message
    assert len(message) < 400 + len(str(path))


def test_damaged_big_file_costs_no_memory(path: Path, gguf_file: Write) -> None:
    """Counts that just fit a large file still allocate nothing before they are disproved."""
    size = 64 << 20
    with path.open("wb") as file:
        file.write(head(0, 1, key(b"a", struct.pack("<IIQ", 9, 8, (size - 100) // 8))))
        file.write(b"\xff" * 64)
        file.truncate(size)
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="metadata key 'a' takes"):
            read_header(open_storage(path))
        assert tracemalloc.get_traced_memory()[1] < MAX_ALLOCATED
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < MAX_SECONDS


@pytest.mark.parametrize("use_mmap", [True, False])
def test_cut_at_every_byte(path: Path, gguf_file: Write, use_mmap: bool) -> None:
    data = gguf_file(SMALL_KEYS, SMALL_TENSORS)
    last_byte = max(entry.offset + entry.num_bytes for entry in parse(path, data).tensors.values())
    for length in range(len(data)):
        path.write_bytes(data[:length])
        storage = open_storage(path, use_mmap=use_mmap)
        if length >= last_byte:
            read_header(storage)
            continue
        with pytest.raises(CheckpointError):
            read_header(storage)
        storage.close()


def test_every_flipped_bit(path: Path, gguf_file: Write) -> None:
    data = gguf_file(SMALL_KEYS, SMALL_TENSORS)
    header_bytes = min(entry.offset for entry in parse(path, data).tensors.values())
    outcomes = {"valid": 0, "refused": 0}
    tracemalloc.start()
    try:
        for bit in range(8 * header_bytes):
            damaged = bytearray(data)
            damaged[bit // 8] ^= 1 << bit % 8
            outcomes[outcome(bytes(damaged))] += 1
        assert tracemalloc.get_traced_memory()[1] < MAX_ALLOCATED
    finally:
        tracemalloc.stop()
    assert min(outcomes.values()) > 500


@settings(max_examples=300, deadline=1000)
@given(st.data())
def test_changed_bytes(gguf_file: Write, data: st.DataObject) -> None:
    whole = bytearray(gguf_file(SMALL_KEYS, SMALL_TENSORS))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(whole) - 9))
        new = data.draw(
            st.one_of(
                st.binary(min_size=1, max_size=8),
                st.sampled_from(
                    [b"\xff" * 8, b"\0" * 8, b"\xff" * 4, struct.pack("<Q", 2**63), struct.pack("<Q", 2**31)]
                ),
            )
        )
        whole[at : at + len(new)] = new
    outcome(bytes(whole))


@settings(max_examples=200, deadline=1000)
@given(st.binary(max_size=300))
def test_random_bytes_after_the_magic(rest: bytes) -> None:
    outcome(b"GGUF\3\0\0\0" + rest)


def outcome(data: bytes) -> str:
    """What the parser makes of a file: everything it accepts must be decodable and lie within the file."""
    try:
        header = read_header(InMemory(data))
    except CheckpointError:
        return "refused"
    for name in header.metadata:
        assert header.metadata[name] is not None
    for entry in header.tensors.values():
        assert 0 < entry.offset <= entry.offset + entry.num_bytes <= len(data)
    return "valid"


def test_random_cuts_of_a_real_file(shared: Path) -> None:
    data = (shared / "goldens/models/llama/model-q8_0.gguf").read_bytes()
    rng = random.Random(0)
    for length in [*rng.sample(range(len(data)), 100), len(data) - 1]:
        assert outcome(data[:length]) == "refused"

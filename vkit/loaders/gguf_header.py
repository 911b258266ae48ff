"""The header of a GGUF file: metadata and tensor entries, checked so that nothing after it can fail on a damaged file.

Every count and length is compared with what is left of the file before anything is allocated for it. Knows neither
architectures nor what tensors are for.
Source: GGUF specification, version 3 (2 differs in nothing that matters here).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from vkit.errors import CheckpointError
from vkit.loaders.storage import Storage
from vkit.quantization import BLOCK_FORMATS, BlockFormat

MAGIC = b"GGUF"
FIXED_HEADER_BYTES = 24
MIN_KEY_BYTES = 13
MIN_TENSOR_BYTES = 24
MIN_STRING_BYTES = 8
MIN_ARRAY_BYTES = 12
MAX_DIMENSIONS = 4
MAX_ELEMENTS = 2**63 - 1
MAX_ARRAY_DEPTH = 2
DEFAULT_ALIGNMENT = 32
FIRST_READ_BYTES = 1 << 20
"""Header bytes read at first when the file is not mapped; four times as many each time they do not suffice."""

BOOL, STRING, ARRAY = 7, 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    BOOL: struct.Struct("<B"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
"""Value types of fixed size, by their number in the file."""

FLOAT32 = 6
ACTIVATION_TYPES = {9: "Q8_1", 15: "Q8_K"}
_BLOCK_FORMATS_BY_ID = {block.type_id: block for block in BLOCK_FORMATS.values()}
_U32 = SCALARS[4]
_U64 = SCALARS[10]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies. `shape` is in torch order, `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    block: BlockFormat
    offset: int
    num_bytes: int


class GGUFMetadata(Mapping[str, Any]):
    """Keys of a GGUF file. Values are int, float, bool, str, a numpy array, or a list of strings or arrays.

    Arrays are decoded each time they are asked for: nobody pays for what only the tokenizer reads, nor keeps it (a
    vocabulary's merges alone are megabytes). A float32 number is the shortest decimal that rounds to it (1e-06, not
    9.999999974752427e-07). Strings keep bytes that are not UTF-8 as surrogate escapes, so no two become equal.
    """

    def __init__(self, values: dict[str, Any], raw: Mapping[str, memoryview]) -> None:
        """`raw`: of each key, the bytes of type and value."""
        self._values = values
        self._raw = raw

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        return value.decode() if isinstance(value, _LazyArray) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def digest(self, *prefixes: str) -> str:
        """SHA-256, in hexadecimal digits, of every key that begins with one of these, and of its bytes."""
        total = hashlib.sha256()
        for key in sorted(key for key in self._raw if key.startswith(prefixes)):
            name, raw = key.encode(), self._raw[key]
            total.update(b"%d %d " % (len(name), len(raw)))
            total.update(name)
            total.update(raw)
        return total.hexdigest()

    def array_length(self, key: str) -> int | None:
        """Number of elements of an array, without decoding it; None if the key is absent or holds no array."""
        value = self._values.get(key)
        return len(value) if isinstance(value, _LazyArray | list | np.ndarray) else None


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Everything before the tensor data, checked against the size of the file."""

    version: int
    metadata: GGUFMetadata
    tensors: dict[str, TensorEntry]


def read_header(storage: Storage) -> GGUFHeader:
    """The checked header of a GGUF file.

    Raises:
        CheckpointError: the file is no GGUF file, or is damaged; the message names file and fault.
    """
    num_bytes = FIRST_READ_BYTES
    while True:
        try:
            return _HeaderReader(storage.path, storage.header(num_bytes), storage.size).read()
        except _HeaderIsLonger:
            num_bytes *= 4


class _HeaderIsLonger(Exception):
    """The header continues beyond the bytes at hand, though not beyond the file."""


@dataclass(frozen=True, slots=True)
class _LazyArray:
    """An array whose extent is checked but whose elements are not decoded yet."""

    length: int
    decode: Callable[[], Any]

    def __len__(self) -> int:
        return self.length


class _HeaderReader:
    """A cursor over the header that never reads or allocates beyond the file."""

    def __init__(self, path: Path, data: memoryview, size: int) -> None:
        self.path = path
        self.data = data
        self.size = size
        self.position = 0

    def read(self) -> GGUFHeader:
        version = self.read_version()
        num_tensors, num_keys = self.number(_U64, "tensor count"), self.number(_U64, "key count")
        self.check_count(num_keys, MIN_KEY_BYTES, "metadata keys")
        self.check_count(num_tensors, MIN_TENSOR_BYTES, "tensors")
        metadata = self.read_metadata(num_keys)
        alignment = self.alignment(metadata)
        self.check_count(num_tensors, MIN_TENSOR_BYTES, "tensors")
        entries = self.read_tensors(num_tensors)
        start = -(-self.position // alignment) * alignment
        return GGUFHeader(version, metadata, {entry.name: self.placed(entry, start, alignment) for entry in entries})

    def read_version(self) -> int:
        if self.size == 0:
            self.refuse("the file is empty")
        magic = bytes(self.data[:4])
        if magic != MAGIC[: len(magic)]:
            self.refuse(f"not a GGUF file: starts with {magic!r}, expected {MAGIC!r}")
        if self.size < FIXED_HEADER_BYTES:
            self.refuse(f"the file is {self.size} bytes long, shorter than a GGUF header ({FIXED_HEADER_BYTES} bytes)")
        self.position = 4
        version: int = self.number(_U32, "version")
        if version in (0x02000000, 0x03000000):
            self.refuse("big-endian file, expected little-endian")
        if version not in (2, 3):
            self.refuse(f"GGUF version {version}, expected 2 or 3")
        return version

    def read_metadata(self, count: int) -> GGUFMetadata:
        values: dict[str, Any] = {}
        raw: dict[str, memoryview] = {}
        for number in range(count):
            key = self.name(f"key {number + 1} of {count}")
            if key in values:
                self.refuse(f"metadata key {_shown(key)} occurs twice")
            what = f"metadata key {_shown(key)}"
            start = self.position
            values[key] = self.value(self.number(_U32, what), what, depth=0)
            raw[key] = self.data[start : self.position]
        return GGUFMetadata(values, raw)

    def alignment(self, metadata: GGUFMetadata) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            given = alignment if isinstance(alignment, int | float) else f"a {type(alignment).__name__}"
            self.refuse(f"general.alignment is {given}, expected a power of two")
        return alignment

    def read_tensors(self, count: int) -> list[TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for number in range(count):
            name = self.name(f"name of tensor {number + 1} of {count}")
            if name in entries:
                self.refuse(f"tensor {_shown(name)} occurs twice")
            entries[name] = self.read_tensor(name)
        return list(entries.values())

    def read_tensor(self, name: str) -> TensorEntry:
        """One tensor entry, its offset still relative to the start of the tensor data."""
        what = f"tensor {_shown(name)}"
        num_dimensions = self.number(_U32, what)
        if num_dimensions > MAX_DIMENSIONS:
            self.refuse(f"{what} has {num_dimensions} dimensions, expected at most {MAX_DIMENSIONS}")
        shape = tuple(self.number(_U64, what) for _ in range(num_dimensions))[::-1]
        if 0 in shape:
            self.refuse(f"{what} has a dimension of 0: {list(shape)}")
        num_elements = 1
        for size in shape:
            num_elements *= size
        if num_elements > MAX_ELEMENTS:
            self.refuse(f"{what} has more than 2^63 elements: {list(shape)}")
        block = self.block_format(self.number(_U32, what), what)
        num_columns = shape[-1] if shape else 1
        if num_columns % block.num_elements:
            self.refuse(
                f"{what} has rows of {num_columns} elements, expected a multiple of {block.num_elements} "
                f"for type {block.name}"
            )
        return TensorEntry(name, shape, block, self.number(_U64, what), block.row_bytes(num_elements))

    def block_format(self, type_id: int, what: str) -> BlockFormat:
        block = _BLOCK_FORMATS_BY_ID.get(type_id)
        if block is None:
            if type_id in ACTIVATION_TYPES:
                self.refuse(f"{what} has type {ACTIVATION_TYPES[type_id]}, which is not a type of stored weights")
            self.refuse(f"{what} has unknown type {type_id}")
        return block

    def placed(self, entry: TensorEntry, start: int, alignment: int) -> TensorEntry:
        """The entry with its offset counted from the start of the file."""
        if entry.offset % alignment:
            self.refuse(f"tensor {_shown(entry.name)} is at offset {entry.offset}, expected a multiple of {alignment}")
        offset = start + entry.offset
        if offset + entry.num_bytes > self.size:
            self.refuse(
                f"tensor {_shown(entry.name)} ends at byte {offset + entry.num_bytes}, past the end of the file "
                f"({self.size} bytes): the file is cut short or damaged"
            )
        return TensorEntry(entry.name, entry.shape, entry.block, offset, entry.num_bytes)

    def value(self, type_id: int, what: str, depth: int) -> Any:
        if type_id == STRING:
            return _text(self.string(what))
        if type_id == ARRAY:
            return self.array(what, depth + 1)
        scalar = SCALARS.get(type_id)
        if scalar is None:
            self.refuse(f"{what} has unknown value type {type_id}")
        number = self.number(scalar, what)
        if type_id == BOOL:
            return bool(number)
        return float(str(np.float32(number))) if type_id == FLOAT32 else number

    def array(self, what: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self.refuse(f"{what} holds arrays nested more than {MAX_ARRAY_DEPTH} deep")
        type_id, length = self.number(_U32, what), self.number(_U64, what)
        if type_id == STRING:
            return self.string_array(length, what)
        if type_id == ARRAY:
            self.check_count(length, MIN_ARRAY_BYTES, f"elements of {what}")
            arrays = [self.array(what, depth + 1) for _ in range(length)]
            return _LazyArray(length, lambda: [array.decode() for array in arrays])
        scalar = SCALARS.get(type_id)
        if scalar is None:
            self.refuse(f"{what} has unknown element type {type_id}")
        self.check_count(length, scalar.size, f"elements of {what}")
        data = self.take(length * scalar.size, what)
        return _LazyArray(length, lambda: _numbers(data, scalar.format, is_bool=type_id == BOOL))

    def string_array(self, length: int, what: str) -> _LazyArray:
        self.check_count(length, MIN_STRING_BYTES, f"elements of {what}")
        data, start = self.data, self.position
        available, position, read_length = len(data), start, _U64.unpack_from
        try:
            for _ in range(length):  # the hot loop of opening a file: some hundred thousand turns
                position += MIN_STRING_BYTES + read_length(data, position)[0]
        except (struct.error, OverflowError):  # less than a length is left
            self.position = position
            self.need(MIN_STRING_BYTES, what)
        if position > available:
            self.need(position - self.position, what)
        self.position = position
        return _LazyArray(length, lambda: _strings(data, start, length))

    def name(self, what: str) -> str:
        """A key or tensor name: not empty, strictly UTF-8."""
        raw = bytes(self.string(what))
        if not raw:
            self.refuse(f"{what} is an empty string")
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not valid UTF-8: {raw[:80]!r}")

    def string(self, what: str) -> memoryview:
        length = self.number(_U64, what)
        return self.take(length, what)

    def number(self, kind: struct.Struct, what: str) -> Any:
        self.need(kind.size, what)
        value = kind.unpack_from(self.data, self.position)[0]
        self.position += kind.size
        return value

    def take(self, num_bytes: int, what: str) -> memoryview:
        self.need(num_bytes, what)
        start = self.position
        self.position += num_bytes
        return self.data[start : self.position]

    def need(self, num_bytes: int, what: str) -> None:
        end = self.position + num_bytes
        if end > self.size:
            left = max(0, self.size - self.position)
            self.refuse(f"{what} takes {num_bytes} bytes, but only {left} are left of the file: cut short or damaged")
        if end > len(self.data):
            raise _HeaderIsLonger

    def check_count(self, count: int, min_bytes: int, what: str) -> None:
        """Refuse a count that cannot fit in the rest of the file, each element taking at least `min_bytes`."""
        left = self.size - self.position
        if count * min_bytes > left:
            self.refuse(f"{count} {what} cannot fit in the {left} bytes that are left of the file")

    def refuse(self, fault: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {fault}")


def _shown(name: str) -> str:
    """A name for a message: quoted, and cut when absurdly long."""
    return repr(name) if len(name) <= 80 else f"{name[:80]!r}…"


def _text(raw: memoryview) -> str:
    return str(raw, "utf-8", "surrogateescape")


def _strings(data: memoryview, position: int, count: int) -> list[str]:
    strings = []
    for _ in range(count):
        start = position + MIN_STRING_BYTES
        position = start + _U64.unpack_from(data, position)[0]
        strings.append(_text(data[start:position]))
    return strings


def _numbers(data: memoryview, layout: str, *, is_bool: bool) -> npt.NDArray[Any]:
    numbers = np.frombuffer(data, dtype=np.dtype(layout))
    return numbers != 0 if is_bool else numbers

"""The bytes of a GGUF header: metadata and tensor entries, ready for the data to follow.

Source: GGUF specification, version 3.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vkit.quantization import BLOCK_FORMATS

ALIGNMENT = 32
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 7, 8, 9, 10


def gguf_header(
    metadata: Mapping[str, Any], tensors: Sequence[tuple[str, tuple[int, ...], str]]
) -> tuple[bytes, list[int]]:
    """The padded header, and where each tensor's data starts, counted from the start of the file.

    `tensors` are (name, shape in torch order, type name). Values are bool, int, float, str or lists of one of them.
    """
    entries, offset, offsets = [], 0, []
    for name, shape, kind in tensors:
        block = BLOCK_FORMATS[kind]
        offsets.append(offset)
        dims = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        entries.append(_string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", block.type_id, offset))
        num_rows = int(np.prod(shape[:-1], dtype=np.int64))
        offset += _aligned(num_rows * block.row_bytes(shape[-1]))
    keys = b"".join(_string(key) + _value(value) for key, value in metadata.items())
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata)) + keys + b"".join(entries)
    header += bytes(_aligned(len(header)) - len(header))
    return header, [len(header) + start for start in offsets]


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(value: Any) -> bytes:
    kind = _kind(value)
    if kind == _ARRAY:
        element = _kind(value[0]) if value else _STRING
        element = _INT32 if element == _UINT32 else element
        return struct.pack("<IIQ", _ARRAY, element, len(value)) + _elements(value, element)
    return struct.pack("<I", kind) + _elements([value], kind)


def _kind(value: Any) -> int:
    if isinstance(value, bool):
        return _BOOL
    if isinstance(value, int):
        return _UINT32 if 0 <= value < 2**32 else _UINT64
    if isinstance(value, float):
        return _FLOAT32
    if isinstance(value, str):
        return _STRING
    return _ARRAY


def _elements(values: Sequence[Any], kind: int) -> bytes:
    if kind == _STRING:
        return b"".join(map(_string, values))
    dtype = {_UINT32: "<u4", _INT32: "<i4", _FLOAT32: "<f4", _BOOL: "u1", _UINT64: "<u8"}[kind]
    return np.array(values, dtype).tobytes()

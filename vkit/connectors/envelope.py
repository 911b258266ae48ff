"""The form in which a chunk of cache entries leaves the process: who it belongs to, its name, its bytes, a checksum.

magic (8 bytes), header length (u32), header (JSON: identity, key, payload length), payload, BLAKE2b-256 of all before.
Little endian. Whatever does not match in every part is as good as absent.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping

Payload = bytes | bytearray | memoryview

MAGIC = b"VKITKV\x00\x01"
_CHECKSUM_BYTES = 32
_HEAD = struct.Struct("<8sI")
MAX_HEADER_BYTES = 1 << 16


def seal(identity: Mapping[str, str], key: bytes, payload: Payload) -> list[Payload]:
    """The parts to write, in order."""
    header = _header(identity, key, len(payload))
    head = _HEAD.pack(MAGIC, len(header)) + header
    digest = hashlib.blake2b(head, digest_size=_CHECKSUM_BYTES)
    digest.update(payload)
    return [head, payload, digest.digest()]


def unseal(identity: Mapping[str, str], key: bytes, data: Payload, payload_bytes: int) -> Payload | None:
    """The payload, if `data` is whole, sound, of this identity and of this name; else None."""
    view = memoryview(data)
    expected = _header(identity, key, payload_bytes)
    start = _HEAD.size + len(expected)
    if len(view) != start + payload_bytes + _CHECKSUM_BYTES:
        return None
    if view[:start] != _HEAD.pack(MAGIC, len(expected)) + expected:
        return None
    end = start + payload_bytes
    if hashlib.blake2b(view[:end], digest_size=_CHECKSUM_BYTES).digest() != view[end:]:
        return None
    return view[start:end]


def sealed_bytes(identity: Mapping[str, str], key: bytes, payload_bytes: int) -> int:
    """Length of a sealed chunk."""
    return _HEAD.size + len(_header(identity, key, payload_bytes)) + payload_bytes + _CHECKSUM_BYTES


def _header(identity: Mapping[str, str], key: bytes, payload_bytes: int) -> bytes:
    fields = {"identity": dict(identity), "key": key.hex(), "payload_bytes": payload_bytes}
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()

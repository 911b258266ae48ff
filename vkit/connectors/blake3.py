"""BLAKE3, hash mode, 32 bytes of output: the names of chunks among vkit's own engines at an LMCache server.

A chunk's name is made of a few hundred bytes, so plain Python is fast enough and no dependency is needed.
Source: O'Connor, Aumasson, Neves, Wilcox-O'Hearn 2020, "BLAKE3: one function, fast everywhere".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

_IV = (
    *(0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A),
    *(0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19),
)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_BLOCK, _CHUNK = 64, 1024
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8
_MASK = 0xFFFFFFFF
_MIXES = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),
)


def blake3(data: bytes) -> bytes:
    """The 32-byte hash of `data`."""
    chunks = [data[i : i + _CHUNK] for i in range(0, len(data), _CHUNK)] or [b""]
    if len(chunks) == 1:
        return _packed(_chunk_value(chunks[0], 0, _ROOT))
    values = [_chunk_value(chunk, index, 0) for index, chunk in enumerate(chunks)]
    return _packed(_tree(values, _ROOT))


def _tree(values: Sequence[Sequence[int]], flags: int) -> Sequence[int]:
    """The value of a subtree; the left one holds the largest power of two of chunks that leaves some for the right."""
    if len(values) == 1:
        return values[0]
    left = 1 << (len(values) - 1).bit_length() - 1
    words = [*_tree(values[:left], 0), *_tree(values[left:], 0)]
    return _compress(_IV, words, 0, _BLOCK, _PARENT | flags)


def _chunk_value(chunk: bytes, index: int, flags: int) -> Sequence[int]:
    value: Sequence[int] = _IV
    blocks = [chunk[i : i + _BLOCK] for i in range(0, len(chunk), _BLOCK)] or [b""]
    for number, block in enumerate(blocks):
        own = (_CHUNK_START if number == 0 else 0) | ((_CHUNK_END | flags) if number == len(blocks) - 1 else 0)
        value = _compress(value, struct.unpack("<16I", block.ljust(_BLOCK, b"\0")), index, len(block), own)
    return value


def _compress(value: Sequence[int], words: Sequence[int], counter: int, size: int, flags: int) -> list[int]:
    v = [*value, *_IV[:4], counter & _MASK, counter >> 32, size, flags]
    m = list(words)
    for round_number in range(7):
        for index, (a, b, c, d) in enumerate(_MIXES):
            v[a] = (v[a] + v[b] + m[2 * index]) & _MASK
            v[d] = _rotated(v[d] ^ v[a], 16)
            v[c] = (v[c] + v[d]) & _MASK
            v[b] = _rotated(v[b] ^ v[c], 12)
            v[a] = (v[a] + v[b] + m[2 * index + 1]) & _MASK
            v[d] = _rotated(v[d] ^ v[a], 8)
            v[c] = (v[c] + v[d]) & _MASK
            v[b] = _rotated(v[b] ^ v[c], 7)
        if round_number < 6:
            m = [m[i] for i in _PERMUTATION]
    return [v[i] ^ v[i + 8] for i in range(8)]


def _rotated(word: int, count: int) -> int:
    return (word >> count | word << (32 - count)) & _MASK


def _packed(words: Sequence[int]) -> bytes:
    return struct.pack("<8I", *words)

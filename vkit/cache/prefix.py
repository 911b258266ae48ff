"""Names for block contents: a chain of hashes over tokens and whatever else determines their keys and values. No torch.

Two sequences whose chains agree up to block i have the same cache content up to block i. Collisions must not happen in
practice, hence cryptographic hashes only.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceABC

from vkit.sequence import Sequence

Extra = tuple[str | int | bytes, ...]
"""What else determines a block's content, in a fixed order: digest and place of every media item whose rows it holds;
for the first block, the cache salt."""

HashFunction = Callable[[bytes, SequenceABC[int], Extra], bytes]
"""(hash of the block before, tokens of the block, extras) -> hash."""


def hash_sha256(parent: bytes, token_ids: SequenceABC[int], extra: Extra) -> bytes:
    """SHA-256 of the parent, the extras (canonical CBOR) and the tokens as 64-bit words of this machine."""
    digest = hashlib.sha256(parent)
    if extra:
        digest.update(_cbor_array(extra))
    digest.update(array("q", token_ids).tobytes())
    return digest.digest()


def hash_sha256_cbor(parent: bytes, token_ids: SequenceABC[int], extra: Extra) -> bytes:
    """SHA-256 of canonical CBOR of [parent, [tokens], extras or null]: the same on every machine and in every language.

    Source: RFC 8949, section 4.2.1 (deterministic encoding).
    """
    tail = _cbor_array(extra) if extra else b"\xf6"
    tokens = _cbor_head(4, len(token_ids)) + b"".join(map(_TOKEN_CBOR.__getitem__, token_ids))
    return hashlib.sha256(b"\x83" + cbor_item(parent) + tokens + tail).digest()


HASH_ALGORITHMS: dict[str, HashFunction] = {"sha256": hash_sha256, "sha256_cbor": hash_sha256_cbor}


def none_hash(seed: str | None = None) -> bytes:
    """The hash before the first block: random per process unless `seed` or PYTHONHASHSEED fixes it."""
    if seed is None:
        seed = os.environ.get("PYTHONHASHSEED")
        if seed in (None, "", "random"):
            return os.urandom(32)
    return hashlib.sha256(cbor_item(seed)).digest()


class BlockHasher:
    """Extends a sequence's chain as its tokens arrive: each block is hashed once."""

    def __init__(self, block_size: int, algorithm: str = "sha256", *, seed: str | None = None) -> None:
        self.block_size = block_size
        self.algorithm = algorithm
        self.none_hash = none_hash(seed)
        self._hash = HASH_ALGORITHMS[algorithm]

    def extend(self, sequence: Sequence) -> None:
        """Bring `sequence.block_hashes` up to its full blocks of known tokens."""
        hashes = sequence.block_hashes
        size = self.block_size
        for index in range(len(hashes), len(sequence.token_ids) // size):
            parent = hashes[-1] if hashes else self.none_hash
            extra: Extra = _media_in(sequence, index * size, size) if sequence.media else ()
            if sequence.adapter is not None:
                extra = (sequence.adapter.key, *extra)
            if index == 0 and sequence.cache_salt is not None:
                extra = (*extra, sequence.cache_salt)
            hashes.append(self._hash(parent, sequence.token_ids[index * size : (index + 1) * size], extra))


def _media_in(sequence: Sequence, start: int, size: int) -> Extra:
    """Digest of each item with rows among `size` tokens from `start` on, and where it begins, counted from there."""
    found: list[int | bytes] = []
    for placed in sequence.media:
        if any(first < start + size and beyond > start for first, beyond in placed.spans):
            found += [placed.item.digest, placed.start - start]
    return tuple(found)


def cbor_item(value: str | int | bytes) -> bytes:
    """Canonical CBOR of one value."""
    if isinstance(value, bytes):
        return _cbor_head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)


def _cbor_array(values: Extra) -> bytes:
    return _cbor_head(4, len(values)) + b"".join(map(cbor_item, values))


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise ValueError(f"cbor: {value} does not fit in 64 bits")


class _TokenCbor(dict[int, bytes]):
    """Encoded token ids, remembered: a vocabulary is small and ids recur."""

    def __missing__(self, token_id: int) -> bytes:
        encoded = self[token_id] = cbor_item(token_id)
        return encoded


_TOKEN_CBOR = _TokenCbor()

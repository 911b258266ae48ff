"""Packed weights in the layout of the kernels, made at first use and kept as long as the original lives."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cpu.facts import reads_facts
from vkit.kernels.cpu.library import Library, make_op

BIASES = {
    "Q4_0": 8,
    "Q5_0": 16,
    "Q8_0": 128,
    "Q3_K": 4,
    "Q6_K": 32,
    "IQ4_NL": 128,
    "IQ4_XS": 128,
    "MXFP4": 12,
    "NVFP4": 12,
    "W8": 128,
}
MINIMUMS = frozenset({"Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K", "W4"})
HALVES = frozenset({"Q2_K", "Q3_K", "Q6_K", "NVFP4"})
"""What each format wants to know of its activations: see formats.h."""
PACKED_FORMATS = (frozenset(BIASES) | MINIMUMS) - {"W4", "W8"}

KIND_PAIRS, KIND_FLOATS = -1, -2
"""Activations for bfloat16 weights (pairs of up to 8 bytes), and for exact products."""


def block_kind(qtype: str) -> int:
    """Which sums an activation block carries for this weight format."""
    return BIASES.get(qtype, 0) << 2 | (qtype in MINIMUMS) << 1 | (qtype in HALVES)


_PACKED_AT_ONCE = 4 << 20
"""Bytes of a weight that are packed before their pages are given back: what loading needs beyond the packed form."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in groups of 16 rows."""

    address: int
    qtype: str
    format_id: int
    num_rows: int
    num_columns: int
    factor: float = 1.0
    """What the product is multiplied by."""

    @property
    def needs_floats(self) -> bool:
        """Whether there is no product with integer activations."""
        return self.qtype in ("F8", "NF4", "FP4")


class WeightCache:
    """Originals -> packed. An entry goes when the storage of its original does."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._packed: dict[tuple[int, tuple[int, ...], str], PackedWeight] = {}
        self._by_storage: dict[int, list[tuple[int, tuple[int, ...], str]]] = {}

    @reads_facts
    def get(self, data: Tensor, qtype: str, num_columns: int) -> PackedWeight:
        """The packed form of data (rows, row_bytes) uint8; packed now if this is the first time."""
        key = (data.data_ptr(), tuple(data.shape), qtype)
        packed = self._packed.get(key)
        if packed is None:
            self._packed[key] = packed = self._pack(data, qtype, num_columns)
            self._remember(data.untyped_storage(), key)
        return packed

    def _pack(self, data: Tensor, qtype: str, num_columns: int) -> PackedWeight:
        library, format_id, num_rows = self._library, BLOCK_FORMATS[qtype].type_id, data.shape[0]
        num_bytes = -(-num_rows // 16) * library.group_bytes(format_id, num_columns)
        address, group_bytes, stride = (
            library.allocate(num_bytes),
            library.group_bytes(format_id, num_columns),
            data.stride(0),
        )
        step = max(1, _PACKED_AT_ONCE // (16 * stride)) * 16
        for row in range(0, num_rows, step):
            source, count = data.data_ptr() + row * stride, min(step, num_rows - row)
            target = address + row // 16 * group_bytes
            library.run_now(make_op("PACK", count, (source, target), (format_id, count, num_columns, stride)))
            library.release_mapping(source, count * stride)
        return PackedWeight(address, qtype, format_id, num_rows, num_columns)

    def _remember(self, storage: torch.UntypedStorage, key: tuple[int, tuple[int, ...], str]) -> None:
        owner = id(storage)
        if owner not in self._by_storage:
            self._by_storage[owner] = []
            weakref.finalize(storage, self._forget, owner)
        self._by_storage[owner].append(key)

    def _forget(self, owner: int) -> None:
        for key in self._by_storage.pop(owner, []):
            self._library.free(self._packed.pop(key).address)

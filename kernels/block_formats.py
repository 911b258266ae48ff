"""Sizes of the GGUF block formats: how many elements share a block and how many bytes it takes. No torch.

A row of a packed weight is a whole number of blocks. What the bytes mean is the business of `reference/dequantize.py`.
Source: GGUF specification, ggml block types.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One block format. `type_id` is its number in GGUF files."""

    name: str
    type_id: int
    num_elements: int
    num_bytes: int
    row_alignment: int = 1
    """Rows are filled up to a multiple of this many bytes, fewer than a block has."""

    def row_bytes(self, num_columns: int) -> int:
        """Bytes of a row of `num_columns` elements.

        Raises:
            ValueError: the row is not a whole number of blocks.
        """
        num_blocks, rest = divmod(num_columns, self.num_elements)
        if rest:
            raise ValueError(f"{self.name}: row of {num_columns} elements, expected a multiple of {self.num_elements}")
        return -(-num_blocks * self.num_bytes // self.row_alignment) * self.row_alignment

    def num_columns(self, row_bytes: int) -> int:
        """Elements of a row of `row_bytes` bytes.

        Raises:
            ValueError: the bytes are not a whole number of blocks.
        """
        num_columns = row_bytes // self.num_bytes * self.num_elements
        if self.row_bytes(num_columns) != row_bytes:
            raise ValueError(f"{self.name}: row of {row_bytes} bytes, expected a multiple of {self.num_bytes}")
        return num_columns


BLOCK_FORMATS: dict[str, BlockFormat] = {
    block.name: block
    for block in (
        BlockFormat("F32", 0, 1, 4),
        BlockFormat("F16", 1, 1, 2),
        BlockFormat("Q4_0", 2, 32, 18),
        BlockFormat("Q4_1", 3, 32, 20),
        BlockFormat("Q5_0", 6, 32, 22),
        BlockFormat("Q5_1", 7, 32, 24),
        BlockFormat("Q8_0", 8, 32, 34),
        BlockFormat("Q2_K", 10, 256, 84),
        BlockFormat("Q3_K", 11, 256, 110),
        BlockFormat("Q4_K", 12, 256, 144),
        BlockFormat("Q5_K", 13, 256, 176),
        BlockFormat("Q6_K", 14, 256, 210),
        BlockFormat("IQ2_XXS", 16, 256, 66),
        BlockFormat("IQ2_XS", 17, 256, 74),
        BlockFormat("IQ3_XXS", 18, 256, 98),
        BlockFormat("IQ1_S", 19, 256, 50),
        BlockFormat("IQ4_NL", 20, 32, 18),
        BlockFormat("IQ3_S", 21, 256, 110),
        BlockFormat("IQ2_S", 22, 256, 82),
        BlockFormat("IQ4_XS", 23, 256, 136),
        BlockFormat("I8", 24, 1, 1),
        BlockFormat("I16", 25, 1, 2),
        BlockFormat("I32", 26, 1, 4),
        BlockFormat("I64", 27, 1, 8),
        BlockFormat("F64", 28, 1, 8),
        BlockFormat("IQ1_M", 29, 256, 56),
        BlockFormat("BF16", 30, 1, 2),
        BlockFormat("TQ1_0", 34, 256, 54),
        BlockFormat("TQ2_0", 35, 256, 66),
        BlockFormat("MXFP4", 39, 32, 17),
        BlockFormat("NVFP4", 40, 64, 36),
        BlockFormat("Q1_0", 41, 128, 18),
    )
}
"""By name, as GGUF names them. Q8_1 and Q8_K are absent: they are formats of activations, never of stored weights."""

PLANES: dict[str, tuple[tuple[int, int], ...]] = {
    "Q4_0": ((2, 16), (0, 2)),
    "Q4_1": ((4, 16), (0, 4)),
    "Q5_0": ((6, 16), (2, 4), (0, 2)),
    "Q5_1": ((8, 16), (4, 4), (0, 4)),
    "Q8_0": ((2, 32), (0, 2)),
    "Q2_K": ((16, 64), (0, 16), (80, 4)),
    "Q3_K": ((32, 64), (0, 32), (96, 12), (108, 2)),
    "Q4_K": ((16, 128), (4, 12), (0, 4)),
    "Q5_K": ((48, 128), (16, 32), (4, 12), (0, 4)),
    "Q6_K": ((0, 128), (128, 64), (192, 16), (208, 2)),
    "IQ4_NL": ((2, 16), (0, 2)),
    "IQ4_XS": ((8, 128), (4, 4), (2, 2), (0, 2)),
    "MXFP4": ((1, 16), (0, 1)),
    "NVFP4": ((4, 32), (0, 4)),
}
"""Formats that can be laid out in planes: (first byte, bytes) of each part of a block, in the order of the planes.

A row in planes has the first part of all its blocks, then the second part of all, and so on: the same bytes, but a card
loads codes sixteen bytes at a time, which blocks of 18 or 210 bytes do not allow.
"""

PLANE_SUFFIX = "_PLANES"
PLANE_FORMATS: dict[str, BlockFormat] = {
    name + PLANE_SUFFIX: BlockFormat(
        name + PLANE_SUFFIX, -1, BLOCK_FORMATS[name].num_elements, BLOCK_FORMATS[name].num_bytes, row_alignment=16
    )
    for name in PLANES
}
"""The same formats in planes, by a name of their own. No file holds them: they are made when a weight is placed."""


def find_format(qtype: str) -> BlockFormat | None:
    """The format of this name, in blocks or in planes; None if there is none."""
    return BLOCK_FORMATS.get(qtype) or PLANE_FORMATS.get(qtype)


def format_of(qtype: str, what: str) -> BlockFormat:
    """The format of this name, in blocks or in planes.

    Raises:
        ValueError: there is none; the message begins with `what`.
    """
    block = find_format(qtype)
    if block is None:
        raise ValueError(f"{what}: qtype {qtype!r}, expected one of {', '.join(BLOCK_FORMATS)}")
    return block

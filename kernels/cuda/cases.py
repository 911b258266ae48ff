"""Arguments for the CUDA kernels beyond `kernels.cases`: packed rows in blocks, and shapes for each of their paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vkit.kernels import cases
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cases import Case, Shape, Source
from vkit.kernels.cuda.packed import FORMATS

SCALES_AT = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q6_K": (208,),
    "MXFP4": (),
}
"""Where a block keeps its half-precision numbers."""
LARGEST = {"Q8_0": 127, "IQ4_NL": 127, "Q6_K": 32 * 127, "IQ4_XS": 127 * 32, "Q4_K": 15 * 63, "Q5_K": 31 * 63}
"""The largest code times the largest scale of a group; 31 for the others."""


def packed_rows(qtype: str, num_rows: int, num_columns: int, generator: torch.Generator) -> Tensor:
    """Random blocks uint8 (num_rows, row_bytes) with values of up to about 0.02."""
    block = BLOCK_FORMATS[qtype]
    data = torch.randint(0, 256, (num_rows, block.row_bytes(num_columns)), dtype=torch.uint8, generator=generator)
    blocks = data.view(num_rows, -1, block.num_bytes)
    for at in SCALES_AT[qtype]:
        scales = torch.randn(*blocks.shape[:2], 1, generator=generator) * (0.02 / LARGEST.get(qtype, 31))
        blocks[..., at : at + 2] = scales.half().view(torch.uint8)
    if qtype == "MXFP4":
        blocks[..., 0] = blocks[..., 0] % 8 + 113
    return data


PACKED_SHAPES = ((1, 16, 256), (3, 35, 768), (8, 17, 2304))
"""Tokens, rows, columns: fewer blocks than warps and more, rows that fill no tile."""
BLOCKS_OF_32 = ((2, 33, 32), (5, 1, 1120))
"""The same for columns that are no multiple of 256."""


def _packed() -> Iterator[Case]:
    for qtype in FORMATS:
        small = BLOCKS_OF_32 if BLOCK_FORMATS[qtype].num_elements == 32 else ()
        for shape in (*PACKED_SHAPES, *small):
            yield Case("quantized_linear", f"{qtype}, {shape}", _product(qtype, *shape))


def _product(qtype: str, tokens: int, rows: int, columns: int) -> Any:
    def make(s: Source) -> tuple[Any, ...]:
        data = packed_rows(qtype, rows, columns, s.generator).to(s.device)
        return s.strided(tokens, columns), data, qtype, s.normal(rows) if rows % 2 else None

    return make


SHAPES = (
    Shape(((1, 37), (1, 513), (1, 5)), 8, 1, 128, 128, 16),
    Shape(((8, 40), (1, 1030), (3, 515)), 8, 1, 64, 64, 32),
    Shape(((1, 300), (2, 65)), 16, 1, 256, 256, 16, window=100, soft_cap=3.0),
    Shape(((4, 90), (1, 33)), 12, 4, 192, 128, 5, has_sinks=True),
    Shape(((1, 70), (1, 1)), 4, 4, 80, 80, 3),
    Shape(((8, 8), (5, 700)), 10, 2, 96, 96, 16, window=64, has_sinks=True),
)
"""One and two columns of query rows, more than one tile, parts to merge, each width of the kernel, odd block sizes."""


def _attentions() -> Iterator[Case]:
    for shape in SHAPES:
        label = f"few queries, {shape.heads}/{shape.kv_heads} heads of {shape.width}/{shape.value_width}"
        yield Case("paged_attention", label, _attention(shape))


def _attention(shape: Shape) -> Any:
    return lambda s: cases.attention_arguments(s, shape)


def _norms() -> Iterator[Case]:
    for width in (8, 5120, 8200, 16384):
        yield Case("rms_norm", f"{width} wide", _norm(width))
        yield Case("add_rms_norm", f"{width} wide", _add_norm(width))
    yield Case(
        "rms_norm", "weight of another type", lambda s: (s.normal(3, 64), s.normal(64, dtype=torch.float32), 1e-6, 1.0)
    )


def _norm(width: int) -> Any:
    return lambda s: (s.normal(2, width), s.normal(width), 1e-6)


def _add_norm(width: int) -> Any:
    return lambda s: (s.strided(2, width), s.normal(2, width), s.normal(width), 1e-6)


OWN_CASES: tuple[Case, ...] = (*_packed(), *_attentions(), *_norms())

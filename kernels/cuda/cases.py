"""Arguments for the CUDA kernels beyond `kernels.cases`: packed rows in blocks, and shapes for each of their paths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from vkit.kernels import cases
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.cases import Case, Shape, Source
from vkit.kernels.cases_packed import packed_rows
from vkit.kernels.cuda.packed import FORMATS

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

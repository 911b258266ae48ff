"""Parts of weights for ranks that share a layer: any rows, and columns where the packing lets them be cut.

A part is a copy of its own: the whole may be a view of a file whose pages are to be given back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from vkit.kernels import ScaledMatrix
from vkit.kernels.block_formats import BLOCK_FORMATS
from vkit.kernels.scaled import PAIRS
from vkit.quantization.tensor import QuantizedTensor, Weight

Span = tuple[int, int]
"""First, and beyond the last."""
_E2M1_GROUP = 16
"""Activations in four bits have a scale for as many columns."""


def num_in(spans: Sequence[Span]) -> int:
    """How many indices the spans hold."""
    return sum(stop - start for start, stop in spans)


def widened(spans: Sequence[Span], width: int, start: int = 0) -> list[Span]:
    """Spans of heads as spans of their `width` channels each, of which the first head's begin at `start`."""
    return [(start + first * width, start + stop * width) for first, stop in spans]


def index_of(spans: Sequence[Span]) -> torch.Tensor:
    """The indices that the spans hold, in their order (n,) int64."""
    return torch.cat([torch.arange(start, stop) for start, stop in spans])


def take_rows(weight: Weight, index: torch.Tensor) -> Weight:
    """The rows that `index` (R,) int64 selects, in its order, of (rows, columns) or (rows,); of every expert, of three
    dimensions."""
    if isinstance(weight, QuantizedTensor | ScaledMatrix):
        return weight.rows(index)
    return weight.index_select(-2 if weight.ndim == 3 else 0, index)


def can_take_columns(weight: Weight, spans: Sequence[Span]) -> bool:
    """Whether the columns of the spans can be had as they are stored, so that products with them sum to the whole's.

    Blocks of a packed format stay whole; and where activations are rounded by the range of all columns, or columns
    name their scale one by one, a part of them is no use.
    """
    if isinstance(weight, QuantizedTensor):
        size = BLOCK_FORMATS[weight.qtype].num_elements
        return all(edge % size == 0 for span in spans for edge in span)
    if isinstance(weight, ScaledMatrix):
        return len(spans) == 1 and all(edge % granule == 0 for granule in _granules(weight) for edge in spans[0])
    return True


def take_columns(weight: Weight, spans: Sequence[Span]) -> Weight:
    """The columns of the spans, of a weight of which `can_take_columns` says that they can be had."""
    if isinstance(weight, QuantizedTensor):
        block = BLOCK_FORMATS[weight.qtype]
        pieces = [weight.data[..., block.row_bytes(start) : block.row_bytes(stop)] for start, stop in spans]
        return replace(weight, data=torch.cat(pieces, dim=-1), shape=(*weight.shape[:-1], num_in(spans)))
    if isinstance(weight, ScaledMatrix):
        return _cut(weight, *spans[0])
    return torch.cat([weight[..., start:stop] for start, stop in spans], dim=-1)


def _granules(weight: ScaledMatrix) -> list[int]:
    """Numbers of columns that stay together, each for a reason of its own."""
    inputs, columns, width = weight.inputs, weight.shape[1], weight.block[1]
    if weight.group_index is not None or (inputs is not None and inputs.scope in ("token", "tensor")):
        return [columns]
    found = [width if width < columns else 1]
    if weight.layout == "words":
        found.append(32 // math.gcd(32, weight.bits))
    if weight.layout in PAIRS:
        found.append(2)
    if inputs is not None:
        found.append(inputs.group if inputs.scope == "group" else _E2M1_GROUP if inputs.kind == "e2m1" else 1)
    return found


def _cut(weight: ScaledMatrix, start: int, stop: int) -> ScaledMatrix:
    rows, columns = weight.shape
    height, width = weight.block
    if weight.layout == "awq":
        codes = weight.codes[start:stop]
    else:
        bits, unit = (1, 2) if weight.layout in PAIRS else {"words": (weight.bits, 32), "bytes": (1, 1)}[weight.layout]
        codes = weight.codes[:, start * bits // unit : stop * bits // unit]
    blocks = slice(start // width, -(-stop // width)) if width < columns else slice(None)
    zeros, input_scale = weight.zeros, weight.input_scale
    return replace(
        weight,
        codes=_copied(codes),
        shape=(rows, stop - start),
        block=(height, min(width, stop - start)),
        scales=_copied(weight.scales[:, blocks]),
        zeros=None if zeros is None else zeros[:, blocks].clone(),
        input_scale=None if input_scale is None else input_scale[start:stop].clone(),
    )


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.clone(memory_format=torch.contiguous_format)

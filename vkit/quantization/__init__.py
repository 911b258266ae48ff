"""Packed weights and the linear methods over them, one file per scheme."""

from __future__ import annotations

from vkit.kernels import ScaledMatrix
from vkit.kernels.block_formats import BLOCK_FORMATS, BlockFormat
from vkit.quantization.linear import (
    DenseLinear,
    GGUFLinear,
    LinearMethod,
    ScaledLinear,
    StackedLinear,
    concat,
    linear_method_for,
)
from vkit.quantization.tensor import BlockWeight, QuantizedTensor, Weight, concat_rows, placed

__all__ = [
    "BLOCK_FORMATS",
    "BlockFormat",
    "BlockWeight",
    "DenseLinear",
    "GGUFLinear",
    "LinearMethod",
    "QuantizedTensor",
    "ScaledLinear",
    "ScaledMatrix",
    "StackedLinear",
    "Weight",
    "concat",
    "concat_rows",
    "linear_method_for",
    "placed",
]

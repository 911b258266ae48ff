"""Tensor operations behind one name each; the only kernel import other code may use."""

from __future__ import annotations

from vkit.kernels.reference.dequantize import dequantize
from vkit.kernels.reference.quantized_embedding import quantized_embedding
from vkit.kernels.reference.quantized_linear import quantized_linear

__all__ = [
    "dequantize",
    "quantized_embedding",
    "quantized_linear",
]

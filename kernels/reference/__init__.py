"""Every op in plain torch: the fallback on any device, and the judge of every faster kernel."""

from __future__ import annotations

from vkit.kernels.reference.activation import add, gelu_and_mul, multiply, scale, silu_and_mul, soft_cap, unary
from vkit.kernels.reference.attention import paged_attention, write_kv
from vkit.kernels.reference.dequantize import dequantize
from vkit.kernels.reference.linear import concat, embedding, linear
from vkit.kernels.reference.norm import add_rms_norm, layer_norm, rms_norm
from vkit.kernels.reference.quantized_embedding import quantized_embedding
from vkit.kernels.reference.quantized_linear import quantized_linear
from vkit.kernels.reference.rope import qk_norm_rope, rope

__all__ = [
    "add",
    "add_rms_norm",
    "concat",
    "dequantize",
    "embedding",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "multiply",
    "paged_attention",
    "qk_norm_rope",
    "quantized_embedding",
    "quantized_linear",
    "rms_norm",
    "rope",
    "scale",
    "silu_and_mul",
    "soft_cap",
    "unary",
    "write_kv",
]

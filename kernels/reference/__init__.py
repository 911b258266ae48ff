"""Every op in plain torch: the fallback on any device, and the judge of every faster kernel."""

from __future__ import annotations

from vkit.kernels.reference.activation import add, gelu_and_mul, multiply, scale, silu_and_mul, soft_cap, unary
from vkit.kernels.reference.attention import paged_attention, write_kv
from vkit.kernels.reference.linear import embedding, linear
from vkit.kernels.reference.norm import add_rms_norm, layer_norm, rms_norm
from vkit.kernels.reference.rope import qk_norm_rope, rope

__all__ = [
    "add",
    "add_rms_norm",
    "embedding",
    "gelu_and_mul",
    "layer_norm",
    "linear",
    "multiply",
    "paged_attention",
    "qk_norm_rope",
    "rms_norm",
    "rope",
    "scale",
    "silu_and_mul",
    "soft_cap",
    "unary",
    "write_kv",
]

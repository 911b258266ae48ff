"""Every op in plain torch: the fallback on any device, and the judge of every faster kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vkit.kernels.reference import (
    activation,
    attention,
    dequantize,
    draw,
    linear,
    moe,
    norm,
    quantized_embedding,
    quantized_linear,
    rope,
)

OPS: Mapping[str, Callable[..., Any]] = {
    "add": activation.add,
    "add_rms_norm": norm.add_rms_norm,
    "concat": linear.concat,
    "dequantize": dequantize.dequantize,
    "draw": draw.draw,
    "embedding": linear.embedding,
    "gelu_and_mul": activation.gelu_and_mul,
    "layer_norm": norm.layer_norm,
    "linear": linear.linear,
    "multiply": activation.multiply,
    "paged_attention": attention.paged_attention,
    "qk_norm_rope": rope.qk_norm_rope,
    "quantized_embedding": quantized_embedding.quantized_embedding,
    "quantized_linear": quantized_linear.quantized_linear,
    "rms_norm": norm.rms_norm,
    "rope": rope.rope,
    "route_experts": moe.route_experts,
    "run_experts": moe.run_experts,
    "scale": activation.scale,
    "silu_and_mul": activation.silu_and_mul,
    "soft_cap": activation.soft_cap,
    "unary": activation.unary,
    "write_kv": attention.write_kv,
}
"""Op name -> implementation."""

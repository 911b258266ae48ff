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
    recurrent,
    rope,
    scaled_linear,
)

OPS: Mapping[str, Callable[..., Any]] = {
    "add": activation.add,
    "add_rows": linear.add_rows,
    "axis_table": rope.axis_table,
    "add_rms_norm": norm.add_rms_norm,
    "causal_conv1d": recurrent.causal_conv1d,
    "clamp": activation.clamp,
    "concat": linear.concat,
    "dequantize": dequantize.dequantize,
    "dequantize_scaled": scaled_linear.dequantize_scaled,
    "draw": draw.draw,
    "embedding": linear.embedding,
    "gated_delta_net": recurrent.gated_delta_net,
    "gelu_and_mul": activation.gelu_and_mul,
    "head_linear": linear.head_linear,
    "layer_norm": norm.layer_norm,
    "linear": linear.linear,
    "log_decay": recurrent.log_decay,
    "mamba2_scan": recurrent.mamba2_scan,
    "multiply": activation.multiply,
    "paged_attention": attention.paged_attention,
    "put_rows": linear.put_rows,
    "qk_norm_rope": rope.qk_norm_rope,
    "quantized_embedding": quantized_embedding.quantized_embedding,
    "quantized_linear": quantized_linear.quantized_linear,
    "replace_ids": linear.replace_ids,
    "rms_norm": norm.rms_norm,
    "rope": rope.rope,
    "route_experts": moe.route_experts,
    "route_scored_experts": moe.route_scored_experts,
    "run_experts": moe.run_experts,
    "scale": activation.scale,
    "scale_rows": activation.scale_rows,
    "scaled_linear": scaled_linear.scaled_linear,
    "segment_attention": attention.segment_attention,
    "silu_and_mul": activation.silu_and_mul,
    "soft_cap": activation.soft_cap,
    "unary": activation.unary,
    "write_kv": attention.write_kv,
}
"""Op name -> implementation."""

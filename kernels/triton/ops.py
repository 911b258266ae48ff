"""Every op that has Triton kernels, and every kernel as compiled ahead of time. Importing it loads triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vkit.kernels.triton import (
    activation,
    cache,
    convolution,
    draw,
    edit,
    expert_products,
    experts,
    latent,
    norm,
    packed,
    paged,
    rope,
    scaled,
    segments,
    states,
)
from vkit.kernels.triton.common import FLOATS, Ahead

OPS: Mapping[str, Callable[..., Any]] = {
    "add_rms_norm": norm.add_rms_norm,
    "axis_table": rope.axis_table,
    "causal_conv1d": convolution.causal_conv1d,
    "draw": draw.draw,
    "gated_delta_net": states.gated_delta_net,
    "gelu_and_mul": activation.gelu_and_mul,
    "largest": draw.largest,
    "largest_rows": draw.largest_rows,
    "log_decay": convolution.log_decay,
    "mamba2_scan": states.mamba2_scan,
    "mask_tokens": edit.mask_tokens,
    "paged_attention": paged.paged_attention,
    "penalise": edit.penalise,
    "qk_norm_rope": rope.qk_norm_rope,
    "quantized_embedding": packed.quantized_embedding,
    "quantized_linear": packed.quantized_linear,
    "rms_norm": norm.rms_norm,
    "rope": rope.rope,
    "run_experts": experts.run_experts,
    "scaled_linear": scaled.scaled_linear,
    "segment_attention": segments.segment_attention,
    "silu_and_mul": activation.silu_and_mul,
    "write_kv": cache.write_kv,
}
"""Op name -> implementation, with the signature of the reference of that name."""

AHEAD: tuple[Ahead, ...] = (
    *(*norm.AHEAD, *activation.AHEAD, *rope.AHEAD, *cache.AHEAD, *paged.AHEAD, *experts.AHEAD),
    *(*packed.AHEAD, *scaled.AHEAD, *expert_products.AHEAD),
    *(*latent.AHEAD, *segments.AHEAD, *draw.AHEAD, *edit.AHEAD, *convolution.AHEAD, *states.AHEAD),
)

__all__ = ["AHEAD", "FLOATS", "OPS"]

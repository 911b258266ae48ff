"""The operations a model is written in: one name, one meaning, on every device.

Each function checks its arguments, then calls the implementation `dispatch` chose for the tensor's device and dtype.
Errors are built in (`ValueError`, `TypeError`) and name the op, the argument, what came and what was wanted.
"""

from __future__ import annotations

from vkit.kernels.activations import add, gelu_and_mul, multiply, scale, silu_and_mul, soft_cap, unary
from vkit.kernels.attention import paged_attention, write_kv
from vkit.kernels.dense import concat, embedding, linear
from vkit.kernels.dispatch import (
    Backend,
    backends,
    configure,
    kv_layout,
    register_backend,
    use_backend,
    using_backend,
    wrap_step,
)
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.drawing import draw, draw_with_survivors
from vkit.kernels.experts import ExpertMatrix, route_experts, run_experts
from vkit.kernels.norms import add_rms_norm, layer_norm, rms_norm
from vkit.kernels.packed import quantized_embedding, quantized_linear
from vkit.kernels.paged import PagedBatch
from vkit.kernels.reference.dequantize import dequantize
from vkit.kernels.rotary import qk_norm_rope, rope

__all__ = [
    "Backend",
    "DrawRules",
    "ExpertMatrix",
    "PagedBatch",
    "add",
    "add_rms_norm",
    "backends",
    "concat",
    "configure",
    "dequantize",
    "draw",
    "draw_with_survivors",
    "embedding",
    "gelu_and_mul",
    "kv_layout",
    "layer_norm",
    "linear",
    "multiply",
    "paged_attention",
    "qk_norm_rope",
    "quantized_embedding",
    "quantized_linear",
    "register_backend",
    "rms_norm",
    "rope",
    "route_experts",
    "run_experts",
    "scale",
    "silu_and_mul",
    "soft_cap",
    "unary",
    "use_backend",
    "using_backend",
    "wrap_step",
    "write_kv",
]

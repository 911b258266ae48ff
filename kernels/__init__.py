"""The operations a model is written in: one name, one meaning, on every device.

Each function checks its arguments, then calls the implementation `dispatch` chose for the tensor's device and dtype.
Errors are built in (`ValueError`, `TypeError`) and name the op, the argument, what came and what was wanted.
"""

from __future__ import annotations

from vkit.kernels.activations import (
    add,
    clamp,
    gelu_and_mul,
    multiply,
    scale,
    scale_rows,
    silu_and_mul,
    soft_cap,
    unary,
)
from vkit.kernels.attention import paged_attention, segment_attention, write_kv
from vkit.kernels.dense import add_rows, concat, embedding, head_linear, linear, put_rows, replace_ids
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
from vkit.kernels.experts import ExpertMatrix, Scoring, route_experts, route_scored_experts, run_experts
from vkit.kernels.norms import add_rms_norm, layer_norm, rms_norm
from vkit.kernels.packed import quantized_embedding, quantized_linear
from vkit.kernels.paged import PagedBatch
from vkit.kernels.recurrent import ScanConstants, StateBatch, causal_conv1d, gated_delta_net, log_decay, mamba2_scan
from vkit.kernels.reference.dequantize import dequantize
from vkit.kernels.rotary import axis_table, qk_norm_rope, rope
from vkit.kernels.scaled import InputRounding, ScaledMatrix, scaled_linear

__all__ = [
    "Backend",
    "DrawRules",
    "ExpertMatrix",
    "InputRounding",
    "PagedBatch",
    "ScaledMatrix",
    "ScanConstants",
    "Scoring",
    "StateBatch",
    "add",
    "add_rms_norm",
    "add_rows",
    "axis_table",
    "backends",
    "causal_conv1d",
    "clamp",
    "concat",
    "configure",
    "dequantize",
    "draw",
    "draw_with_survivors",
    "embedding",
    "gated_delta_net",
    "gelu_and_mul",
    "head_linear",
    "kv_layout",
    "layer_norm",
    "linear",
    "log_decay",
    "mamba2_scan",
    "multiply",
    "paged_attention",
    "put_rows",
    "qk_norm_rope",
    "quantized_embedding",
    "quantized_linear",
    "register_backend",
    "replace_ids",
    "rms_norm",
    "rope",
    "route_experts",
    "route_scored_experts",
    "run_experts",
    "scale",
    "scale_rows",
    "scaled_linear",
    "segment_attention",
    "silu_and_mul",
    "soft_cap",
    "unary",
    "use_backend",
    "using_backend",
    "wrap_step",
    "write_kv",
]

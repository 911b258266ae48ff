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
from vkit.kernels.compressed import (
    compressed_attention,
    hyper_enter,
    hyper_head_weights,
    hyper_leave,
    hyper_weights,
    limited_silu_and_mul,
    pool_windows,
    route_by_root,
    run_limited_experts,
    spread_streams,
    store_rows,
)
from vkit.kernels.dense import add_rows, concat, embedding, head_linear, linear, put_rows, replace_ids
from vkit.kernels.dispatch import (
    Backend,
    backends,
    configure,
    kv_by_token,
    kv_layout,
    pack,
    register_backend,
    usable_backends,
    use_backend,
    using_backend,
    wrap_step,
)
from vkit.kernels.draw_rules import DrawRules
from vkit.kernels.drawing import draw, draw_with_survivors, largest, largest_rows
from vkit.kernels.editing import mask_tokens, penalise
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
    "compressed_attention",
    "concat",
    "configure",
    "dequantize",
    "draw",
    "draw_with_survivors",
    "embedding",
    "gated_delta_net",
    "gelu_and_mul",
    "head_linear",
    "hyper_enter",
    "hyper_head_weights",
    "hyper_leave",
    "hyper_weights",
    "kv_by_token",
    "kv_layout",
    "largest",
    "largest_rows",
    "layer_norm",
    "limited_silu_and_mul",
    "linear",
    "log_decay",
    "mamba2_scan",
    "mask_tokens",
    "multiply",
    "pack",
    "paged_attention",
    "penalise",
    "pool_windows",
    "put_rows",
    "qk_norm_rope",
    "quantized_embedding",
    "quantized_linear",
    "register_backend",
    "replace_ids",
    "rms_norm",
    "rope",
    "route_by_root",
    "route_experts",
    "route_scored_experts",
    "run_experts",
    "run_limited_experts",
    "scale",
    "scale_rows",
    "scaled_linear",
    "segment_attention",
    "silu_and_mul",
    "soft_cap",
    "spread_streams",
    "store_rows",
    "unary",
    "usable_backends",
    "use_backend",
    "using_backend",
    "wrap_step",
    "write_kv",
]

"""Which block type each tensor of a GGUF file gets: one type, or a mix that spends more on what matters more."""

from __future__ import annotations

import re

from vkit.quantization import BLOCK_FORMATS

FLOATS = ("F32", "F16", "BF16")
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
"""Mix -> the type of most tensors; half of the value and down projections get Q6_K."""
GGUF_TYPES = (*FLOATS, *BLOCKS, *MIXES)

FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9,
    "Q4_K": 14, "Q4_K_M": 15, "Q5_K": 16, "Q5_K_M": 17, "Q6_K": 18, "BF16": 32,
}  # fmt: skip
"""Numbers of `general.file_type`."""

NARROWER = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What rows that are no multiple of 256 get instead: the next better type of 32."""

_KEPT = re.compile(
    r"(?:.*_norm|.*norm.*|ffn_gate_inp|ffn_gate_inp_shexp|ssm_conv1d.*|ssm_a|ssm_d|ssm_dt|position_embd|exp_probs_b"
    r"|rope_f.*|attn_sinks|hc_.*|output_hc_.*|.*_ape|ffn_gate_tid2eid|inp_gate|proj|per_layer_model_proj|layer_output_scale)"
)
"""Base names of small or delicate tensors, which no type of blocks is for."""


def tensor_type(wanted: str, base: str, name: str, shape: tuple[int, ...], num_layers: int, *, is_tied: bool) -> str:
    """The type of one tensor in a file of type `wanted`; vectors and delicate matrices stay in float32."""
    if len(shape) < 2 or _KEPT.fullmatch(base):
        return "F32"
    if wanted in FLOATS:
        return wanted
    kind = MIXES.get(wanted, wanted)
    is_head = base == "output" or (base == "token_embd" and is_tied)
    is_delicate = wanted in MIXES and base in ("attn_v", "ffn_down", "ffn_down_exps") and _gets_more(name, num_layers)
    if is_delicate or (is_head and kind != "Q8_0"):
        kind = "Q6_K"
    if shape[-1] % BLOCK_FORMATS[kind].num_elements:
        kind = NARROWER.get(kind, kind)
    return "F16" if shape[-1] % BLOCK_FORMATS[kind].num_elements else kind


def _gets_more(name: str, num_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    layer = int(name.split(".")[1])
    return layer < num_layers // 8 or layer >= 7 * num_layers // 8 or (layer - num_layers // 8) % 3 == 2

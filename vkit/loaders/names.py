"""GGUF tensor names to Hugging Face names, one map for each family.

Keys are GGUF names without `blk.{i}.` and without `.weight` or `.bias`, which pass through. Stacked experts
(E, out, in) have no name in Hugging Face checkpoints, which keep one tensor per expert; they get the expert's name
without its number: `mlp.experts.gate_proj.weight`.
Source: GGUF specification, standardised tensor names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)\.(weight|bias)")
_ANY_BLOCK_NAME = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(.+)")
_EXPERT_NAME = re.compile(r"(.+)\.(0|[1-9]\d{0,5})")


@dataclass(frozen=True, slots=True)
class TensorName:
    """A GGUF name taken apart. `base` is the map's key; `hf_base` lacks `.weight` or `.bias`."""

    base: str
    hf_base: str
    suffix: str

    @property
    def hf_name(self) -> str:
        """The complete Hugging Face name."""
        return f"{self.hf_base}.{self.suffix}" if self.suffix else self.hf_base


@dataclass(frozen=True, slots=True)
class NameMap:
    """Names of one family. `per_expert` maps files that keep one tensor per expert; `{e}` is the expert's number.

    `exact` maps the names of a layer that end otherwise than in `.weight` or `.bias`, in the file or in the checkpoint.
    """

    top: Mapping[str, str]
    layer: Mapping[str, str]
    layer_prefix: str = "model.layers.{i}."
    per_expert: Mapping[str, str] = field(default_factory=dict)
    exact: Mapping[str, str] = field(default_factory=dict)

    def find(self, gguf_name: str) -> TensorName | None:
        """The parts of a name this family has, else None."""
        whole = _ANY_BLOCK_NAME.fullmatch(gguf_name)
        if whole is not None and whole[2] in self.exact:
            return TensorName(whole[2], self.layer_prefix.format(i=whole[1]) + self.exact[whole[2]], "")
        block = _BLOCK_NAME.fullmatch(gguf_name)
        if block is None:
            base, _, suffix = gguf_name.rpartition(".")
            known = suffix in ("weight", "bias") and base in self.top
            return TensorName(base, self.top[base], suffix) if known else None
        layer, base, suffix = block.groups()
        prefix = self.layer_prefix.format(i=layer)
        if base in self.layer:
            return TensorName(base, prefix + self.layer[base], suffix)
        expert = _EXPERT_NAME.fullmatch(base)
        if expert is not None and expert[1] in self.per_expert:
            return TensorName(expert[1], prefix + self.per_expert[expert[1]].format(e=expert[2]), suffix)
        return None

    def gguf_name(self, hf_name: str) -> tuple[str, str] | None:
        """The GGUF name of a Hugging Face tensor and the map's key of it, else None. Of several the first."""
        before, _, after = self.layer_prefix.partition("{i}")
        layer = re.fullmatch(rf"{re.escape(before)}(\d+){re.escape(after)}(.+)", hf_name)
        rest = hf_name if layer is None else layer[2]
        prefix = "" if layer is None else f"blk.{layer[1]}."
        for key, name in self.exact.items():
            if layer is not None and name == rest:
                return prefix + key, key
        base, _, suffix = rest.rpartition(".")
        for key, name in (self.top if layer is None else self.layer).items():
            if name == base and suffix in ("weight", "bias"):
                return f"{prefix}{key}.{suffix}", key
        return None


TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
MIXTRAL_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
}
MIXTRAL_PER_EXPERT = {
    "ffn_gate": "block_sparse_moe.experts.{e}.w1",
    "ffn_down": "block_sparse_moe.experts.{e}.w2",
    "ffn_up": "block_sparse_moe.experts.{e}.w3",
}
QWEN_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}

LLAMA = NameMap(TOP, ATTENTION | MLP | PRE_NORMS | MIXTRAL_EXPERTS, per_expert=MIXTRAL_PER_EXPERT)
PLAIN = NameMap(TOP, ATTENTION | MLP | PRE_NORMS)
QWEN3 = NameMap(TOP, ATTENTION | QK_NORM | MLP | PRE_NORMS)
QWEN3_MOE = NameMap(TOP, ATTENTION | QK_NORM | MLP | PRE_NORMS | QWEN_EXPERTS)
QWEN35 = NameMap(
    TOP,
    ATTENTION
    | QK_NORM
    | MLP
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "attn_qkv": "linear_attn.in_proj_qkv",
        "attn_gate": "linear_attn.in_proj_z",
        "ssm_alpha": "linear_attn.in_proj_a",
        "ssm_beta": "linear_attn.in_proj_b",
        "ssm_conv1d": "linear_attn.conv1d",
        "ssm_norm": "linear_attn.norm",
        "ssm_out": "linear_attn.out_proj",
    },
    exact={"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
)
GEMMA = PLAIN
GEMMA2 = NameMap(TOP, ATTENTION | MLP | FOUR_NORMS)
GEMMA3 = NameMap(TOP, ATTENTION | QK_NORM | MLP | FOUR_NORMS)
OLMO2 = NameMap(TOP, ATTENTION | QK_NORM | MLP | POST_NORMS)
COHERE = NameMap(TOP, ATTENTION | QK_NORM | MLP | {"attn_norm": "input_layernorm"})
GPT2 = NameMap(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
    layer_prefix="transformer.h.{i}.",
)
PHI2 = NameMap(
    {"token_embd": "model.embed_tokens", "output_norm": "model.final_layernorm", "output": "lm_head"},
    ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.dense",
        "ffn_up": "mlp.fc1",
        "ffn_down": "mlp.fc2",
    },
)
PHI3 = NameMap(
    TOP,
    PRE_NORMS
    | {
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
)
STABLELM = NameMap(
    TOP,
    ATTENTION | MLP | PRE_NORMS | {"attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"},
)
GLM4 = NameMap(
    TOP,
    ATTENTION
    | {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_self_attn_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
)

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

    `exact` maps whole names, of a layer or outside all, that end otherwise than in `.weight` or `.bias` in the file or
    in the checkpoint.
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
        if gguf_name in self.exact:
            return TensorName(gguf_name, self.exact[gguf_name], "")
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
            if name == rest:
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

EXPERT_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
SHARED_EXPERTS = {
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
SHARED_EXPERT = {key: name.replace("shared_experts", "shared_expert") for key, name in SHARED_EXPERTS.items()}
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
}
"""Of layers after the model's own, which predict further tokens ahead."""
LATENT = {
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
}
DEEPSEEK2 = NameMap(TOP, LATENT | MLP | PRE_NORMS | QWEN_EXPERTS | SHARED_EXPERTS | NEXTN, exact=EXPERT_BIAS)
MINICPM3 = NameMap(TOP, LATENT | MLP | PRE_NORMS)
QWEN35MOE = NameMap(
    TOP,
    dict(QWEN35.layer)
    | QWEN_EXPERTS
    | SHARED_EXPERT
    | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_up_exps": "mlp.experts.gate_up_proj"},
    exact=QWEN35.exact,
)
KIMI_LINEAR = NameMap(
    TOP,
    LATENT
    | MLP
    | PRE_NORMS
    | MIXTRAL_EXPERTS
    | {key: name.replace("mlp.", "block_sparse_moe.") for key, name in SHARED_EXPERTS.items()}
    | {
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "ssm_conv1d_q": "self_attn.q_conv1d",
        "ssm_conv1d_k": "self_attn.k_conv1d",
        "ssm_conv1d_v": "self_attn.v_conv1d",
        "ssm_f_a": "self_attn.f_a_proj",
        "ssm_f_b": "self_attn.f_b_proj",
        "ssm_g_a": "self_attn.g_a_proj",
        "ssm_g_b": "self_attn.g_b_proj",
        "ssm_beta": "self_attn.b_proj",
        "ssm_norm": "self_attn.o_norm",
    },
    exact={
        "ssm_a": "self_attn.A_log",
        "ssm_dt.bias": "self_attn.dt_bias",
        "exp_probs_b.bias": "block_sparse_moe.gate.e_score_correction_bias",
    },
)
NEMOTRON_H = NameMap(
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    {
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        "ssm_in": "mixer.in_proj",
        "ssm_conv1d": "mixer.conv1d",
        "ssm_norm": "mixer.norm",
        "ssm_out": "mixer.out_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_gate_inp": "mixer.gate",
        "ffn_up_exps": "mixer.experts.up_proj",
        "ffn_down_exps": "mixer.experts.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
        "ffn_latent_down": "mixer.fc1_latent_proj",
        "ffn_latent_up": "mixer.fc2_latent_proj",
    },
    layer_prefix="backbone.layers.{i}.",
    exact={
        "ssm_a": "mixer.A_log",
        "ssm_d": "mixer.D",
        "ssm_dt.bias": "mixer.dt_bias",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    },
)
LAGUNA = NameMap(
    TOP,
    ATTENTION | QK_NORM | MLP | PRE_NORMS | QWEN_EXPERTS | SHARED_EXPERT | {"attn_gate": "self_attn.g_proj"},
    exact={"exp_probs_b.bias": "mlp.experts.e_score_correction_bias"},
)
MUSE_GLIMMER = NameMap(TOP, ATTENTION | MLP | FOUR_NORMS | {"attn_gate": "self_attn.gate_proj"})
GEMMA4 = NameMap(
    {
        "token_embd": "model.language_model.embed_tokens",
        "output_norm": "model.language_model.norm",
        "output": "lm_head",
        "per_layer_token_embd": "model.language_model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.language_model.per_layer_model_projection",
        "per_layer_proj_norm": "model.language_model.per_layer_projection_norm",
    },
    ATTENTION
    | QK_NORM
    | MLP
    | FOUR_NORMS
    | {
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_down_exps": "experts.down_proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    layer_prefix="model.language_model.layers.{i}.",
    exact={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
)
DEEPSEEK4 = NameMap(
    {"token_embd": "embed", "output_norm": "norm", "output": "head"},
    {
        "attn_norm": "attn_norm",
        "ffn_norm": "ffn_norm",
        "attn_q_a": "attn.wq_a",
        "attn_q_a_norm": "attn.q_norm",
        "attn_q_b": "attn.wq_b",
        "attn_kv": "attn.wkv",
        "attn_kv_a_norm": "attn.kv_norm",
        "attn_output_a": "attn.wo_a",
        "attn_output_b": "attn.wo_b",
        "attn_compressor_kv": "attn.compressor.wkv",
        "attn_compressor_gate": "attn.compressor.wgate",
        "attn_compressor_norm": "attn.compressor.norm",
        "indexer.proj": "attn.indexer.weights_proj",
        "indexer.attn_q_b": "attn.indexer.wq_b",
        "indexer_compressor_kv": "attn.indexer.compressor.wkv",
        "indexer_compressor_gate": "attn.indexer.compressor.wgate",
        "indexer_compressor_norm": "attn.indexer.compressor.norm",
        "ffn_gate_inp": "ffn.gate",
        "ffn_gate_exps": "ffn.experts.w1",
        "ffn_up_exps": "ffn.experts.w3",
        "ffn_down_exps": "ffn.experts.w2",
        "ffn_gate_shexp": "ffn.shared_experts.w1",
        "ffn_up_shexp": "ffn.shared_experts.w3",
        "ffn_down_shexp": "ffn.shared_experts.w2",
    },
    layer_prefix="layers.{i}.",
    exact={
        "exp_probs_b.bias": "ffn.gate.bias",
        "ffn_gate_tid2eid.weight": "ffn.gate.tid2eid",
        "attn_sinks.weight": "attn.attn_sink",
        "attn_compressor_ape.weight": "attn.compressor.ape",
        "indexer_compressor_ape.weight": "attn.indexer.compressor.ape",
        **{
            f"hc_{part}_{kind}.weight": f"hc_{part}_{kind}"
            for part in ("attn", "ffn")
            for kind in ("fn", "base", "scale")
        },
        **{f"output_hc_{kind}.weight": f"hc_head_{kind}" for kind in ("fn", "base", "scale")},
    },
)

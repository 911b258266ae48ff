"""config.json keys to GGUF metadata for families whose layers differ: the way back of `loaders.gguf_config_mixed`.

Source: GGUF specification, standardised key-value pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vkit.conversion.metadata import FULL, Described, add_rope, layer_flags, qwen35_keys, refuse
from vkit.models.deepseek_v4 import layer_kinds
from vkit.models.gemma4 import full_layer_keys
from vkit.models.hf_config import HFConfig
from vkit.models.nemotron_h import block_kinds

SOFTMAX, SIGMOID = 1, 2
PUBLISHED_MINICPM3 = {"scale_emb": 12.0, "scale_depth": 1.4, "dim_model_base": 256.0}
_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def block_letters(config: Mapping[str, Any]) -> str:
    """Nemotron-H's blocks, one letter each."""
    return "".join(_LETTERS[kind] for kind in block_kinds(HFConfig(config)))


def _experts(described: Described, config: HFConfig, *, scale_key: str = "routed_scaling_factor") -> None:
    described.keys |= {
        "expert_count": config.num_experts,
        "expert_used_count": config.integer("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
        "expert_weights_scale": config.number(scale_key, default=1.0),
    }


def _groups(described: Described, config: HFConfig, *keys: str) -> None:
    groups = config.integer(*keys, default=1)
    if groups > 1:
        described.keys |= {
            "expert_group_count": groups,
            "expert_group_used_count": config.integer("topk_group", default=groups),
        }


def _latent(described: Described, config: HFConfig, *, is_split: bool) -> None:
    """Widths of latent attention; written as one key head in latent space where its matrices are split."""
    rank, rope_dim = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim")
    query_dim, value_dim = config.integer("qk_nope_head_dim") + rope_dim, config.integer("v_head_dim")
    described.keys |= {
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope_dim if is_split else query_dim,
        "attention.value_length": rank if is_split else value_dim,
        "rope.dimension_count": rope_dim,
    }
    if (q_rank := config.optional_integer("q_lora_rank")) is not None:
        described.keys["attention.q_lora_rank"] = q_rank
    if is_split:
        described.keys |= {
            "attention.head_count_kv": 1,
            "attention.key_length_mla": query_dim,
            "attention.value_length_mla": value_dim,
        }


def _deepseek2(described: Described, config: HFConfig, arch: str) -> None:
    if config.integer("moe_layer_freq", default=1) != 1:
        refuse(arch, "moe_layer_freq other than 1")
    _latent(described, config, is_split=True)
    _experts(described, config)
    is_v2 = config.values["architectures"] == ["DeepseekV2ForCausalLM"]
    method = config.text("topk_method", default="greedy" if is_v2 else "noaux_tc")
    if method != "greedy":
        _groups(described, config, "n_group")
    scoring = config.text("scoring_func", default="sigmoid" if method == "noaux_tc" else "softmax")
    described.keys |= {
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=0),
        "expert_shared_count": config.integer("n_shared_experts", default=0),
        "expert_weights_norm": config.flag("norm_topk_prob", default=False),
        "expert_gating_func": SIGMOID if scoring == "sigmoid" else SOFTMAX,
    }


def _minicpm3(described: Described, config: HFConfig, arch: str) -> None:
    for key, published in PUBLISHED_MINICPM3.items():
        if config.number(key, default=published) != published:
            refuse(arch, f"{key} other than {published:g}")
    _latent(described, config, is_split=False)


def _qwen35moe(described: Described, config: HFConfig, arch: str) -> None:
    qwen35_keys(described, config, arch)
    _experts(described, config)
    del described.keys["expert_weights_scale"]
    described.keys["expert_shared_feed_forward_length"] = config.integer("shared_expert_intermediate_size")


def _kimi_linear(described: Described, config: HFConfig, arch: str) -> None:
    linear = config.mapping("linear_attn_config")
    full = set(linear["full_attn_layers"])
    _latent(described, config, is_split=True)
    _experts(described, config)
    _groups(described, config, "num_expert_group")
    scoring = config.text("moe_router_activation_func", default="sigmoid")
    described.keys |= {
        "attention.head_count_kv": [int(layer + 1 in full) for layer in range(described.keys["block_count"])],
        "kda.head_dim": int(linear["head_dim"]),
        "ssm.conv_kernel": int(linear.get("short_conv_kernel_size") or 4),
        "leading_dense_block_count": config.integer("first_k_dense_replace", default=0),
        "expert_shared_count": config.integer("num_shared_experts", default=0),
        "expert_weights_norm": config.flag("moe_renormalize", default=True),
        "expert_gating_func": SIGMOID if scoring == "sigmoid" else SOFTMAX,
    }


def _nemotron_h(described: Described, config: HFConfig, arch: str) -> None:
    letters = block_letters(config.values)
    keys, heads = described.keys, config.integer("mamba_num_heads")
    kv_heads, width = keys["attention.head_count_kv"], config.integer("intermediate_size", default=0)
    keys |= {
        "attention.head_count_kv": [kv_heads if letter == "*" else 0 for letter in letters],
        "feed_forward_length": [width if letter == "-" else 0 for letter in letters],
        "attention.layer_norm_rms_epsilon": config.number("layer_norm_epsilon", "rms_norm_eps", default=1e-5),
        "ssm.conv_kernel": config.integer("conv_kernel", default=4),
        "ssm.state_size": config.integer("ssm_state_size"),
        "ssm.group_count": config.integer("n_groups"),
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * config.integer("mamba_head_dim"),
    }
    if arch != "nemotron_h_moe":
        return
    _experts(described, config)
    _groups(described, config, "n_group")
    num_shared = config.integer("n_shared_experts", default=1)
    keys |= {
        "expert_shared_count": num_shared,
        "expert_shared_feed_forward_length": config.integer(
            "moe_shared_expert_intermediate_size", default=num_shared * config.integer("moe_intermediate_size")
        ),
        "expert_weights_norm": config.flag("norm_topk_prob", default=True),
        "expert_gating_func": SIGMOID,
    }
    if (narrow := config.optional_integer("moe_latent_size")) is not None:
        keys["moe_latent_size"] = narrow


def _two_ropes(described: Described, config: HFConfig, arch: str, dims: tuple[int, int]) -> None:
    """The rope of full layers under the plain keys, that of sliding layers under those with `_swa`."""
    add_rope(described, config, arch, head_dim=dims[0])
    sliding = Described({"context_length": described.keys["context_length"]})
    add_rope(sliding, config, arch, head_dim=dims[1], layer_type="sliding_attention")
    if any(key.startswith("rope.scaling") for key in sliding.keys) or sliding.vectors:
        refuse(arch, "rope scaling of sliding layers")
    described.keys |= {
        "rope.freq_base_swa": sliding.keys["rope.freq_base"],
        "rope.dimension_count_swa": sliding.keys["rope.dimension_count"],
    }


def _laguna(described: Described, config: HFConfig, arch: str) -> None:
    num_layers, head_dim = described.keys["block_count"], config.head_dim
    _two_ropes(described, config, arch, (head_dim, head_dim))
    _experts(described, config, scale_key="moe_routed_scaling_factor")
    counts = config.values.get("num_attention_heads_per_layer")
    described.keys |= {
        "attention.head_count": counts or [config.integer("num_attention_heads")] * num_layers,
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": layer_flags(config, arch),
        "expert_shared_feed_forward_length": config.integer("shared_expert_intermediate_size"),
        "expert_gating_func": SIGMOID,
        "router_logit_softcapping": config.number("moe_router_logit_softcapping", default=0.0),
    }


def _muse_glimmer(described: Described, config: HFConfig, arch: str) -> None:
    num_layers, head_dim = described.keys["block_count"], config.head_dim
    types = config.layer_types(num_layers)
    flags = [kind != FULL for kind in types] if types else [(num_layers - 1 - i) % 4 != 0 for i in range(num_layers)]
    bases = config.values.get("layer_rope_theta")
    base = described.keys["rope.freq_base"]
    if isinstance(bases, list) and [float(value) for value in bases[:num_layers]] != [
        base if f else 0.0 for f in flags
    ]:
        refuse(arch, "layer_rope_theta other than one base for sliding layers and none for full ones")
    if config.number("post_norm_eps", default=1e-8) != 1e-8:
        refuse(arch, "post_norm_eps other than 1e-8")
    described.keys |= {
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": flags,
        "logit_scale": config.number("output_multiplier", default=0.19611613513818404),
        "final_logit_softcapping": config.number("final_logit_softcapping", default=20.0),
    }
    factor = config.number("qk_scale_factor", default=3.87)
    for layer in range(num_layers):
        described.vectors |= {
            f"blk.{layer}.attn_q_norm": [factor] * head_dim,
            f"blk.{layer}.attn_k_norm": [1.0] * head_dim,
        }


def _gemma4(described: Described, config: HFConfig, arch: str) -> None:
    keys, num_layers = described.keys, described.keys["block_count"]
    flags = layer_flags(config, arch)
    full = full_layer_keys(config, ["sliding_attention" if flag else FULL for flag in flags])
    global_dim, head_dim = full.integer("head_dim", default=512), config.head_dim
    num_shared = config.integer("num_kv_shared_layers", default=0)
    _two_ropes(described, config, arch, (global_dim, head_dim))
    kv_heads = config.num_kv_heads
    global_kv_heads = kv_heads
    if config.flag("attention_k_eq_v", default=False):
        global_kv_heads = full.integer("num_key_value_heads", default=kv_heads)
    width = config.integer("intermediate_size")
    is_wide = config.flag("use_double_wide_mlp", default=False)
    first_shared = num_layers - num_shared
    keys |= {
        "attention.key_length": global_dim,
        "attention.value_length": global_dim,
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": head_dim,
        "attention.head_count_kv": [kv_heads if flag else global_kv_heads for flag in flags],
        "feed_forward_length": [width * (2 if is_wide and i >= first_shared else 1) for i in range(num_layers)],
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.sliding_window_pattern": flags,
        "attention.shared_kv_layers": num_shared,
        "embedding_length_per_layer_input": config.integer("hidden_size_per_layer_input", default=0),
    }
    if (cap := config.optional_number("final_logit_softcapping")) is not None:
        keys["final_logit_softcapping"] = cap
    if config.flag("enable_moe_block", default=False):
        _experts(described, config)
        del keys["expert_weights_scale"]


def _deepseek4(described: Described, config: HFConfig, arch: str) -> None:
    kinds = layer_kinds(config, described.keys["block_count"])
    _experts(described, config)
    described.keys |= {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.integer("q_lora_rank"),
        "attention.output_group_count": config.integer("o_groups"),
        "attention.output_lora_rank": config.integer("o_lora_rank"),
        "attention.sliding_window": config.integer("sliding_window"),
        "attention.compress_ratios": [0 if rate == 1 else rate for _, rate in kinds],
        "attention.compress_rope_freq_base": config.number("compress_rope_theta", default=160000.0),
        "attention.indexer.head_count": config.integer("index_n_heads"),
        "attention.indexer.key_length": config.integer("index_head_dim"),
        "attention.indexer.top_k": config.integer("index_topk"),
        "hyper_connection.count": config.integer("hc_mult", default=4),
        "hyper_connection.sinkhorn_iterations": config.integer("hc_sinkhorn_iters", default=20),
        "hyper_connection.epsilon": config.number("hc_eps", default=1e-6),
        "expert_shared_count": config.integer("n_shared_experts", default=1),
        "swiglu_clamp_exp": config.number("swiglu_limit"),
    }


WRITERS: dict[str, Callable[[Described, HFConfig, str], None]] = {
    "deepseek2": _deepseek2,
    "deepseek4": _deepseek4,
    "gemma4": _gemma4,
    "kimi-linear": _kimi_linear,
    "laguna": _laguna,
    "minicpm3": _minicpm3,
    "muse-glimmer": _muse_glimmer,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "qwen35moe": _qwen35moe,
}
"""GGUF architecture -> what adds its keys."""

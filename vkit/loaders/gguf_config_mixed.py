"""GGUF metadata to config.json keys for families whose layers differ: latent attention, experts, states, two ropes.

Source: GGUF specification; published configurations of the families.
"""

from __future__ import annotations

from vkit.loaders.gguf_config import (
    FULL,
    MINICPM_DIM_MODEL_BASE,
    MINICPM_SCALE_DEPTH,
    MINICPM_SCALE_EMB,
    SLIDING,
    Config,
    MetadataReader,
    attention,
    common,
    qwen35,
    rms_norm,
    rope,
    rope_scaling,
)

SOFTMAX, SIGMOID = 1, 2
STANDS_STILL = 1e29
"""Divisors from here on mean a pair that does not rotate."""


def qwen35moe(reader: MetadataReader) -> Config:
    """Qwen 3.5 with experts."""
    return qwen35(reader, hf_class="Qwen3_5MoeForCausalLM", model_type="qwen3_5_moe_text") | {
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.integer("expert_shared_feed_forward_length"),
    }


def _latent(reader: MetadataReader, layer: int) -> Config:
    """Widths of latent attention. `layer` is one that has it; older files do not say the values' width."""
    num_heads = max(reader.integers("attention.head_count"))
    rope_dim = reader.integer("rope.dimension_count", minimum=2)
    query_dim = reader.optional_integer("attention.key_length_mla") or reader.integer("attention.key_length")
    rank = reader.integer("attention.kv_lora_rank")
    nope_dim = query_dim - rope_dim
    if nope_dim < 1:
        reader.refuse(f"a key of {query_dim} cannot hold a rotating part of {rope_dim}")
    value_dim = reader.optional_integer("attention.value_length_mla") or reader.optional_integer(
        "attention.value_length"
    )
    whole = reader.tensors.get(f"blk.{layer}.attn_kv_b.weight")
    if whole is not None:
        value_dim = whole.shape[0] // num_heads - nope_dim
    if not value_dim:
        reader.refuse("the width of a value is nowhere said")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "kv_lora_rank": rank,
        "q_lora_rank": reader.optional_integer("attention.q_lora_rank") or None,
        "qk_nope_head_dim": nope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
    }


def _rope_keys(reader: MetadataReader, width: int) -> Config:
    theta = reader.optional_number("rope.freq_base")
    return {"rope_theta": 10000.0 if theta is None else theta, "rope_scaling": rope_scaling(reader, width)}


def _is_sigmoid(reader: MetadataReader, *, has_bias: bool) -> bool:
    gating = reader.optional_integer("expert_gating_func") or (SIGMOID if has_bias else SOFTMAX)
    if gating not in (SOFTMAX, SIGMOID):
        reader.unsupported(f"expert gating function {gating}")
    return gating == SIGMOID


def _groups(reader: MetadataReader) -> tuple[int, int]:
    groups = reader.optional_integer("expert_group_count") or 1
    return groups, reader.optional_integer("expert_group_used_count") or groups


def _scale(reader: MetadataReader) -> float:
    """Factor on the routed experts; writers put 0 for none."""
    return reader.optional_number("expert_weights_scale") or 1.0


def _has(reader: MetadataReader, suffix: str) -> bool:
    return any(name.endswith(suffix) for name in reader.tensors)


def deepseek2(reader: MetadataReader) -> Config:
    """DeepSeek-V2 or, with a correction bias, V3; GLM-4.7-Flash is the latter."""
    has_bias = _has(reader, ".exp_probs_b.bias")
    name, model_type = ("V3", "deepseek_v3") if has_bias else ("V2", "deepseek_v2")
    config = common(reader, f"Deepseek{name}ForCausalLM", model_type) | rms_norm(reader)
    num_dense = reader.optional_integer("leading_dense_block_count") or 0
    config |= _latent(reader, 0) | _rope_keys(reader, reader.integer("rope.dimension_count"))
    scaling = config["rope_scaling"]
    if scaling is not None and scaling.get("mscale_all_dim") is not None:
        multiplier = float(f"{10 * scaling['mscale_all_dim']:.6g}")  # the file has a tenth, in float32
        config["rope_scaling"] = scaling | {"mscale": multiplier, "mscale_all_dim": multiplier}
    groups, top_groups = _groups(reader)
    method = "noaux_tc" if has_bias else "greedy" if groups == 1 else "group_limited_greedy"
    return config | {
        "intermediate_size": reader.integer("feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "first_k_dense_replace": num_dense,
        "n_routed_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "n_shared_experts": reader.optional_integer("expert_shared_count") or 0,
        "routed_scaling_factor": _scale(reader),
        "norm_topk_prob": reader.flag("expert_weights_norm", default=False),
        "n_group": groups,
        "topk_group": top_groups,
        "topk_method": method,
        "scoring_func": "sigmoid" if _is_sigmoid(reader, has_bias=has_bias) else "softmax",
    }


def minicpm3(reader: MetadataReader) -> Config:
    """MiniCPM 3; the format has no keys for its scalars, which are the same in every published file."""
    config = common(reader, "MiniCPM3ForCausalLM", "minicpm3") | rms_norm(reader) | _latent(reader, 0)
    return (
        config
        | _rope_keys(reader, config["qk_rope_head_dim"])
        | {
            "intermediate_size": reader.integer("feed_forward_length"),
            "hidden_act": "silu",
            "attention_bias": False,
            "scale_emb": MINICPM_SCALE_EMB,
            "scale_depth": MINICPM_SCALE_DEPTH,
            "dim_model_base": MINICPM_DIM_MODEL_BASE,
        }
    )


def kimi_linear(reader: MetadataReader) -> Config:
    """Kimi Linear; layers without key heads are recurrent."""
    config = common(reader, "KimiLinearForCausalLM", "kimi_linear") | rms_norm(reader)
    num_layers = config["num_hidden_layers"]
    counts = reader.integers("attention.head_count_kv", length=num_layers)
    full = [layer + 1 for layer in range(num_layers) if counts[layer]]
    if not full:
        reader.refuse_key("attention.head_count_kv", 0, "a layer with key heads")
    config |= _latent(reader, full[0] - 1)
    has_bias = _has(reader, ".exp_probs_b.bias")
    groups, top_groups = _groups(reader)
    return config | {
        "intermediate_size": max(reader.integers("feed_forward_length")),
        "hidden_act": "silu",
        "mla_use_nope": True,
        "linear_attn_config": {
            "full_attn_layers": full,
            "kda_layers": [layer + 1 for layer in range(num_layers) if not counts[layer]],
            "head_dim": reader.integer("kda.head_dim"),
            "num_heads": config["num_attention_heads"],
            "short_conv_kernel_size": reader.integer("ssm.conv_kernel"),
        },
        "first_k_dense_replace": reader.optional_integer("leading_dense_block_count") or 0,
        "moe_layer_freq": 1,
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_token": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "num_shared_experts": reader.optional_integer("expert_shared_count") or 0,
        "routed_scaling_factor": _scale(reader),
        "moe_renormalize": reader.flag("expert_weights_norm", default=True),
        "moe_router_activation_func": "sigmoid" if _is_sigmoid(reader, has_bias=has_bias) else "softmax",
        "use_grouped_topk": True,
        "num_expert_group": groups,
        "topk_group": top_groups,
    }


def nemotron_h(reader: MetadataReader) -> Config:
    """Nemotron-H; the tensors of a layer say what it is."""
    config = common(reader, "NemotronHForCausalLM", "nemotron_h")
    kinds = {"ssm_in": "M", "attn_q": "*", "ffn_gate_inp": "E", "ffn_up": "-"}
    pattern = ""
    for layer in range(config["num_hidden_layers"]):
        found = [letter for name, letter in kinds.items() if reader.has_tensor(f"blk.{layer}.{name}.weight")]
        if not found:
            reader.refuse(f"layer {layer} holds no part that is known")
        pattern += found[0]
    epsilon = reader.optional_number("attention.layer_norm_rms_epsilon")
    num_heads = reader.integer("ssm.time_step_rank")
    head_dim, rest = divmod(reader.integer("ssm.inner_size"), num_heads)
    if rest:
        reader.refuse_key("ssm.inner_size", reader.integer("ssm.inner_size"), f"a multiple of {num_heads} heads")
    heads = max(reader.integers("attention.head_count"))
    config |= {
        "hybrid_override_pattern": pattern,
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon") if epsilon is None else epsilon,
        "mamba_num_heads": num_heads,
        "mamba_head_dim": head_dim,
        "n_groups": reader.integer("ssm.group_count"),
        "ssm_state_size": reader.integer("ssm.state_size"),
        "conv_kernel": reader.integer("ssm.conv_kernel"),
        "num_attention_heads": heads,
        "num_key_value_heads": max(reader.integers("attention.head_count_kv")) or heads,
        "head_dim": reader.optional_integer("attention.key_length") or config["hidden_size"] // heads,
        "intermediate_size": max(reader.integers("feed_forward_length")),
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
        "use_bias": _has(reader, ".ssm_in.bias"),
        "use_conv_bias": _has(reader, ".ssm_conv1d.bias"),
        "mlp_bias": _has(reader, ".ffn_up.bias"),
    }
    return config | (_nemotron_experts(reader) if "E" in pattern else {})


def _nemotron_experts(reader: MetadataReader) -> Config:
    groups, top_groups = _groups(reader)
    num_shared = reader.optional_integer("expert_shared_count")
    return {
        "n_routed_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": reader.integer("expert_shared_feed_forward_length"),
        "n_shared_experts": 1 if num_shared is None else num_shared,
        "moe_latent_size": reader.optional_integer("moe_latent_size") or None,
        "norm_topk_prob": reader.flag("expert_weights_norm", default=True),
        "routed_scaling_factor": _scale(reader),
        "n_group": groups,
        "topk_group": top_groups,
    }


def laguna(reader: MetadataReader) -> Config:
    """Laguna: heads of each layer apart, a rope for each kind of layer, the first of every four layers full."""
    config = common(reader, "LagunaForCausalLM", "laguna") | rms_norm(reader)
    num_layers, head_dim = config["num_hidden_layers"], reader.integer("attention.key_length")
    counts = reader.integers("attention.head_count", length=num_layers)
    flags = reader.period_or_flags("attention.sliding_window_pattern")
    if not isinstance(flags, list):
        flags = [layer % (flags or 4) != 0 for layer in range(num_layers)]
    gate = reader.tensors.get("blk.0.attn_gate.weight")
    return config | {
        "num_attention_heads": max(counts),
        "num_attention_heads_per_layer": counts,
        "num_key_value_heads": max(reader.integers("attention.head_count_kv")),
        "head_dim": head_dim,
        "intermediate_size": max(reader.integers("feed_forward_length")),
        "hidden_act": "silu",
        "layer_types": [SLIDING if flag else FULL for flag in flags[:num_layers]],
        "sliding_window": reader.integer("attention.sliding_window"),
        "gating": "per-head" if gate is not None and gate.shape[0] == counts[0] else "per-element",
        "mlp_layer_types": [
            "sparse" if reader.has_tensor(f"blk.{layer}.ffn_gate_inp.weight") else "dense"
            for layer in range(num_layers)
        ],
        "rope_parameters": {
            FULL: _typed_rope(reader, head_dim, ""),
            SLIDING: _typed_rope(reader, head_dim, "_swa") | {"rope_type": "default"},
        },
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": reader.integer("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": _scale(reader),
        "moe_router_logit_softcapping": reader.optional_number("router_logit_softcapping") or 0.0,
    }


def _typed_rope(reader: MetadataReader, head_dim: int, suffix: str) -> Config:
    """The rope of one kind of layer, in the newer keys."""
    width = reader.optional_integer(f"rope.dimension_count{suffix}", minimum=2) or head_dim
    theta = reader.optional_number(f"rope.freq_base{suffix}")
    scaling = None if suffix else rope_scaling(reader, width)
    return {
        "rope_type": "default",
        **(scaling or {}),
        "rope_theta": 10000.0 if theta is None else theta,
        "partial_rotary_factor": width / head_dim,
    }


def muse_glimmer(reader: MetadataReader) -> Config:
    """Muse Glimmer, text; the factor on queries is kept as a constant norm weight."""
    config = common(reader, "MuseGlimmerForCausalLM", "muse_glimmer_text")
    config |= attention(reader, config) | rms_norm(reader)
    config |= rope(reader, config["head_dim"])
    num_layers = config["num_hidden_layers"]
    flags = reader.period_or_flags("attention.sliding_window_pattern")
    if not isinstance(flags, list):
        flags = [(num_layers - 1 - layer) % (flags or 4) != 0 for layer in range(num_layers)]
    factors = set(reader.optional_vector("blk.0.attn_q_norm.weight") or [3.87])
    if len(factors) != 1:
        reader.refuse("tensor 'blk.0.attn_q_norm.weight' holds different numbers, expected one factor")
    cap = reader.optional_number("final_logit_softcapping")
    return config | {
        "intermediate_size": reader.integer("feed_forward_length"),
        "hidden_act": "silu",
        "layer_types": [SLIDING if flag else FULL for flag in flags[:num_layers]],
        "layer_rope_theta": [config["rope_theta"] if flag else 0.0 for flag in flags[:num_layers]],
        "sliding_window": reader.integer("attention.sliding_window"),
        "qk_scale_factor": factors.pop(),
        "output_multiplier": reader.number("logit_scale"),
        "final_logit_softcapping": 20.0 if cap is None else cap,
        "post_norm_eps": 1e-8,
    }


def gemma4(reader: MetadataReader) -> Config:
    """Gemma 4, text: two head widths, keys shared by the last layers, inputs per layer, experts."""
    config = common(reader, "Gemma4ForConditionalGeneration", "gemma4") | rms_norm(reader)
    num_layers = config["num_hidden_layers"]
    types = _gemma4_types(reader, num_layers)
    kv_heads = reader.integers("attention.head_count_kv", length=num_layers)
    widths = reader.integers("feed_forward_length", length=num_layers)
    num_shared = reader.optional_integer("attention.shared_kv_layers") or 0
    sliding = [kv_heads[i] for i in range(num_layers) if types[i] == SLIDING]
    full = [i for i in range(num_layers) if types[i] == FULL]
    per_layer = reader.tensors.get("per_layer_token_embd.weight")
    num_experts = reader.optional_integer("expert_count") or 0
    own_full = [i for i in full if i < num_layers - num_shared]
    global_dim = reader.integer("attention.key_length")
    return config | {
        "num_attention_heads": max(reader.integers("attention.head_count")),
        "num_key_value_heads": max(sliding or kv_heads),
        "num_global_key_value_heads": max((kv_heads[i] for i in full), default=None),
        "head_dim": reader.optional_integer("attention.key_length_swa") or global_dim,
        "global_head_dim": global_dim,
        "attention_k_eq_v": any(not reader.has_tensor(f"blk.{i}.attn_v.weight") for i in own_full),
        "num_kv_shared_layers": num_shared,
        "layer_types": types,
        "sliding_window": reader.integer("attention.sliding_window"),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "hidden_size_per_layer_input": reader.optional_integer("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": config["vocab_size"] if per_layer is None else per_layer.shape[0],
        "final_logit_softcapping": reader.optional_number("final_logit_softcapping") or None,
        "enable_moe_block": bool(num_experts),
        "num_experts": num_experts or None,
        "top_k_experts": reader.integer("expert_used_count") if num_experts else None,
        "moe_intermediate_size": reader.integer("expert_feed_forward_length") if num_experts else None,
        "rope_parameters": {FULL: _gemma4_rope(reader, global_dim), SLIDING: _gemma4_sliding_rope(reader)},
    }


def _gemma4_types(reader: MetadataReader, num_layers: int) -> list[str]:
    flags = reader.period_or_flags("attention.sliding_window_pattern")
    if not isinstance(flags, list):
        flags = [(layer + 1) % (flags or 6) != 0 for layer in range(num_layers)]
    if len(flags) < num_layers:
        reader.refuse(
            f"'{reader.architecture}.attention.sliding_window_pattern' has {len(flags)} flags, not {num_layers}"
        )
    return [SLIDING if flag else FULL for flag in flags[:num_layers]]


def _gemma4_rope(reader: MetadataReader, head_dim: int) -> Config:
    """Of full layers: the first pairs rotate, the others stand still, as the divisors say."""
    theta = reader.optional_number("rope.freq_base")
    keys: Config = {"rope_theta": 1000000.0 if theta is None else theta}
    divisors = reader.optional_vector("rope_freqs.weight")
    if divisors is None:
        return keys | {"rope_type": "default"}
    if len(divisors) != head_dim // 2:
        reader.refuse(f"tensor 'rope_freqs.weight' has {len(divisors)} numbers, expected {head_dim // 2}")
    rotating = sum(value < STANDS_STILL for value in divisors)
    if divisors[:rotating] == [1.0] * rotating:
        return keys | {"rope_type": "proportional", "partial_rotary_factor": rotating / len(divisors)}
    return keys | {"rope_type": "frequency_divisors", "divisors": divisors}


def _gemma4_sliding_rope(reader: MetadataReader) -> Config:
    theta = reader.optional_number("rope.freq_base_swa")
    return {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}


def deepseek4(reader: MetadataReader) -> Config:
    """DeepSeek-V4. A compressing layer with an indexer is a sparse one."""
    config = common(reader, "DeepseekV4ForCausalLM", "deepseek_v4") | rms_norm(reader)
    num_layers = config["num_hidden_layers"]
    ratios = reader.integers("attention.compress_ratios", length=num_layers)
    types: list[str] = []
    rates: dict[str, int] = {}
    for layer, ratio in enumerate(ratios):
        kind = SLIDING
        if ratio:
            is_sparse = reader.has_tensor(f"blk.{layer}.indexer.attn_q_b.weight")
            kind = "compressed_sparse_attention" if is_sparse else "heavily_compressed_attention"
            if rates.setdefault(kind, ratio) != ratio:
                reader.unsupported(f"compression by {ratio} and {rates[kind]} in layers of one kind")
        types.append(kind)
    limits = reader.numbers("swiglu_clamp_exp")
    if len(set(limits)) != 1:
        reader.unsupported("a limit of the experts that differs from layer to layer")
    rope_dim = reader.integer("rope.dimension_count")
    scaling = _rope_keys(reader, rope_dim)
    return (
        config
        | scaling
        | {
            "num_attention_heads": reader.integer("attention.head_count"),
            "num_key_value_heads": 1,
            "head_dim": reader.integer("attention.key_length"),
            "q_lora_rank": reader.integer("attention.q_lora_rank"),
            "qk_rope_head_dim": rope_dim,
            "o_groups": reader.integer("attention.output_group_count"),
            "o_lora_rank": reader.integer("attention.output_lora_rank"),
            "sliding_window": reader.integer("attention.sliding_window"),
            "index_n_heads": reader.integer("attention.indexer.head_count"),
            "index_head_dim": reader.integer("attention.indexer.key_length"),
            "index_topk": reader.integer("attention.indexer.top_k"),
            "hc_mult": reader.integer("hyper_connection.count"),
            "hc_sinkhorn_iters": reader.integer("hyper_connection.sinkhorn_iterations"),
            "hc_eps": reader.number("hyper_connection.epsilon"),
            "layer_types": types,
            "compress_rates": rates,
            "compress_rope_theta": reader.number("attention.compress_rope_freq_base"),
            "mlp_layer_types": [
                "hash_moe" if reader.has_tensor(f"blk.{layer}.ffn_gate_tid2eid.weight") else "moe"
                for layer in range(num_layers)
            ],
            "hidden_act": "silu",
            "n_routed_experts": reader.integer("expert_count"),
            "num_experts_per_tok": reader.integer("expert_used_count"),
            "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
            "n_shared_experts": reader.optional_integer("expert_shared_count") or 1,
            "routed_scaling_factor": _scale(reader),
            "swiglu_limit": limits[0],
            "scoring_func": "sqrtsoftplus",
        }
    )

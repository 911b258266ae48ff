"""config.json keys to GGUF metadata: the way back of `vkit.loaders.gguf_config`, one function for each architecture.

Source: GGUF specification, standardised key-value pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any, NoReturn

from vkit.errors import ModelLoadError
from vkit.layers.rotary import RopeSpec, frequencies_of
from vkit.models.hf_config import CONTEXT_KEYS, HFConfig

Keys = dict[str, Any]

FULL = "full_attention"
DEFAULT_PERIODS = {"gemma2": 2, "gemma3": 6, "olmo2": 4, "cohere2": 4}
"""All but the last of so many layers slide, where a file does not say otherwise."""


@dataclass(slots=True)
class Described:
    """What a configuration becomes: keys without the architecture's prefix, and the vectors of rope scaling."""

    keys: Keys
    vectors: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the format cannot say, for the person converting."""


def describe(arch: str, config: HFConfig, names: Set[str]) -> Described:
    """The metadata of a model of GGUF architecture `arch`; `names` are its tensors' plain Hugging Face names.

    Raises:
        ModelLoadError: the configuration says something the format has no key for.
    """
    from vkit.conversion.metadata_mixed import WRITERS as MIXED

    described = _common(config)
    if arch not in _WITHOUT_ROPE:
        add_rope(described, config, arch, head_dim=config.optional_integer("qk_rope_head_dim"))
    {**_WRITERS, **MIXED}[arch](described, config, arch)
    return described


def refuse(arch: str, what: str) -> NoReturn:
    """Raise ModelLoadError naming what GGUF architecture `arch` cannot say."""
    raise ModelLoadError(f"{what} cannot be said in a GGUF file of architecture {arch!r}")


def _common(config: HFConfig) -> Described:
    hidden, heads = config.integer("hidden_size", "n_embd"), config.integer("num_attention_heads", "n_head")
    kinds = config.values.get("hybrid_override_pattern") or config.values.get("layers_block_type")
    keys: Keys = {
        "vocab_size": config.integer("vocab_size"),
        "context_length": config.integer(*CONTEXT_KEYS, "model_max_length"),
        "embedding_length": hidden,
        "block_count": len(kinds) if kinds else config.integer("num_hidden_layers", "n_layer"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.integer("num_key_value_heads", default=heads),
    }
    width = config.optional_integer("intermediate_size", "n_inner")
    keys["feed_forward_length"] = 4 * hidden if width is None else width
    head_dim = config.optional_integer("head_dim") or hidden // heads
    keys |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if "rms_norm_eps" in config:
        keys["attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps")
    elif (epsilon := config.optional_number("layer_norm_eps", "layer_norm_epsilon")) is not None:
        keys["attention.layer_norm_epsilon"] = epsilon
    return Described(keys)


def add_rope(
    described: Described, config: HFConfig, arch: str, *, head_dim: int | None = None, layer_type: str = FULL
) -> None:
    context = described.keys["context_length"]
    spec = config.rope(
        context,
        layer_type=layer_type,
        default_partial=_DEFAULT_PARTIAL.get(arch, 1.0),
        default_base=_DEFAULT_BASE.get(arch, 10000.0),
        head_dim=head_dim or described.keys["attention.key_length"],
    )
    described.keys |= {"rope.freq_base": spec.base, "rope.dimension_count": spec.width}
    match spec.kind:
        case "default":
            pass
        case "dynamic":
            described.notes.append(
                "dynamic rope scaling has no place in a GGUF file; positions beyond the context change"
            )
        case "linear":
            described.keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(spec.scaling["factor"])}
        case "yarn":
            add_yarn(described, spec)
        case "longrope":
            _add_longrope(described, spec)
        case "llama3" | "frequency_divisors" | "proportional":
            described.vectors["rope_freqs"] = divisors(spec)
        case _:
            refuse(arch, f"rope scaling {spec.kind!r}")


def add_yarn(described: Described, spec: RopeSpec) -> None:
    scaling = spec.scaling
    described.keys |= {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": float(scaling["factor"]),
        "rope.scaling.original_context_length": spec.original_length,
        "rope.scaling.yarn_beta_fast": float(scaling.get("beta_fast") or 32.0),
        "rope.scaling.yarn_beta_slow": float(scaling.get("beta_slow") or 1.0),
    }
    if scaling.get("attention_factor") is not None:
        described.keys["rope.scaling.yarn_attn_factor"] = float(scaling["attention_factor"])
    mscale, all_dims = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and all_dims and mscale != all_dims:
        raise ModelLoadError(
            f"yarn with mscale {mscale} beside mscale_all_dim {all_dims} cannot be said in a GGUF file"
        )
    if all_dims:
        described.keys["rope.scaling.yarn_log_multiplier"] = 0.1 * float(all_dims)


def _add_longrope(described: Described, spec: RopeSpec) -> None:
    described.vectors["rope_factors_long"] = [float(value) for value in spec.scaling["long_factor"]]
    described.vectors["rope_factors_short"] = [float(value) for value in spec.scaling["short_factor"]]
    described.keys["rope.scaling.original_context_length"] = spec.original_length
    if spec.scaling.get("attention_factor") is not None:
        described.keys["rope.scaling.attn_factor"] = float(spec.scaling["attention_factor"])


STANDING_STILL = 1e30
"""Divisor of a pair that does not rotate."""


def divisors(spec: RopeSpec) -> list[float]:
    """By what each plain frequency is divided."""
    scaled, _ = frequencies_of(spec)
    width = spec.width
    values = []
    for pair, frequency in enumerate(scaled.tolist()):
        plain = spec.base ** (-2 * pair / width)
        values.append(plain / frequency if frequency else STANDING_STILL)
    return values


def layer_flags(config: HFConfig, arch: str) -> list[bool]:
    """Which layers slide: as listed, by the period of older configurations, or by the family's own."""
    num_layers = config.integer("num_hidden_layers")
    listed = config.layer_types(num_layers)
    if listed is not None:
        return [kind != FULL for kind in listed]
    default = DEFAULT_PERIODS.get(arch, 1)
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=default)
    return [(layer + 1) % period != 0 for layer in range(num_layers)]


def add_window(described: Described, config: HFConfig, arch: str) -> None:
    """The window, and the layers that slide where they are not the family's usual ones."""
    window = config.optional_integer("sliding_window")
    flags = layer_flags(config, arch)
    if window is None or not any(flags):
        return
    described.keys["attention.sliding_window"] = window
    period = DEFAULT_PERIODS.get(arch)
    if period is None or flags != [(layer + 1) % period != 0 for layer in range(len(flags))]:
        described.keys["attention.sliding_window_pattern"] = flags


def _plain(described: Described, config: HFConfig, arch: str) -> None:
    """Nothing beyond the common keys."""


def _llama(described: Described, config: HFConfig, arch: str) -> None:
    window = config.optional_integer("sliding_window")
    if window is not None and config.flag("use_sliding_window", default=True):
        described.keys["attention.sliding_window"] = window
    if "num_local_experts" in config:
        described.keys |= {
            "expert_count": config.integer("num_local_experts"),
            "expert_used_count": config.integer("num_experts_per_tok"),
        }
    pooling = config.values.get("pooling_type")
    if pooling is not None or config.values.get("architectures") == ["LlamaModel"]:
        described.keys["pooling_type"] = {"mean": 1, "cls": 2, "last": 3}.get(str(pooling or "last"), 3)


def _without_window(described: Described, config: HFConfig, arch: str) -> None:
    if config.flag("use_sliding_window", default=False):
        refuse(arch, "use_sliding_window")


def _qwen3moe(described: Described, config: HFConfig, arch: str) -> None:
    _without_window(described, config, arch)
    if not config.flag("norm_topk_prob", default=False):
        refuse(arch, "norm_topk_prob false")
    if config.integer("decoder_sparse_step", default=1) != 1 or config.values.get("mlp_only_layers"):
        refuse(arch, "layers without experts (decoder_sparse_step, mlp_only_layers)")
    described.keys |= {
        "expert_count": config.num_experts,
        "expert_used_count": config.integer("num_experts_per_tok"),
        "expert_feed_forward_length": config.integer("moe_intermediate_size"),
    }


def qwen35_keys(described: Described, config: HFConfig, arch: str) -> None:
    interval = config.integer("full_attention_interval", default=4)
    num_layers = described.keys["block_count"]
    listed = config.layer_types(num_layers)
    if listed and listed != [FULL if (i + 1) % interval == 0 else "linear_attention" for i in range(num_layers)]:
        refuse(arch, "layer_types without a period")
    value_heads = config.integer("linear_num_value_heads")
    rope = {**config.mapping("rope_scaling"), **config.mapping("rope_parameters")}
    sections = rope.get("mrope_section") or config.values.get("mrope_section")
    if sections:
        described.keys["rope.dimension_sections"] = [*sections, *[0] * (4 - len(sections))]
    described.keys |= {
        "full_attention_interval": interval,
        "ssm.conv_kernel": config.integer("linear_conv_kernel_dim"),
        "ssm.group_count": config.integer("linear_num_key_heads"),
        "ssm.time_step_rank": value_heads,
        "ssm.state_size": config.integer("linear_key_head_dim"),
        "ssm.inner_size": value_heads * config.integer("linear_value_head_dim"),
    }


def _gemma2(described: Described, config: HFConfig, arch: str) -> None:
    add_window(described, config, arch)
    described.keys["attention.scale"] = config.number("query_pre_attn_scalar", default=256.0) ** -0.5
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        described.keys[key] = config.number(key, default=0.0)


def _gemma3(described: Described, config: HFConfig, arch: str) -> None:
    _gemma2(described, config, arch)
    local = config.mapping("rope_parameters").get("sliding_attention", {}).get("rope_theta")
    described.keys["rope.freq_base_swa"] = float(local or config.number("rope_local_base_freq", default=10000.0))


def _granite(described: Described, config: HFConfig, arch: str) -> None:
    described.keys |= {
        "embedding_scale": config.number("embedding_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "attention.scale": config.number("attention_multiplier", default=1.0),
        "logit_scale": config.number("logits_scaling", default=1.0),
    }


def _minicpm(described: Described, config: HFConfig, arch: str) -> None:
    keys = described.keys
    described.keys |= {
        "embedding_scale": config.number("scale_emb"),
        "residual_scale": config.number("scale_depth") / math.sqrt(keys["block_count"]),
        "logit_scale": keys["embedding_length"] / config.number("dim_model_base"),
    }


def _cohere(described: Described, config: HFConfig, arch: str) -> None:
    described.keys["logit_scale"] = config.number("logit_scale", default=1.0)
    if arch == "cohere2":
        add_window(described, config, arch)


def _phi2(described: Described, config: HFConfig, arch: str) -> None:
    if config.flag("qk_layernorm", default=False):
        refuse(arch, "qk_layernorm")


def _phi3(described: Described, config: HFConfig, arch: str) -> None:
    original = config.optional_integer("original_max_position_embeddings")
    if original is not None:
        described.keys["rope.scaling.original_context_length"] = original
    if (window := config.optional_integer("sliding_window")) is not None:
        described.keys["attention.sliding_window"] = window


_WITHOUT_ROPE = frozenset({"gpt2", "gemma4", "laguna", "nemotron_h", "nemotron_h_moe", "kimi-linear"})
"""Architectures without positions by rotation, or with more than one rope: their writers say the rest."""
_DEFAULT_PARTIAL = {"phi2": 0.5, "stablelm": 0.25, "glm4": 0.5, "qwen35": 0.25, "qwen35moe": 0.25}
_DEFAULT_BASE = {"gemma3": 1e6}
_WRITERS: dict[str, Callable[[Described, HFConfig, str], None]] = {
    "command-r": _cohere,
    "cohere2": _cohere,
    "gemma": _plain,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "glm4": _plain,
    "gpt2": _plain,
    "granite": _granite,
    "internlm2": _plain,
    "llama": _llama,
    "minicpm": _minicpm,
    "olmo2": add_window,
    "phi2": _phi2,
    "phi3": _phi3,
    "qwen2": _without_window,
    "qwen3": _without_window,
    "qwen35": qwen35_keys,
    "qwen3moe": _qwen3moe,
    "stablelm": _plain,
}

ARCHITECTURE_OF: dict[str, str] = {
    "DeepseekV2ForCausalLM": "deepseek2",
    "DeepseekV3ForCausalLM": "deepseek2",
    "DeepseekV4ForCausalLM": "deepseek4",
    "Gemma4ForConditionalGeneration": "gemma4",
    "Gemma4UnifiedForConditionalGeneration": "gemma4",
    "Glm4MoeLiteForCausalLM": "deepseek2",
    "KimiLinearForCausalLM": "kimi-linear",
    "LagunaForCausalLM": "laguna",
    "MiniCPM3ForCausalLM": "minicpm3",
    "MuseGlimmerForCausalLM": "muse-glimmer",
    "MuseGlimmerForConditionalGeneration": "muse-glimmer",
    "NemotronHForCausalLM": "nemotron_h",
    "Qwen3_5MoeForCausalLM": "qwen35moe",
    "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    "Cohere2ForCausalLM": "cohere2",
    "CohereForCausalLM": "command-r",
    "GPT2LMHeadModel": "gpt2",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
    "GemmaForCausalLM": "gemma",
    "Glm4ForCausalLM": "glm4",
    "GraniteForCausalLM": "granite",
    "InternLM2ForCausalLM": "internlm2",
    "InternLM3ForCausalLM": "llama",
    "LlamaForCausalLM": "llama",
    "LlamaModel": "llama",
    "MiniCPMForCausalLM": "minicpm",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Phi3ForCausalLM": "phi3",
    "PhiForCausalLM": "phi2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "Qwen3_5ForCausalLM": "qwen35",
    "Qwen3_5ForConditionalGeneration": "qwen35",
    "StableLmForCausalLM": "stablelm",
}
"""Hugging Face class -> GGUF architecture."""

"""GGUF metadata to the keys of a Hugging Face config.json: shared parts, and one function for each architecture.

Knows no tensor names (names.py) and no values of weights (transforms.py).
Source: GGUF specification, standardised key-value pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.gguf_header import GGUFMetadata, TensorEntry

Config = dict[str, Any]

DEFAULT_ROPE_THETA = 10000.0
SLIDING, FULL = "sliding_attention", "full_attention"
FREQUENCY_DIVISORS = "frequency_divisors"
"""`rope_type` of files that carry a tensor of divisors: each inverse frequency is divided by its own number.

It stands for scalings such as "llama3", whose parameters a GGUF file does not keep; `divisors` has one number per pair.
"""

GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
GEMMA2_SLIDING_WINDOW = 4096
MINICPM_SCALE_EMB, MINICPM_SCALE_DEPTH, MINICPM_DIM_MODEL_BASE = 12.0, 1.4, 256


class MetadataReader:
    """Typed access to the keys of one architecture; every absence or wrong type is refused by name.

    `read_vector` reads a small tensor of the file as numbers.
    """

    def __init__(
        self,
        path: Path,
        architecture: str,
        metadata: GGUFMetadata,
        tensors: Mapping[str, TensorEntry],
        read_vector: Callable[[str], list[float]],
    ) -> None:
        self.path = path
        self.architecture = architecture
        self.metadata = metadata
        self.tensors = tensors
        self._read_vector = read_vector

    def has_tensor(self, name: str) -> bool:
        """Whether the file holds a tensor of this GGUF name."""
        return name in self.tensors

    def optional_integer(self, name: str, *, minimum: int = 0) -> int | None:
        """An integer, or None if the key is absent. A per-layer array is accepted when all its values are equal."""
        value = self._get(name)
        if isinstance(value, np.ndarray):
            value = self._uniform(name, value)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse_key(name, value, "an integer")
        if value < minimum:
            self.refuse_key(name, value, f"at least {minimum}")
        return value

    def integer(self, name: str, *, minimum: int = 1) -> int:
        """An integer that must be present."""
        value = self.optional_integer(name, minimum=minimum)
        return self._required(name) if value is None else value

    def optional_number(self, name: str) -> float | None:
        """A finite number, or None if the key is absent."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse_key(name, value, "a finite number")
        return float(value)

    def number(self, name: str) -> float:
        """A finite number that must be present."""
        value = self.optional_number(name)
        return self._required(name) if value is None else value

    def optional_text(self, name: str) -> str | None:
        """A string, or None if the key is absent."""
        value = self._get(name)
        if value is not None and not isinstance(value, str):
            self.refuse_key(name, value, "a string")
        return value

    def token_id(self, name: str) -> int | None:
        """A token id of the tokenizer's keys, or None."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id")
        return value if type(value) is int else None

    def integers(self, name: str, *, length: int | None = None) -> list[int]:
        """Integers of which there is one for each layer, or one for all; at least `length` of them, if given."""
        value = self._get(name)
        if value is None:
            return self._required(name)
        values = value.tolist() if isinstance(value, np.ndarray) else [value]
        if not values or not all(type(item) is int and item >= 0 for item in values):
            self.refuse_key(name, value, "integers")
        if length is None:
            return values
        values = values * length if len(values) == 1 else values
        if len(values) < length:
            self.refuse(f"metadata key '{self.architecture}.{name}' has {len(values)} numbers, expected {length}")
        return values[:length]

    def numbers(self, name: str) -> list[float]:
        """Numbers of which there is one for each layer, or one for all."""
        value = self._get(name)
        if isinstance(value, np.ndarray) and value.size and np.isfinite(value).all():
            return [float(str(item)) for item in value.astype(np.float32)]
        return [self.number(name)]

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false, or the default if the key is absent."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse_key(name, value, "true or false")
        return value

    def period_or_flags(self, name: str) -> int | list[bool] | None:
        """A period or one flag per layer, or None if the key is absent."""
        value = self._get(name)
        if isinstance(value, np.ndarray) and value.dtype == np.bool_:
            return [bool(flag) for flag in value]
        return self.optional_integer(name, minimum=1)

    def optional_vector(self, name: str) -> list[float] | None:
        """The numbers of a small tensor, all finite and not zero, or None if the file holds no such tensor."""
        if name not in self.tensors:
            return None
        values = self._read_vector(name)
        if not all(math.isfinite(value) and value != 0 for value in values):
            self.refuse(f"tensor {name!r} holds a number that is zero or not finite")
        return values

    def refuse(self, fault: str) -> NoReturn:
        """Raise CheckpointError naming the file."""
        raise CheckpointError(f"{self.path}: {fault}")

    def refuse_key(self, name: str, value: object, expected: str) -> NoReturn:
        """Raise CheckpointError naming the key, what it holds and what was expected."""
        shown = value if isinstance(value, int | float) else f"a {type(value).__name__}"
        self.refuse(f"metadata key '{self.architecture}.{name}' is {shown}, expected {expected}")

    def unsupported(self, what: str) -> NoReturn:
        """Raise ModelLoadError naming something no model of ours can do."""
        raise ModelLoadError(f"{self.path}: {what}, which is not supported for GGUF architecture {self.architecture!r}")

    def _get(self, name: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{name}")

    def _required(self, name: str) -> NoReturn:
        self.refuse(f"metadata key '{self.architecture}.{name}' is missing")

    def _uniform(self, name: str, values: np.ndarray[Any, Any]) -> Any:
        if values.size and (values == values.flat[0]).all():
            return values.flat[0].item()
        return self.unsupported(f"metadata key '{self.architecture}.{name}' differs from layer to layer")


# Parts that architectures share.


def common(reader: MetadataReader, hf_class: str, model_type: str) -> Config:
    """Sizes, token ids and names that every architecture has."""
    embedding = reader.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        reader.refuse("tensor 'token_embd.weight' is missing or not a matrix")
    hidden_size = reader.integer("embedding_length")
    num_rows, num_columns = embedding.shape
    if num_columns != hidden_size:
        reader.refuse(
            f"tensor 'token_embd.weight' has {num_columns} columns, but the embedding length is {hidden_size}"
        )
    _check_vocabulary(reader, num_rows)
    num_drafts = reader.optional_integer("nextn_predict_layers")
    drafts = {"num_nextn_predict_layers": num_drafts} if num_drafts else {}
    return drafts | {
        "architectures": [hf_class],
        "model_type": model_type,
        "vocab_size": num_rows,
        "hidden_size": hidden_size,
        "num_hidden_layers": _num_layers(reader),
        "max_position_embeddings": reader.integer("context_length"),
        "bos_token_id": reader.token_id("bos"),
        "eos_token_id": reader.token_id("eos"),
        "pad_token_id": reader.token_id("padding"),
        "tie_word_embeddings": not reader.has_tensor("output.weight"),
    }


def _check_vocabulary(reader: MetadataReader, num_rows: int) -> None:
    num_tokens = reader.metadata.array_length("tokenizer.ggml.tokens")
    if num_tokens is None:
        num_tokens = reader.optional_integer("vocab_size")
    if num_tokens is not None and num_tokens != num_rows:
        reader.refuse(f"tensor 'token_embd.weight' has {num_rows} rows, but the vocabulary has {num_tokens} tokens")


def _num_layers(reader: MetadataReader) -> int:
    num_blocks = reader.integer("block_count")
    if num_blocks > len(reader.tensors):
        reader.refuse(
            f"metadata key '{reader.architecture}.block_count' is {num_blocks}, "
            f"but the file holds only {len(reader.tensors)} tensors"
        )
    num_layers = num_blocks - (reader.optional_integer("nextn_predict_layers") or 0)
    if num_layers < 1:
        reader.refuse(f"metadata key '{reader.architecture}.nextn_predict_layers' leaves no layer of {num_blocks}")
    return num_layers


def attention(reader: MetadataReader, config: Config) -> Config:
    """Heads of ordinary attention, the same in every layer."""
    num_heads = reader.integer("attention.head_count")
    num_kv_heads = reader.optional_integer("attention.head_count_kv", minimum=1) or num_heads
    if num_heads % num_kv_heads:
        reader.refuse(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
    head_dim = reader.optional_integer("attention.key_length", minimum=1)
    if head_dim is None:
        head_dim, rest = divmod(config["hidden_size"], num_heads)
        if rest:
            reader.refuse(f"{num_heads} attention heads do not divide the embedding length {config['hidden_size']}")
    value_dim = reader.optional_integer("attention.value_length", minimum=1)
    if value_dim not in (None, head_dim):
        reader.unsupported(f"a value head of {value_dim} beside a key head of {head_dim}")
    return {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads, "head_dim": head_dim}


def rms_norm(reader: MetadataReader) -> Config:
    """The epsilon of an RMSNorm."""
    return {"rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon")}


def rope(reader: MetadataReader, head_dim: int) -> Config:
    """Rope over a part of the head, as `rope.dimension_count` says."""
    rotary_dim = reader.optional_integer("rope.dimension_count", minimum=2) or head_dim
    if rotary_dim > head_dim or rotary_dim % 2:
        reader.refuse_key("rope.dimension_count", rotary_dim, f"an even number up to the head size {head_dim}")
    theta = reader.optional_number("rope.freq_base")
    config: Config = {
        "rope_theta": DEFAULT_ROPE_THETA if theta is None else theta,
        "rope_scaling": rope_scaling(reader, rotary_dim),
    }
    if config["rope_theta"] <= 0:
        reader.refuse_key("rope.freq_base", theta, "a positive number")
    if rotary_dim != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def _full_rope(reader: MetadataReader, head_dim: int) -> Config:
    """Rope over the whole head, for architectures that know nothing else."""
    config = rope(reader, head_dim)
    if "partial_rotary_factor" in config:
        reader.unsupported(f"a rotary width other than the head size {head_dim}")
    return config


def rope_scaling(reader: MetadataReader, rotary_dim: int) -> Config | None:
    """The scaling that keys or tensors of divisors say, in Hugging Face keys; None for none."""
    kind = reader.optional_text("rope.scaling.type")
    divisors = reader.optional_vector("rope_freqs.weight")
    long_factor = reader.optional_vector("rope_factors_long.weight")
    short_factor = reader.optional_vector("rope_factors_short.weight")
    for name, values in (
        ("rope_freqs", divisors),
        ("rope_factors_long", long_factor),
        ("rope_factors_short", short_factor),
    ):
        if values is not None and len(values) != rotary_dim // 2:
            reader.refuse(f"tensor '{name}.weight' has {len(values)} numbers, expected {rotary_dim // 2}")
    if long_factor is not None and short_factor is not None:
        return _longrope(reader, long_factor, short_factor)
    if long_factor is not None or short_factor is not None or kind == "longrope":
        reader.refuse("longrope needs both tensors 'rope_factors_long.weight' and 'rope_factors_short.weight'")
    if kind == "yarn":
        if divisors is not None:
            reader.unsupported("yarn beside a tensor 'rope_freqs.weight'")
        return _yarn(reader)
    # Files from before `rope.scaling.type` say linear scaling by `rope.scale_linear`.
    factor = reader.optional_number("rope.scaling.factor") if kind == "linear" else None
    if kind in (None, "linear") and factor is None:
        factor = reader.optional_number("rope.scale_linear")
    if kind not in (None, "none", "linear"):
        reader.unsupported(f"rope scaling type {kind!r}")
    if kind == "linear" and factor is None:
        reader.number("rope.scaling.factor")
    if factor is not None and factor <= 0:
        reader.refuse_key("rope.scaling.factor", factor, "a positive number")
    if divisors is not None:
        return {"rope_type": FREQUENCY_DIVISORS, "divisors": [value * (factor or 1.0) for value in divisors]}
    return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": factor}


def _yarn(reader: MetadataReader) -> Config:
    if reader.optional_number("rope.scaling.yarn_ext_factor") not in (None, 1.0):
        reader.unsupported("a yarn extrapolation factor other than 1")
    scaling: Config = {
        "rope_type": "yarn",
        "factor": reader.number("rope.scaling.factor"),
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length"),
    }
    if scaling["factor"] <= 0:
        reader.refuse_key("rope.scaling.factor", scaling["factor"], "a positive number")
    log_multiplier = reader.optional_number("rope.scaling.yarn_log_multiplier")
    optional = {
        "attention_factor": _attention_factor(reader),
        "beta_fast": reader.optional_number("rope.scaling.yarn_beta_fast"),
        "beta_slow": reader.optional_number("rope.scaling.yarn_beta_slow"),
        "mscale": None if log_multiplier is None else 1.0,
        "mscale_all_dim": log_multiplier,
    }
    return scaling | {key: value for key, value in optional.items() if value is not None}


def _longrope(reader: MetadataReader, long_factor: list[float], short_factor: list[float]) -> Config:
    scaling: Config = {
        "rope_type": "longrope",
        "long_factor": long_factor,
        "short_factor": short_factor,
        "original_max_position_embeddings": reader.integer("rope.scaling.original_context_length"),
    }
    factor = _attention_factor(reader)
    return scaling if factor is None else scaling | {"attention_factor": factor}


def _attention_factor(reader: MetadataReader) -> float | None:
    factor = reader.optional_number("rope.scaling.attn_factor")
    return reader.optional_number("rope.scaling.yarn_attn_factor") if factor is None else factor


def _layer_types(reader: MetadataReader, num_layers: int, default_period: int) -> list[str]:
    """Which layers slide: by flag, or all but the last of every period."""
    pattern = reader.period_or_flags("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        if len(pattern) < num_layers:
            reader.refuse(
                f"metadata key '{reader.architecture}.attention.sliding_window_pattern' has {len(pattern)} "
                f"flags, expected one for each of {num_layers} layers"
            )
        return [SLIDING if flag else FULL for flag in pattern[:num_layers]]
    period = default_period if pattern is None else pattern
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]


def _sliding(reader: MetadataReader, num_layers: int, default_period: int, default_window: int | None = None) -> Config:
    """Window and layer types; without a window every layer is full."""
    window = reader.optional_integer("attention.sliding_window") or default_window
    if window is None:
        return {"sliding_window": None, "layer_types": [FULL] * num_layers}
    return {"sliding_window": window, "layer_types": _layer_types(reader, num_layers, default_period)}


def _llama_like(reader: MetadataReader, hf_class: str, model_type: str) -> Config:
    """Pre-norm, RMSNorm, full rope, gated SiLU MLP: what most architectures add little to."""
    config = common(reader, hf_class, model_type)
    config |= attention(reader, config) | rms_norm(reader)
    config |= _full_rope(reader, config["head_dim"])
    return config | {"intermediate_size": reader.integer("feed_forward_length"), "hidden_act": "silu"}


def _biases(reader: MetadataReader) -> Config:
    return {
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": reader.has_tensor("blk.0.ffn_down.bias"),
    }


# One function for each architecture.


def llama(reader: MetadataReader) -> Config:
    """Llama, Mistral (with a window), Mixtral (with experts) or an embedding model (with a pooling type)."""
    num_experts = reader.optional_integer("expert_count") or 0
    window = reader.optional_integer("attention.sliding_window") or None
    if num_experts:
        experts = {"num_local_experts": num_experts, "num_experts_per_tok": reader.integer("expert_used_count")}
        return _llama_like(reader, "MixtralForCausalLM", "mixtral") | experts | {"sliding_window": window}
    if reader.optional_integer("pooling_type"):
        return _llama_like(reader, "LlamaModel", "llama") | _biases(reader) | _pooling(reader)
    if window:
        return _llama_like(reader, "MistralForCausalLM", "mistral") | {"sliding_window": window}
    return _llama_like(reader, "LlamaForCausalLM", "llama") | _biases(reader)


def _pooling(reader: MetadataReader) -> Config:
    pooling = {1: "mean", 2: "cls", 3: "last"}.get(reader.integer("pooling_type"))
    if pooling is None:
        reader.refuse_key("pooling_type", reader.integer("pooling_type"), "0 to 3")
    return {"pooling_type": pooling}


def mistral3(reader: MetadataReader) -> Config:
    """The text part of Mistral 3."""
    if reader.optional_number("attention.temperature_scale"):
        reader.unsupported("a temperature scale that depends on the position")
    return _llama_like(reader, "MistralForCausalLM", "mistral") | {
        "sliding_window": reader.optional_integer("attention.sliding_window") or None
    }


def qwen2(reader: MetadataReader) -> Config:
    """Qwen 2 and 2.5: Llama with biases on q, k and v."""
    return _llama_like(reader, "Qwen2ForCausalLM", "qwen2") | {"use_sliding_window": False, "sliding_window": None}


def qwen3(reader: MetadataReader) -> Config:
    """Qwen 3 dense."""
    return _llama_like(reader, "Qwen3ForCausalLM", "qwen3") | {
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def qwen35(reader: MetadataReader, *, hf_class: str = "Qwen3_5ForCausalLM", model_type: str = "qwen3_5_text") -> Config:
    """Qwen 3.5. The file's value heads are in tiled order, which the model takes as it is."""
    config = common(reader, hf_class, model_type)
    config |= attention(reader, config) | rms_norm(reader)
    config |= rope(reader, config["head_dim"])
    num_value_heads = reader.integer("ssm.time_step_rank")
    value_dim, rest = divmod(reader.integer("ssm.inner_size"), num_value_heads)
    if rest:
        reader.refuse_key("ssm.inner_size", reader.integer("ssm.inner_size"), f"a multiple of {num_value_heads} heads")
    return config | {
        "intermediate_size": reader.optional_integer("feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": False,
        "full_attention_interval": reader.optional_integer("full_attention_interval", minimum=1) or 4,
        "linear_conv_kernel_dim": reader.integer("ssm.conv_kernel"),
        "linear_num_key_heads": reader.integer("ssm.group_count"),
        "linear_num_value_heads": num_value_heads,
        "linear_key_head_dim": reader.integer("ssm.state_size"),
        "linear_value_head_dim": value_dim,
        "linear_value_head_order": "tiled",
    }


def qwen3moe(reader: MetadataReader) -> Config:
    """Qwen 3 with experts in every layer; the router's weights are always renormalised."""
    if reader.optional_integer("expert_gating_func") not in (None, 0, 1):
        reader.unsupported("an expert gating function other than softmax")
    return _llama_like(reader, "Qwen3MoeForCausalLM", "qwen3_moe") | {
        "attention_bias": False,
        "num_experts": reader.integer("expert_count"),
        "num_experts_per_tok": reader.integer("expert_used_count"),
        "moe_intermediate_size": reader.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        "sliding_window": None,
    }


def gemma(reader: MetadataReader) -> Config:
    """Gemma 1."""
    return _llama_like(reader, "GemmaForCausalLM", "gemma") | {
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
    }


def gemma2(reader: MetadataReader) -> Config:
    """Gemma 2: every other layer slides, scores and logits are capped."""
    config = _llama_like(reader, "Gemma2ForCausalLM", "gemma2") | _gemma_attention(reader)
    config |= _sliding(reader, config["num_hidden_layers"], 2, GEMMA2_SLIDING_WINDOW)
    attention_cap = reader.optional_number("attn_logit_softcapping")
    final_cap = reader.optional_number("final_logit_softcapping")
    return config | {
        "attn_logit_softcapping": 50.0 if attention_cap is None else attention_cap or None,
        "final_logit_softcapping": 30.0 if final_cap is None else final_cap or None,
        "query_pre_attn_scalar": _query_pre_attn_scalar(reader, config),
    }


def gemma3(reader: MetadataReader) -> Config:
    """The text part of Gemma 3: five layers slide for one that does not, each kind with a rope of its own."""
    config = _llama_like(reader, "Gemma3ForCausalLM", "gemma3_text") | _gemma_attention(reader)
    config |= _sliding(reader, config["num_hidden_layers"], 6)
    local_theta = reader.optional_number("rope.freq_base_swa")
    return config | {
        "rope_local_base_freq": DEFAULT_ROPE_THETA if local_theta is None else local_theta,
        "attn_logit_softcapping": reader.optional_number("attn_logit_softcapping") or None,
        "final_logit_softcapping": reader.optional_number("final_logit_softcapping") or None,
        "query_pre_attn_scalar": _query_pre_attn_scalar(reader, config),
    }


def _gemma_attention(reader: MetadataReader) -> Config:
    return {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


def _query_pre_attn_scalar(reader: MetadataReader, config: Config) -> float:
    """The number whose inverse square root scales the scores."""
    scale = reader.optional_number("attention.scale")
    if scale is None:
        if config["num_hidden_layers"] == GEMMA_27B_LAYERS[reader.architecture]:
            return float(config["hidden_size"] / config["num_attention_heads"])
        return float(config["head_dim"])
    if scale <= 0:
        reader.refuse_key("attention.scale", scale, "a positive number")
    scalar = 1.0 / (scale * scale)
    # The file keeps the scale in float32; published scalars are whole numbers.
    return float(round(scalar)) if math.isclose(scalar, round(scalar), rel_tol=1e-6) else scalar


def gpt2(reader: MetadataReader) -> Config:
    """GPT-2, under its own key names."""
    config = common(reader, "GPT2LMHeadModel", "gpt2")
    return config | {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": reader.integer("attention.head_count"),
        "n_positions": config["max_position_embeddings"],
        "n_inner": reader.integer("feed_forward_length"),
        "layer_norm_epsilon": reader.number("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


def phi2(reader: MetadataReader) -> Config:
    """Phi 1.5 and 2."""
    config = common(reader, "PhiForCausalLM", "phi")
    config |= attention(reader, config)
    config |= rope(reader, config["head_dim"])
    return config | {
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "intermediate_size": reader.integer("feed_forward_length"),
        "layer_norm_eps": reader.number("attention.layer_norm_epsilon"),
        "hidden_act": "gelu_new",
        "qk_layernorm": False,
    }


def phi3(reader: MetadataReader) -> Config:
    """Phi 3, 3.5 and 4 mini: fused projections, longrope in the long variants."""
    config = common(reader, "Phi3ForCausalLM", "phi3")
    config |= attention(reader, config) | rms_norm(reader)
    config |= rope(reader, config["head_dim"])
    original = reader.optional_integer("rope.scaling.original_context_length", minimum=1)
    return config | {
        "original_max_position_embeddings": original or config["max_position_embeddings"],
        "intermediate_size": reader.integer("feed_forward_length"),
        "hidden_act": "silu",
        "sliding_window": reader.optional_integer("attention.sliding_window") or None,
    }


def stablelm(reader: MetadataReader) -> Config:
    """StableLM: LayerNorm, partial rope; the variants show in which tensors the file holds."""
    config = common(reader, "StableLmForCausalLM", "stablelm")
    config |= attention(reader, config)
    config |= rope(reader, config["head_dim"])
    return config | {
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "intermediate_size": reader.integer("feed_forward_length"),
        "layer_norm_eps": reader.number("attention.layer_norm_epsilon"),
        "hidden_act": "silu",
        "use_qkv_bias": reader.has_tensor("blk.0.attn_q.bias"),
        "qk_layernorm": reader.has_tensor("blk.0.attn_q_norm.weight"),
        "use_parallel_residual": not reader.has_tensor("blk.0.ffn_norm.weight"),
    }


def granite(reader: MetadataReader) -> Config:
    """Granite 3: Llama with four scalars."""
    return (
        _llama_like(reader, "GraniteForCausalLM", "granite")
        | _biases(reader)
        | {
            "embedding_multiplier": reader.number("embedding_scale"),
            "residual_multiplier": reader.number("residual_scale"),
            "attention_multiplier": reader.number("attention.scale"),
            "logits_scaling": reader.number("logit_scale"),
        }
    )


def minicpm(reader: MetadataReader) -> Config:
    """MiniCPM: the file keeps scale_depth / √layers and hidden_size / dim_model_base."""
    config = _llama_like(reader, "MiniCPMForCausalLM", "minicpm") | _biases(reader)
    scale_emb = reader.optional_number("embedding_scale")
    residual_scale = reader.optional_number("residual_scale")
    logit_scale = reader.optional_number("logit_scale")
    if logit_scale is not None and logit_scale <= 0:
        reader.refuse_key("logit_scale", logit_scale, "a positive number")
    depth = math.sqrt(config["num_hidden_layers"])
    return config | {
        "scale_emb": MINICPM_SCALE_EMB if scale_emb is None else scale_emb,
        "scale_depth": MINICPM_SCALE_DEPTH if residual_scale is None else residual_scale * depth,
        "dim_model_base": MINICPM_DIM_MODEL_BASE if logit_scale is None else config["hidden_size"] / logit_scale,
    }


def olmo2(reader: MetadataReader) -> Config:
    """OLMo 2, or OLMo 3 when the file has a window."""
    if not reader.optional_integer("attention.sliding_window"):
        return _llama_like(reader, "Olmo2ForCausalLM", "olmo2") | {"attention_bias": False}
    config = _llama_like(reader, "Olmo3ForCausalLM", "olmo3") | {"attention_bias": False}
    return config | _sliding(reader, config["num_hidden_layers"], 4)


def glm4(reader: MetadataReader) -> Config:
    """GLM 4 dense."""
    config = common(reader, "Glm4ForCausalLM", "glm4")
    config |= attention(reader, config) | rms_norm(reader)
    config |= rope(reader, config["head_dim"])
    return config | {
        "partial_rotary_factor": config.get("partial_rotary_factor", 1.0),
        "intermediate_size": reader.integer("feed_forward_length"),
        "hidden_act": "silu",
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
    }


def command_r(reader: MetadataReader) -> Config:
    """Command R."""
    config = _cohere(reader, "CohereForCausalLM", "cohere")
    return config | {"use_qk_norm": reader.has_tensor("blk.0.attn_q_norm.weight")}


def cohere2(reader: MetadataReader) -> Config:
    """Command R7B and A: three layers slide for one that does not."""
    config = _cohere(reader, "Cohere2ForCausalLM", "cohere2")
    return config | _sliding(reader, config["num_hidden_layers"], 4)


def _cohere(reader: MetadataReader, hf_class: str, model_type: str) -> Config:
    config = common(reader, hf_class, model_type)
    config |= attention(reader, config)
    config |= _full_rope(reader, config["head_dim"])
    return config | {
        "intermediate_size": reader.integer("feed_forward_length"),
        "layer_norm_eps": reader.number("attention.layer_norm_epsilon"),
        "logit_scale": reader.number("logit_scale"),
        "hidden_act": "silu",
        "attention_bias": reader.has_tensor("blk.0.attn_q.bias"),
    }

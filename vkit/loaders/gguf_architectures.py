"""The GGUF architectures that can be loaded: configuration, names and value transforms of each, in one table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vkit.loaders import gguf_config, gguf_config_mixed, names
from vkit.loaders.gguf_config import Config, MetadataReader
from vkit.loaders.names import NameMap
from vkit.loaders.transforms import (
    CONVOLUTION,
    DEPTHWISE,
    FLAT,
    FLAT_LOGARITHM,
    GROUPS,
    KIMI_LOGARITHM,
    LOGARITHM,
    MINUS_ONE,
    ONE_ROW,
    TRANSPOSED,
    Split,
    Transform,
    half_split_rows,
    split_heads,
    split_qkv,
)


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How one architecture reads. Keys of `transforms` and `splits` are GGUF base names, as in the name map.

    Transforms apply to weight and bias alike; a weight that is split is not transformed.
    """

    config: Callable[[MetadataReader], Config]
    names: NameMap
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    splits: Mapping[str, Split] = field(default_factory=dict)
    constants: frozenset[str] = frozenset()
    """Base names of tensors that only spell out a number of the configuration."""

    def is_synthetic(self, gguf_name: str) -> bool:
        """Whether a tensor is one of `constants`."""
        return bool(self.constants) and gguf_name.split(".", 2)[-1].removesuffix(".weight") in self.constants


_HALF_SPLIT = {
    "attn_q": half_split_rows("num_attention_heads"),
    "attn_k": half_split_rows("num_key_value_heads"),
}
_NORMS = (
    "attn_norm",
    "ffn_norm",
    "post_attention_norm",
    "post_ffw_norm",
    "attn_q_norm",
    "attn_k_norm",
    "output_norm",
)
_ZERO_CENTRED = dict.fromkeys(_NORMS, MINUS_ONE)
_CONV1D = dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), TRANSPOSED)

_MAMBA = {"ssm_a": FLAT_LOGARITHM, "ssm_d": FLAT, "ssm_norm": GROUPS, "ssm_conv1d": CONVOLUTION}

ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "deepseek2": GGUFArchitecture(gguf_config_mixed.deepseek2, names.DEEPSEEK2),
    "deepseek4": GGUFArchitecture(gguf_config_mixed.deepseek4, names.DEEPSEEK4),
    "gemma4": GGUFArchitecture(gguf_config_mixed.gemma4, names.GEMMA4),
    "kimi-linear": GGUFArchitecture(
        gguf_config_mixed.kimi_linear,
        names.KIMI_LINEAR,
        {"ssm_a": KIMI_LOGARITHM} | dict.fromkeys(("ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), CONVOLUTION),
    ),
    "laguna": GGUFArchitecture(gguf_config_mixed.laguna, names.LAGUNA),
    "minicpm3": GGUFArchitecture(gguf_config_mixed.minicpm3, names.MINICPM3),
    "muse-glimmer": GGUFArchitecture(
        gguf_config_mixed.muse_glimmer,
        names.MUSE_GLIMMER,
        _HALF_SPLIT | dict.fromkeys(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), MINUS_ONE),
        constants=frozenset({"attn_q_norm", "attn_k_norm"}),
    ),
    "nemotron_h": GGUFArchitecture(gguf_config_mixed.nemotron_h, names.NEMOTRON_H, _MAMBA),
    "nemotron_h_moe": GGUFArchitecture(gguf_config_mixed.nemotron_h, names.NEMOTRON_H, _MAMBA),
    "qwen35moe": GGUFArchitecture(
        gguf_config_mixed.qwen35moe,
        names.QWEN35MOE,
        _ZERO_CENTRED | {"ssm_a": LOGARITHM, "ssm_conv1d": DEPTHWISE, "ffn_gate_inp_shexp": ONE_ROW},
    ),
    "command-r": GGUFArchitecture(gguf_config.command_r, names.COHERE),
    "cohere2": GGUFArchitecture(gguf_config.cohere2, names.COHERE),
    "gemma": GGUFArchitecture(gguf_config.gemma, names.GEMMA, _ZERO_CENTRED),
    "gemma2": GGUFArchitecture(gguf_config.gemma2, names.GEMMA2, _ZERO_CENTRED),
    "gemma3": GGUFArchitecture(gguf_config.gemma3, names.GEMMA3, _ZERO_CENTRED),
    "glm4": GGUFArchitecture(gguf_config.glm4, names.GLM4),
    "gpt2": GGUFArchitecture(gguf_config.gpt2, names.GPT2, _CONV1D),
    "granite": GGUFArchitecture(gguf_config.granite, names.PLAIN, _HALF_SPLIT),
    # InternLM2 is Llama with q, k and v fused; the file holds them apart, so it loads as Llama.
    "internlm2": GGUFArchitecture(gguf_config.llama, names.PLAIN, _HALF_SPLIT),
    "llama": GGUFArchitecture(gguf_config.llama, names.LLAMA, _HALF_SPLIT),
    "minicpm": GGUFArchitecture(gguf_config.minicpm, names.PLAIN, _HALF_SPLIT),
    "mistral3": GGUFArchitecture(gguf_config.mistral3, names.PLAIN, _HALF_SPLIT),
    "olmo2": GGUFArchitecture(gguf_config.olmo2, names.OLMO2),
    "phi2": GGUFArchitecture(gguf_config.phi2, names.PHI2, splits={"attn_qkv": split_qkv}),
    "phi3": GGUFArchitecture(gguf_config.phi3, names.PHI3),
    "qwen2": GGUFArchitecture(gguf_config.qwen2, names.PLAIN),
    "qwen3": GGUFArchitecture(gguf_config.qwen3, names.QWEN3),
    "qwen35": GGUFArchitecture(
        gguf_config.qwen35, names.QWEN35, _ZERO_CENTRED | {"ssm_a": LOGARITHM, "ssm_conv1d": DEPTHWISE}
    ),
    "qwen3moe": GGUFArchitecture(gguf_config.qwen3moe, names.QWEN3_MOE),
    # Positions in three axes only matter beside a tower, which lies in a file of its own (mmproj.py).
    "qwen3vl": GGUFArchitecture(gguf_config.qwen3, names.QWEN3),
    "stablelm": GGUFArchitecture(
        gguf_config.stablelm, names.STABLELM, splits={"attn_q_norm": split_heads, "attn_k_norm": split_heads}
    ),
}
"""By `general.architecture`."""

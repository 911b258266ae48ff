"""A checkpoint's tensors under the names that the GGUF name maps know, whatever its family spells or packs them like.

Experts become one stack each, InternLM2's fused projection comes apart, the wrapper of multimodal models goes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vkit.errors import ModelLoadError
from vkit.loaders import Checkpoint

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
_HEAD_NORM = re.compile(r"(.+_layernorm)\.norms\.(\d+)\.weight")
_TOWERS = (
    *("visual", "vision_tower", "vision_model", "vision_adapter", "vision_projection", "vision_embedder"),
    *("audio_tower", "embed_vision", "embed_audio", "multi_modal_projector"),
)
_LEFT_OUT = re.compile(rf"(?:model\.)?(?:{'|'.join(_TOWERS)})\..*|mtp\..*")
_IGNORED = re.compile(r".*rotary_emb\.inv_freq|.*\.masked_bias|.*\.attn\.bias")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor to convert; `load` reads it, dense, in the checkpoint's own dtype or float32."""

    name: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    is_float: bool = True


def dense(checkpoint: Checkpoint, name: str) -> Tensor:
    """A tensor of the checkpoint with all its values spelled out."""
    weight = checkpoint.load(name)
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


def source_tensors(checkpoint: Checkpoint, config: dict[str, Any]) -> tuple[dict[str, SourceTensor], list[str]]:
    """The text model's tensors by their plain names; and the names of those that a text model has no place for."""
    found: dict[str, SourceTensor] = {}
    left_out: list[str] = []
    stacks: dict[str, dict[int, str]] = {}
    for name in sorted(checkpoint.tensor_names()):
        if _IGNORED.fullmatch(name):
            continue
        if _LEFT_OUT.fullmatch(name) or _is_draft(name, config):
            left_out.append(name)
            continue
        plain = _plain_name(name, checkpoint.architecture)
        expert, head = _EXPERT.fullmatch(plain), _HEAD_NORM.fullmatch(plain)
        if expert is not None:
            stacks.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = name
        elif head is not None:
            stacks.setdefault(f"{head[1]}.weight", {})[int(head[2])] = name
        else:
            for tensor in _unpacked(checkpoint, name, plain, config):
                found[tensor.name] = tensor
    for name, members in stacks.items():
        found[name] = _stack(checkpoint, name, members)
    if config.get("tie_word_embeddings"):
        found.pop("lm_head.weight", None)
    return found, left_out


def _plain_name(name: str, architecture: str) -> str:
    """The name with the prefix that most published files of its family have."""
    if architecture == "LlamaModel" and not name.startswith("model."):
        return f"model.{name}"
    if architecture == "GPT2LMHeadModel" and not name.startswith(("transformer.", "lm_head.")):
        return f"transformer.{name}"
    return name if architecture.startswith("Gemma4") else name.replace("model.language_model.", "model.", 1)


def _is_draft(name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor belongs to a layer after the model's own, which only predicts further tokens ahead."""
    layer = re.match(r"(?:.*\.)?layers\.(\d+)\.", name)
    return layer is not None and int(layer[1]) >= int(config.get("num_hidden_layers") or 10**9)


def _stack(checkpoint: Checkpoint, name: str, members: dict[int, str]) -> SourceTensor:
    if sorted(members) != list(range(len(members))):
        raise ModelLoadError(
            f"{checkpoint.path}: {name}: parts {sorted(members)} are not numbered from 0 without a gap"
        )
    names = [members[number] for number in range(len(members))]
    shapes = {tuple(checkpoint.tensor_info(member).shape) for member in names}
    if len(shapes) != 1:
        raise ModelLoadError(f"{checkpoint.path}: {name}: parts of different shapes {sorted(shapes)}")
    return SourceTensor(
        name, (len(names), *shapes.pop()), lambda: torch.stack([dense(checkpoint, member) for member in names])
    )


def _unpacked(checkpoint: Checkpoint, name: str, plain: str, config: dict[str, Any]) -> list[SourceTensor]:
    """The tensor itself, or the parts it holds."""
    info = checkpoint.tensor_info(name)
    if plain.endswith(".experts.gate_up_proj") and checkpoint.architecture.startswith("Gemma4"):
        return [SourceTensor(f"{plain}.weight", info.shape, lambda: dense(checkpoint, name))]
    if plain.endswith(".experts.gate_up_proj"):
        base = plain.removesuffix("gate_up_proj")
        half = info.shape[1] // 2
        shape = (info.shape[0], half, info.shape[2])
        return [
            SourceTensor(f"{base}gate_proj.weight", shape, lambda: dense(checkpoint, name)[:, :half]),
            SourceTensor(f"{base}up_proj.weight", shape, lambda: dense(checkpoint, name)[:, half:]),
        ]
    if plain.endswith(".experts.down_proj"):
        return [SourceTensor(f"{plain}.weight", info.shape, lambda: dense(checkpoint, name))]
    if checkpoint.architecture == "InternLM2ForCausalLM":
        return _internlm2(checkpoint, name, config)
    is_float = info.dtype is None or info.dtype.is_floating_point
    return [SourceTensor(plain, info.shape, lambda: dense(checkpoint, name), is_float)]


_INTERNLM2 = {
    "tok_embeddings": "embed_tokens",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def _internlm2(checkpoint: Checkpoint, name: str, config: dict[str, Any]) -> list[SourceTensor]:
    """Llama's names; `wqkv` holds for each key head its queries, then its key, then its value."""
    shape = checkpoint.tensor_info(name).shape
    if ".wqkv." not in name:
        renamed = "lm_head.weight" if name == "output.weight" else name
        for old, new in _INTERNLM2.items():
            renamed = renamed.replace(f".{old}.", f".{new}.")
        return [SourceTensor(renamed, shape, lambda: dense(checkpoint, name))]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    group = heads // kv_heads
    width = shape[0] // (kv_heads * (group + 2))

    def part(start: int, stop: int) -> Callable[[], Tensor]:
        def load() -> Tensor:
            weight = dense(checkpoint, name)
            grouped = weight.view(kv_heads, group + 2, width, *weight.shape[1:])
            return grouped[:, start:stop].flatten(0, 2)

        return load

    sizes = {"q_proj": (0, group), "k_proj": (group, group + 1), "v_proj": (group + 1, group + 2)}
    return [
        SourceTensor(
            name.replace("attention.wqkv", f"self_attn.{key}"),
            (kv_heads * (stop - start) * width, *shape[1:]),
            part(start, stop),
        )
        for key, (start, stop) in sizes.items()
    ]

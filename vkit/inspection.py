"""What a model is and what it would need, from its headers alone: no weight byte is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from vkit.config import EngineArgs, resolve_token_budget
from vkit.description import describe_model
from vkit.device import find_device
from vkit.errors import ModelLoadError, UsageError
from vkit.facts import ModelFacts
from vkit.loaders import Checkpoint, TensorInfo, open_checkpoint
from vkit.models import check_tensors, create_model
from vkit.models.hf_config import HFConfig
from vkit.text.tokenizer import load_tokenizer

SIZE_KEYS: dict[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers", "n_layer"),
    "hidden_size": ("hidden_size", "n_embd"),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_dim"),
    "num_heads": ("num_attention_heads", "n_head"),
    "num_kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "num_experts": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts_per_tok",),
    "vocab_size": ("vocab_size",),
}
"""Sizes worth showing -> the names that families give them."""


@dataclass(frozen=True, slots=True)
class Inspection:
    """One model, read from its headers."""

    checkpoint: Checkpoint
    facts: ModelFacts | None
    """None when nothing here computes the architecture; `problem` says why."""
    problem: str | None
    """Why the model cannot be loaded, or None."""

    @property
    def tensors(self) -> list[TensorInfo]:
        """Every tensor, in the order of names with numbers compared as numbers."""
        names = sorted(self.checkpoint.tensor_names(), key=_natural)
        return [self.checkpoint.tensor_info(name) for name in names]

    def to_dict(self, args: EngineArgs) -> dict[str, Any]:
        """Everything in plain JSON values; memory as for `args.max_model_len` and `args.max_num_seqs`."""
        checkpoint, tensors = self.checkpoint, self.tensors
        num_parameters = sum(prod(info.shape) for info in tensors)
        num_bytes = sum(info.nbytes for info in tensors)
        return {
            "name": checkpoint.name,
            "path": str(checkpoint.path),
            "format": checkpoint.format,
            "architecture": checkpoint.architecture,
            "is_loadable": self.problem is None,
            "problem": self.problem,
            "num_parameters": num_parameters,
            "num_tensors": len(tensors),
            "num_weight_bytes": num_bytes,
            "bits_per_weight": round(8 * num_bytes / num_parameters, 2) if num_parameters else 0.0,
            "quantization": _scheme_of(checkpoint),
            "types": _types(tensors),
            "max_model_len": None if self.facts is None else self.facts.max_model_len,
            "sizes": _sizes(checkpoint),
            **_text_facts(checkpoint),
            "memory": None if self.facts is None else memory_needed(self.facts, args),
            "tensors": [
                {"name": info.name, "shape": list(info.shape), "type": _type_of(info), "num_bytes": info.nbytes}
                for info in tensors
            ],
        }


def inspect_model(args: EngineArgs) -> Inspection:
    """The model at `args.model`; reads headers, configuration and tokenizer files only.

    Raises:
        CheckpointError: a file is missing or damaged.
        ModelLoadError: the format, or the quantisation scheme, cannot be read at all.
    """
    checkpoint = open_checkpoint(Path(args.model))
    device = find_device(args.device)
    try:
        facts = describe_model(checkpoint, args, device).facts
    except ModelLoadError as error:
        return Inspection(checkpoint, None, str(error))
    try:
        check_tensors(create_model(checkpoint, _Shape(facts, device.kind)), checkpoint)
    except ModelLoadError as error:
        return Inspection(checkpoint, facts, str(error))
    return Inspection(checkpoint, facts, None)


def memory_needed(facts: ModelFacts, args: EngineArgs) -> dict[str, Any]:
    """Bytes for `max_num_seqs` sequences of `max_model_len` tokens (0: the model's limit) at a time.

    Raises:
        UsageError: more tokens than the model was made for.
    """
    length = args.max_model_len or facts.max_model_len
    if length > facts.max_model_len:
        raise UsageError(
            f"--max-model-len: {length} is above the {facts.max_model_len} tokens {facts.name} was made for"
        )
    block_size = facts.block_size_for(args.block_size)
    budget = resolve_token_budget(args, length, facts.is_moe)
    num_blocks = 1 + args.max_num_seqs * facts.blocks_for(length, block_size, budget)
    cache_bytes = num_blocks * facts.bytes_per_block(block_size)
    return {
        "max_model_len": length,
        "max_num_seqs": args.max_num_seqs,
        "block_size": block_size,
        "num_blocks": num_blocks,
        "weight_bytes": facts.num_weight_bytes,
        "cache_bytes": cache_bytes,
        "activation_bytes": facts.num_activation_bytes,
        "total_bytes": facts.num_weight_bytes + cache_bytes + facts.num_activation_bytes,
        "cache": _cache_kinds(facts),
    }


def _cache_kinds(facts: ModelFacts) -> list[dict[str, Any]]:
    """What layers keep, those of one kind and window together."""
    kinds: dict[tuple[str, int | None], list[int]] = {}
    for group in facts.cache_groups:
        totals = kinds.setdefault((group.kind, group.window), [0, 0])
        totals[0] += group.num_layers
        totals[1] += group.num_layers * group.bytes_per_unit
    return [
        {
            "kind": kind,
            "num_layers": num_layers,
            "window": window,
            "bytes_per_sequence" if kind == "state" else "bytes_per_token": num_bytes,
        }
        for (kind, window), (num_layers, num_bytes) in kinds.items()
    ]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Enough of a configuration to list a model's tensors."""

    facts: ModelFacts
    device: str
    dtype: str = "float32"
    kv_cache_dtype: str = "float32"

    @property
    def max_model_len(self) -> int:
        return self.facts.max_model_len


def _types(tensors: list[TensorInfo]) -> dict[str, dict[str, int]]:
    """What weights are stored as: type -> tensors, parameters and bytes, largest first."""
    types: dict[str, dict[str, int]] = {}
    for info in tensors:
        entry = types.setdefault(_type_of(info), {"num_tensors": 0, "num_parameters": 0, "num_bytes": 0})
        entry["num_tensors"] += 1
        entry["num_parameters"] += prod(info.shape)
        entry["num_bytes"] += info.nbytes
    return dict(sorted(types.items(), key=lambda item: -item[1]["num_bytes"]))


def _type_of(info: TensorInfo) -> str:
    return info.qtype or str(info.dtype).removeprefix("torch.")


def _scheme_of(checkpoint: Checkpoint) -> str | None:
    """The declared scheme of a safetensors checkpoint; for a GGUF file the block type most bytes have."""
    if checkpoint.format == "gguf":
        packed = _types(
            [info for name in checkpoint.tensor_names() if (info := checkpoint.tensor_info(name)).is_packed]
        )
        return next(iter(packed), None)
    return checkpoint.quantization


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    config = HFConfig(checkpoint.config)
    found = {}
    for name, keys in SIZE_KEYS.items():
        value = next((config.values[key] for key in keys if isinstance(config.values.get(key), int)), None)
        if value is not None:
            found[name] = value
    return found


def _text_facts(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Tokenizer and template; a model without a tokenizer is still a model."""
    try:
        tokenizer = load_tokenizer(checkpoint)
    except ModelLoadError as error:
        return {"tokenizer": None, "tokenizer_problem": str(error), "chat_template": None}
    return {
        "tokenizer": {
            "num_tokens": tokenizer.vocab_size,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "adds_bos": tokenizer.adds_bos,
            "chat_templates": sorted(tokenizer.chat_templates),
        },
        "tokenizer_problem": None,
        "chat_template": tokenizer.chat_templates.get("default"),
    }


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

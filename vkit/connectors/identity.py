"""What the bytes of a cache block mean: everything that two engines must agree on to share them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from vkit.cache.groups import LayerCacheSpec
from vkit.cache.store import TensorStore
from vkit.connectors.file_digest import file_digest

FORMAT_VERSION = "1"
SHARED_HASH_SEED = "vkit"
"""Seed of block hashes wherever a connector is in use: names must outlive the process."""

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_SIGNS_OF_LENGTH = ('"dynamic"', '"long_factor"')
"""What configurations say whose angles depend on the context limit; a false sign only keeps stores apart."""


class IdentityConfig(Protocol):
    """The part of the engine's configuration that shapes cache entries."""

    @property
    def dtype(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def cpu_precision(self) -> str: ...
    @property
    def gguf_dequantize(self) -> bool: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def deterministic(self) -> bool: ...
    @property
    def prefix_caching_hash_algo(self) -> str: ...


class IdentityCheckpoint(Protocol):
    """The part of a checkpoint that shapes cache entries."""

    @property
    def name(self) -> str: ...
    @property
    def weight_files(self) -> Sequence[Path]: ...
    @property
    def quantization(self) -> str | None: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def architecture(self) -> str: ...
    def preprocessor_config(self, kind: Literal["image", "video"]) -> Mapping[str, Any]: ...


def cache_identity(
    config: IdentityConfig, checkpoint: IdentityCheckpoint, specs: Sequence[LayerCacheSpec | None]
) -> dict[str, str]:
    """Names and values that must all be equal for two engines to share entries.

    `weights` is of every byte of every file (a fine-tuned twin differs in some); `quantization` is what the weights are
    once loaded, so plain ones that are rounded on the way have names of their own.
    """
    values = dict(checkpoint.config)
    store = TensorStore(list(specs), num_blocks=2, block_size=config.block_size, device=torch.device(config.device))
    layout = [
        {name: [str(x.dtype), list(x.shape[1:]), list(x.stride()[1:])] for name, x in tensors.items()}
        for tensors in store.tensors
    ]
    return {
        "format_version": FORMAT_VERSION,
        "model": checkpoint.name,
        "architecture": checkpoint.architecture,
        "config": _digest(values),
        "weights": _weights_digest(checkpoint.weight_files),
        "quantization": f"{checkpoint.quantization}{' expanded' if config.gguf_dequantize else ''}",
        "media": _digest([checkpoint.preprocessor_config("image"), checkpoint.preprocessor_config("video")]),
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "cpu_precision": config.cpu_precision,
        "deterministic": str(config.deterministic),
        "rope": _digest([{key: values.get(key) for key in _ROPE_KEYS}, _rope_length(values, config.max_model_len)]),
        "windows": json.dumps([spec.window if spec is not None else None for spec in specs]),
        "block_size": str(config.block_size),
        "page_layout": _digest(layout),
        "device": config.device,
        "hash_algorithm": config.prefix_caching_hash_algo,
        "hash_seed": SHARED_HASH_SEED,
        "parallel": "tp1 pp1",
    }


def identity_digest(identity: Mapping[str, str]) -> str:
    """A short name of an identity."""
    return _digest(dict(identity))[:24]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def _rope_length(values: Mapping[str, Any], max_model_len: int) -> int | None:
    """The context limit where angles depend on it (dynamic and longrope), else None."""
    text = json.dumps(values, default=str)
    return max_model_len if any(sign in text for sign in _SIGNS_OF_LENGTH) else None


def _weights_digest(files: Sequence[Path]) -> str:
    return _digest([file_digest(file) for file in files])

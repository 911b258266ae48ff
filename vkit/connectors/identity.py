"""What the bytes of a cache block mean: everything that two engines must agree on to share them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from vkit.cache.groups import LayerCacheSpec
from vkit.cache.store import TensorStore

FORMAT_VERSION = "1"
SHARED_HASH_SEED = "vkit"
"""Seed of block hashes wherever a connector is in use: names must outlive the process."""

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
_SAMPLES = 16
_SAMPLE_BYTES = 4096


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
    def prefix_caching_hash_algo(self) -> str: ...


class IdentityCheckpoint(Protocol):
    """The part of a checkpoint that shapes cache entries."""

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> Any: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def architecture(self) -> str: ...


def cache_identity(
    config: IdentityConfig, checkpoint: IdentityCheckpoint, specs: Sequence[LayerCacheSpec | None]
) -> dict[str, str]:
    """Names and values that must all be equal; samples of the weights tell a fine-tuned twin apart."""
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
        "weights": _weights_digest(Path(checkpoint.path)),
        "quantization": f"{_digest(values.get('quantization_config'))}{' expanded' if config.gguf_dequantize else ''}",
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "cpu_precision": config.cpu_precision,
        "rope": _digest({key: values.get(key) for key in _ROPE_KEYS}),
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


def _weights_digest(path: Path) -> str:
    """SHA-256 of the size of each weight file and of samples spread over it."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{size};".encode())
        with file.open("rb") as stream:
            for index in range(_SAMPLES):
                stream.seek(size * index // _SAMPLES)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()

"""Small model files made byte by byte, so that tests can damage them where they like."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GGUFWriter = Callable[..., bytes]
TENSOR_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "BF16": 30, "NVFP4": 40}

LLAMA_KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "d", "e", "f", "g", "h"],
    "tokenizer.ggml.scores": np.arange(8, dtype=np.float32),
    "tokenizer.ggml.eos_token_id": 2,
}
LLAMA_SHAPES = {
    "token_embd.weight": (8, 32),
    "output_norm.weight": (32,),
    "blk.0.attn_norm.weight": (32,),
    "blk.0.attn_q.weight": (32, 32),
    "blk.0.attn_k.weight": (16, 32),
    "blk.0.attn_v.weight": (16, 32),
    "blk.0.attn_output.weight": (32, 32),
    "blk.0.ffn_norm.weight": (32,),
    "blk.0.ffn_gate.weight": (32, 32),
    "blk.0.ffn_up.weight": (32, 32),
    "blk.0.ffn_down.weight": (32, 32),
}


def gguf_string(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value: Any) -> bytes:
    """Value type and value."""
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<IQ", 10, value) if value > 0xFFFFFFFF else struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str | bytes):
        return struct.pack("<I", 8) + gguf_string(value)
    if isinstance(value, np.ndarray):
        kinds = {"float32": 6, "int32": 5, "bool": 7, "uint8": 0, "int64": 11, "float64": 12}
        return struct.pack("<IIQ", 9, kinds[value.dtype.name], len(value)) + value.tobytes()
    assert isinstance(value, list)
    if value and isinstance(value[0], list | np.ndarray):
        return struct.pack("<IIQ", 9, 9, len(value)) + b"".join(gguf_value(item)[4:] for item in value)
    return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(gguf_string(text) for text in value)


def write_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[tuple[int, ...], str, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A GGUF file; tensors are (torch shape, type name, bytes)."""
    head, data = b"", b""
    for name, (shape, kind, raw) in tensors.items():
        dims = b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += gguf_string(name) + struct.pack("<I", len(shape)) + dims
        head += struct.pack("<IQ", TENSOR_TYPES[kind], len(data))
        data += raw + bytes(-len(raw) % alignment)
    keys = b"".join(gguf_string(key) + gguf_value(value) for key, value in metadata.items())
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + keys + head
    return head + bytes(-len(head) % alignment) + data.rstrip(b"\0") + bytes(len(data) - len(data.rstrip(b"\0")))


def random_tensors(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    rng = np.random.default_rng(0)
    return {
        name: (shape, "F32", rng.standard_normal(shape).astype(np.float32).tobytes()) for name, shape in shapes.items()
    }


def write_safetensors(tensors: Mapping[str, np.ndarray[Any, Any]], header: dict[str, Any] | None = None) -> bytes:
    """A safetensors file; entries of `header` replace or add to the right ones."""
    data, entries = b"", {}
    kinds = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}
    for name, array in tensors.items():
        entries[name] = {
            "dtype": kinds[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + array.nbytes],
        }
        data += array.tobytes()
    text = json.dumps(entries | (header or {})).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of specifications and goldens beside the checkout."""
    return Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture(scope="session")
def gguf_file() -> Callable[..., bytes]:
    """write_gguf."""
    return write_gguf


@pytest.fixture(scope="session")
def safetensors_file() -> Callable[..., bytes]:
    """write_safetensors."""
    return write_safetensors


@pytest.fixture
def llama_keys() -> dict[str, Any]:
    """Metadata of a complete tiny llama file."""
    return dict(LLAMA_KEYS)


@pytest.fixture
def llama_tensors() -> dict[str, tuple[tuple[int, ...], str, bytes]]:
    """Tensors of the tiny llama file."""
    return random_tensors(LLAMA_SHAPES)

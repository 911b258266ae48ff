"""Models of random weights in the shape of a real one, written where a benchmark runs: nothing is downloaded.

Their text is noise, and their speed is that of the model whose shape they have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from vkit.conversion.gguf_file import gguf_header
from vkit.quantization import BLOCK_FORMATS

Q4_K_SPREAD = 330.0
"""Standard deviation of a Q4_K block of random bytes whose two scales are 1, the mean taken out."""


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int

    def matrices(self) -> Iterator[tuple[str, str, int, int]]:
        """(name, name in GGUF files, rows, columns) of every matrix, the embedding first and the head last."""
        yield "model.embed_tokens", "token_embd", self.vocab, self.hidden
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        for layer in range(self.layers):
            here, there = f"model.layers.{layer}", f"blk.{layer}"
            yield f"{here}.self_attn.q_proj", f"{there}.attn_q", q, self.hidden
            yield f"{here}.self_attn.k_proj", f"{there}.attn_k", kv, self.hidden
            yield f"{here}.self_attn.v_proj", f"{there}.attn_v", kv, self.hidden
            yield f"{here}.self_attn.o_proj", f"{there}.attn_output", self.hidden, q
            yield f"{here}.mlp.gate_proj", f"{there}.ffn_gate", self.intermediate, self.hidden
            yield f"{here}.mlp.up_proj", f"{there}.ffn_up", self.intermediate, self.hidden
            yield f"{here}.mlp.down_proj", f"{there}.ffn_down", self.hidden, self.intermediate
        yield "lm_head", "output", self.vocab, self.hidden

    def norms(self) -> Iterator[tuple[str, str]]:
        """(name, name in GGUF files) of every norm's weight, (hidden,) ones."""
        for layer in range(self.layers):
            yield f"model.layers.{layer}.input_layernorm", f"blk.{layer}.attn_norm"
            yield f"model.layers.{layer}.post_attention_layernorm", f"blk.{layer}.ffn_norm"
        yield "model.norm", "output_norm"

    @property
    def num_multiplied(self) -> int:
        """Weights that every token is multiplied with."""
        return sum(rows * columns for name, _, rows, columns in self.matrices() if "embed" not in name)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of the cache of one token, two per number."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim

    def prefill_flop(self, num_tokens: int) -> int:
        """Operations of a prompt: products with the weights, scores and values of attention; one row of the head."""
        head = self.vocab * self.hidden
        products = 2 * num_tokens * (self.num_multiplied - head) + 2 * head
        return products + 2 * self.layers * self.heads * self.head_dim * num_tokens * (num_tokens + 1)


LLAMA_8B = Shape(4096, 14336, 32, 32, 8, 128, 128_256, 8192 + 1024)
TINY = Shape(256, 512, 2, 4, 2, 64, 300, 256)
SMALL = Shape(256, 768, 4, 8, 2, 32, 512, 256)
"""For the comparison of tokens between backends."""


@dataclass(frozen=True)
class Stored:
    """A model on disk."""

    path: Path
    tokenizer: Path
    shape: Shape
    weight_bytes: int
    """As stored, without the table of embeddings, of which a step reads a row per token."""


def write_plain(folder: Path, shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Stored:
    """A folder of safetensors files, one per layer, that `transformers` reads too. Done already: only described."""
    num_bytes = shape.num_multiplied * dtype.itemsize + sum(1 for _ in shape.norms()) * shape.hidden * dtype.itemsize
    stored = Stored(folder, folder, shape, num_bytes)
    if (folder / "model.safetensors.index.json").exists():
        return stored
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab, "max_position_embeddings": shape.max_len, "rms_norm_eps": 1e-5, "mlp_bias": False,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "dtype": str(dtype).removeprefix("torch."),
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator(device).manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, _, rows, columns in shape.matrices():
        weight = torch.randn(rows, columns, generator=generator, device=device, dtype=dtype)
        files.setdefault(_file_of(name), {})[f"{name}.weight"] = weight.mul_(columns**-0.5).cpu()
    for name, _ in shape.norms():
        files.setdefault(_file_of(name), {})[f"{name}.weight"] = torch.ones(shape.hidden, dtype=dtype)
    places = {}
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return stored


def write_q4_k(path: Path, shape: Shape, tokenizer: Path) -> Stored:
    """A GGUF file with every matrix in Q4_K, of random blocks: speed alone is asked of it."""
    block = BLOCK_FORMATS["Q4_K"]
    tensors = [(f"{name}.weight", (rows, columns), "Q4_K") for _, name, rows, columns in shape.matrices()]
    tensors += [(f"{name}.weight", (shape.hidden,), "F32") for _, name in shape.norms()]
    multiplied = shape.num_multiplied // block.num_elements * block.num_bytes
    stored = Stored(path, tokenizer, shape, multiplied + 4 * shape.hidden * sum(1 for _ in shape.norms()))
    if path.exists():
        return stored
    header, offsets = gguf_header(_metadata(shape), tensors)
    rng = np.random.default_rng(0)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        file.write(header)
        for (_, dims, kind), offset in zip(tensors, offsets, strict=True):
            file.seek(offset)
            if kind == "F32":
                file.write(np.ones(dims, np.float32).tobytes())
            else:
                file.write(_random_blocks(rng, dims[0] * dims[1] // block.num_elements, dims[1]))
    partial.rename(path)
    return stored


def _random_blocks(rng: np.random.Generator, count: int, columns: int) -> bytes:
    """Q4_K blocks: two float16 scales that make the weights about 1 / sqrt(columns), then random codes."""
    scale = 1.0 / (Q4_K_SPREAD * math.sqrt(columns))
    blocks = rng.integers(0, 256, (count, BLOCK_FORMATS["Q4_K"].num_bytes), np.uint8)
    blocks[:, :4] = np.array([scale, 7.5 * scale], np.float16).view(np.uint8)
    return blocks.tobytes()


def _metadata(shape: Shape) -> dict[str, Any]:
    sizes = {
        "vocab_size": shape.vocab, "context_length": shape.max_len, "embedding_length": shape.hidden,
        "block_count": shape.layers, "feed_forward_length": shape.intermediate, "rope.freq_base": 500000.0,
        "attention.head_count": shape.heads, "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim, "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": shape.head_dim,
    }  # fmt: skip
    general = {"general.architecture": "llama", "general.name": "synthetic", "general.quantization_version": 2}
    return general | {f"llama.{key}": value for key, value in sizes.items()}


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes: prompts are token ids, and nobody reads the output."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letters[byte]: byte for byte in range(256)}, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))


def described(stored: Stored) -> dict[str, Any]:
    """What a report says of a model."""
    return {"shape": asdict(stored.shape), "weight_bytes": stored.weight_bytes}


def _file_of(name: str) -> str:
    layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
    return f"model-{layer}.safetensors"

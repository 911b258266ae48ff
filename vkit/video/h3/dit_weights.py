"""The diffusion transformer's tensors, whichever of its spellings a file has: names, row orders, shapes.

Three spellings: the release (fused qkv rows grouped by head, or contiguous; fc1 = [gate; up]), the split one (q, k, v
apart; [up; gate]), and GGUF files of the release's names. Everything is handed out in one: contiguous qkv, [gate; up].
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vkit.errors import CheckpointError, ModelLoadError, UsageError
from vkit.loaders.checkpoint import some_names
from vkit.loaders.tensors import open_tensors
from vkit.quantization import QuantizedTensor
from vkit.video.h3.config_files import read_config
from vkit.video.h3.dit_config import PATCH_VOLUME, DiTConfig
from vkit.video.h3.request import QkvLayout
from vkit.video.h3.weights import BlockWeight, Layer

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
CURVE_TABLE = "adaln_t_table"

SPLIT_NAMES = {
    "video_patch_proj": "proj_in",
    "audio_patch_proj": "audio_proj_in",
    "condition_proj": "context_embedder",
    "time_embedder.proj_in": "time_embedder.linear_1",
    "time_embedder.proj_out": "time_embedder.linear_2",
    "token_refiner.final_norm": "token_refiner.final_norm",
    "final_layer.norm": "norm_out.norm",
    "final_layer.adaln_proj.linear": "norm_out.linear",
    "final_layer.video_out": "proj_out",
    "final_layer.audio_out": "audio_proj_out",
}
SPLIT_BLOCK_NAMES = {
    "norm1": "norm1",
    "norm2": "norm2",
    "attn.q_norm": "attn.norm_q",
    "attn.k_norm": "attn.norm_k",
    "attn.out_proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "adaln_proj.linear": "adaln_proj.linear",
}
SPLIT_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
BLOCK_TENSORS = {
    "norm1": "norm1.weight",
    "norm2": "norm2.weight",
    "qkv": "attn.qkv_proj.weight",
    "q_norm": "attn.q_norm.weight",
    "k_norm": "attn.k_norm.weight",
    "out": "attn.out_proj.weight",
    "fc1": "mlp.fc1.weight",
    "fc2": "mlp.fc2.weight",
}
"""Short name -> release name within a block."""
MATRICES = frozenset({"qkv", "out", "fc1", "fc2"})

_BLOCK = re.compile(r"(token_refiner\.)?blocks\.(\d+)\.")


class DiTWeights:
    """The opened files of a diffusion transformer."""

    def __init__(self, path: Path, *, qkv_layout: QkvLayout | None = None, config: Path | None = None) -> None:
        """Open `path` and check every header.

        Raises:
            CheckpointError: a tensor is missing, or has a shape that contradicts the others or the configuration.
            ModelLoadError: a form of the weights that is not supported.
            UsageError: a row order is asked for where the rows are not fused.
        """
        self.path = path
        self.files = open_tensors(path)
        self._names = {_without_prefix(name): name for name in self.files.names()}
        self.is_split = "proj_in.weight" in self._names
        self._refuse_other_forms()
        if self.is_split and qkv_layout is not None:
            raise UsageError(f"--qkv-layout {qkv_layout}: {path} keeps q, k and v apart, there is no order to choose")
        is_grouped = not self.is_split and self.files.is_sharded
        self.qkv_layout: QkvLayout = qkv_layout or ("grouped" if is_grouped else "contiguous")
        given = _given_config(path, config)
        self.config = self._derive(given)
        self._check_shapes()
        self._compare(given)

    @property
    def is_packed(self) -> bool:
        """Whether any matrix of a block is packed."""
        return any(self.files.info(self._stored(name)).is_packed for name in self._block_matrices())

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        """Type of most matrices, None if they are packed."""
        info = self.files.info(self._stored(next(iter(self._block_matrices()))))
        return info.dtype

    def num_bytes(self, prefix: str = "") -> int:
        """Bytes of the tensors whose stored names begin with `prefix`, as stored."""
        return sum(self.files.info(stored).nbytes for name, stored in self._names.items() if name.startswith(prefix))

    def block_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes of the matrices and norms of all blocks: as stored, or packed ones as `dtype`."""
        total = 0
        for block in self._block_prefixes():
            for short in BLOCK_TENSORS:
                for stored in self._stored_parts(block, short):
                    info = self.files.info(stored)
                    is_expanded = dtype is not None and info.is_packed
                    total += _count(info.shape) * dtype.itemsize if is_expanded and dtype else info.nbytes
        return total

    def has(self, name: str) -> bool:
        """Whether there is a tensor of this release name."""
        return self._find(name) is not None

    def tensor(self, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor outside the blocks, dense, by release name."""
        weight = self.files.load(self._stored(name))
        if isinstance(weight, QuantizedTensor):
            return weight.dequantize(dtype)
        return weight.to(dtype)

    def matrix(self, name: str) -> BlockWeight:
        """A matrix outside the blocks as it is stored, by release name."""
        return self.files.load(self._stored(name))

    def adaln(self, index: int | None) -> tuple[BlockWeight, Tensor]:
        """Weight and bias of a block's modulation, or of the final layer's (None)."""
        prefix = "final_layer." if index is None else f"blocks.{index}."
        weight = self.files.load(self._stored(f"{prefix}adaln_proj.linear.weight"))
        return weight, self.tensor(f"{prefix}adaln_proj.linear.bias")

    def release_adaln(self, index: int | None) -> None:
        """Let the pages of a modulation go."""
        prefix = "final_layer." if index is None else f"blocks.{index}."
        self.files.release(self._stored(f"{prefix}adaln_proj.linear.weight"))

    def block(self, index: int, *, refiner: bool = False) -> Layer:
        """One block: norm1, norm2, q_norm, k_norm, qkv (contiguous rows), out, fc1 ([gate; up]), fc2."""
        prefix = self._prefix(index, refiner)
        layer: Layer = {}
        for short in BLOCK_TENSORS:
            parts = [self.files.load(stored) for stored in self._stored_parts(prefix, short)]
            layer[short] = _joined(parts)
        if self.is_split:
            layer["fc1"] = _swapped(layer["fc1"])
        elif self.qkv_layout == "grouped":
            layer["qkv"] = self._ungrouped(layer["qkv"])
        return layer

    def release_block(self, index: int, *, refiner: bool = False) -> None:
        """Let the pages of one block go."""
        prefix = self._prefix(index, refiner)
        for short in BLOCK_TENSORS:
            for stored in self._stored_parts(prefix, short):
                self.files.release(stored)

    def close(self) -> None:
        """End loading."""
        self.files.close()

    # names

    def _prefix(self, index: int, refiner: bool) -> str:
        return f"token_refiner.blocks.{index}." if refiner else f"blocks.{index}."

    def _block_prefixes(self) -> list[str]:
        blocks = [self._prefix(index, False) for index in range(self.config.num_layers)]
        return blocks + [self._prefix(index, True) for index in range(self.config.token_refiner_num_layers)]

    def _block_matrices(self) -> list[str]:
        return [f"blocks.0.{BLOCK_TENSORS[short]}" for short in ("fc1", "out")]

    def _find(self, name: str) -> str | None:
        """The stored name of a release name."""
        return self._names.get(_split_name(name) if self.is_split else name)

    def _stored(self, name: str) -> str:
        found = self._find(name)
        if found is None:
            spelled = _split_name(name) if self.is_split else name
            raise CheckpointError(
                f"{self.path}: tensor {spelled!r} is missing", remedy="is this a MiniMax-H3 diffusion transformer?"
            )
        return found

    def _stored_parts(self, prefix: str, short: str) -> list[str]:
        """Stored names of a block's tensor: three for the qkv of the split spelling."""
        if short != "qkv" or not self.is_split:
            return [self._stored(prefix + BLOCK_TENSORS[short])]
        parts = [f"{_split_prefix(prefix)}{part}.weight" for part in SPLIT_QKV]
        for part in parts:
            if part not in self._names:
                raise CheckpointError(f"{self.path}: tensor {part!r} is missing")
        return [self._names[part] for part in parts]

    # checks

    def _refuse_other_forms(self) -> None:
        if any(name.endswith(".comfy_quant") for name in self._names):
            raise ModelLoadError(
                f"{self.path}: rotated int8 weights (comfy_quant) are not supported", remedy="use bf16 or GGUF weights"
            )
        if any(name.endswith((".weight_scale", ".weight_scale_2")) for name in self._names):
            raise ModelLoadError(
                f"{self.path}: weights with scales (NVFP4) are not supported", remedy="use bf16 or GGUF weights"
            )
        if any(".lora_A." in name or ".lora_down." in name for name in self._names):
            raise ModelLoadError(f"{self.path}: this is a LoRA, not a diffusion transformer")

    def _count_blocks(self, is_refiner: bool) -> int:
        pattern = r"token_refiner\.(?:refiner_)?blocks\.(\d+)\." if is_refiner else r"(?:transformer_)?blocks\.(\d+)\."
        found = {int(match[1]) for match in map(re.compile(pattern).match, self._names) if match}
        return max(found, default=-1) + 1

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.files.info(self._stored(name)).shape

    def _derive(self, given: Mapping[str, Any]) -> DiTConfig:
        hidden = self._shape("final_layer.norm.weight")[0]
        head_dim = self._shape("blocks.0.attn.q_norm.weight")[0]
        width = self._shape("blocks.0.attn.out_proj.weight")[1]
        has_table, has_embedder = self.has(CURVE_TABLE), self.has("time_embedder.proj_in.weight")
        if has_table and has_embedder:
            raise CheckpointError(f"{self.path}: both {CURVE_TABLE} and time_embedder are there, expected one of them")
        if not has_table and not has_embedder:
            raise CheckpointError(f"{self.path}: neither time_embedder nor {CURVE_TABLE} is there")
        if has_table and self._shape(CURVE_TABLE)[0] < 2:
            raise CheckpointError(f"{self.path}: {CURVE_TABLE} has fewer than 2 points")
        if width % head_dim:
            raise CheckpointError(f"{self.path}: heads of {head_dim} do not divide {width} columns of out_proj")
        if self.has("rope.inv_freq"):
            num_freqs = self._shape("rope.inv_freq")[0]
        else:
            num_freqs = _number(given, "rope_inv_freq_len", "rope_freq_dim", default=16)
        embedder = self._shape("time_embedder.proj_in.weight") if has_embedder else None
        return DiTConfig(
            num_layers=self._count_blocks(is_refiner=False),
            token_refiner_num_layers=self._count_blocks(is_refiner=True),
            hidden_size=hidden,
            num_attention_heads=width // head_dim,
            attention_head_dim=head_dim,
            ffn_hidden_size=self._shape("blocks.0.mlp.fc2.weight")[1],
            latents_dim=self._shape("video_patch_proj.weight")[1] // PATCH_VOLUME,
            audio_latents_dim=self._shape("audio_patch_proj.weight")[1],
            text_dim=self._shape("condition_proj.weight")[1],
            timestep_input_dim=embedder[1] if embedder else None,
            time_embed_hidden_size=embedder[0] if embedder else None,
            time_embed_dim=self._shape(CURVE_TABLE)[1]
            if has_table
            else self._shape("time_embedder.proj_out.weight")[0],
            rope_inv_freq_len=num_freqs,
            adaln_curve_grid=self._shape(CURVE_TABLE)[0] if has_table else None,
            rope_theta=float(given.get("rope_theta", 10000.0)),
            norm_eps=float(given.get("norm_eps", 1e-5)),
            qk_norm_eps=float(given.get("qk_norm_eps", 1e-5)),
            final_norm_eps=float(given.get("final_norm_eps", 1e-5)),
        )

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        hidden, width = c.hidden_size, c.attention_width
        block = {
            "norm1.weight": (hidden,),
            "norm2.weight": (hidden,),
            "attn.q_norm.weight": (c.attention_head_dim,),
            "attn.k_norm.weight": (c.attention_head_dim,),
            "attn.out_proj.weight": (hidden, width),
            "mlp.fc1.weight": (2 * c.ffn_hidden_size, hidden),
            "mlp.fc2.weight": (hidden, c.ffn_hidden_size),
        }
        adaln = {"adaln_proj.linear.weight": (18 * hidden, c.time_embed_dim), "adaln_proj.linear.bias": (18 * hidden,)}
        shapes: dict[str, tuple[int, ...]] = {
            "video_patch_proj.weight": (hidden, PATCH_VOLUME * c.latents_dim),
            "video_patch_proj.bias": (hidden,),
            "audio_patch_proj.weight": (hidden, c.audio_latents_dim),
            "audio_patch_proj.bias": (hidden,),
            "condition_proj.weight": (hidden, c.text_dim),
            "condition_proj.bias": (hidden,),
            "token_refiner.final_norm.weight": (hidden,),
            "final_layer.norm.weight": (hidden,),
            "final_layer.adaln_proj.linear.weight": (2 * hidden, c.time_embed_dim),
            "final_layer.adaln_proj.linear.bias": (2 * hidden,),
            "final_layer.video_out.weight": (PATCH_VOLUME * c.latents_dim, hidden),
            "final_layer.video_out.bias": (PATCH_VOLUME * c.latents_dim,),
            "final_layer.audio_out.weight": (c.audio_latents_dim, hidden),
            "final_layer.audio_out.bias": (c.audio_latents_dim,),
        }
        if c.timestep_input_dim is not None and c.time_embed_hidden_size is not None:
            shapes |= {
                "time_embedder.proj_in.weight": (c.time_embed_hidden_size, c.timestep_input_dim),
                "time_embedder.proj_in.bias": (c.time_embed_hidden_size,),
                "time_embedder.proj_out.weight": (c.time_embed_dim, c.time_embed_hidden_size),
                "time_embedder.proj_out.bias": (c.time_embed_dim,),
            }
        for prefix in self._block_prefixes():
            parts = block if prefix.startswith("token_refiner.") else block | adaln
            shapes |= {prefix + name: shape for name, shape in parts.items()}
        return shapes

    def _check_shapes(self) -> None:
        config = self.config
        expected: dict[str, tuple[int, ...]] = {
            self._stored(name): shape for name, shape in self._expected_shapes().items()
        }
        rows = config.attention_width if self.is_split else 3 * config.attention_width
        for prefix in self._block_prefixes():
            expected |= dict.fromkeys(self._stored_parts(prefix, "qkv"), (rows, config.hidden_size))
        for stored, shape in expected.items():
            found = self.files.info(stored).shape
            if found != shape:
                raise CheckpointError(f"{self.path}: tensor {stored!r} is {list(found)}, expected {list(shape)}")
        known = {*expected, *(self._names[name] for name in ("rope.inv_freq", CURVE_TABLE) if name in self._names)}
        unknown = set(self._names.values()) - known
        if unknown:
            raise CheckpointError(f"{self.path}: tensors that this model does not have: {some_names(unknown)}")
        if config.rope_width > config.attention_head_dim:
            raise CheckpointError(f"{self.path}: {config.rope_width} rotated features, heads have fewer")

    def _compare(self, given: Mapping[str, Any]) -> None:
        """Refuse a configuration that contradicts the tensors."""
        derived = self.config.as_params()
        aliases = {
            "token_refiner_num_layers": "num_refiner_layers",
            "ffn_hidden_size": "ffn_dim",
            "latents_dim": "in_channels",
            "audio_latents_dim": "audio_in_channels",
            "timestep_input_dim": "freq_dim",
            "time_embed_hidden_size": "time_embed_hidden_dim",
            "rope_inv_freq_len": "rope_freq_dim",
        }
        for name, value in derived.items():
            for key in (name, aliases.get(name, name)):
                if key in given and given[key] != value:
                    raise CheckpointError(
                        f"{self.path}: the configuration says {key} = {given[key]!r:.60}, the tensors say {value}"
                    )
        if given.get("patch_size", [1, 2, 2]) != [1, 2, 2]:
            raise ModelLoadError(f"{self.path}: patch_size {given['patch_size']!r:.60}, expected [1, 2, 2]")

    def _ungrouped(self, weight: BlockWeight) -> BlockWeight:
        """Rows [head: q k v] to [all q; all k; all v]."""
        heads, dim = self.config.num_attention_heads, self.config.attention_head_dim
        order = torch.arange(3 * heads * dim).view(heads, 3, dim).transpose(0, 1).reshape(-1)
        return weight.rows(order) if isinstance(weight, QuantizedTensor) else weight.index_select(0, order)


def _given_config(path: Path, config: Path | None) -> dict[str, Any]:
    """The configuration given, or the one in the directory of the weights; empty if there is none."""
    place = config or (path / "config.json" if path.is_dir() else None)
    return read_config(place) if place is not None and place.is_file() else {}


def _number(given: Mapping[str, Any], *names: str, default: int) -> int:
    for name in names:
        value = given.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise CheckpointError(f"configuration: {name} is {value!r:.60}, expected a positive integer")
            return value
    return default


def _without_prefix(name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def _split_prefix(prefix: str) -> str:
    if prefix.startswith("token_refiner.blocks."):
        return prefix.replace("token_refiner.blocks.", "token_refiner.refiner_blocks.", 1)
    return prefix.replace("blocks.", "transformer_blocks.", 1)


def _split_name(name: str) -> str:
    """The split spelling of a release name."""
    base, _, kind = name.rpartition(".")
    block = _BLOCK.match(name)
    if block is None:
        return f"{SPLIT_NAMES[base]}.{kind}" if base in SPLIT_NAMES else name
    inner = base[block.end() :]
    return f"{_split_prefix(block[0])}{SPLIT_BLOCK_NAMES.get(inner, inner)}.{kind}"


def _joined(parts: list[BlockWeight]) -> BlockWeight:
    if len(parts) == 1:
        return parts[0]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    assert len(tensors) == len(parts), "the split spelling exists in safetensors files only"
    return torch.cat(tensors)


def _swapped(weight: BlockWeight) -> BlockWeight:
    """[up; gate] to [gate; up]."""
    assert isinstance(weight, Tensor)
    up, gate = weight.chunk(2)
    return torch.cat([gate, up])


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count

"""The vision tower of Qwen3.5 and Qwen3-VL, usable without an engine, and what a language model needs to carry it.

Source: Qwen Team 2025, Qwen3-VL; Wang et al. 2024, Qwen2-VL.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vkit import kernels
from vkit.errors import ModelLoadError
from vkit.layers import (
    Activation,
    Embedding,
    LayerNorm,
    Linear,
    Module,
    MultiAxisRotary,
    Placement,
    PlainMLP,
    RotaryEmbedding,
    TensorSlot,
)
from vkit.media import MediaInput, MediaProcessor
from vkit.media.qwen import IMAGE_RULES, VIDEO_RULES, FrameRules, QwenMarks, QwenMedia
from vkit.models.base import CausalLM, EncodedMedia, ModelConfig
from vkit.models.hf_config import HFConfig
from vkit.models.media_context import MediaContext
from vkit.quantization import LinearMethod, Weight, linear_method_for

_EPS = 1e-6

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


class PatchEmbedding(Module):
    """A convolution whose kernel is its stride: each patch times one matrix."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        """`shape`: (out, channels, frames, rows, columns)."""
        self._shape = shape
        self._bias: Tensor
        self._method: LinearMethod

    def slots(self) -> list[TensorSlot]:
        """proj.weight and proj.bias."""
        return [TensorSlot("proj.weight", self._shape), TensorSlot("proj.bias", self._shape[:1])]

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Take both, the weight as a matrix."""
        weight = tensors["proj.weight"]
        if not isinstance(weight, Tensor):
            raise ModelLoadError("a quantised patch embedding has no loader")
        self._method = linear_method_for(placement.matrix(weight.flatten(1)))
        self._bias = placement.vector(tensors["proj.bias"])

    def __call__(self, patches: Tensor) -> Tensor:
        """patches (n, channels · frames · rows · columns) -> (n, C)."""
        return self._method.apply(patches, self._bias)


class VisionAttention(Module):
    """Every patch of a frame sees all of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        self.qkv = Linear(width, 3 * width, bias=True)
        self.proj = Linear(width, width, bias=True)
        self._num_heads = num_heads

    def __call__(self, x: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (n, C), the angles of each patch (n, D), patches per frame -> (n, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self._num_heads, -1)).unbind(1)
        kernels.rope(q, k, torch.arange(len(x), device=x.device), table)
        out = kernels.segment_attention(q, k, v, lengths, q.shape[-1] ** -0.5)
        return self.proj(out.flatten(1))


class VisionBlock(Module):
    """x += attn(norm x); x += mlp(norm x)."""

    def __init__(self, width: int, num_heads: int, intermediate_size: int, activation: Activation) -> None:
        self.norm1 = LayerNorm(width, _EPS)
        self.attn = VisionAttention(width, num_heads)
        self.norm2 = LayerNorm(width, _EPS)
        self.mlp = PlainMLP(width, intermediate_size, activation=activation, names=("linear_fc1", "linear_fc2"))

    def __call__(self, x: Tensor, table: Tensor, lengths: Sequence[int]) -> Tensor:
        """x (n, C) -> (n, C)."""
        x = kernels.add(x, self.attn(self.norm1(x), table, lengths))
        return kernels.add(x, self.mlp(self.norm2(x)))


class PatchMerger(Module):
    """Blocks of neighbouring patches become one row of the language model's width."""

    def __init__(self, width: int, num_merged: int, out_width: int, *, norms_merged: bool) -> None:
        """`norms_merged`: the norm sees a whole block rather than each patch."""
        merged = width * num_merged
        self.norm = LayerNorm(merged if norms_merged else width, _EPS)
        self.linear_fc1 = Linear(merged, merged, bias=True)
        self.linear_fc2 = Linear(merged, out_width, bias=True)
        self._num_merged = num_merged
        self._norms_merged = norms_merged

    def __call__(self, x: Tensor) -> Tensor:
        """x (n, C) -> (n / merged, out)."""
        merged = (len(x) // self._num_merged, -1)
        x = self.norm(x.reshape(merged)) if self._norms_merged else self.norm(x).reshape(merged)
        return self.linear_fc2(kernels.unary(self.linear_fc1(x), "gelu"))


class QwenVisionTower(Module):
    """Patches to rows of the language model's stream. Tensor names are those below `model.visual.`."""

    def __init__(self, config: HFConfig) -> None:
        """`config`: the keys of vision_config.

        Raises:
            ModelLoadError: keys missing or of the wrong kind.
        """
        width = config.integer("hidden_size")
        self.patch_size = config.integer("patch_size", default=16)
        self.merge_size = config.integer("spatial_merge_size", default=2)
        self.temporal_patch_size = config.integer("temporal_patch_size", default=2)
        num_heads, depth = config.integer("num_heads"), config.integer("depth")
        num_positions = config.integer("num_position_embeddings", default=2304)
        self.table_side = math.isqrt(num_positions)
        if self.table_side**2 != num_positions:
            raise ModelLoadError(f"config.json: num_position_embeddings {num_positions} is no square")
        channels, frames, side = config.integer("in_channels", default=3), self.temporal_patch_size, self.patch_size
        self.num_features = channels * frames * side * side
        self.patch_embed = PatchEmbedding((width, channels, frames, side, side))
        self.pos_embed = Embedding(num_positions, width)
        activation = config.activation("hidden_act", default="gelu_pytorch_tanh")
        inner = config.integer("intermediate_size")
        self.blocks = [VisionBlock(width, num_heads, inner, activation) for _ in range(depth)]
        num_merged, out_width = self.merge_size**2, config.integer("out_hidden_size")
        self.merger = PatchMerger(width, num_merged, out_width, norms_merged=False)
        self.deepstack_layers = deepstack_layers(config, depth)
        self.deepstack_merger_list = [
            PatchMerger(width, num_merged, out_width, norms_merged=True) for _ in self.deepstack_layers
        ]
        self._head_dim = width // num_heads
        rope = config.mapping("rope_parameters")
        self._rope_base = float(rope.get("rope_theta", 10000.0))
        self._placement: Placement

    def set_tensors(self, tensors: Mapping[str, Weight], placement: Placement) -> None:
        """Remember where to compute."""
        self._placement = placement

    def encode(self, features: Tensor, grids: Sequence[Grid]) -> EncodedMedia:
        """Rows of each item's merged patches, one item after the other, and the deeper features that go with them.

        features (n, `num_features`), ordered by item, frame, block of merged patches and patch inside the block.
        """
        placement = self._placement
        x = self.patch_embed(features.to(placement.device, placement.dtype))
        x = kernels.add(x, self._positions(grids))
        table = self._angles(grids).to(placement.device)
        lengths = [rows * columns for frames, rows, columns in grids for _ in range(frames)]
        deeper = []
        for index, block in enumerate(self.blocks):
            x = block(x, table, lengths)
            if index in self.deepstack_layers:
                deeper.append(self.deepstack_merger_list[self.deepstack_layers.index(index)](x))
        return EncodedMedia(self.merger(x), tuple(deeper))

    def _positions(self, grids: Sequence[Grid]) -> Tensor:
        """The learned table, sampled bilinearly at every patch (n, C)."""
        corners = [self._corners(grid) for grid in grids]
        device = self._placement.device
        ids = torch.cat([ids for ids, _ in corners], dim=1).to(device)
        weights = torch.cat([weights for _, weights in corners], dim=1).to(device)
        total = kernels.scale_rows(self.pos_embed(ids[0]), weights[0])
        for corner in range(1, 4):
            total = kernels.add(total, kernels.scale_rows(self.pos_embed(ids[corner]), weights[corner]))
        return total

    def _corners(self, grid: Grid) -> tuple[Tensor, Tensor]:
        """The four table rows around each patch (4, n) and their weights; the table's corners are the picture's."""
        frames, rows, columns = grid
        last = self.table_side - 1
        y, x = (torch.linspace(0, last, size, dtype=torch.float32) for size in (rows, columns))
        low_y, low_x = y.floor().long(), x.floor().long()
        ids, weights = [], []
        for at_y, part_y in ((low_y, 1 - (y - low_y)), ((low_y + 1).clamp(max=last), y - low_y)):
            for at_x, part_x in ((low_x, 1 - (x - low_x)), ((low_x + 1).clamp(max=last), x - low_x)):
                ids.append(self._in_block_order(at_y[:, None] * self.table_side + at_x).repeat(frames))
                weights.append(self._in_block_order(part_y[:, None] * part_x).repeat(frames))
        return torch.stack(ids), torch.stack(weights)

    def _angles(self, grids: Sequence[Grid]) -> Tensor:
        """Cosines and sines of each patch's row and column (n, D)."""
        quarter = self._head_dim // 4
        frequencies = self._rope_base ** (-torch.arange(quarter, dtype=torch.float32) / quarter)
        parts = []
        for frames, rows, columns in grids:
            y = self._in_block_order(torch.arange(rows)[:, None].expand(rows, columns))
            x = self._in_block_order(torch.arange(columns).expand(rows, columns))
            angles = torch.cat([y.float().outer(frequencies), x.float().outer(frequencies)], dim=-1)
            parts.append(torch.cat([angles.cos(), angles.sin()], dim=-1).repeat(frames, 1))
        return torch.cat(parts)

    def _in_block_order(self, values: Tensor) -> Tensor:
        """values (rows, columns) with the patches of a merged block side by side (rows · columns,)."""
        m = self.merge_size
        blocks: Tensor = values.unflatten(1, (-1, m)).unflatten(0, (-1, m))
        return blocks.permute(0, 2, 1, 3).flatten()


def deepstack_layers(config: HFConfig, depth: int) -> list[int]:
    """The blocks after which deeper features are taken; none if the key is not set.

    Raises:
        ModelLoadError: no ascending list of blocks.
    """
    value = config.values.get("deepstack_visual_indexes") or []
    is_listed = isinstance(value, list) and all(type(index) is int and 0 <= index < depth for index in value)
    if not is_listed or sorted(set(value)) != value:
        raise ModelLoadError(f"config.json: deepstack_visual_indexes must name blocks below {depth}, got {value!r}")
    return value


class WithQwenTower(CausalLM):
    """A language model that carries the tower; a file without vision_config is text only."""

    default_sections: tuple[int, int, int] = (24, 20, 20)
    """Pairs of the rope that follow time, rows and columns, where the configuration does not say."""
    rotary: RotaryEmbedding

    def __init__(self, config: HFConfig, options: ModelConfig) -> None:
        super().__init__(config, options)
        vision = config.mapping("vision_config")
        self.visual = QwenVisionTower(HFConfig(vision)) if vision else None
        self.names = {**self.names, "visual": "model.visual"}
        if self.visual is None:
            self.ignored_tensors = (*self.ignored_tensors, r"model\.visual\..*")

    def make_rotary(self) -> None:
        """The rope of all layers, in three axes."""
        spec = self.config.rope(self.options.max_model_len)
        sections = spec.scaling.get("mrope_section") or self.default_sections
        is_interleaved = spec.scaling.get("mrope_interleaved", True)
        if not isinstance(sections, list | tuple) or not isinstance(is_interleaved, bool):
            raise ModelLoadError(
                f"config.json: mrope_section {sections!r} and mrope_interleaved {is_interleaved!r}:"
                " expected three integers, and true or false"
            )
        self.rotary = MultiAxisRotary(spec, sections, is_interleaved=is_interleaved)

    def media_processor(self, context: MediaContext) -> MediaProcessor | None:
        """Patches for the tower."""
        return None if self.visual is None else qwen_media(self.config, self.visual, context)

    def encode_media(self, item: MediaInput) -> EncodedMedia:
        """The tower's rows of one item."""
        assert self.visual is not None, "a model without a tower has no media processor"
        return self.visual.encode(torch.from_numpy(item.features), [item.grid])


def qwen_media(config: HFConfig, tower: QwenVisionTower, context: MediaContext) -> QwenMedia:
    """How images and videos are prepared for the tower.

    Raises:
        ModelLoadError: a preprocessor configuration that contradicts the tower's, or cannot be read.
    """
    own = HFConfig(context.image_config)
    for key, value in (
        ("patch_size", tower.patch_size),
        ("merge_size", tower.merge_size),
        ("temporal_patch_size", tower.temporal_patch_size),
    ):
        if own.integer(key, default=value) != value:
            raise ModelLoadError(
                f"preprocessor_config.json: {key} {own.integer(key)}, but the tower of config.json has {value}"
            )
    video = HFConfig(context.video_config)
    frames = FrameRules(
        fps=video.number("fps", default=2.0),
        min_frames=video.integer("min_frames", default=4),
        max_frames=video.integer("max_frames", default=768),
    )
    return QwenMedia(
        QwenMarks(
            config.integer("image_token_id"),
            config.integer("video_token_id"),
            config.integer("vision_start_token_id"),
            config.integer("vision_end_token_id"),
        ),
        context.token_text,
        context.encode,
        patch_size=tower.patch_size,
        merge_size=tower.merge_size,
        temporal_patch_size=tower.temporal_patch_size,
        image_rules=IMAGE_RULES.updated(context.image_config, "preprocessor_config.json"),
        video_rules=VIDEO_RULES.updated(context.video_config, "video_preprocessor_config.json"),
        frame_rules=frames,
    )

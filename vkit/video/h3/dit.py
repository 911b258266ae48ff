"""The diffusion transformer: one forward pass over the whole packed sequence, and what is computed once per run.

Text refinement does not depend on the timestep, and modulation depends on nothing else: the first is done once, the
second for all timesteps of the schedule at once, after which its weights (a fifth of the model) are let go.
Source: the released model; the rounding points in bfloat16 are the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vkit.quantization import QuantizedTensor, placed
from vkit.video.h3.dit_weights import CURVE_TABLE, MATRICES, DiTWeights
from vkit.video.h3.layout import Layout, RowKind, timestep_of_kind
from vkit.video.h3.weights import (
    BlockWeight,
    Layer,
    LayerStack,
    Residency,
    attention,
    dense,
    project,
    rms_norm,
    rotate_half,
)

ROW_CHUNK = 8192
"""Rows whose wide intermediate results exist at a time."""
NUM_TAGS = 3


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, stop) share one modulation: row `timestep` of the schedule's table, group `tag`."""

    start: int
    stop: int
    timestep: int
    tag: int


@dataclass(frozen=True, slots=True)
class Modulations:
    """Everything that depends on the timestep, for M distinct ones."""

    timesteps: tuple[float, ...]
    """Sorted, as float32."""
    blocks: list[Tensor]
    """Per block (M, 3, 6, H): by modality; shift, scale, gate of attention, then of the MLP."""
    final: Tensor
    """(M, 2, H): shift, scale."""

    def segments(self, layout: Layout, of_kind: dict[RowKind, float]) -> list[Segment]:
        """The runs of `layout` at these timesteps."""
        index = {value: row for row, value in enumerate(self.timesteps)}
        return [Segment(start, stop, index[of_kind[kind]], tag) for start, stop, kind, tag in layout.segments()]


class DiT:
    """A diffusion transformer on a device. Not for use by two threads at once."""

    def __init__(
        self, weights: DiTWeights, residency: Residency, dtype: torch.dtype, *, dequant_to: torch.dtype | None = None
    ) -> None:
        self.config = weights.config
        self._weights = weights
        self._device = residency.device
        self._dtype = dtype
        self._dequant_to = dequant_to
        self._blocks = LayerStack(self.config.num_layers, self._build_block, weights.release_block, residency)
        self._islands: dict[str, Tensor] = {}

    def timestep_embedding(self, timesteps: Tensor) -> Tensor:
        """What modulation is projected from, float32: (M,) -> (M, time_embed_dim), before silu (curve: as it is)."""
        c = self.config
        t = timesteps.to(self._device, torch.float32)
        if c.adaln_curve_grid is not None:
            table = self._island(CURVE_TABLE)
            position = t.clamp(0, 1) * (c.adaln_curve_grid - 1)
            low = position.floor().clamp(max=c.adaln_curve_grid - 2).long()
            return table[low] + (position - low)[:, None] * (table[low + 1] - table[low])
        assert c.timestep_input_dim is not None
        half = c.timestep_input_dim // 2
        freqs = torch.exp(-math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=self._device) / half)
        angles = t[:, None] * freqs
        waves = torch.cat([angles.cos(), angles.sin()], dim=-1)
        hidden = functional.silu(self._dense_island("time_embedder.proj_in", waves))
        return self._dense_island("time_embedder.proj_out", hidden)

    def modulations(self, timesteps: Sequence[float], on_block: Callable[[int], None] | None = None) -> Modulations:
        """The modulation of every block at the distinct `timesteps`; reads the modulation weights once, keeps none."""
        values = sorted({float(torch.tensor(value, dtype=torch.float32)) for value in timesteps})
        embedding = self.timestep_embedding(torch.tensor(values))
        blocks = []
        for index in range(self.config.num_layers):
            blocks.append(self._modulate(index, embedding).view(len(values), NUM_TAGS, 6, -1))
            if on_block is not None:
                on_block(index)
        final = self._modulate(None, embedding).view(len(values), 2, -1)
        return Modulations(tuple(values), blocks, final)

    def refine_text(self, text_embeds: Tensor) -> Tensor:
        """Text rows as they enter the sequence: (L, text_dim) -> (L, H)."""
        x = text_embeds.to(self._device, self._dtype)
        weights = self._weights
        x = project(x, self._matrix("condition_proj.weight"), self._vector("condition_proj.bias"))
        for index in range(self.config.token_refiner_num_layers):
            layer = self._placed(weights.block(index, refiner=True))
            x = x + self._attend(self._normed(x, layer["norm1"]), layer, None)
            x = x + self._mlp(self._normed(x, layer["norm2"]), layer)
            weights.release_block(index, refiner=True)
        return rms_norm(x, self._vector("token_refiner.final_norm.weight"), self.config.norm_eps)

    def rope(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """cos and sin (S, rope_width) of every row's position, float32."""
        c = self.config
        inverse = 1.0 / c.rope_theta ** (torch.arange(c.rope_inv_freq_len, dtype=torch.float32) / c.rope_inv_freq_len)
        positions = torch.from_numpy(layout.positions).to(torch.float32)
        angles = (positions[:, :, None] * inverse).flatten(1)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(self._device), angles.sin().to(self._device)

    def pack(self, layout: Layout, text: Tensor, video_rows: Tensor, audio_rows: Tensor) -> Tensor:
        """The residual stream (S, H) before the first block."""
        x = torch.empty(layout.num_rows, self.config.hidden_size, dtype=self._dtype, device=self._device)
        x[: len(text)] = text
        for indices, rows, name in (
            (layout.video_indices, video_rows, "video_patch_proj"),
            (layout.audio_indices, audio_rows, "audio_patch_proj"),
        ):
            projected = self._dense_island(name, rows.to(self._device, torch.float32))
            x[torch.from_numpy(indices).to(self._device)] = projected.to(self._dtype)
        return x

    def forward(
        self,
        layout: Layout,
        text: Tensor,
        video_rows: Tensor,
        audio_rows: Tensor,
        rope: tuple[Tensor, Tensor],
        modulations: Modulations,
        of_kind: dict[RowKind, float],
        on_block: Callable[[int, Tensor], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Velocities of video rows and audio rows (float32), in the order of the layout's index lists.

        `on_block(i, x)` is called after block i with the residual stream; it may raise to end the pass.
        """
        x = self.pack(layout, text, video_rows, audio_rows)
        segments = modulations.segments(layout, of_kind)
        cos, sin = (part.to(self._dtype) for part in rope)
        for index, layer in enumerate(self._blocks.layers()):
            self._block(x, layer, modulations.blocks[index], segments, (cos, sin))
            if on_block is not None:
                on_block(index, x)
        return self._heads(x, layout, modulations, segments)

    def free(self) -> None:
        """Let all weights go."""
        self._blocks.free()
        self._islands.clear()

    # blocks

    def _block(
        self, x: Tensor, layer: Layer, table: Tensor, segments: list[Segment], rope: tuple[Tensor, Tensor]
    ) -> None:
        """One block; x (S, H) is changed in place."""
        normed = self._modulated(x, layer["norm1"], table, segments, 0)
        self._add_gated(x, self._attend(normed, layer, rope), table, segments, 2)
        del normed
        for start in range(0, len(x), ROW_CHUNK):
            rows = slice(start, min(start + ROW_CHUNK, len(x)))
            inside = _clipped(segments, rows)
            normed = self._modulated(x[rows], layer["norm2"], table, inside, 3)
            self._add_gated(x[rows], self._mlp(normed, layer), table, inside, 5)

    def _attend(self, h: Tensor, layer: Layer, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        """Projected attention over all rows of h (S, H)."""
        c = self.config
        heads, dim = c.num_attention_heads, c.attention_head_dim
        q, k, v = (torch.empty(heads, len(h), dim, dtype=h.dtype, device=h.device) for _ in range(3))
        for start in range(0, len(h), ROW_CHUNK):
            rows = slice(start, min(start + ROW_CHUNK, len(h)))
            parts = project(h[rows], layer["qkv"]).view(-1, 3, heads, dim)
            for index, (target, norm) in enumerate(((q, "q_norm"), (k, "k_norm"))):
                normed = rms_norm(parts[:, index], _tensor(layer[norm]), c.qk_norm_eps)
                if rope is not None:
                    normed = rotate_half(normed, rope[0][rows], rope[1][rows])
                target[:, rows] = normed.transpose(0, 1)
            v[:, rows] = parts[:, 2].transpose(0, 1)
        mixed = attention(q, k, v, dim**-0.5)
        del q, k, v
        return project(mixed, layer["out"])

    def _mlp(self, h: Tensor, layer: Layer) -> Tensor:
        gate, up = project(h, layer["fc1"]).chunk(2, dim=-1)
        return project(functional.silu(gate) * up, layer["fc2"])

    def _normed(self, x: Tensor, weight: BlockWeight) -> Tensor:
        return rms_norm(x, _tensor(weight), self.config.norm_eps)

    def _modulated(self, x: Tensor, weight: BlockWeight, table: Tensor, segments: list[Segment], first: int) -> Tensor:
        """norm(x) · (1 + scale) + shift, each run of rows with its own: shift is entry `first`, scale the next."""
        normed = torch.empty_like(x)
        for segment in segments:
            shift, scale = table[segment.timestep, segment.tag, first : first + 2]
            rows = self._normed(x[segment.start : segment.stop], weight)
            normed[segment.start : segment.stop] = rows.mul_(1 + scale).add_(shift)
        return normed

    @staticmethod
    def _add_gated(x: Tensor, y: Tensor, table: Tensor, segments: list[Segment], entry: int) -> None:
        """x += gate · y in place (y too)."""
        for segment in segments:
            gate = table[segment.timestep, segment.tag, entry]
            x[segment.start : segment.stop] += y[segment.start : segment.stop].mul_(gate)

    def _heads(
        self, x: Tensor, layout: Layout, modulations: Modulations, segments: list[Segment]
    ) -> tuple[Tensor, Tensor]:
        weight = self._vector("final_layer.norm.weight")
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for segment in segments:
            shift, scale = modulations.final[segment.timestep]
            rows = rms_norm(x[segment.start : segment.stop], weight, self.config.final_norm_eps)
            y[segment.start : segment.stop] = (rows * (1 + scale) + shift).to(torch.float32)
        video, audio = (
            self._dense_island(name, y[torch.from_numpy(indices).to(y.device)])
            for name, indices in (
                ("final_layer.video_out", layout.video_indices),
                ("final_layer.audio_out", layout.audio_indices),
            )
        )
        return video, audio

    # weights

    def _modulate(self, index: int | None, embedding: Tensor) -> Tensor:
        """(M, rows of the modulation) in the stream's type."""
        weight, bias = self._weights.adaln(index)
        bias = bias.to(self._device)
        if self.config.adaln_curve_grid is not None:
            out = project(embedding, dense(weight, torch.float32, self._device), bias).to(self._dtype)
        else:
            act = functional.silu(embedding).to(self._dtype)
            out = project(act, dense(weight, self._dtype, self._device), bias.to(self._dtype))
        self._weights.release_adaln(index)
        return out

    def _build_block(self, index: int) -> Layer:
        return self._typed(self._weights.block(index))

    def _placed(self, layer: Layer) -> Layer:
        return {name: placed(weight, self._device) for name, weight in self._typed(layer).items()}

    def _typed(self, layer: Layer) -> Layer:
        """Norms dense, matrices as they are stored unless they are to be expanded."""
        typed: Layer = {}
        for name, weight in layer.items():
            if name not in MATRICES:
                typed[name] = dense(weight, self._dtype)
            elif isinstance(weight, QuantizedTensor) and self._dequant_to is not None:
                typed[name] = weight.dequantize(self._dequant_to)
            else:
                typed[name] = weight
        return typed

    def _island(self, name: str) -> Tensor:
        """A float32 tensor outside the blocks, on the device."""
        if name not in self._islands:
            self._islands[name] = self._weights.tensor(name).to(self._device)
        return self._islands[name]

    def _vector(self, name: str) -> Tensor:
        """A norm or bias of the stream, in its type."""
        return self._island(name).to(self._dtype)

    def _matrix(self, name: str) -> BlockWeight:
        return placed(self._weights.matrix(name), self._device)

    def _dense_island(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._island(f"{name}.weight"), self._island(f"{name}.bias"))


def schedule_timesteps(sigmas_video: Tensor, sigmas_audio: Tensor, noise_aug: float) -> list[dict[RowKind, float]]:
    """Per forward pass, the timestep of every kind of row."""
    return [
        timestep_of_kind(float(1 - sigmas_video[step]), float(1 - sigmas_audio[step]), noise_aug)
        for step in range(len(sigmas_video) - 1)
    ]


def _tensor(weight: BlockWeight) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight


def _clipped(segments: list[Segment], rows: slice) -> list[Segment]:
    """The parts of the segments within `rows`, counted from its start."""
    return [
        Segment(
            max(item.start, rows.start) - rows.start, min(item.stop, rows.stop) - rows.start, item.timestep, item.tag
        )
        for item in segments
        if item.start < rows.stop and item.stop > rows.start
    ]

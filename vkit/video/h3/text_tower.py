"""The conditioner's decoder layers: token rows in, the residual stream after the last layer out, without a final norm.

Source: Qwen Team 2025, Qwen3-VL; rotary positions in three axes, interleaved, as in Qwen2-VL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from vkit.video.h3.encoder_weights import EncoderWeights
from vkit.video.h3.presentation import Presentation
from vkit.video.h3.weights import BlockWeight, Layer, LayerStack, Residency, attention, project, rms_norm, rotate_half

ROW_CHUNK = 8192


class TextTower:
    """The decoder layers on a device."""

    def __init__(self, weights: EncoderWeights, residency: Residency, dtype: torch.dtype) -> None:
        self.config = weights.config
        self._weights = weights
        self._device, self._dtype = residency.device, dtype
        self._layers = LayerStack(self.config.num_layers, weights.layer, weights.release_layer, residency)

    def __call__(
        self,
        shown: Presentation,
        merged: Tensor | None = None,
        deepstack: Sequence[Tensor] = (),
        on_layer: Callable[[int, Tensor], None] | None = None,
    ) -> Tensor:
        """Conditioning (L, H), float32.

        `merged` replaces the rows of the pads, `deepstack[j]` is added to them after layer j; both (pads, H).
        `on_layer(i, x)` is called after layer i; it may raise to end the pass.
        """
        x = self._weights.embed(torch.tensor(shown.token_ids, dtype=torch.int64), self._dtype).to(self._device)
        pads = torch.from_numpy(shown.pads).to(self._device)
        if merged is not None:
            x[pads] = merged.to(self._device, self._dtype)
        rope = self._rope(shown.positions)
        for index, layer in enumerate(self._layers.layers()):
            x = x + self._attend(self._normed(x, layer["input_norm"]), layer, rope)
            x = x + self._mlp(self._normed(x, layer["post_norm"]), layer)
            if index < len(deepstack):
                x[pads] += deepstack[index].to(self._device, self._dtype)
            if on_layer is not None:
                on_layer(index, x)
        return x.to(torch.float32).cpu()

    def _normed(self, x: Tensor, weight: BlockWeight) -> Tensor:
        assert isinstance(weight, Tensor)
        return rms_norm(x, weight, self.config.norm_eps)

    def _attend(self, h: Tensor, layer: Layer, rope: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        q = self._normed(project(h, layer["q"]).view(len(h), c.num_heads, c.head_dim), layer["q_norm"])
        k = self._normed(project(h, layer["k"]).view(len(h), c.num_kv_heads, c.head_dim), layer["k_norm"])
        v = project(h, layer["v"]).view(len(h), c.num_kv_heads, c.head_dim)
        q, k = rotate_half(q, *rope), rotate_half(k, *rope)
        group = c.num_heads // c.num_kv_heads
        k, v = (part.repeat_interleave(group, dim=1).transpose(0, 1) for part in (k, v))
        return project(attention(q.transpose(0, 1), k, v, c.head_dim**-0.5, is_causal=True), layer["o"])

    def _mlp(self, h: Tensor, layer: Layer) -> Tensor:
        parts = [
            project(functional.silu(project(rows, layer["gate"])) * project(rows, layer["up"]), layer["down"])
            for rows in h.split(ROW_CHUNK)
        ]
        return torch.cat(parts)

    def _rope(self, positions: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """cos and sin (L, D): each frequency follows time, rows or columns."""
        c = self.config
        half = c.head_dim // 2
        freqs = 1.0 / c.rope_theta ** (torch.arange(half, dtype=torch.float32) * 2 / c.head_dim)
        axis = torch.zeros(half, dtype=torch.int64)
        for index in (1, 2):
            axis[index : 3 * c.mrope_section[index] : 3] = index
        angles = torch.from_numpy(positions).to(torch.float32)[axis].T * freqs
        angles = torch.cat([angles, angles], dim=-1).to(self._device)
        return angles.cos().to(self._dtype), angles.sin().to(self._dtype)

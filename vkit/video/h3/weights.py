"""Matrices as files have them: dense or packed, wherever they lie, multiplied without a dense copy of the whole.

Packed weights are widened a tile of rows at a time: with thousands of rows of activations a product is bound by
arithmetic, and the widened tile is used often enough to cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from vkit import kernels
from vkit.quantization import QuantizedTensor, placed
from vkit.video.h3.request import Offload

BlockWeight = Tensor | QuantizedTensor
Layer = dict[str, BlockWeight]
"""Tensors of one layer by short name."""

TILE_BYTES = 64 << 20
"""Dense bytes widened at a time."""


def project(x: Tensor, weight: BlockWeight, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + bias in x.dtype; x (T, C), weight (R, C), bias (R,) -> (T, R). Sums are what torch makes of x.dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    if isinstance(weight, Tensor) and weight.dtype == x.dtype:
        return functional.linear(x, weight, bias)
    num_rows, num_columns = weight.shape
    tile = max(64, TILE_BYTES // (4 * num_columns))
    if num_rows <= tile:
        return functional.linear(x, dense(weight, x.dtype, x.device), bias)
    out = torch.empty(x.shape[0], num_rows, dtype=x.dtype, device=x.device)
    for start in range(0, num_rows, tile):
        rows = slice(start, min(start + tile, num_rows))
        part = weight.rows(rows) if isinstance(weight, QuantizedTensor) else weight[rows]
        out[:, rows] = functional.linear(x, dense(part, x.dtype, x.device))
    return out if bias is None else out.add_(bias)


def dense(weight: BlockWeight, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """The weight as an ordinary tensor."""
    if isinstance(weight, QuantizedTensor):
        return weight.to(device).dequantize(dtype)
    return weight.to(device=device, dtype=dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x over its root mean square, times weight; statistic, scaling and product in float32, rounded once.

    Source: Zhang and Sennrich 2019, eq. 4.
    """
    wide = x.to(torch.float32)
    out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        out = out * weight.to(torch.float32)
    return out.to(x.dtype)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool = False) -> Tensor:
    """Softmax attention; q, k, v (H, T, D) -> (T, H · D). Blockwise: no T x T matrix exists."""
    if not is_causal:
        queries, keys, values = (x.transpose(0, 1) for x in (q, k, v))
        return kernels.segment_attention(queries, keys, values, [q.shape[1]], scale).flatten(1)
    out = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=is_causal, scale=scale)[0]
    return out.transpose(0, 1).reshape(out.shape[1], -1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation of the first cos.shape[-1] features of x (T, H, D); cos and sin (T, R) in x.dtype.

    Each product and the sum are rounded to x.dtype, as the reference does.
    """
    width = cos.shape[-1]
    turned, kept = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, dim=-1)
    swapped = torch.cat([-second, first], dim=-1)
    turned = turned * cos[:, None] + swapped * sin[:, None]
    return torch.cat([turned, kept], dim=-1) if kept.shape[-1] else turned


@dataclass(frozen=True, slots=True)
class Residency:
    """Where the layers of a stack are between uses."""

    device: torch.device
    offload: Offload


class LayerStack:
    """Layers by number, read by `build` and brought to the device when they are needed.

    `build(i)` gives the layer on the CPU and may return views of a mapped file; `release(i)` lets its pages go. "none":
    all stay on the device. "host": all stay in host memory, and the next one travels while one computes. "disk": each
    is read again every time.
    """

    def __init__(
        self,
        count: int,
        build: Callable[[int], Mapping[str, BlockWeight]],
        release: Callable[[int], None],
        residency: Residency,
    ) -> None:
        self._count = count
        self._build, self._release = build, release
        self._residency = residency
        self._kept: dict[int, Layer] = {}
        self._copies = torch.cuda.Stream() if self._streams else None

    @property
    def _streams(self) -> bool:
        return self._residency.offload == "host" and self._residency.device.type == "cuda"

    def __len__(self) -> int:
        return self._count

    def layers(self) -> Iterator[Layer]:
        """All layers in order, each usable until the next is asked for."""
        ahead: Layer | None = None
        for index in range(self._count):
            if self._residency.offload == "host":
                layer = ahead if ahead is not None else self._travel(index)
                self._arrive()
                ahead = self._travel(index + 1) if index + 1 < self._count else None
                yield layer
                continue
            with self._on_device(index) as layer:
                yield layer

    def free(self) -> None:
        """Forget every layer."""
        self._kept.clear()

    @contextmanager
    def _on_device(self, index: int) -> Iterator[Layer]:
        layer = self._kept.get(index)
        if layer is None:
            layer = _to(self._build(index), self._residency.device)
            if self._residency.offload == "none":
                self._kept[index] = layer
        yield layer
        if self._residency.offload == "disk":
            del layer
            self._release(index)

    def _travel(self, index: int) -> Layer:
        """Layer `index`, on its way to the device."""
        kept = self._kept.get(index)
        if kept is None:
            kept = self._kept[index] = _pinned(self._build(index))
            self._release(index)
        if self._copies is None:
            return kept
        # What was computed so far may still read the memory that this copy is going to reuse.
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            return _to(kept, self._residency.device)

    def _arrive(self) -> None:
        if self._copies is not None:
            torch.cuda.current_stream().wait_stream(self._copies)


def _to(layer: Mapping[str, BlockWeight], device: torch.device) -> Layer:
    if device.type == "cpu":
        return dict(layer)
    return {
        name: placed(weight, device)
        if isinstance(weight, QuantizedTensor)
        else weight.to(device, non_blocking=weight.is_pinned())
        for name, weight in layer.items()
    }


def _pinned(layer: Mapping[str, BlockWeight]) -> Layer:
    return {
        name: weight if isinstance(weight, QuantizedTensor) else weight.clone().pin_memory()
        for name, weight in layer.items()
    }

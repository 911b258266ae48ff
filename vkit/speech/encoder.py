"""The FastConformer encoder: features to one vector per 80 ms.

A whole utterance at a time, not causal, nothing cached, so these are plain torch modules named as the checkpoint names
them. A batch is padded: `lengths` says how many frames of each row are real, and the rest never changes them.

Source: Rekesh et al. 2023 (Fast Conformer); Gulati et al. 2020 (Conformer); Dai et al. 2019, appendix B (shift).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from vkit.models.hf_config import HFConfig

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """Sizes of an encoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_mels: int
    kernel_size: int
    num_channels: int
    factor: int
    """Feature frames per encoder frame."""
    has_attention_bias: bool
    has_convolution_bias: bool
    scales_input: bool

    @classmethod
    def of(cls, config: HFConfig) -> EncoderShape:
        """The sizes in `encoder_config`."""
        return cls(
            hidden_size=config.integer("hidden_size"),
            intermediate_size=config.integer("intermediate_size"),
            num_layers=config.integer("num_hidden_layers"),
            num_heads=config.integer("num_attention_heads"),
            num_mels=config.integer("num_mel_bins", default=80),
            kernel_size=config.integer("conv_kernel_size", default=9),
            num_channels=config.integer("subsampling_conv_channels", default=256),
            factor=config.integer("subsampling_factor", default=8),
            has_attention_bias=config.flag("attention_bias", default=True),
            has_convolution_bias=config.flag("convolution_bias", default=True),
            scales_input=config.flag("scale_input", default=True),
        )


class Encoder(nn.Module):
    """Features (B, T, mels) and lengths (B,) -> vectors (B, T', H) and lengths (B,)."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        self.subsampling = Subsampling(shape)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self._hidden_size = shape.hidden_size
        self._scale = math.sqrt(shape.hidden_size) if shape.scales_input else 1.0

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Vectors and how many of them are real."""
        x, lengths = self.subsampling(features, lengths)
        x = x * self._scale
        num_frames = x.shape[1]
        is_real = torch.arange(num_frames, device=x.device) < lengths[:, None]
        positions = relative_positions(num_frames, self._hidden_size, x.device).to(x.dtype)
        for layer in self.layers:
            x = layer(x, positions, is_real)
        return x, lengths


class Subsampling(nn.Module):
    """Convolutions that halve time and frequency, then one vector per remaining frame."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        channels = shape.num_channels
        layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, stride=2, padding=1), nn.ReLU()]
        for _ in range(round(math.log2(shape.factor)) - 1):
            layers.append(nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels))
            layers.append(nn.Conv2d(channels, channels, 1))
            layers.append(nn.ReLU())
        self.layers = nn.ModuleList(layers)
        self.linear = nn.Linear(channels * (shape.num_mels // shape.factor), shape.hidden_size)

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, mels) -> (B, T', H); frames beyond a row's length are zero after every convolution."""
        x = features.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                if layer.stride[0] == 2:
                    lengths = (lengths - 1) // 2 + 1
                is_real = torch.arange(x.shape[2], device=x.device) < lengths[:, None]
                x = x * is_real[:, None, :, None]
        return self.linear(x.transpose(1, 2).flatten(2)), lengths


class Block(nn.Module):
    """Half a feed-forward, attention, convolution, half a feed-forward, and a norm."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width = shape.hidden_size
        self.norm_feed_forward1 = nn.LayerNorm(width, NORM_EPS)
        self.feed_forward1 = FeedForward(shape)
        self.norm_self_att = nn.LayerNorm(width, NORM_EPS)
        self.self_attn = RelativeAttention(shape)
        self.norm_conv = nn.LayerNorm(width, NORM_EPS)
        self.conv = Convolution(shape)
        self.norm_feed_forward2 = nn.LayerNorm(width, NORM_EPS)
        self.feed_forward2 = FeedForward(shape)
        self.norm_out = nn.LayerNorm(width, NORM_EPS)

    def forward(self, x: Tensor, positions: Tensor, is_real: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        x = x + self.self_attn(self.norm_self_att(x), positions, is_real)
        x = x + self.conv(self.norm_conv(x), is_real)
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        normed: Tensor = self.norm_out(x)
        return normed


class FeedForward(nn.Module):
    """linear2( silu(linear1 x) )."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        bias = shape.has_attention_bias
        self.linear1 = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=bias)
        self.linear2 = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        y: Tensor = self.linear2(functional.silu(self.linear1(x)))
        return y


class RelativeAttention(nn.Module):
    """Attention whose scores see how far key and query are apart: D^-1/2 [(q_i + u) k_j + (q_i + v) p_{i-j}]."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width, bias = shape.hidden_size, shape.has_attention_bias
        self._num_heads, self._head_dim = shape.num_heads, width // shape.num_heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=bias)
        self.relative_k_proj = nn.Linear(width, width, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(self._num_heads, self._head_dim))
        self.bias_v = nn.Parameter(torch.zeros(self._num_heads, self._head_dim))

    def forward(self, x: Tensor, positions: Tensor, is_real: Tensor) -> Tensor:
        """x (B, T, H), positions (2T - 1, H), is_real (B, T) -> (B, T, H)."""
        q = self._heads(self.q_proj(x))
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        p = self._heads(self.relative_k_proj(positions)[None])
        scale = self._head_dim**-0.5
        by_distance = shifted((q + self.bias_v[:, None]) @ p.transpose(-2, -1)) * scale
        bias = by_distance.masked_fill(~is_real[:, None, None, :], float("-inf"))
        y = functional.scaled_dot_product_attention(q + self.bias_u[:, None], k, v, attn_mask=bias, scale=scale)
        out: Tensor = self.o_proj(y.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        by_head: Tensor = x.unflatten(-1, (self._num_heads, self._head_dim)).transpose(1, 2)
        return by_head


class Convolution(nn.Module):
    """Gated pointwise, depthwise over time, batch norm, pointwise."""

    def __init__(self, shape: EncoderShape) -> None:
        super().__init__()
        width, bias, kernel = shape.hidden_size, shape.has_convolution_bias, shape.kernel_size
        self.pointwise_conv1 = nn.Conv1d(width, 2 * width, 1, bias=bias)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=(kernel - 1) // 2, groups=width, bias=bias)
        self.norm = nn.BatchNorm1d(width, NORM_EPS)
        self.pointwise_conv2 = nn.Conv1d(width, width, 1, bias=bias)

    def forward(self, x: Tensor, is_real: Tensor) -> Tensor:
        """(B, T, H) -> (B, T, H)."""
        y = functional.glu(self.pointwise_conv1(x.transpose(1, 2)), dim=1)
        y = self.norm(self.depthwise_conv(y * is_real[:, None, :]))
        out: Tensor = self.pointwise_conv2(functional.silu(y)).transpose(1, 2)
        return out


def relative_positions(num_frames: int, width: int, device: torch.device) -> Tensor:
    """Sines and cosines (2T - 1, width) of the distances T - 1, ..., 0, ..., -(T - 1), interleaved."""
    distances = torch.arange(num_frames - 1, -num_frames, -1, dtype=torch.float32, device=device)
    divisors = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    angles = distances[:, None] * divisors
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


def shifted(scores: Tensor) -> Tensor:
    """Scores by distance (B, heads, T, 2T - 1) -> by key (B, heads, T, T): entry j of row i is the one for i - j."""
    batch, heads, num_frames, num_distances = scores.shape
    padded = functional.pad(scores, (1, 0)).view(batch, heads, num_distances + 1, num_frames)
    by_key: Tensor = padded[:, :, 1:].view(batch, heads, num_frames, num_distances)[..., :num_frames]
    return by_key

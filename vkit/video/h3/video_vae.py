"""The video autoencoder: pixels to moments by a causal convolutional encoder, latents to pixels by a transformer.

Both work in chunks of 17 frames and in tiles; that is part of the model, not only of saving memory. Everything is
float32. Source: the released model's autoencoder; names of both its spellings are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from vkit.errors import CheckpointError, InvalidRequest
from vkit.loaders.tensors import open_tensors
from vkit.video.h3.geometry import CLIP_FRAMES, CLIP_LATENTS, Tile, tiles
from vkit.video.h3.tiling import assemble, cross_fade
from vkit.video.h3.video_vae_config import VideoVAEConfig
from vkit.video.h3.weights import attention, dense, rms_norm, rotate_half

PIXEL_MEAN, PIXEL_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LATENT_DROP = 3
CHUNK_OVERLAP = 2
"""Latent frames that a chunk of the decoder looks ahead."""
FRAME_PAD = 3
"""Frames at the start of every decoded chunk that are thrown away."""
FRAME_OVERLAP = 5
QK_EPS = 1e-5
NARROW = 16
"""Channels below which torch's 3-D convolution is slow on a CPU: 2.8 against 9.1 GFLOP/s for 8 channels of 17x128x128
on one core (EPYC, November 2026). From 32 on it is the faster one."""

_SPLIT_RULES = (
    (re.compile(r"^encoder\.down_blocks\.(\d+)\.resnets\.(\d+)\."), r"encoder.down.\1.block.\2."),
    (re.compile(r"^encoder\.down_blocks\.(\d+)\.downsamplers\.0\.conv\."), r"encoder.down.\1.downsample.conv."),
    (re.compile(r"\.conv_shortcut\."), ".nin_shortcut."),
    (re.compile(r"^decoder\.proj_in\."), "decoder.x_embedder."),
    (re.compile(r"\.attn\.to_out\.0\."), ".attn.to_out."),
    (re.compile(r"\.ff\.net\.2\."), ".ff.w2."),
)


def normalise_pixels(frames: Tensor) -> Tensor:
    """Frames (T, H, W, 3) of uint8 -> (3, T, H, W), as the encoder wants them."""
    pixels = frames.permute(3, 0, 1, 2).to(torch.float32) / 255
    return (pixels - torch.tensor(PIXEL_MEAN).view(3, 1, 1, 1)) / torch.tensor(PIXEL_STD).view(3, 1, 1, 1)


def denormalise_pixels(frames: Tensor) -> Tensor:
    """What the decoder makes (3, T, H, W) -> (T, H, W, 3) within 0..1."""
    mean, std = (torch.tensor(value, device=frames.device).view(3, 1, 1, 1) for value in (PIXEL_MEAN, PIXEL_STD))
    return (frames * std + mean).clamp(0, 1).permute(1, 2, 3, 0)


def pixels_to_bytes(frames: Tensor) -> Tensor:
    """Pixels within 0..1 -> uint8, rounded to nearest."""
    return (frames * 255).round().to(torch.uint8)


def count_decoded_frames(num_latents: int) -> int:
    """Frames that so many latent frames make."""
    return sum(1 if index % CLIP_LATENTS == 0 else 4 for index in range(num_latents))


class VideoVAE:
    """An autoencoder on a device. Weights are read when first needed, encoder and decoder apart."""

    def __init__(self, path: Path, config: VideoVAEConfig, device: torch.device | None = None) -> None:
        """Open `path`, a file or directory, and check that every tensor is there.

        Raises:
            CheckpointError: a tensor is missing or has the wrong shape.
        """
        self.config = config
        self.path = path
        self._device = device or torch.device("cpu")
        self.files = open_tensors(path)
        self._stored = {_release_name(name): name for name in self.files.names()}
        self._is_split = any(".to_q." in name for name in self._stored)
        self._loaded: dict[str, Tensor] = {}
        self.has_encoder = "encoder.conv_in.weight" in self._stored
        self._check()

    def num_bytes(self, *prefixes: str) -> int:
        """Float32 bytes of the tensors whose release names begin so."""
        total = 0
        for name, stored in self._stored.items():
            if name.startswith(prefixes):
                count = 1
                for side in self.files.info(stored).shape:
                    count *= side
                total += 4 * count
        return total

    def free(self) -> None:
        """Let all weights go."""
        self._loaded.clear()
        for stored in self._stored.values():
            self.files.release(stored)

    def close(self) -> None:
        """End loading."""
        self.free()
        self.files.close()

    # encoder

    def encode(self, pixels: Tensor, on_unit: Callable[[], None] | None = None, *, tiled: bool = True) -> Tensor:
        """Moments (2 C, t, h, w) of normalised pixels (3, T, H, W): mean, then log variance.

        One frame is encoded alone; more are filled up to whole chunks of 17 with the last one, whose latents go again.
        `on_unit` is called after every chunk.
        """
        if pixels.shape[1] == 1:
            return self._encode_tiled(pixels, tiled)
        surplus = -pixels.shape[1] % CLIP_FRAMES
        filled = torch.cat([pixels, pixels[:, -1:].expand(-1, surplus, -1, -1)], dim=1)
        parts = []
        for chunk in filled.split(CLIP_FRAMES, dim=1):
            parts.append(self._encode_tiled(chunk, tiled))
            if on_unit is not None:
                on_unit()
        return torch.cat(parts, dim=1)[:, :-LATENT_DROP]

    def _encode_tiled(self, pixels: Tensor, tiled: bool) -> Tensor:
        c = self.config
        sides = pixels.shape[2:]
        rows, columns = (tiles(side, c.tile, c.min_overlap, c.ratio) if tiled else [Tile(0, side, 0)] for side in sides)

        def encode(row: Tile, column: Tile) -> Tensor:
            part = pixels[:, :, row.start : row.start + row.length, column.start : column.start + column.length]
            return self._encode_clip(part.to(self._device)).cpu()

        return assemble(rows, columns, encode, c.ratio)

    def _encode_clip(self, x: Tensor) -> Tensor:
        c = self.config
        x = self._conv3(x, "encoder.conv_in")
        width = c.widths[0]
        for level, out_width in enumerate(c.widths):
            for block in range(c.blocks_per_level):
                x = self._res_block(x, f"encoder.down.{level}.block.{block}", width != out_width)
                width = out_width
            strides = c.time_strides[level], c.space_strides[level]
            if max(strides) > 1:
                x = self._down(x, f"encoder.down.{level}.downsample.conv", *strides)
        x = self._conv3(functional.silu(self._group_norm(x, "encoder.norm_out")), "encoder.conv_out")
        return self._conv1(x, "quant_conv")

    def _res_block(self, x: Tensor, name: str, has_shortcut: bool) -> Tensor:
        h = self._conv3(functional.silu(self._group_norm(x, f"{name}.norm1")), f"{name}.conv1")
        h = self._conv3(functional.silu(self._group_norm(h, f"{name}.norm2")), f"{name}.conv2")
        return h + (self._conv1(x, f"{name}.nin_shortcut") if has_shortcut else x)

    def _group_norm(self, x: Tensor, name: str) -> Tensor:
        """Statistics of every frame by itself."""
        c = self.config
        frames = x.transpose(0, 1)
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return functional.group_norm(frames, c.norm_groups, weight, bias, c.norm_eps).transpose(0, 1)

    def _conv3(self, x: Tensor, name: str) -> Tensor:
        return self._causal(functional.pad(x, (1, 1, 1, 1), mode="reflect"), name, 1, 1)

    def _down(self, x: Tensor, name: str, time: int, space: int) -> Tensor:
        # A stride of 1 in space would want padding on both sides; only strides of 2 exist in this model.
        return self._causal(functional.pad(x, (0, 1, 0, 1), mode="reflect"), name, time, space)

    def _causal(self, padded: Tensor, name: str, time: int, space: int) -> Tensor:
        """3x3x3 over two frames of zeros in front."""
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        if padded.shape[1] == 1:  # the zeros meet all but the last slice of the kernel
            frame = functional.conv2d(padded[:, 0][None], weight[:, :, -1], bias, stride=space)
            return frame[0][:, None]
        filled = functional.pad(padded, (0, 0, 0, 0, 2, 0))
        if weight.shape[1] < NARROW and filled.device.type == "cpu":
            return _stacked_conv(filled, weight, bias, time, space)
        return functional.conv3d(filled[None], weight, bias, stride=(time, space, space))[0]

    def _conv1(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return functional.linear(x.movedim(0, -1), weight.flatten(1), bias).movedim(-1, 0)

    # decoder

    def decode(self, latent: Tensor, on_tile: Callable[[], None] | None = None) -> Iterator[Tensor]:
        """Frames of a denormalised latent (C, T, h, w) in pieces (3, n, H, W), not yet denormalised, in order.

        `on_tile` is called after every tile of every chunk.

        Raises:
            InvalidRequest: two latent frames or fewer make no picture.
        """
        num_latents = latent.shape[1]
        if num_latents <= CHUNK_OVERLAP:
            raise InvalidRequest(f"{num_latents} latent frames make no picture: the shortest clip has 22 frames")
        left = count_decoded_frames(num_latents)
        surplus = -(num_latents + LATENT_DROP) % CLIP_LATENTS
        filled = torch.cat([latent, latent[:, -1:].expand(-1, surplus, -1, -1)], dim=1)
        num_chunks = count_chunks(num_latents)
        tail: Tensor | None = None
        for chunk in range(num_chunks):
            start = CLIP_LATENTS * chunk
            frames = self._decode_tiled(filled[:, start : start + CLIP_LATENTS + CHUNK_OVERLAP], on_tile)
            split = CLIP_LATENTS * self.config.time_ratio
            current = frames[:, FRAME_PAD:split]
            if tail is not None:
                current = cross_fade(tail, current, FRAME_OVERLAP, 1)
            tail = frames[:, split + FRAME_PAD :].clone()
            yield current[:, :left]
            left -= min(left, current.shape[1])
        if left and tail is not None:
            yield tail[:, :left]

    def _decode_tiled(self, latent: Tensor, on_tile: Callable[[], None] | None) -> Tensor:
        c = self.config
        rows, columns = (tiles(side * c.ratio, c.tile, c.min_overlap, c.ratio) for side in latent.shape[2:])

        def decode(row: Tile, column: Tile) -> Tensor:
            top, bottom = row.start // c.ratio, (row.start + row.length) // c.ratio
            left, right = column.start // c.ratio, (column.start + column.length) // c.ratio
            frames = self.decode_clip(latent[:, :, top:bottom, left:right].to(self._device)).cpu()
            if on_tile is not None:
                on_tile()
            return frames

        return assemble(rows, columns, decode, 1)

    def decode_clip(self, latent: Tensor) -> Tensor:
        """One tile of one chunk (C, t, h, w) -> (3, 4 t, 16 h, 16 w), by the transformer."""
        c = self.config
        size = latent.shape[1:]
        tokens = self.post_quant(latent).movedim(0, -1).reshape(-1, c.latent_channels)
        x = functional.linear(tokens, self._get("decoder.x_embedder.weight"), self._get("decoder.x_embedder.bias"))
        registers = self._get("decoder.register_tokens")[0]
        x = torch.cat([x, registers, torch.zeros(1, x.shape[1], device=x.device)])
        rope = self._rope(size, c.decoder_registers + 1)
        for index in range(c.decoder_layers):
            x = self._decoder_block(x, f"decoder.transformer_blocks.{index}", rope)
        weight, bias = self._get("decoder.norm_out.weight"), self._get("decoder.norm_out.bias")
        x = functional.layer_norm(x[: len(tokens)], (c.decoder_width,), weight, bias, c.decoder_eps)
        x = functional.linear(x, self._get("decoder.proj_out.weight"), self._get("decoder.proj_out.bias"))
        patches = x.view(*size, 3, c.time_ratio, c.ratio, c.ratio).permute(3, 0, 4, 1, 5, 2, 6)
        return patches.reshape(3, size[0] * c.time_ratio, size[1] * c.ratio, size[2] * c.ratio)

    def post_quant(self, latent: Tensor) -> Tensor:
        """The 1x1x1 convolution before the transformer."""
        return self._conv1(latent, "post_quant_conv")

    def _decoder_block(self, x: Tensor, name: str, rope: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        normed = rms_norm(x, self._get(f"{name}.norm1.weight"), c.decoder_eps)
        q, k, v = self._qkv(normed, name)
        q, k = (rotate_half(rms_norm(part, None, QK_EPS), *rope) for part in (q, k))
        q, k, v = (part.transpose(0, 1) for part in (q, k, v))
        mixed = attention(q, k, v, c.decoder_head_dim**-0.5)
        out = functional.linear(mixed, self._get(f"{name}.attn.to_out.weight"), self._get(f"{name}.attn.to_out.bias"))
        x = x + out * self._get(f"{name}.scale1")
        normed = rms_norm(x, self._get(f"{name}.norm2.weight"), c.decoder_eps)
        wide = functional.linear(normed, self._get(f"{name}.ff.w1.weight"), self._get(f"{name}.ff.w1.bias"))
        gate, up = wide.chunk(2, dim=-1)
        hidden = functional.silu(gate) * up
        out = functional.linear(hidden, self._get(f"{name}.ff.w2.weight"), self._get(f"{name}.ff.w2.bias"))
        return x + out * self._get(f"{name}.scale2")

    def _qkv(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values (T, H, D). The fused rows are grouped by head."""
        c = self.config
        heads, dim = c.decoder_heads, c.decoder_head_dim
        if self._is_split:
            q, k, v = (
                functional.linear(
                    x, self._get(f"{name}.attn.to_{part}.weight"), self._get(f"{name}.attn.to_{part}.bias")
                ).view(-1, heads, dim)
                for part in "qkv"
            )
            return q, k, v
        fused = functional.linear(x, self._get(f"{name}.attn.to_qkv.weight"), self._get(f"{name}.attn.to_qkv.bias"))
        q, k, v = fused.view(-1, heads, 3, dim).unbind(2)
        return q, k, v

    def _rope(self, size: torch.Size, num_appended: int) -> tuple[Tensor, Tensor]:
        """cos and sin of positions normalised by the clip's extent; appended tokens stand in the middle."""
        c = self.config
        width = int(c.decoder_head_dim * c.decoder_rope_ratio)
        num_freqs = width // 6
        freqs = c.decoder_rope_theta ** (-6.0 * torch.arange(num_freqs, dtype=torch.float32) / width)
        axes = [2 * (torch.arange(count, dtype=torch.float32) + 0.5) / count - 1 for count in size]
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
        grid = torch.cat([grid, torch.zeros(num_appended, 3)])
        angles = (2 * torch.pi * grid[:, :, None] * freqs).flatten(1)
        angles = torch.cat([angles, angles], dim=-1).to(self._device)
        return angles.cos(), angles.sin()

    # weights

    def _get(self, name: str) -> Tensor:
        """A tensor by release name, float32, on the device."""
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = self._loaded[name] = self._load(name)
        return loaded

    def _load(self, name: str) -> Tensor:
        stored = self._stored.get(name)
        if stored is None and ".ff.w1." in name:
            up, gate = self._read(self._stored[name.replace(".ff.w1.", ".ff.net.0.proj.")]).chunk(2)
            return torch.cat([gate, up])
        if stored is None:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self._read(stored)

    def _read(self, stored: str) -> Tensor:
        return dense(self.files.load(stored), torch.float32, self._device)

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        width, inner = c.decoder_width, c.decoder_width * c.decoder_ff_mult
        shapes: dict[str, tuple[int, ...]] = {
            "post_quant_conv.weight": (c.latent_channels, c.latent_channels, 1, 1, 1),
            "decoder.x_embedder.weight": (width, c.latent_channels),
            "decoder.register_tokens": (1, c.decoder_registers, width),
            "decoder.norm_out.weight": (width,),
            "decoder.proj_out.weight": (3 * c.time_ratio * c.ratio**2, width),
        }
        for index in range(c.decoder_layers):
            name = f"decoder.transformer_blocks.{index}"
            first = ".ff.net.0.proj" if self._is_split else ".ff.w1"
            qkv = [f".attn.to_{part}" for part in "qkv"] if self._is_split else [".attn.to_qkv"]
            rows = width if self._is_split else 3 * width
            shapes |= {f"{name}{part}.weight": (rows, width) for part in qkv}
            shapes |= {
                f"{name}{first}.weight": (2 * inner, width),
                f"{name}.ff.w2.weight": (width, inner),
                f"{name}.attn.to_out.weight": (width, width),
                f"{name}.scale1": (width,),
                f"{name}.scale2": (width,),
                f"{name}.norm1.weight": (width,),
                f"{name}.norm2.weight": (width,),
            }
        if self.has_encoder:
            shapes |= self._encoder_shapes()
        return shapes

    def _encoder_shapes(self) -> dict[str, tuple[int, ...]]:
        c = self.config
        moments = 2 * c.latent_channels
        shapes: dict[str, tuple[int, ...]] = {
            "encoder.conv_in.weight": (c.widths[0], 3, 3, 3, 3),
            "encoder.conv_out.weight": (moments, c.widths[-1], 3, 3, 3),
            "quant_conv.weight": (moments, moments, 1, 1, 1),
        }
        width = c.widths[0]
        for level, out_width in enumerate(c.widths):
            for block in range(c.blocks_per_level):
                name = f"encoder.down.{level}.block.{block}"
                shapes[f"{name}.conv1.weight"] = (out_width, width, 3, 3, 3)
                shapes[f"{name}.conv2.weight"] = (out_width, out_width, 3, 3, 3)
                if width != out_width:
                    shapes[f"{name}.nin_shortcut.weight"] = (out_width, width, 1, 1, 1)
                width = out_width
            if max(c.time_strides[level], c.space_strides[level]) > 1:
                shapes[f"encoder.down.{level}.downsample.conv.weight"] = (width, width, 3, 3, 3)
        return shapes

    def _check(self) -> None:
        for name, shape in self._expected_shapes().items():
            stored = self._stored.get(name)
            if stored is None:
                raise CheckpointError(
                    f"{self.path}: tensor {name!r} is missing", remedy="is this the video autoencoder of MiniMax-H3?"
                )
            found = self.files.info(stored).shape
            if found != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {stored!r} is {list(found)}, expected {list(shape)} by the configuration"
                )


def _stacked_conv(filled: Tensor, weight: Tensor, bias: Tensor, time: int, space: int) -> Tensor:
    """A 3x3x3 convolution as a flat one over three neighbouring frames side by side."""
    frames = filled.transpose(0, 1)
    last = len(frames) - 2
    windows = torch.cat([frames[start : start + last : time] for start in range(3)], dim=1)
    flat = weight.transpose(1, 2).flatten(1, 2)
    return functional.conv2d(windows, flat, bias, stride=space).transpose(0, 1)


def count_chunks(num_latents: int) -> int:
    """Chunks that the decoder makes of so many latent frames."""
    return -(-(num_latents + LATENT_DROP) // CLIP_LATENTS) - 1


def _release_name(name: str) -> str:
    for pattern, replacement in _SPLIT_RULES:
        name = pattern.sub(replacement, name)
    return name

"""Operations and bytes of every stage, counted from shapes: what a plan is made of. Measures speed, runs no model."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn import functional

from vkit.video.h3.audio_vae import AudioVAEConfig
from vkit.video.h3.dit import NUM_TAGS, ROW_CHUNK
from vkit.video.h3.dit_config import DiTConfig
from vkit.video.h3.encoder_weights import EncoderConfig
from vkit.video.h3.geometry import CLIP_FRAMES, CLIP_LATENTS, tiles
from vkit.video.h3.video_vae import CHUNK_OVERLAP, count_chunks
from vkit.video.h3.video_vae_config import VideoVAEConfig

FLOAT_BYTES = 4
PRODUCT_SHARE = 0.85
"""Share of the measured speed that products inside a model reach; the rest is norms, rotations and copies."""


@dataclass(frozen=True, slots=True)
class Speed:
    """Floating-point operations per second of this device, as just measured."""

    products: float
    attention: float


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a stage."""

    products: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.products + self.attention

    def seconds(self, speed: Speed) -> float:
        """Expected time."""
        return self.products / (PRODUCT_SHARE * speed.products) + self.attention / speed.attention

    def __add__(self, other: Work) -> Work:
        return Work(self.products + other.products, self.attention + other.attention)

    def times(self, count: float) -> Work:
        """The same done `count` times."""
        return Work(self.products * count, self.attention * count)


@lru_cache(maxsize=8)
def measured_speed(device: str, dtype: torch.dtype) -> Speed:
    """The speed of products and attention on `device`, from a fraction of a second of each."""
    size, heads, length = (1024, 4, 1024) if device == "cpu" else (8192, 16, 8192)
    x, w = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    q = torch.randn(1, heads, length, 128, device=device, dtype=dtype)
    products = _best(lambda: functional.linear(x, w), device)
    attention = _best(lambda: functional.scaled_dot_product_attention(q, q, q), device)
    return Speed(2 * size**3 / products, 4 * heads * length**2 * 128 / attention)


def _best(run: Callable[[], object], device: str) -> float:
    """Seconds of the fastest of a few calls, after one that does not count."""
    times = []
    for _ in range(4):
        if device != "cpu":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times[1:])


# transformer


def dit_block_params(c: DiTConfig) -> int:
    """Weights of the matrices of one block."""
    return c.hidden_size * (4 * c.attention_width + 3 * c.ffn_hidden_size)


def dit_forward(c: DiTConfig, num_rows: int) -> Work:
    """One pass over S rows."""
    products = 2.0 * num_rows * dit_block_params(c) * c.num_layers
    return Work(products, 4.0 * num_rows**2 * c.attention_width * c.num_layers)


def dit_once(c: DiTConfig, num_text: int, num_timesteps: int) -> Work:
    """What is done before the first pass: refined text, modulations."""
    refined = 2.0 * num_text * (dit_block_params(c) * c.token_refiner_num_layers + c.text_dim * c.hidden_size)
    modulated = 2.0 * num_timesteps * 18 * c.hidden_size * c.time_embed_dim * c.num_layers
    return Work(refined + modulated, 4.0 * num_text**2 * c.attention_width * c.token_refiner_num_layers)


def dit_activation_bytes(c: DiTConfig, num_rows: int, itemsize: int) -> int:
    """The most that one pass holds beside weights and modulations."""
    stream = num_rows * c.hidden_size * itemsize
    heads = num_rows * c.attention_width * itemsize
    chunk = min(ROW_CHUNK, num_rows)
    rope = 2 * num_rows * c.rope_width * (FLOAT_BYTES + itemsize)
    projecting = 2 * stream + 3 * heads + chunk * c.attention_width * (3 * itemsize + 3 * FLOAT_BYTES)
    mixing = 2 * stream + 5 * heads
    feeding = stream + chunk * (3 * c.hidden_size + 4 * c.ffn_hidden_size) * itemsize
    ending = stream + num_rows * c.hidden_size * 2 * FLOAT_BYTES
    return rope + max(projecting, mixing, feeding, ending)


def modulation_bytes(c: DiTConfig, num_timesteps: int, itemsize: int) -> int:
    """The tables of all blocks."""
    return num_timesteps * c.hidden_size * itemsize * (NUM_TAGS * 6 * c.num_layers + 2)


# conditioner


def text_work(c: EncoderConfig, num_tokens: int) -> Work:
    """All decoder layers over a prompt."""
    width = c.num_heads * c.head_dim
    matrices = c.hidden_size * (2 * width + 2 * c.num_kv_heads * c.head_dim + 3 * c.intermediate_size)
    return Work(2.0 * num_tokens * matrices * c.num_layers, 2.0 * num_tokens**2 * width * c.num_layers)


def text_activation_bytes(c: EncoderConfig, num_tokens: int, itemsize: int) -> int:
    """The most that a layer holds."""
    width = c.num_heads * c.head_dim
    return num_tokens * itemsize * (4 * c.hidden_size + max(6 * width, 3 * c.intermediate_size))


def vision_work(vision: dict[str, int], num_patches: int, patches_per_frame: int) -> Work:
    """The tower over all patches."""
    width, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    products = 2.0 * num_patches * depth * (4 * width**2 + 2 * width * inner)
    return Work(products, 4.0 * num_patches * patches_per_frame * width * depth)


# autoencoders


def video_decode_work(c: VideoVAEConfig, latent_t: int, width: int, height: int) -> Work:
    """All chunks and tiles of the decoder."""
    width_params = c.decoder_width**2 * (4 + 3 * c.decoder_ff_mult)
    total = Work()
    for row in tiles(height, c.tile, c.min_overlap, c.ratio):
        for column in tiles(width, c.tile, c.min_overlap, c.ratio):
            cells = (row.length // c.ratio) * (column.length // c.ratio)
            tokens = (CLIP_LATENTS + CHUNK_OVERLAP) * cells + c.decoder_registers + 1
            attention = 4.0 * tokens**2 * c.decoder_width * c.decoder_layers
            total += Work(2.0 * tokens * width_params * c.decoder_layers, attention)
    return total.times(max(1, count_chunks(latent_t)))


def video_decode_units(c: VideoVAEConfig, latent_t: int, width: int, height: int) -> int:
    """Tiles of all chunks."""
    rows, columns = (tiles(side, c.tile, c.min_overlap, c.ratio) for side in (height, width))
    return max(1, count_chunks(latent_t)) * len(rows) * len(columns)


def video_decode_bytes(c: VideoVAEConfig, width: int, height: int) -> int:
    """One chunk of frames, tile by tile and put together, and the transformer over one tile."""
    frames = (CLIP_LATENTS + CHUNK_OVERLAP) * c.time_ratio * 3 * width * height * FLOAT_BYTES
    tokens = (CLIP_LATENTS + CHUNK_OVERLAP) * (c.tile // c.ratio) ** 2
    return 3 * frames + tokens * c.decoder_width * FLOAT_BYTES * (6 + 4 * c.decoder_ff_mult)


def video_encode_work(c: VideoVAEConfig, num_frames: int, width: int, height: int) -> Work:
    """The convolutions over every tile of every chunk. A single frame meets a third of each kernel."""
    chunks = 1 if num_frames == 1 else -(-num_frames // CLIP_FRAMES)
    frames, taps = (1, 9) if num_frames == 1 else (CLIP_FRAMES, 27)
    total = 0.0
    for row in tiles(height, c.tile, c.min_overlap, c.ratio):
        for column in tiles(width, c.tile, c.min_overlap, c.ratio):
            total += _encode_tile(c, frames, row.length * column.length, taps)
    return Work(total * chunks)


def _encode_tile(c: VideoVAEConfig, frames: float, area: float, taps: int) -> float:
    flops = 2.0 * frames * area * taps * 3 * c.widths[0]
    before = c.widths[0]
    for level, width in enumerate(c.widths):
        cells = frames * area
        flops += 2.0 * cells * taps * width * (before + width)
        flops += 2.0 * cells * taps * width * 2 * width * (c.blocks_per_level - 1)
        before = width
        frames = max(1.0, frames / c.time_strides[level])
        area /= c.space_strides[level] ** 2
        if max(c.time_strides[level], c.space_strides[level]) > 1:
            flops += 2.0 * frames * area * taps * width * width
    return flops + 2.0 * frames * area * taps * before * 2 * c.latent_channels


def video_encode_bytes(c: VideoVAEConfig, num_frames: int, width: int, height: int) -> int:
    """The widest level of one tile, a few times over, beside the clip's pixels."""
    frames = 1 if num_frames == 1 else CLIP_FRAMES
    area = min(c.tile, height) * min(c.tile, width)
    widest, cells = 0, float(area * frames)
    for level, channels in enumerate(c.widths):
        widest = max(widest, int(cells * channels))
        cells /= c.space_strides[level] ** 2 * c.time_strides[level]
    pixels = 2 * num_frames * 3 * width * height * FLOAT_BYTES
    return pixels + 6 * widest * FLOAT_BYTES


def audio_decode_work(c: AudioVAEConfig, steps: int) -> Work:
    """The convolutions of both channels."""
    flops = 2.0 * steps * 7 * c.latent_dim * c.decoder_dim
    width, length = c.decoder_dim, float(steps)
    for rate, kernel in zip(c.decoder_rates, c.decoder_kernels, strict=True):
        flops += 2.0 * length * kernel * width * (width // 2)
        width, length = width // 2, length * rate
        for size, dilations in zip(c.resblock_kernels, c.resblock_dilations, strict=True):
            flops += 2.0 * length * len(dilations) * 2 * (size * width * width + 6 * 12 * width)
    return Work(2 * flops)


def audio_decode_bytes(c: AudioVAEConfig, steps: int) -> int:
    """The widest stage of both channels, a few times over and at twice the rate."""
    widest, width, length = c.latent_dim * steps, c.decoder_dim, steps
    for rate in c.decoder_rates:
        width, length = width // 2, length * rate
        widest = max(widest, width * length)
    return 2 * widest * FLOAT_BYTES * 12


def audio_encode_work(c: AudioVAEConfig, samples: int) -> Work:
    """The convolutions of both channels."""
    width, length, flops = c.encoder_dim, float(samples), 2.0 * samples * 7 * c.encoder_dim
    for rate in c.encoder_rates:
        flops += 2.0 * length * 3 * 8 * width * width
        length /= rate
        flops += 2.0 * length * 2 * rate * width * 2 * width
        width *= 2
    return Work(2 * (flops + 2.0 * length * (3 * width * c.latent_dim + 3 * c.latent_dim**2)))


def audio_encode_bytes(c: AudioVAEConfig, samples: int) -> int:
    """The first level of both channels, a few times over."""
    return 2 * samples * c.encoder_dim * FLOAT_BYTES * 5

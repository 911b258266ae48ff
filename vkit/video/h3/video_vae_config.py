"""Sizes and statistics of the video autoencoder, from either spelling of its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vkit.errors import CheckpointError, ModelLoadError
from vkit.video.h3.config_files import numbers, read_config

LATENTS_MEAN = (
    0.858090341091156, -0.9606591463088989, 1.0661640167236328, -0.5090325474739075, -0.2727581858634949,
    -1.3675414323806763, -0.2553254961967468, -0.26907554268836975, -0.5376840829849243, -0.0464097298681736,
    0.6657370328903198, 0.19690127670764923, -0.5460608005523682, -0.4035342037677765, -0.23683024942874908,
    0.25928452610969543, -0.30133944749832153, 0.211341992020607, -1.1206848621368408, 0.3581933379173279,
    -0.04225143790245056, 0.2604829967021942, 0.22864092886447906, 0.7056031823158264,
)  # fmt: skip
LATENTS_STD = (
    1.2223774194717407, 1.2767263650894165, 1.6831774711608887, 1.7549455165863037, 1.5636216402053833,
    2.194143533706665, 0.9653137922286987, 1.0569885969161987, 0.841948926448822, 0.7729952931404114,
    1.8955937623977661, 0.946841835975647, 0.7996809482574463, 0.44988900423049927, 0.7197399735450745,
    0.6936293244361877, 2.961095094680786, 2.7694199085235596, 3.0496184825897217, 2.1088054180145264,
    3.276226282119751, 3.1627357006073, 2.2816812992095947, 2.6127843856811523,
)  # fmt: skip

FIXED = {
    "padding_mode": "reflect",
    "spatial_padding_mode": "reflect",
    "use_t_isolated_gn": True,
    "causal_encoder": True,
    "causal_decoder": False,
    "use_vit_decoder": True,
    "pixel_norm_type": "imagenet",
    "scaling_factor": 1,
    "shift_factor": 0,
    "in_channels": 3,
    "out_ch": 3,
    "out_channels": 3,
    "vae_clip_length": 17,
    "clip_length": 17,
    "vae_token_drop": 3,
    "token_drop": 3,
    "vae_encoder_tiling": 1,
    "vae_decoder_tiling": 1,
    "norm_type": "rms_norm",
    "norm_affine": True,
    "qk_norm_type": "rms_norm",
    "qk_norm_affine": False,
    "ffn_activation_fn": "silu",
    "ffn_use_gated": True,
}
"""Choices of the architecture that only the released value is computed for."""


@dataclass(frozen=True, slots=True)
class VideoVAEConfig:
    """The released model's values are the defaults."""

    latent_channels: int = 24
    widths: tuple[int, ...] = (128, 256, 256, 512, 512, 1024)
    """Channels of each level of the encoder."""
    blocks_per_level: int = 2
    space_strides: tuple[int, ...] = (2, 2, 2, 2, 1, 1)
    time_strides: tuple[int, ...] = (1, 2, 2, 1, 1, 1)
    norm_groups: int = 32
    norm_eps: float = 1e-6
    decoder_layers: int = 36
    decoder_heads: int = 32
    decoder_head_dim: int = 64
    decoder_registers: int = 4
    decoder_ff_mult: int = 4
    decoder_rope_theta: float = 100.0
    decoder_rope_ratio: float = 0.75
    decoder_eps: float = 1e-5
    tile: int = 256
    min_overlap: int = 64
    latents_mean: tuple[float, ...] = LATENTS_MEAN
    latents_std: tuple[float, ...] = LATENTS_STD

    @property
    def ratio(self) -> int:
        """Pixels per latent pixel, along a side."""
        return math.prod(self.space_strides)

    @property
    def time_ratio(self) -> int:
        """Frames per latent frame."""
        return math.prod(self.time_strides)

    @property
    def decoder_width(self) -> int:
        """Width of the decoder."""
        return self.decoder_heads * self.decoder_head_dim


def video_vae_config(path: Path) -> VideoVAEConfig:
    """The configuration at `path`: the released outer file (its inner one is read too), the inner one, or a split one.

    Raises:
        CheckpointError: it cannot be read, or contradicts itself.
        ModelLoadError: a choice of the architecture that is not supported.
    """
    given = read_config(path)
    inner = given.get("source_path")
    if isinstance(inner, str) and (path.parent / inner / "config.json").is_file():
        given = read_config(path.parent / inner / "config.json") | given
    elif "latents_mean" not in given and (path.parent.parent / "config.json").is_file():
        outer = read_config(path.parent.parent / "config.json")
        if "vae_clip_length" in outer:
            given = given | outer
    return merged_config(given, str(path))


def merged_config(given: Mapping[str, Any], source: str) -> VideoVAEConfig:
    """The configuration of these keys, of whichever spelling.

    Raises:
        CheckpointError, ModelLoadError: as `video_vae_config`.
    """
    inner = given.get("vit_decoder_kwargs", {})
    if not isinstance(inner, dict):
        raise CheckpointError(f"{source}: vit_decoder_kwargs is {inner!r:.60}, expected an object")
    for key, value in {**given, **inner}.items():
        if key in FIXED and value is not None and value != FIXED[key]:
            raise ModelLoadError(f"{source}: {key} is {value!r:.60}, only {FIXED[key]!r} is supported")
    default = VideoVAEConfig()
    read = numbers(source, given)
    vit = numbers(source, inner)
    multipliers = read.integers("ch_mult", (1, 2, 2, 4, 4, 8))
    widths = tuple(read.integer("ch", 128) * factor for factor in multipliers)
    channels = read.integer("latent_channels", read.integer("z_channels", default.latent_channels))
    config = VideoVAEConfig(
        latent_channels=channels,
        widths=read.integers("block_out_channels", widths),
        blocks_per_level=read.integer("layers_per_block", read.integer("num_res_blocks", default.blocks_per_level)),
        space_strides=read.integers("spatial_downsample_factors", read.integers("space_down", default.space_strides)),
        time_strides=read.integers("temporal_downsample_factors", read.integers("time_down", default.time_strides)),
        norm_groups=read.integer("norm_num_groups", default.norm_groups),
        norm_eps=read.number("norm_eps", default.norm_eps),
        decoder_layers=read.integer("decoder_num_layers", vit.integer("num_layers", default.decoder_layers)),
        decoder_heads=read.integer("decoder_num_attention_heads", vit.integer("heads", default.decoder_heads)),
        decoder_head_dim=read.integer("decoder_attention_head_dim", vit.integer("dim_head", default.decoder_head_dim)),
        decoder_registers=read.integer("decoder_num_register_tokens", default.decoder_registers),
        decoder_ff_mult=read.integer("decoder_ffn_mult", default.decoder_ff_mult),
        decoder_rope_theta=read.number("decoder_rope_theta", vit.number("rope_theta", default.decoder_rope_theta)),
        decoder_rope_ratio=read.number(
            "decoder_rope_dim_ratio", vit.number("rope_dim_ratio", default.decoder_rope_ratio)
        ),
        decoder_eps=read.number("decoder_norm_eps", default.decoder_eps),
        tile=read.integer("vae_tile_size", default.tile),
        min_overlap=read.integer("vae_tile_overlap_min", default.min_overlap),
        latents_mean=read.series("latents_mean", default.latents_mean),
        latents_std=read.series("latents_std", default.latents_std),
    )
    _check(config, given, source)
    return config


def _check(config: VideoVAEConfig, given: Mapping[str, Any], source: str) -> None:
    levels = {len(config.widths), len(config.space_strides), len(config.time_strides)}
    if len(levels) != 1:
        raise CheckpointError(f"{source}: widths and strides are of {sorted(levels)} levels, expected one number")
    for name, values in (("latents_mean", config.latents_mean), ("latents_std", config.latents_std)):
        if len(values) != config.latent_channels:
            raise CheckpointError(f"{source}: {name} has {len(values)} entries for {config.latent_channels} channels")
    if config.time_ratio != 4:
        raise ModelLoadError(f"{source}: {config.time_ratio} frames per latent frame, only 4 is supported")
    for key, value in (("vae_ratio", config.ratio), ("vae_ratio_t", config.time_ratio)):
        if key in given and given[key] != value:
            raise CheckpointError(f"{source}: {key} is {given[key]!r:.60}, the strides make {value}")
    if config.tile % config.ratio or config.min_overlap % config.ratio or config.tile <= config.min_overlap:
        raise CheckpointError(f"{source}: tiles of {config.tile} with overlap {config.min_overlap} do not work")

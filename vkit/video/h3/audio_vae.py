"""The sound autoencoder: each stereo channel by itself, 40 latents a second at 32 kHz. Float32 always.

Source: the released model's autoencoder (a convolutional encoder, a causal attention block, a BigVGAN decoder);
weight-normalised convolutions in all three spellings, folded ones too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders.tensors import TensorFiles, open_tensors
from vkit.video.h3.config_files import numbers, read_config
from vkit.video.h3.weights import dense

LATENTS_MEAN = (
    -0.020211687488382354, 0.3876466479950502, -0.04398279799186767, -0.28591514936373, 0.08179686214561671,
    -0.35782641352446604, 0.040623809960919084, -0.01552534501956604, -0.223362481667332, 0.1821006842509091,
    0.2941778783780663, -0.07901167601970885, -0.056815072777201, -0.3699028221860095, -0.31616315591624855,
    0.5905951377425391, -0.052139568068853864, 0.013673160263486295, -0.03691647864630577, 0.09732660653298163,
    -0.3394662328788498, -0.30685677538541667, -0.24504598907458763, -0.034698524462007344, 0.02868032184767538,
    -0.21217779266454084, -0.1678263169941987, 0.3221287889040614, -0.1223055851554907, 0.4356604928128464,
    -0.0502599202236253, 0.3979258376211797,
)  # fmt: skip
LATENTS_STD = (
    1.6895524230479284, 2.76263727217653, 1.7945344281264435, 1.6801681847309828, 1.6390226546605453,
    2.7788298348882177, 1.7659090095747236, 1.6199757612137327, 2.6336525640336896, 1.8539356672817833,
    2.5056497896915633, 1.811019237886178, 1.9579657790720237, 1.6685498243529284, 1.4922469314453364,
    3.298670198067373, 1.9491804496832168, 1.8720003270431442, 1.8334080103291832, 1.6488070416529093,
    1.6176957696319716, 1.9131449234774398, 1.5695245398428617, 1.6943659940415912, 1.8318420762504692,
    1.5540637421583379, 1.9344930328968526, 1.599198216109855, 1.718045989838149, 1.6307219190837705,
    1.8661226051202384, 1.5613768203168363,
)  # fmt: skip
RESIDUAL_DILATIONS = (1, 3, 9)
LAYER_NORM_EPS = 1e-5
SNAKE_EPS = 1e-9
FILTER_TAPS, FILTER_CUTOFF, FILTER_BETA = 12, 0.25, 0.1102 * (2.285 * 5 * math.pi * 1.2 + 7.95 - 8.7)


@dataclass(frozen=True, slots=True)
class AudioVAEConfig:
    """The released model's values are the defaults. Statistics matter only where latents meet the transformer."""

    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 4, 5, 5)
    latent_dim: int = 2048
    latent_channels: int = 32
    num_heads: int = 8
    decoder_dim: int = 1024
    decoder_rates: tuple[int, ...] = (5, 5, 2, 2, 2, 2, 2)
    decoder_kernels: tuple[int, ...] = (9, 9, 4, 4, 4, 4, 4)
    resblock_kernels: tuple[int, ...] = (3, 7, 11)
    resblock_dilations: tuple[tuple[int, ...], ...] = ((1, 3, 5), (1, 3, 5), (1, 3, 5))
    sample_rate: int = 32_000
    latents_mean: tuple[float, ...] | None = LATENTS_MEAN
    latents_std: tuple[float, ...] | None = LATENTS_STD

    @property
    def hop(self) -> int:
        """Samples per latent step."""
        return math.prod(self.encoder_rates)


def audio_vae_config(path: Path) -> AudioVAEConfig:
    """The configuration at `path`: the released file (the metadata it names is read too), or a split one.

    Raises:
        CheckpointError, ModelLoadError: it cannot be read, contradicts itself, or is not supported.
    """
    given = read_config(path)
    metadata = given.get("source_metadata_path", "metadata.json")
    if isinstance(metadata, str) and (path.parent / metadata).is_file() and metadata.endswith(".json"):
        inner = read_config(path.parent / metadata).get("metadata", {})
        kwargs = inner.get("kwargs", {}) if isinstance(inner, dict) else {}
        given = (kwargs if isinstance(kwargs, dict) else {}) | given
    return audio_config_of(given, str(path))


def audio_config_of(given: Mapping[str, Any], source: str) -> AudioVAEConfig:
    """The configuration of these keys, of whichever spelling."""
    default = AudioVAEConfig()
    read = numbers(source, given)
    if given.get("decoder_type", "bigvgan") != "bigvgan" or not given.get("attn_proj", True):
        raise ModelLoadError(f"{source}: only decoder_type bigvgan with attn_proj is supported")
    channels = read.integer("latent_channels", read.integer("vae_latent_channels", default.latent_channels))
    kernels = read.integers("resblock_kernel_sizes", default.resblock_kernels)
    dilations = given.get("resblock_dilation_sizes")
    if dilations is None:
        dilations = [list(default.resblock_dilations[0])] * len(kernels)
    if not isinstance(dilations, list) or len(dilations) != len(kernels):
        raise CheckpointError(f"{source}: resblock_dilation_sizes {dilations!r:.60} for {len(kernels)} kernels")
    has_statistics = channels == default.latent_channels or "latents_mean" in given
    rates = read.integers("decoder_rates", default.decoder_rates)
    config = AudioVAEConfig(
        encoder_dim=read.integer("encoder_dim", default.encoder_dim),
        encoder_rates=read.integers("encoder_rates", default.encoder_rates),
        latent_dim=read.integer("latent_dim", default.latent_dim),
        latent_channels=channels,
        num_heads=read.integer("num_attention_heads", default.num_heads),
        decoder_dim=read.integer("decoder_dim", default.decoder_dim),
        decoder_rates=rates,
        decoder_kernels=read.integers("decoder_kernel_sizes", default.decoder_kernels),
        resblock_kernels=kernels,
        resblock_dilations=tuple(numbers(source, {"d": item}).integers("d", (1,)) for item in dilations),
        sample_rate=read.integer("sampling_rate", read.integer("sample_rate", default.sample_rate)),
        latents_mean=read.series("latents_mean", LATENTS_MEAN) if has_statistics else None,
        latents_std=read.series("latents_std", LATENTS_STD) if has_statistics else None,
    )
    for name, values in (("latents_mean", config.latents_mean), ("latents_std", config.latents_std)):
        if values is not None and len(values) != channels:
            raise CheckpointError(f"{source}: {name} has {len(values)} entries for {channels} channels")
    if len(config.decoder_kernels) != len(rates):
        raise CheckpointError(f"{source}: {len(config.decoder_kernels)} decoder kernels for {len(rates)} rates")
    if math.prod(rates) != config.hop:
        raise CheckpointError(f"{source}: decoder rates make {math.prod(rates)} samples, encoder rates {config.hop}")
    if config.latent_dim % (config.num_heads * channels):
        raise CheckpointError(f"{source}: {config.num_heads} heads and {channels} channels do not divide latent_dim")
    return config


def resampling_filter() -> Tensor:
    """The 12 taps of the anti-aliasing filter: a Kaiser-windowed sinc of sum 1."""
    window = torch.kaiser_window(FILTER_TAPS, periodic=False, beta=FILTER_BETA, dtype=torch.float64)
    time = torch.arange(FILTER_TAPS, dtype=torch.float64) - (FILTER_TAPS - 1) / 2
    taps = 2 * FILTER_CUTOFF * window * torch.sinc(2 * FILTER_CUTOFF * time)
    return (taps / taps.sum()).to(torch.float32)


class AudioVAE:
    """An autoencoder on a device. Weights are read when first needed."""

    def __init__(self, path: Path, config: AudioVAEConfig, device: torch.device | None = None) -> None:
        """Open `path`, a file or directory.

        Raises:
            CheckpointError: a tensor is missing.
        """
        self.path = path
        self.config = config
        self._device = device or torch.device("cpu")
        self.files: TensorFiles = open_tensors(path)
        self._loaded: dict[str, Tensor] = {}
        self._filter = resampling_filter().to(self._device)
        self._check()

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (A,) of latents: the configuration's, else the file's.

        Raises:
            CheckpointError: neither has them.
        """
        if {"latents_mean", "latents_std"} <= self.files.names():
            mean, std = (dense(self.files.load(name), torch.float32) for name in ("latents_mean", "latents_std"))
            return mean.flatten(), std.flatten()
        if self.config.latents_mean is None or self.config.latents_std is None:
            raise CheckpointError(
                f"{self.path}: latents_mean and latents_std are neither in the configuration nor in the file"
            )
        return torch.tensor(self.config.latents_mean), torch.tensor(self.config.latents_std)

    def num_bytes(self) -> int:
        """Float32 bytes of all tensors."""
        return sum(4 * math.prod(self.files.info(name).shape) for name in self.files.names())

    def free(self) -> None:
        """Let all weights go."""
        self._loaded.clear()
        for name in self.files.names():
            self.files.release(name)

    def close(self) -> None:
        """End loading."""
        self.free()
        self.files.close()

    # encoder

    def trunk(self, wave: Tensor) -> Tensor:
        """Features (2, latent_dim, T) of a wave (2, samples), filled up with silence to whole steps."""
        c = self.config
        wave = wave.to(self._device, torch.float32)
        x = functional.pad(wave, (0, -wave.shape[1] % c.hop))[:, None]
        x = self._conv(x, "encoder.block.0", padding=3)
        for level, rate in enumerate(c.encoder_rates, start=1):
            name = f"encoder.block.{level}.block"
            for unit, dilation in enumerate(RESIDUAL_DILATIONS):
                x = x + self._residual(x, f"{name}.{unit}.block", dilation)
            x = self._snake(x, f"{name}.3.alpha")
            x = self._conv(x, f"{name}.4", stride=rate, padding=-(-rate // 2))
        last = len(c.encoder_rates) + 1
        return self._conv(self._snake(x, f"encoder.block.{last}.alpha"), f"encoder.block.{last + 1}", padding=1)

    def encode(self, wave: Tensor) -> Tensor:
        """The posterior's mean (2, A, T) of a stereo wave (2, samples)."""
        return self.moments(self.trunk(wave))[0]

    def moments(self, trunk: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation (2, A, T) of the encoder's features."""
        mixed = torch.stack([self._pre_block(rows) for rows in trunk.transpose(1, 2)]).transpose(1, 2)
        mean, log_std = (
            functional.conv1d(mixed, self._get(f"{name}.weight"), self._get(f"{name}.bias"))
            for name in ("mean_proj", "logs_proj")
        )
        return mean.cpu(), log_std.cpu()

    def _residual(self, x: Tensor, name: str, dilation: int) -> Tensor:
        h = self._conv(self._snake(x, f"{name}.0.alpha"), f"{name}.1", padding=3 * dilation, dilation=dilation)
        return self._conv(self._snake(h, f"{name}.2.alpha"), f"{name}.3")

    def _snake(self, x: Tensor, name: str) -> Tensor:
        alpha = self._get(name)
        return x + torch.sin(alpha * x).square() / (alpha + SNAKE_EPS)

    def _pre_block(self, x: Tensor) -> Tensor:
        """One channel's features (T, latent_dim) -> (T, A)."""
        y = self._linear(self._layer_norm(x, "pre_block.norm3"), "pre_block.proj")
        y = y + self._pre_attention(self._layer_norm(x, "pre_block.norm1"))
        h = self._layer_norm(self._layer_norm(y, "pre_block.norm2"), "pre_block.mlp.norm")
        gate = functional.gelu(self._linear(h, "pre_block.mlp.w0"), approximate="tanh")
        return y + self._linear(gate * self._linear(h, "pre_block.mlp.w1"), "pre_block.mlp.w2")

    def _pre_attention(self, x: Tensor) -> Tensor:
        """Causal attention whose heads are averaged, then pooled to the latent channels."""
        c = self.config
        bias = torch.cat([self._get(f"pre_block.attn.{name}") for name in ("q_bias", "zero_k_bias", "v_bias")])
        fused = functional.linear(x, self._get("pre_block.attn.qkv.weight"), bias)
        head_dim = c.latent_dim // c.num_heads
        q, k, v = fused.view(-1, 3, c.num_heads, head_dim).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0].mean(0)
        pooled = mixed.view(len(x), c.latent_channels, -1).mean(-1)
        return self._linear(pooled, "pre_block.attn.proj")

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._get(f"{name}.weight"), self._get(f"{name}.bias")
        return functional.layer_norm(x, weight.shape, weight, bias, LAYER_NORM_EPS)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self._get(f"{name}.weight"), self._get(f"{name}.bias"))

    # decoder

    def decode(self, latent: Tensor) -> Tensor:
        """Wave (2, hop · T) within −1..1 of a denormalised latent (2, A, T)."""
        c = self.config
        x = self.dec_in_proj(latent)
        x = self._conv(x, "decoder.conv_pre", padding=3)
        num_kernels = len(c.resblock_kernels)
        for stage, (rate, kernel) in enumerate(zip(c.decoder_rates, c.decoder_kernels, strict=True)):
            weight, bias = self._weight(f"decoder.ups.{stage}.0"), self._get(f"decoder.ups.{stage}.0.bias")
            x = functional.conv_transpose1d(x, weight, bias, stride=rate, padding=(kernel - rate) // 2)
            blocks = [self._amp_block(x, stage * num_kernels + index, index) for index in range(num_kernels)]
            x = torch.stack(blocks).sum(0) / num_kernels
        x = self._activation(x, "decoder.activation_post")
        return self._conv(x, "decoder.conv_post", padding=3, has_bias=False)[:, 0].clamp(-1, 1).cpu()

    def dec_in_proj(self, latent: Tensor) -> Tensor:
        """The first projection of the decoder: (2, latent_dim, T)."""
        latent = latent.to(self._device, torch.float32)
        return functional.conv1d(latent, self._get("dec_in_proj.weight"), self._get("dec_in_proj.bias"))

    def _amp_block(self, x: Tensor, number: int, index: int) -> Tensor:
        c = self.config
        name, kernel = f"decoder.resblocks.{number}", c.resblock_kernels[index]
        for position, dilation in enumerate(c.resblock_dilations[index]):
            h = self._activation(x, f"{name}.activations.{2 * position}")
            padding = (kernel * dilation - dilation) // 2
            h = self._conv(h, f"{name}.convs1.{position}", padding=padding, dilation=dilation)
            h = self._activation(h, f"{name}.activations.{2 * position + 1}")
            x = x + self._conv(h, f"{name}.convs2.{position}", padding=(kernel - 1) // 2)
        return x

    def _activation(self, x: Tensor, name: str) -> Tensor:
        """SnakeBeta between an up-sampling and a down-sampling by two, so that it makes no aliases.

        Source: Lee et al. 2022, BigVGAN.
        """
        alpha = self._get(f"{name}.act.alpha").exp()[None, :, None]
        beta = self._get(f"{name}.act.beta").exp()[None, :, None]
        batch, channels, _ = x.shape
        taps = self._filter.view(1, 1, -1)
        flat = functional.pad(x, (5, 5), mode="replicate").view(batch * channels, 1, -1)
        up = 2 * functional.conv_transpose1d(flat, taps, stride=2)[..., 15:-15].view(batch, channels, -1)
        up = up + torch.sin(alpha * up).square() / (beta + SNAKE_EPS)
        flat = functional.pad(up, (5, 6), mode="replicate").view(batch * channels, 1, -1)
        return functional.conv1d(flat, taps, stride=2).view(batch, channels, -1)

    # weights

    def _conv(
        self, x: Tensor, name: str, *, stride: int = 1, padding: int = 0, dilation: int = 1, has_bias: bool = True
    ) -> Tensor:
        bias = self._get(f"{name}.bias") if has_bias else None
        return functional.conv1d(x, self._weight(name), bias, stride=stride, padding=padding, dilation=dilation)

    def _weight(self, name: str) -> Tensor:
        """A convolution's weight, its norm folded in: g · v / |v|, over all dimensions but the first."""
        key = f"{name}.weight"
        if key in self._loaded or key in self.files.names():
            return self._get(key)
        for gain_name, direction_name in _NORM_SPELLINGS:
            if name + gain_name in self.files.names():
                gain, direction = self._get(name + gain_name), self._get(name + direction_name)
                norm: Tensor = direction.flatten(1).square().sum(1).sqrt().view(-1, 1, 1)
                weight = gain * direction / norm
                self._loaded[key] = weight
                return weight
        raise CheckpointError(f"{self.path}: tensor {key!r} is missing, in every spelling")

    def _get(self, name: str) -> Tensor:
        loaded = self._loaded.get(name)
        if loaded is None:
            loaded = self._loaded[name] = dense(self.files.load(name), torch.float32, self._device)
        return loaded

    def _check(self) -> None:
        """Refuse files that lack a tensor or have one of another shape."""
        c = self.config
        names = self.files.names()
        width = c.encoder_dim * 2 ** len(c.encoder_rates)
        last = c.decoder_dim >> len(c.decoder_rates)
        expected: dict[str, tuple[int, ...]] = {
            "encoder.block.0": (c.encoder_dim, 1, 7),
            f"encoder.block.{len(c.encoder_rates) + 2}": (c.latent_dim, width, 3),
            "decoder.conv_pre": (c.decoder_dim, c.latent_dim, 7),
            "decoder.conv_post": (1, last, 7),
            "mean_proj": (c.latent_channels, c.latent_channels, 1),
            "dec_in_proj": (c.latent_dim, c.latent_channels, 1),
            "pre_block.attn.qkv": (3 * c.latent_dim, c.latent_dim),
        }
        channels = c.decoder_dim
        for stage, (kernel, _) in enumerate(zip(c.decoder_kernels, c.decoder_rates, strict=True)):
            expected[f"decoder.ups.{stage}.0"] = (channels, channels // 2, kernel)
            channels //= 2
            for index, size in enumerate(c.resblock_kernels):
                block = f"decoder.resblocks.{stage * len(c.resblock_kernels) + index}"
                for position in range(len(c.resblock_dilations[index])):
                    expected[f"{block}.convs1.{position}"] = (channels, channels, size)
                    expected[f"{block}.convs2.{position}"] = (channels, channels, size)
        for name, shape in expected.items():
            spellings = [f"{name}.weight", *(name + direction for _, direction in _NORM_SPELLINGS)]
            found = [spelling for spelling in spellings if spelling in names]
            if not found:
                raise CheckpointError(
                    f"{self.path}: tensor '{name}.weight' is missing", remedy="is this MiniMax-H3's sound autoencoder?"
                )
            stored = self.files.info(found[0]).shape
            if stored != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {found[0]!r} is {list(stored)}, expected {list(shape)} by the configuration"
                )


_NORM_SPELLINGS = (
    (".weight_g", ".weight_v"),
    (".parametrizations.weight.original0", ".parametrizations.weight.original1"),
)

"""Latents to rows of the sequence and back, and the noise they start from.

Source: the released pipeline; the random numbers are those of a torch generator on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

POSTERIOR_SEED = 42
"""Sampling the autoencoder's posterior does not depend on the request."""


def to_rows(latent: Tensor) -> Tensor:
    """Video latent (C, T, h, w) -> rows (T · h/2 · w/2, 4 C); feature index c · 4 + dy · 2 + dx."""
    channels, frames, height, width = latent.shape
    split = latent.reshape(channels, frames, height // 2, 2, width // 2, 2)
    return split.permute(1, 2, 4, 0, 3, 5).reshape(-1, channels * 4)


def from_rows(rows: Tensor, frames: int, height: int, width: int) -> Tensor:
    """The inverse of `to_rows`, for a latent of (frames, height, width)."""
    channels = rows.shape[1] // 4
    split = rows.reshape(frames, height // 2, width // 2, channels, 2, 2)
    return split.permute(3, 0, 1, 4, 2, 5).reshape(channels, frames, height, width)


def audio_to_rows(latent: Tensor) -> Tensor:
    """Sound latent (2, A, T) -> rows (2 T, A), all steps of the left channel first."""
    return latent.transpose(1, 2).reshape(-1, latent.shape[1])


def audio_from_rows(rows: Tensor) -> Tensor:
    """The inverse of `audio_to_rows`."""
    return rows.reshape(2, -1, rows.shape[1]).transpose(1, 2)


def normal(seed: int, *shape: int) -> Tensor:
    """Float32 normal draws of a CPU generator that starts anew with `seed`."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def video_noise(seed: int, channels: int, frames: int, height: int, width: int) -> Tensor:
    """Initial noise of the pictures (C, T, h, w)."""
    return normal(seed, 1, channels, frames, height, width)[0]


def audio_noise(seed: int, channels: int, steps: int) -> Tensor:
    """Initial noise of the sound as rows (2 T, A): a generator of its own, same seed."""
    return normal(seed, 2 * steps, channels)


def condition_noise(seed: int, latent: Tensor, target_frames: int, num_conditions: int) -> Tensor:
    """Noise mixed into one visual condition (C, t, h, w): the first t frames of a longer draw."""
    channels, frames, height, width = latent.shape
    drawn = max(target_frames + num_conditions, frames)
    return normal(seed, 1, channels, drawn, height, width)[0, :, :frames]


def mix_condition(latent: Tensor, noise: Tensor, noise_aug: float) -> Tensor:
    """A condition as clean as `noise_aug` says (1: exact)."""
    return noise_aug * latent + (1.0 - noise_aug) * noise


def sample_posterior(moments: Tensor) -> Tensor:
    """One sample (C, T, h, w) of a Gaussian given as moments (2 C, T, h, w), rounded to float16 and back."""
    mean, log_variance = moments.chunk(2)
    noise = normal(POSTERIOR_SEED, 1, *mean.shape)[0]
    sample = mean + torch.exp(0.5 * log_variance.clamp(-30.0, 20.0)) * noise
    return sample.to(torch.float16).to(torch.float32)


def normalise(latent: Tensor, mean: Tensor, std: Tensor, axis: int) -> Tensor:
    """(latent − mean) / std along `axis`."""
    shape = [1] * latent.ndim
    shape[axis] = -1
    return (latent - mean.view(shape)) / std.view(shape)


def denormalise(latent: Tensor, mean: Tensor, std: Tensor, axis: int) -> Tensor:
    """latent · std + mean along `axis`."""
    shape = [1] * latent.ndim
    shape[axis] = -1
    return latent * std.view(shape) + mean.view(shape)

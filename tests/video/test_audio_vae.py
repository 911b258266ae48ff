"""The sound autoencoder against the reference, in every spelling of its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vkit.errors import CheckpointError, ModelLoadError
from vkit.video.h3 import rows
from vkit.video.h3.audio_vae import (
    AudioVAE,
    AudioVAEConfig,
    audio_config_of,
    audio_vae_config,
    resampling_filter,
)

TOLERANCE = 5e-5


def _close(got: Tensor, want: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= tolerance


def _check(vae: AudioVAE, io: dict[str, Tensor]) -> None:
    trunk = vae.trunk(io["wave"])
    _close(trunk, io["enc.trunk"])
    mean, log_std = vae.moments(trunk)
    _close(mean, io["enc.mean"])
    _close(log_std, io["enc.log_std"])
    _close(vae.encode(io["wave"]), io["enc.mean"])
    _close(vae.dec_in_proj(io["latent"]), io["dec.in_proj"])
    _close(vae.decode(io["latent"]), io["dec.wave"])


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        ("small", "weights.release.safetensors"),
        ("small", "weights.folded.safetensors"),
        ("released_strides", "weights.release.safetensors"),
    ],
)
def test_both_directions(goldens: Path, case: str, weights: str) -> None:
    folder = goldens / "audio_vae" / case
    vae = AudioVAE(folder / weights, audio_vae_config(folder / "config.split.json"))
    _check(vae, load_file(folder / "io.safetensors"))
    _check(vae, load_file(folder / "io.safetensors"))  # a second time, from what is loaded


def test_the_parametrised_spelling(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "audio_vae" / "small"
    tensors = {
        name.replace(".weight_g", ".parametrizations.weight.original0").replace(
            ".weight_v", ".parametrizations.weight.original1"
        ): tensor
        for name, tensor in load_file(folder / "weights.release.safetensors").items()
    }
    save_file(tensors, tmp_path / "vae.safetensors")
    vae = AudioVAE(tmp_path / "vae.safetensors", audio_vae_config(folder / "config.split.json"))
    _check(vae, load_file(folder / "io.safetensors"))


def test_statistics_index_the_latent_axis(goldens: Path) -> None:
    folder = goldens / "audio_vae" / "small"
    vae = AudioVAE(folder / "weights.release.safetensors", audio_vae_config(folder / "config_stats.split.json"))
    io = load_file(folder / "io_stats.safetensors")
    mean, std = vae.statistics()
    for index in (0, 1):
        latent = vae.encode(io[f"ref{index}.wave"])
        _close(latent, io[f"ref{index}.mean"])
        _close(rows.audio_to_rows(rows.normalise(latent, mean, std, 1)), io[f"ref{index}.rows_normalized"])
    latent = rows.audio_from_rows(io["out.rows_normalized"])
    _close(latent, io["out.latent_normalized"], 0)
    latent = rows.denormalise(latent, mean, std, 1)
    _close(latent, io["out.latent"])
    _close(vae.decode(latent), io["out.wave"])


def test_statistics_may_be_absent_until_they_are_needed(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "audio_vae" / "small"
    config = audio_vae_config(folder / "config.split.json")
    with pytest.raises(CheckpointError, match="latents_mean"):
        AudioVAE(folder / "weights.folded.safetensors", config).statistics()
    tensors = load_file(folder / "weights.folded.safetensors")
    save_file(tensors | {"latents_mean": torch.ones(4), "latents_std": torch.ones(4)}, tmp_path / "vae.safetensors")
    assert torch.equal(AudioVAE(tmp_path / "vae.safetensors", config).statistics()[0], torch.ones(4))


def test_the_filter(goldens: Path) -> None:
    want = load_file(goldens / "audio_vae" / "kaiser_filter.safetensors")["ratio2_k12"]
    _close(resampling_filter(), want, 1e-7)


def test_the_release_s_files(goldens: Path, tmp_path: Path) -> None:
    assert audio_config_of({}, "empty") == AudioVAEConfig()
    (tmp_path / "config.json").write_text(
        json.dumps({"sample_rate": 32000, "latent_channels": 32, "source_metadata_path": "metadata.json"})
    )
    kwargs = {"encoder_dim": 64, "encoder_rates": [2, 4, 4, 5, 5], "decoder_type": "bigvgan", "attn_proj": True}
    (tmp_path / "metadata.json").write_text(json.dumps({"metadata": {"kwargs": kwargs | {"latent_dim": 4096}}}))
    assert audio_vae_config(tmp_path / "config.json").latent_dim == 4096


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"decoder_type": "vocos"}, "bigvgan"),
        ({"latents_mean": [0.0]}, "latents_mean"),
        ({"decoder_rates": [5, 5]}, "decoder kernels"),
        ({"encoder_rates": [2, 2]}, "encoder rates 4"),
        ({"resblock_dilation_sizes": [[1]]}, "resblock_dilation_sizes"),
        ({"latent_dim": 100}, "latent_dim"),
        ({"encoder_dim": "64"}, "encoder_dim"),
    ],
)
def test_configurations_that_cannot_be(keys: dict[str, Any], words: str) -> None:
    with pytest.raises((CheckpointError, ModelLoadError), match=words):
        audio_config_of(keys, "config.json")


def test_damaged_weights(goldens: Path, tmp_path: Path) -> None:
    folder = goldens / "audio_vae" / "small"
    config = audio_vae_config(folder / "config.split.json")
    tensors = load_file(folder / "weights.folded.safetensors")
    tensors.pop("decoder.conv_post.weight")
    save_file(tensors, tmp_path / "vae.safetensors")
    with pytest.raises(CheckpointError, match="conv_post"):
        AudioVAE(tmp_path / "vae.safetensors", config)
    with pytest.raises(CheckpointError, match="by the configuration"):
        AudioVAE(folder / "weights.folded.safetensors", AudioVAEConfig())

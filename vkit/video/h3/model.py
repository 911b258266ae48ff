"""All parts of a model, opened and checked against each other. Nothing but headers is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from vkit.device import Device, find_device
from vkit.errors import CheckpointError, InvalidRequest, ModelLoadError, UsageError
from vkit.loaders.tensors import TensorFiles
from vkit.text.tokenizer import Tokenizer, load_tokenizer
from vkit.video.h3.audio_vae import AudioVAE, AudioVAEConfig, audio_vae_config
from vkit.video.h3.config_files import beside
from vkit.video.h3.dit_weights import DiTWeights
from vkit.video.h3.encoder_weights import EncoderWeights
from vkit.video.h3.geometry import CANVAS_STEP, LATENTS_PER_SECOND, SAMPLE_RATE
from vkit.video.h3.layout import PATCH
from vkit.video.h3.partition import resolve_partition
from vkit.video.h3.request import TASKS_OF, Partition, Task, VideoModelPaths, VideoOptions
from vkit.video.h3.video_vae import VideoVAE
from vkit.video.h3.video_vae_config import VideoVAEConfig, video_vae_config
from vkit.video.h3.weights import Residency

if TYPE_CHECKING:
    from collections.abc import Iterator

OFFLOADS = ("none", "host", "disk")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class H3Model:
    """What was opened. Parts a request does not need may be None."""

    dit: DiTWeights
    partition: Partition | None
    device: Device
    residency: Residency
    dtype: torch.dtype
    """Of the transformer's stream."""
    options: VideoOptions
    encoder: EncoderWeights | None = None
    tokenizer: Tokenizer | None = None
    video_vae: VideoVAE | None = None
    audio_vae: AudioVAE | None = None
    paths: VideoModelPaths = field(kw_only=True)

    @property
    def encoder_dtype(self) -> torch.dtype:
        """Of the conditioner's stream."""
        assert self.encoder is not None
        return _compute_type(self.options, self.encoder.matrix_dtype, self.device)

    def check_task(self, task: Task, *, denoise_only: bool) -> None:
        """Refuse a task that these weights do not serve.

        Raises:
            InvalidRequest: they are the other partition's.
            UsageError: nothing tells which partition they are.
        """
        if self.partition is None:
            if denoise_only:
                return
            raise UsageError(
                f"--partition: neither model_index.json nor the name of {self.paths.dit} tells what it was trained for",
                remedy="give --partition fl2va or --partition ref2va; the wrong one renders a lattice",
            )
        served = TASKS_OF[self.partition]
        if task not in served:
            raise InvalidRequest(
                f"the weights are partition {self.partition}, which serves {' and '.join(served)}; asked for is {task}",
                param="task",
            )

    def files(self) -> Iterator[tuple[str, TensorFiles]]:
        """The opened weight files by part."""
        yield "dit", self.dit.files
        if self.encoder is not None:
            yield "encoder", self.encoder.files
        if self.video_vae is not None:
            yield "video_vae", self.video_vae.files
        if self.audio_vae is not None:
            yield "audio_vae", self.audio_vae.files

    def close(self) -> None:
        """Give all files back."""
        for _, files in self.files():
            files.close()


def open_model(paths: VideoModelPaths, options: VideoOptions) -> H3Model:
    """All parts at `paths`.

    Raises:
        CheckpointError, ModelLoadError: a part is damaged, is something else, or does not go with the others.
        UsageError: an option that cannot do what it says here.
    """
    if options.offload not in OFFLOADS:
        raise UsageError(f"--offload {options.offload}: expected one of {', '.join(OFFLOADS)}")
    device = find_device(options.device)
    if options.offload == "host" and device.kind == "cpu":
        raise UsageError(
            "--offload host: the device is the host already, weights wait in its memory anyway",
            remedy="use --offload disk, or none",
        )
    partition = resolve_partition(paths.dit, paths.partition)
    dit = DiTWeights(paths.dit, qkv_layout=options.qkv_layout)
    if options.dequant_bf16 and not dit.is_packed:
        raise UsageError(f"--dequant-bf16: {paths.dit} holds no packed weights to expand")
    if options.dequant_bf16 and options.dtype == "float32":
        raise UsageError("--dequant-bf16: contradicts dtype float32")
    dtype = _compute_type(options, dit.matrix_dtype, device)
    encoder = None if paths.encoder is None else EncoderWeights(paths.encoder)
    if encoder is not None and encoder.config.hidden_size != dit.config.text_dim:
        raise ModelLoadError(
            f"{paths.encoder}: width {encoder.config.hidden_size}, the transformer takes {dit.config.text_dim}"
        )
    torch_device = device.torch_device
    return H3Model(
        dit,
        partition,
        device,
        Residency(torch_device, options.offload),
        dtype,
        options,
        encoder,
        _tokenizer(paths, encoder),
        _video_vae(paths, dit, torch_device),
        _audio_vae(paths, dit, torch_device),
        paths=paths,
    )


def _tokenizer(paths: VideoModelPaths, encoder: EncoderWeights | None) -> Tokenizer | None:
    """The tokenizer given, that within the conditioner's file, or the one beside it."""
    if paths.tokenizer is not None:
        return load_tokenizer(paths.tokenizer)
    if paths.encoder is None or encoder is None:
        return None
    if "tokenizer.ggml.tokens" in encoder.files.metadata:
        return load_tokenizer(paths.encoder)
    folder = paths.encoder if paths.encoder.is_dir() else paths.encoder.parent
    return load_tokenizer(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None


def _video_vae(paths: VideoModelPaths, dit: DiTWeights, device: torch.device) -> VideoVAE | None:
    if paths.video_vae is None:
        return None
    source = _source(paths.video_vae)
    described = beside(paths.video_vae, paths.video_vae_config)
    config = VideoVAEConfig() if described is None else video_vae_config(described)
    if config.latent_channels != dit.config.latents_dim:
        raise ModelLoadError(
            f"{paths.video_vae}: {config.latent_channels} latent channels, the transformer has {dit.config.latents_dim}"
        )
    if config.ratio * PATCH != CANVAS_STEP:
        raise ModelLoadError(f"{paths.video_vae}: {config.ratio} pixels per latent pixel, expected 16")
    return VideoVAE(source, config, device)


def _audio_vae(paths: VideoModelPaths, dit: DiTWeights, device: torch.device) -> AudioVAE | None:
    if paths.audio_vae is None:
        return None
    source = _source(paths.audio_vae)
    described = beside(paths.audio_vae, paths.audio_vae_config)
    config = AudioVAEConfig() if described is None else audio_vae_config(described)
    if config.latent_channels != dit.config.audio_latents_dim:
        raise ModelLoadError(
            f"{paths.audio_vae}: {config.latent_channels} latent channels, "
            f"the transformer has {dit.config.audio_latents_dim}"
        )
    if config.sample_rate != SAMPLE_RATE or config.hop * LATENTS_PER_SECOND != SAMPLE_RATE:
        raise ModelLoadError(
            f"{paths.audio_vae}: {config.sample_rate} Hz in steps of {config.hop}, expected 32000 Hz in steps of 800"
        )
    vae = AudioVAE(source, config, device)
    vae.statistics()
    return vae


def _source(path: Path) -> Path:
    """The weights of a released folder, which lie one folder deeper."""
    if path.is_dir() and not any(path.glob("*.safetensors")) and (path / "source").is_dir():
        return path / "source"
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    return path


def _compute_type(options: VideoOptions, stored: torch.dtype | None, device: Device) -> torch.dtype:
    """The type of a stream: asked for, or that of the weights; packed weights go with bfloat16."""
    if options.dtype != "auto":
        if options.dtype not in DTYPES:
            raise UsageError(f"dtype {options.dtype!r}: expected auto, {' or '.join(DTYPES)}")
        return DTYPES[options.dtype]
    if device.kind == "cuda" and "bfloat16" not in device.dtypes:
        return torch.float32
    return torch.float32 if stored is torch.float32 else torch.bfloat16

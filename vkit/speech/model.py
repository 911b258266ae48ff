"""Parakeet models: a checkpoint's encoder and decoder, filled with its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vkit.errors import CheckpointError, ModelLoadError
from vkit.loaders import Checkpoint
from vkit.models import SPEECH_MODELS
from vkit.models.hf_config import HFConfig
from vkit.speech.decoders import CTCHead, Heard, Transducer
from vkit.speech.encoder import Encoder, EncoderShape
from vkit.speech.features import HOP, SAMPLE_RATE, MelFeatures

ProgressCallback = Callable[[int, int], None]
"""(bytes done, bytes in all)"""

MIN_SAMPLES = SAMPLE_RATE // 10
"""Shorter recordings are filled up with silence: a deviation over time needs frames."""

_NAMES_SHOWN = 8


class SpeechModel(nn.Module):
    """Features, encoder and decoder of one checkpoint. The decoder's tensors stand at the top level, as stored."""

    def __init__(self, architecture: str, config: HFConfig) -> None:
        super().__init__()
        if architecture not in SPEECH_MODELS:
            raise ModelLoadError(
                f"architecture {architecture!r} is no speech model", remedy=f"known: {', '.join(SPEECH_MODELS)}"
            )
        self.shape = EncoderShape.of(HFConfig(config.mapping("encoder_config")))
        self.encoder = Encoder(self.shape)
        # Held in a tuple, so that it is no child: its own children are registered at this level, as the names say.
        self._decoder = (_decoder(architecture, config, self.shape.hidden_size),)
        for name, child in self._decoder[0].named_children():
            self.add_module(name, child)
        self.features: MelFeatures

    @property
    def frame_s(self) -> float:
        """Seconds per encoder frame."""
        return self.shape.factor * HOP / SAMPLE_RATE

    @property
    def head(self) -> CTCHead | Transducer:
        """What turns encoder vectors into tokens."""
        return self._decoder[0]

    @torch.inference_mode()
    def encode(self, recordings: list[Tensor]) -> list[Tensor]:
        """Encoder vectors (T, H) of each recording (N,) at 16 kHz, all in one padded batch."""
        weight = self.encoder.subsampling.linear.weight
        features = [self.features(_filled(samples)) for samples in recordings]
        lengths = torch.tensor([len(rows) for rows in features], device=weight.device)
        padded = nn.utils.rnn.pad_sequence(features, batch_first=True).to(weight.dtype)
        encoded, lengths = self.encoder(padded, lengths)
        return [rows[:length] for rows, length in zip(encoded, lengths.tolist(), strict=True)]

    @torch.inference_mode()
    def hear(self, recordings: list[Tensor]) -> list[Heard]:
        """Tokens of each recording (N,) at 16 kHz."""
        return [self.head.decode(encoded) for encoded in self.encode(recordings)]


def build_speech_model(
    checkpoint: Checkpoint, *, device: str, dtype: torch.dtype, progress: ProgressCallback | None = None
) -> SpeechModel:
    """The model with its weights.

    Raises:
        ModelLoadError: another architecture, or a configuration it cannot be built from.
        CheckpointError: tensors missing, misshapen, unknown or packed.
    """
    with torch.device("meta"):
        model = SpeechModel(checkpoint.architecture, HFConfig(checkpoint.config))
    _check_tensors(model, checkpoint)
    total, done = checkpoint.num_weight_bytes, 0
    tensors: dict[str, Any] = {}
    for name, slot in model.state_dict().items():
        stored = checkpoint.load(name)
        if not isinstance(stored, Tensor):
            raise CheckpointError(f"{checkpoint.path}: {name} is quantised, which speech models are not computed with")
        tensors[name] = stored.to(device, dtype if slot.is_floating_point() else stored.dtype, copy=True)
        done += stored.nbytes
        if progress is not None:
            progress(min(done, total), total)
    model.load_state_dict(tensors, assign=True)
    model.features = MelFeatures(model.shape.num_mels, torch.device(device))
    checkpoint.release_pages()
    return model.eval().requires_grad_(False)


def _decoder(architecture: str, config: HFConfig, hidden_size: int) -> CTCHead | Transducer:
    if architecture == "ParakeetForCTC":
        return CTCHead(config, hidden_size)
    if architecture == "ParakeetForRNNT":
        return Transducer(config, hidden_size)
    durations = config.values.get("durations")
    if not isinstance(durations, list) or not durations or not all(type(d) is int and d >= 0 for d in durations):
        raise ModelLoadError(f"config.json: durations must be a list of frame counts, got {durations!r}")
    return Transducer(config, hidden_size, tuple(durations))


def _check_tensors(model: SpeechModel, checkpoint: Checkpoint) -> None:
    expected = {name: tuple(slot.shape) for name, slot in model.state_dict().items()}
    stored = checkpoint.tensor_names()
    if missing := sorted(expected.keys() - stored):
        raise CheckpointError(f"{checkpoint.path}: missing tensors: {_listed(missing)}")
    for name, shape in expected.items():
        found = tuple(checkpoint.tensor_info(name).shape)
        if found != shape:
            raise CheckpointError(f"{checkpoint.path}: {name} has shape {found}, the configuration means {shape}")
    if unread := sorted(stored - expected.keys()):
        raise CheckpointError(
            f"{checkpoint.path}: tensors that {checkpoint.architecture} does not use: {_listed(unread)}",
            remedy="the file is damaged or made for another architecture",
        )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"


def _filled(samples: Tensor) -> Tensor:
    missing = MIN_SAMPLES - len(samples)
    return nn.functional.pad(samples, (0, missing)) if missing > 0 else samples

"""Features, encoder, heads and decoded tokens against recorded ones, alone and in a padded batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vkit.loaders import open_checkpoint
from vkit.speech.decoders import CTCHead, Transducer
from vkit.speech.model import SpeechModel, build_speech_model

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
KINDS = ["parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"]
TOLERANCE = 5e-4


def load(kind: str) -> tuple[SpeechModel, dict[str, torch.Tensor]]:
    checkpoint = open_checkpoint(GOLDENS / kind)
    model = build_speech_model(checkpoint, device="cpu", dtype=torch.float32)
    return model, load_file(GOLDENS / kind / "golden.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_features(kind: str) -> None:
    model, golden = load(kind)
    for suffix in ("", "_b"):
        found = model.features(golden[f"waveform{suffix}"])
        assert found.shape == golden[f"features{suffix}"].shape
        assert (found - golden[f"features{suffix}"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_alone_and_in_a_padded_batch(kind: str) -> None:
    model, golden = load(kind)
    waves = [golden["waveform"], golden["waveform_b"]]
    expected = [golden["encoder"], golden["encoder_b"]]
    alone = [model.encode([wave])[0] for wave in waves]
    for found, wanted in zip([*alone, *model.encode(waves)], expected * 2, strict=True):
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_their_frames(kind: str) -> None:
    model, golden = load(kind)
    waves = [golden["waveform"], golden["waveform_b"]]
    for heard, suffix in zip([*model.hear(waves), *model.hear(waves[1:])], ["", "_b", "_b"], strict=True):
        assert heard.token_ids == golden[f"tokens{suffix}"].tolist()
        if kind != "parakeet_ctc":
            assert heard.frames == golden[f"token_frames{suffix}"].tolist()
        assert heard.frames == sorted(heard.frames)


def test_ctc_logits() -> None:
    model, golden = load("parakeet_ctc")
    assert isinstance(model.head, CTCHead)
    for suffix in ("", "_b"):
        found = model.head.logits(model.encode([golden[f"waveform{suffix}"]])[0])
        assert (found - golden[f"logits{suffix}"]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", KINDS[1:])
def test_joint_scores(kind: str) -> None:
    model, golden = load(kind)
    assert isinstance(model.head, Transducer)
    for suffix in ("", "_b"):
        projected = model.head.encoder_projector(golden[f"encoder{suffix}"][:6])
        state, columns = None, []
        for token_id in golden[f"joint_ids{suffix}"].tolist():
            predicted, state = model.head.decoder.step(token_id, state)
            columns.append(model.head.joint(projected, predicted))
        found = torch.stack(columns, 1)
        assert (found - golden[f"joint_logits{suffix}"]).abs().max() < TOLERANCE

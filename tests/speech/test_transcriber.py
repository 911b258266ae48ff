"""Text, segments and words from tokens; long recordings cut where they are quiet; checkpoints refused in a line."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file, save_file

from vkit.errors import CheckpointError, InvalidRequest, ModelLoadError
from vkit.speech.decoders import Heard
from vkit.speech.transcriber import Transcriber, check_speech_model, cut

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
KINDS = ["parakeet_ctc", "parakeet_rnnt", "parakeet_tdt"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[[str], Path]:
    def copy(kind: str) -> Path:
        path = tmp_path / kind
        path.mkdir()
        for source in (GOLDENS / kind, GOLDENS / "byte_tokenizer"):
            for file in source.iterdir():
                if file.name not in ("golden.safetensors", "meta.json"):
                    shutil.copyfile(file, path / file.name)
        return path

    return copy


def wav(samples: np.ndarray[Any, Any], rate: int = 16000) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, samples, rate, subtype="FLOAT", format="WAV")
    return out.getvalue()


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_the_golden_tokens(kind: str, checkpoint: Callable[[str], Path]) -> None:
    golden = load_file(GOLDENS / kind / "golden.safetensors")
    transcriber = check_speech_model(checkpoint(kind), device="cpu", threads=1).load()
    for suffix in ("", "_b"):
        tokens = golden[f"tokens{suffix}"].tolist()
        found = transcriber.transcribe(wav(golden[f"waveform{suffix}"].numpy()))
        expected = bytes(token for token in tokens if token < 248).decode("utf-8", "replace").strip()
        assert found.text == expected
        assert found.duration_s == len(golden[f"waveform{suffix}"]) / 16000
        assert [token for segment in found.segments for token in segment.token_ids] == tokens
        if kind != "parakeet_ctc":
            assert found.segments[0].start == pytest.approx(golden[f"token_frames{suffix}"][0].item() * 0.08)


class Scripted:
    """A model that hears what it is told, and remembers how much it was given."""

    frame_s = 0.08

    def __init__(self, *heard: tuple[str, list[int]]) -> None:
        self.script = list(heard)
        self.lengths: list[int] = []

    def hear(self, recordings: list[torch.Tensor]) -> list[Heard]:
        self.lengths += [len(recording) for recording in recordings]
        text, frames = self.script.pop(0)
        return [Heard(list(text.encode()), frames)]


class Bytes:
    vocab_size = 256

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "replace")


def scripted(*heard: tuple[str, list[int]], **keywords: Any) -> Transcriber:
    return Transcriber("scripted", Scripted(*heard), Bytes(), **keywords)  # type: ignore[arg-type]


def test_sentences_pauses_and_words() -> None:
    text = " Hi you. 3.5 yes"
    frames = [0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 60, 61, 62, 63]
    found = scripted((text, frames)).transcribe(wav(np.zeros(16000 * 6, np.float32)))
    assert found.text == "Hi you. 3.5 yes"
    assert [segment.text for segment in found.segments] == ["Hi you.", "3.5", "yes"]
    assert [segment.id for segment in found.segments] == [0, 1, 2]
    first = found.segments[0]
    assert [(word.text, round(word.start, 2), round(word.end, 2)) for word in first.words] == [
        ("Hi", 0.0, 0.24),
        ("you.", 0.24, 0.64),
    ]
    assert found.segments[2].start == pytest.approx(60 * 0.08)


def test_silence_is_no_text() -> None:
    found = scripted(("", [])).transcribe(wav(np.zeros(160, np.float32)))
    assert (found.text, found.segments, found.duration_s) == ("", (), 0.01)


def test_long_recordings_are_heard_in_parts() -> None:
    rng = np.random.default_rng(0)
    samples = rng.normal(0, 0.3, 16000 * 5).astype(np.float32)
    samples[28000:30400] = 0
    transcriber = scripted((" one", [0, 1, 2, 3]), (" two", [2, 3, 4, 5]), (" end", [0] * 4), max_chunk_s=2.0)
    stretches = list(transcriber.stream(wav(samples)))
    model = transcriber.model
    assert sum(model.lengths) == len(samples)  # type: ignore[attr-defined]
    assert 28000 < model.lengths[0] < 30400  # type: ignore[attr-defined]
    assert [stretch.text for stretch in stretches] == ["one", "two", "end"]
    offset = model.lengths[0] / 16000  # type: ignore[attr-defined]
    assert stretches[1].segments[0].start == pytest.approx(offset + 2 * 0.08)
    assert [stretch.segments[0].id for stretch in stretches] == [0, 1, 2]


@pytest.mark.parametrize("size", [1, 999, 100_000])
def test_cutting_loses_nothing(size: int) -> None:
    samples = np.random.default_rng(1).normal(0, 1, 50_000).astype(np.float32)
    pieces = [samples[start : start + size] for start in range(0, len(samples), size)] if size > 1 else [samples]
    chunks = list(cut(pieces, 12_000))
    assert all(0 < len(chunk) <= 12_000 for chunk in chunks)
    assert np.array_equal(np.concatenate(chunks), samples)
    assert len(list(cut(pieces, 50_000))) == 1


def test_a_very_short_recording_and_one_sample(checkpoint: Callable[[str], Path]) -> None:
    transcriber = check_speech_model(checkpoint("parakeet_tdt"), device="cpu", threads=1).load()
    for length in (1, 100, 1599, 1600):
        found = transcriber.transcribe(wav(np.full(length, 0.1, np.float32)))
        assert found.duration_s == length / 16000
        assert all(segment.end <= found.duration_s + 0.08 for segment in found.segments)
    with pytest.raises(InvalidRequest, match="no sound"):
        transcriber.transcribe(wav(np.zeros(0, np.float32)))


def test_damaged_checkpoints_are_refused(checkpoint: Callable[[str], Path]) -> None:
    path = checkpoint("parakeet_tdt")
    tensors = load_file(path / "model.safetensors")
    cases: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: value for name, value in tensors.items() if name != "joint.head.bias"}, "missing tensors: joint.head"),
        ({**tensors, "joint.extra.weight": torch.ones(2)}, "does not use: joint.extra.weight"),
        ({**tensors, "joint.head.bias": torch.ones(3)}, r"joint.head.bias has shape \(3,\)"),
    ]
    for changed, message in cases:
        save_file({name: value.contiguous() for name, value in changed.items()}, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            check_speech_model(path, device="cpu", threads=1).load()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "durations": ["x"]}))
    with pytest.raises(ModelLoadError, match="durations"):
        check_speech_model(path, device="cpu", threads=1)
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps({"feature_size": 80}))
    with pytest.raises(CheckpointError, match="feature_size is 80"):
        check_speech_model(path, device="cpu", threads=1)

"""`vkit transcribe` on tiny recorded models: text, times, JSON, and every refusal in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import soundfile
from safetensors.torch import load_file

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "parakeet_tdt"
    path.mkdir()
    for source in (GOLDENS / "parakeet_tdt", GOLDENS / "byte_tokenizer"):
        for file in source.iterdir():
            shutil.copyfile(file, path / file.name)
    (path / "golden.safetensors").unlink()
    return path


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "speech.flac"
    samples = load_file(GOLDENS / "parakeet_tdt" / "golden.safetensors")["waveform"].numpy()
    soundfile.write(path, samples / 8, 16000, subtype="PCM_24")
    return path


def test_text_json_and_times_agree(
    vkit_run: Callable[..., Any], model: Path, recording: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKIT_THREADS", "1")
    plain = vkit_run("transcribe", str(recording), "--model", str(model), "--device", "cpu")
    assert plain.status == 0, plain.stderr
    shown = vkit_run("transcribe", str(recording), "--model", str(model), "--json")
    value = json.loads(shown.stdout)
    assert plain.stdout == value["text"] + "\n"
    assert value["duration"] == pytest.approx(1.23)
    assert value["segments"]
    words = [word for segment in value["segments"] for word in segment["words"]]
    assert all(0 <= word["start"] < word["end"] <= 1.23 for word in words)
    timed = vkit_run("transcribe", str(recording), "--model", str(model), "--timestamps")
    assert timed.stdout.startswith("[00:00:0")
    assert len(timed.stdout.rstrip("\n").split("\n[")) == len(value["segments"])


def test_refusals(vkit_run: Callable[..., Any], model: Path, recording: Path, tmp_path: Path) -> None:
    noise = tmp_path / "noise.txt"
    noise.write_text("no sound here")
    (tmp_path / "empty.wav").touch()
    cases = [
        ((str(recording),), "--model: a speech model is needed", 2),
        (("none.wav", "--model", str(model)), "FILE: none.wav: no such file", 2),
        ((str(tmp_path), "--model", str(model)), "not a file", 2),
        ((str(noise), "--model", str(model)), "no known audio or video format", 2),
        ((str(tmp_path / "empty.wav"), "--model", str(model)), "it is empty", 2),
        ((str(recording), "--model", str(model), "--json", "--timestamps"), "--timestamps", 2),
        ((str(recording), "--model", str(GOLDENS / "llama")), "'LlamaForCausalLM' is no speech model", 1),
    ]
    for args, message, status in cases:
        result = vkit_run("transcribe", *args)
        assert (result.status, result.stdout) == (status, ""), result.stderr
        assert message in result.error


def test_other_commands_refuse_a_speech_model_and_name_this_one(vkit_run: Callable[..., Any], model: Path) -> None:
    result = vkit_run("complete", "--model", str(model), "--prompt", "x")
    assert result.status == 1
    assert "vkit transcribe" in result.error

"""What `vkit h3-gen` refuses: one line, the right status, and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vkit.video.h3.request import VideoModelPaths

REMOVED = None
CASES: list[tuple[str, dict[str, Any], str, int]] = [
    # weights
    ("no transformer", {"dit": REMOVED}, "--dit: this option is required", 2),
    ("transformer elsewhere", {"dit": "none.gguf"}, "--dit: none.gguf: no such file", 2),
    ("a folder without weights", {"dit": "@hollow"}, "found none", 1),
    ("a transformer that is text", {"dit": "@text.png"}, "expected a .safetensors or .gguf file", 1),
    ("the encoder as transformer", {"dit": "ENCODER"}, "no tensor|missing|neither", 1),
    ("the wrong partition", {"partition": "ref2va"}, "--partition ref2va: model_index.json", 2),
    ("references on keyframe weights", {"ref_image": "@square.ppm"}, "--dit: the weights are .*asked for is ref2va", 2),
    ("an unknown partition", {"partition": "t2va"}, "--partition: ", 2),
    ("a prompt without encoder", {"encoder": REMOVED}, "--prompt: needs the text encoder", 2),
    ("a tokenizer without encoder", {"encoder": REMOVED, "tokenizer": "@two.f32"}, "--tokenizer: needs --encoder", 2),
    ("no picture autoencoder", {"video_vae": REMOVED}, "--video-vae: needed", 2),
    ("no sound autoencoder", {"audio_vae": REMOVED}, "--audio-vae: needed", 2),
    ("autoencoder elsewhere", {"video_vae": "none"}, "--video-vae: none: no such file", 2),
    ("swapped autoencoders", {"video_vae": "AUDIO"}, r"vae|tensor|config", 1),
    ("a lone config", {"audio_vae": REMOVED, "audio_vae_config": "@two.f32"}, "--audio-vae-config: needs", 2),
    ("a config that is no JSON", {"audio_vae_config": "@text.png"}, r"text\.png", 1),
    ("row order", {"qkv_layout": "mixed"}, "--qkv-layout", 2),
    # length and size
    ("five frames", {"frames": 5}, "--frames.* 22", 2),
    ("no frames", {"frames": 0}, "--frames", 2),
    ("fewer than no frames", {"frames": -3}, "--frames", 2),
    ("half a frame", {"frames": "1.5"}, "--frames", 2),
    ("two lengths", {"duration": 5}, "--frames and --duration", 2),
    ("no number of seconds", {"frames": REMOVED, "duration": "nan"}, "--duration", 2),
    ("endless", {"frames": REMOVED, "duration": "inf"}, "--duration", 2),
    ("hours", {"frames": REMOVED, "duration": 1e9}, r"--duration: got 1e\+09 s, expected at most 600", 2),
    ("ten minutes", {"frames": 14400}, "--frames: 14400 frames make 14404, expected at most 14400", 2),
    ("no seconds", {"frames": REMOVED, "duration": 0}, "--duration", 2),
    ("half a size", {"size": "64"}, "--size: got '64'", 2),
    ("no size", {"size": "64x0"}, "--size: got '64x0'", 2),
    ("a negative size", {"size": "-64x64"}, "--size", 2),
    ("too small", {"size": "31x64"}, "at least 32", 2),
    ("too narrow", {"size": "640x64"}, "aspect", 2),
    ("width alone", {"size": REMOVED, "width": 64}, "--width: needs --height", 2),
    ("height alone", {"size": REMOVED, "height": 65}, "--height: needs --width", 2),
    ("two sizes", {"width": 64}, "--size and --width", 2),
    ("another rate", {"fps": 30}, "--fps 30: the model makes 24 frames a second", 2),
    ("no rate", {"fps": "nan"}, "--fps nan", 2),
    # sampling
    ("one point", {"steps": 1}, "--steps.*at least 2", 2),
    ("steps without end", {"steps": 1_000_000_000}, "--steps.*at most 1000", 2),
    ("no number of steps", {"steps": "many"}, "--steps", 2),
    ("a shift that is no number", {"flow_shift": "nan"}, "--flow-shift", 2),
    ("no shift", {"flow_shift": 0}, "--flow-shift", 2),
    ("an endless shift", {"flow_shift": "inf"}, "--flow-shift", 2),
    ("a sound shift below 0", {"audio_flow_shift": -3}, "--audio-flow-shift", 2),
    ("a seed below 0", {"seed": -1}, "--seed: got -1, expected an integer of 0", 2),
    ("a huge seed", {"seed": 1 << 70}, "--seed", 2),
    # prompt
    ("no prompt", {"prompt": REMOVED}, "--prompt: needed, or --prompt-embeds", 2),
    ("an empty prompt", {"prompt": ""}, "--prompt: expected at least one token", 2),
    ("two prompts", {"prompt_embeds": "@two.f32"}, "--prompt and --prompt-embeds", 2),
    ("embeddings elsewhere", {"prompt": REMOVED, "prompt_embeds": "none.f32"}, "--prompt-embeds: none.f32", 2),
    ("odd embeddings", {"prompt": REMOVED, "prompt_embeds": "@odd.f32"}, "20 bytes, expected a multiple of 128", 2),
    ("storing twice", {"prompt": REMOVED, "prompt_embeds": "@two.f32", "save_embeds": "e"}, "--save-embeds", 2),
    ("storing nowhere", {"save_embeds": "none/e.f32"}, "--save-embeds: none/e.f32: no such folder", 2),
    # keyframes and references
    ("a corrupt picture", {"first_frame": "@broken.png"}, r"broken\.png", 2),
    ("text for a picture", {"first_frame": "@text.png"}, r"text\.png", 2),
    ("an empty picture", {"last_frame": "@empty.jpg"}, r"empty\.jpg", 2),
    ("a picture cut short", {"first_frame": "@cut.ppm"}, "cut short", 2),
    ("a picture elsewhere", {"last_frame": "none.png"}, "--last-frame: none.png: no such file", 2),
    ("a folder for a picture", {"first_frame": "@clip"}, "clip: cannot be read", 2),
    ("keyframe and picture", {"first_frame": "@wide.ppm", "ref_image": "@wide.ppm"}, "--first-frame and --ref-im", 2),
    ("keyframe and sound", {"last_frame": "@square.ppm", "ref_audio": "@tone.wav"}, "--last-frame and --ref-audio", 2),
    ("not exactly its size", {"first_frame": "@wide.ppm", "fit": "exact"}, "64x64", 2),
    ("an unknown fit", {"first_frame": "@wide.ppm", "fit": "squash"}, "--fit", 2),
    ("nothing to fit", {"fit": "crop"}, "--fit: fits --first-frame", 2),
    ("held too firmly", {"first_frame": "@square.ppm", "noise_aug": 1.5}, "--noise-aug", 2),
    ("held to no number", {"first_frame": "@square.ppm", "noise_aug": "nan"}, "--noise-aug", 2),
    ("nothing to hold to", {"noise_aug": 0.5}, "--noise-aug: there are no pictures", 2),
    ("nothing to see", {"no_vision_conditioning": True}, "--no-vision-conditioning: there are no pictures", 2),
    # how it runs, what comes out
    ("an unknown device", {"device": "tpu"}, "--device", 2),
    ("waiting where it computes", {"offload": "host", "device": "cpu"}, "--offload host", 2),
    ("nothing packed", {"dequant_bf16": True}, "--dequant-bf16", 2),
    ("previews below 0", {"preview_every": -1}, "--preview-every", 2),
    ("no output", {"out": REMOVED}, "--out: needed", 2),
    ("an output of another kind", {"out": "o.avi"}, "--out: o.avi: expected a name that ends in .mp4", 2),
    ("an output in no folder", {"out": "none/o.mp4"}, "--out: none/o.mp4: no such folder", 2),
    ("an output that cannot be written", {"out": "/proc/x.mp4"}, "--out: /proc/x.mp4: cannot be written to", 2),
    ("a rehearsal of that", {"out": "/proc/x.mp4", "dry_run": True}, "--out: .*cannot be written to", 2),
    ("a working directory that is a file", {"workdir": "@two.f32"}, "--workdir.*two.f32 is not a folder", 2),
    ("a working directory in a file", {"workdir": "@two.f32/in"}, "--workdir.*two.f32 is not a folder", 2),
    ("no such program", {"ffmpeg": "none-such"}, "--ffmpeg none-such: no such program", 2),
    ("resuming nowhere", {"resume": True}, "--resume: needs the --workdir", 2),
    ("two at once", {"plan": True, "dry_run": True}, "--plan and --dry-run", 2),
    ("resuming a plan", {"plan": True, "resume": True}, "--resume: --plan", 2),
    ("a loop with an output", {"denoise_only": True}, "--out: --denoise-only ends before", 2),
    ("a loop with previews", {"out": REMOVED, "denoise_only": True, "preview_every": 2}, "--preview-every: --den", 2),
    ("sizes of a prompt", {"dump_params": True}, "says nothing to --dump-params", 2),
    ("an unknown flag", {"cfg_scale": 7}, "--cfg-scale", 2),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words", "status"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_bad_input(
    vkit_run: Callable[..., Any],
    line: Callable[..., list[str]],
    tiny: VideoModelPaths,
    media: Path,
    temporary: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    words: str,
    status: int,
) -> None:
    places = {"ENCODER": tiny.encoder, "AUDIO": tiny.audio_vae}

    def placed(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("@"):
            return media / value[1:]
        return places.get(value, value) if isinstance(value, str) else value

    result = vkit_run(*line(**{name: placed(value) for name, value in changes.items()}))
    assert (result.status, result.stdout) == (status, ""), result.stderr
    assert re.search(words, result.error), result.error
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "out.mp4").exists()
    assert not list(temporary.iterdir())


REFERENCES: list[tuple[str, dict[str, Any], str]] = [
    ("a keyframe on reference weights", {"first_frame": "square.ppm"}, "partition ref2va, which serves ref2va"),
    ("text alone on reference weights", {}, "partition ref2va, which serves ref2va"),
    ("a clip of no frames", {"ref_video": "hollow"}, "no frame_000000.ppm here"),
    ("a clip that is text", {"ref_video": "text.png"}, "no known video format|no picture|frame rate"),
    ("a clip elsewhere", {"ref_video": "none"}, "--ref-video: .*none: no such file or folder"),
    ("a sound that is text", {"ref_audio": "text.png"}, "no known"),
    ("a sound of no samples", {"ref_audio": "silent.wav"}, "no sound|without samples|cut short"),
    ("a picture that is sound", {"ref_image": "tone.wav"}, "picture"),
    ("a strip", {"ref_image": "strip.ppm"}, "aspect"),
    ("ten pictures", {"ref_image": ["square.ppm"] * 10}, "10 pictures"),
    ("four clips", {"ref_video": ["clip"] * 4}, "4 clips"),
]


@pytest.mark.parametrize(("changes", "words"), [case[1:] for case in REFERENCES], ids=[c[0] for c in REFERENCES])
def test_bad_references(
    vkit_run: Callable[..., Any],
    line: Callable[..., list[str]],
    tiny_ref: VideoModelPaths,
    media: Path,
    temporary: Path,
    changes: dict[str, Any],
    words: str,
) -> None:
    placed = {
        name: [media / item for item in value] if isinstance(value, list) else media / value
        for name, value in changes.items()
    }
    result = vkit_run(*line(tiny_ref, **placed))
    assert (result.status, result.stdout) == (2, ""), result.stderr
    assert re.search(words, result.error), result.error
    assert len(result.stderr.splitlines()) == 1
    assert not list(temporary.iterdir())


def test_a_damaged_shard_is_named(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], tiny: VideoModelPaths, tmp_path: Path
) -> None:
    shutil.copytree(tiny.dit, tmp_path / "dit")
    shard = tmp_path / "dit" / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    result = vkit_run(*line(dit=tmp_path / "dit"))
    assert result.status == 1
    assert shard.name in result.error


def test_weights_that_are_not_finite_are_found_by_a_dry_run(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], tiny: VideoModelPaths, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny.dit, tmp_path / "dit")
    shard = tmp_path / "dit" / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    name = sorted(tensors)[0]
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, shard)
    result = vkit_run(*line(dit=tmp_path / "dit", dry_run=True, out=None))
    assert result.status == 1
    assert f"{name} holds numbers that are not finite" in result.error


def test_a_partition_nobody_told_is_asked_for(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], tiny: VideoModelPaths, tmp_path: Path
) -> None:
    shutil.copytree(tiny.dit, tmp_path / "weights")
    (tmp_path / "weights" / "model_index.json").unlink()
    result = vkit_run(*line(dit=tmp_path / "weights"))
    assert result.status == 2
    assert "--partition" in result.error
    assert vkit_run(*line(dit=tmp_path / "weights", partition="fl2va", plan=True)).status == 0


def test_an_encoder_without_tokenizer(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], tiny: VideoModelPaths, tmp_path: Path
) -> None:
    assert tiny.encoder is not None
    shutil.copytree(tiny.encoder, tmp_path / "encoder")
    (tmp_path / "encoder" / "tokenizer.json").unlink()
    result = vkit_run(*line(encoder=tmp_path / "encoder"))
    assert result.status == 2
    assert "--tokenizer" in result.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_device_that_is_not_there(vkit_run: Callable[..., Any], line: Callable[..., list[str]]) -> None:
    result = vkit_run(*line(device="cuda"))
    assert result.status == 2
    assert "--device cuda" in result.error


def test_no_way_to_write_the_file_names_both(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    result = vkit_run(*line())
    assert result.status == 2
    assert "vkit[video]" in result.error
    assert "--ffmpeg PATH" in result.error


def test_a_full_disk_is_told_before_weights_are_read(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, temporary: Path
) -> None:
    from vkit.loaders.safetensors import SafetensorsTensors

    def read(self: object, name: str, shape: object = None) -> None:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(SafetensorsTensors, "load", read)
    monkeypatch.setattr("shutil.disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 1000))
    for changes in ({}, {"dry_run": True}):
        result = vkit_run(*line(**changes))
        assert result.status == 1
        assert "GB are free" in result.error
    result = vkit_run(*line(plan=True))
    assert result.status == 0
    assert "GB are free" in result.stderr
    result = vkit_run(*line(plan=True, json=True))
    assert "GB are free" in json.loads(result.stdout)["warnings"][-1]
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("name", ["nan.f32", "tagged.f32"])
def test_embeddings_that_cannot_be(
    vkit_run: Callable[..., Any], line: Callable[..., list[str]], media: Path, name: str
) -> None:
    result = vkit_run(*line(prompt=None, prompt_embeds=media / name))
    assert result.status == 2
    assert name in result.error


def test_a_flag_without_value(vkit_run: Callable[..., Any], line: Callable[..., list[str]]) -> None:
    result = vkit_run(*line(), "--seed")
    assert result.status == 2
    assert "--seed" in result.error

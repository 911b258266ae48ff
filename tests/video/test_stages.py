"""The three tasks from input pixels and waves to frames and samples, against the reference's runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vkit.video.h3 import rows
from vkit.video.h3.audio_vae import AudioVAE, audio_vae_config
from vkit.video.h3.conditioning import Conditions, TextRows, encode_pixels, encode_sound
from vkit.video.h3.denoising import LoopState, Schedule, denoise, initial_state, loop_inputs
from vkit.video.h3.dit import DiT
from vkit.video.h3.dit_weights import DiTWeights
from vkit.video.h3.layout import LatentSize
from vkit.video.h3.sampler import sigmas
from vkit.video.h3.video_vae import VideoVAE, denormalise_pixels, pixels_to_bytes
from vkit.video.h3.video_vae_config import merged_config
from vkit.video.h3.weights import Residency
from vkit.video.sound import pcm16

ROWS, WAVE = 2e-5, 2e-4


def _close(got: Tensor, want: Tensor, tolerance: float) -> None:
    assert got.shape == want.shape
    assert float((got.float() - want.float()).abs().max()) <= tolerance


class Parts:
    """The tiny model of the reference's runs."""

    def __init__(self, folder: Path) -> None:
        source = json.loads((folder / "video_vae_config.release_source.json").read_text())
        outer = json.loads((folder / "video_vae_config.release.json").read_text())
        self.vae = VideoVAE(folder / "video_vae.release.safetensors", merged_config(source | outer, "vae"))
        audio_config = audio_vae_config(folder / "audio_vae_config.split.json")
        self.audio = AudioVAE(folder / "audio_vae.release.safetensors", audio_config)
        weights = DiTWeights(
            folder / "dit.release_names_contiguous_qkv.safetensors", config=folder / "dit_config.release.json"
        )
        self.dit = DiT(weights, Residency(torch.device("cpu"), "none"), torch.float32)

    def conditions(self, io: dict[str, Tensor]) -> Conditions:
        def encode(name: str) -> Tensor:
            frames = io[name] if io[name].ndim == 4 else io[name][None]
            return encode_pixels(self.vae, frames.numpy())

        def sound(name: str) -> Tensor:
            return encode_sound(self.audio, io[name].numpy())

        if "in.first_frame" in io:
            return Conditions((encode("in.first_frame"), encode("in.last_frame")), (), ("first", "last"))
        if "in.ref_image" in io:
            visual = encode("in.ref_image"), encode("in.ref_clip")
            sounds = None, sound("in.ref_clip_wave"), sound("in.ref_wave")
            return Conditions(visual, sounds, ("image", "video", "audio"))
        return Conditions((), (), ())


@pytest.fixture(scope="module")
def folder(goldens: Path) -> Path:
    return goldens / "pipeline"


@pytest.fixture(scope="module")
def parts(folder: Path) -> Parts:
    return Parts(folder)


@pytest.mark.parametrize("task", ["t2va", "fl2va", "ref2va"])
def test_a_whole_run(parts: Parts, folder: Path, task: str) -> None:
    how: dict[str, Any] = json.loads((folder / f"{task}.json").read_text())
    io = load_file(folder / f"{task}.safetensors")
    target = LatentSize(how["latent_t"], how["latent_h"], how["latent_w"])
    conditions = parts.conditions(io)
    for index, latent in enumerate(conditions.visual):
        _close(latent, io[f"cond.{index}.clean_latent_normalized"], 2e-3)
        noise = rows.condition_noise(how["seed"], latent, target.t, len(conditions.visual))
        _close(noise, io[f"cond.{index}.noise"], 5e-7)
    for index, sound in enumerate(item for item in conditions.sounds if item is not None):
        _close(sound, io[f"cond_audio.{index}.rows"], 5e-5)
    tags = tuple(io["token_tags"][: how["text_len"]].tolist())
    text = TextRows(io["text_embeds"], tags)
    seeded = {"seed": how["seed"], "noise_aug": how["noise_aug"]}
    inputs = loop_inputs(text, conditions, target, how["audio_t"], **seeded)
    assert torch.equal(torch.from_numpy(inputs.layout.positions), io["position_ids"])
    assert torch.equal(torch.from_numpy(inputs.layout.tags), io["token_tags"])
    start = initial_state(how["seed"], 6, 4, target, how["audio_t"])
    _close(rows.from_rows(start.video, target.t, target.h, target.w), io["noise.video"], 5e-7)
    _close(start.audio, io["noise.audio_rows"], 5e-7)
    schedule = Schedule(
        sigmas(how["steps"], how["flow_shift"]), sigmas(how["steps"], how["audio_flow_shift"]), how["noise_aug"]
    )
    _close(schedule.video, io["sigmas_video"], 1.2e-7)
    num_video, num_audio = int(io["num_condition_video_rows"]), int(io["num_condition_audio_rows"])
    if num_video:
        _close(inputs.condition_video, io["init.video_rows"][:num_video], 2e-3)
    last = start
    for state in denoise(parts.dit, inputs, schedule, start):
        _close(state.video, io[f"step{state.step - 1}.video_rows"][num_video:], ROWS)
        _close(state.audio, io[f"step{state.step - 1}.audio_rows"][num_audio:], ROWS)
        last = state
    assert last.step == how["steps"] - 1
    assert last.clean_video is not None
    _close(last.clean_video, last.video, 1e-5)
    _check_outputs(parts, io, last, target)


def _check_outputs(parts: Parts, io: dict[str, Tensor], last: LoopState, target: LatentSize) -> None:
    latent = rows.from_rows(last.video, target.t, target.h, target.w)
    _close(latent, io["final.video_latent_normalized"], ROWS)
    c = parts.vae.config
    latent = rows.denormalise(latent, torch.tensor(c.latents_mean), torch.tensor(c.latents_std), 0)
    frames = denormalise_pixels(torch.cat(list(parts.vae.decode(latent)), dim=1))
    _close(frames[0].permute(2, 0, 1), io["final.frame0_float"], 1e-4)
    difference = (pixels_to_bytes(frames).int() - io["final.frames_u8"].int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) <= 1e-3
    sound = rows.audio_from_rows(last.audio)
    _close(sound, io["final.audio_latent_normalized"], ROWS)
    wave = parts.audio.decode(rows.denormalise(sound, *parts.audio.statistics(), 1))
    _close(wave, io["final.wave"], WAVE)
    steps = pcm16(wave.numpy()).astype(int) - io["final.wave_pcm16"].numpy().astype(int)
    assert abs(steps).max() <= 8


def test_a_run_continues_from_any_step_bit_for_bit(parts: Parts, folder: Path) -> None:
    io = load_file(folder / "ref2va.safetensors")
    how = json.loads((folder / "ref2va.json").read_text())
    target = LatentSize(how["latent_t"], how["latent_h"], how["latent_w"])
    text = TextRows(io["text_embeds"], tuple(io["token_tags"][: how["text_len"]].tolist()))
    inputs = loop_inputs(text, parts.conditions(io), target, how["audio_t"], seed=1, noise_aug=0.9)
    schedule = Schedule(sigmas(5, 12.0), sigmas(5, 3.0), 0.9)
    states = list(denoise(parts.dit, inputs, schedule, initial_state(1, 6, 4, target, how["audio_t"])))
    for state in states[:-1]:
        resumed = list(denoise(parts.dit, inputs, schedule, state))
        assert torch.equal(resumed[-1].video, states[-1].video)
        assert torch.equal(resumed[-1].audio, states[-1].audio)


def test_noise_aug_moves_conditions_and_their_time_together(parts: Parts, folder: Path) -> None:
    io = load_file(folder / "fl2va.safetensors")
    text = TextRows(io["text_embeds"], (1,) * len(io["text_embeds"]))
    conditions = parts.conditions(io)
    target = LatentSize(7, 12, 10)
    exact = loop_inputs(text, conditions, target, 4, seed=1, noise_aug=1.0)
    assert torch.equal(exact.condition_video, torch.cat([rows.to_rows(latent) for latent in conditions.visual]))
    loose = loop_inputs(text, conditions, target, 4, seed=1, noise_aug=0.5)
    assert not torch.equal(loose.condition_video, exact.condition_video)

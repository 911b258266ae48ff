"""The loop: noise to latents, step by step, conditions re-imposed at every one. Knows nothing of files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from vkit.video.h3 import rows
from vkit.video.h3.conditioning import Conditions, TextRows
from vkit.video.h3.dit import DiT, schedule_timesteps
from vkit.video.h3.layout import LatentSize, Layout, pack
from vkit.video.h3.sampler import euler_step


@dataclass(frozen=True, slots=True)
class LoopState:
    """Target rows after `step` forward passes, float32 on the CPU."""

    step: int
    video: Tensor
    audio: Tensor
    clean_video: Tensor | None = None
    """The transformer's latest guess of the clean rows, for previews; None before the first pass."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Noise levels of pictures and sound, stepped together, and how exact conditions are."""

    video: Tensor
    audio: Tensor
    noise_aug: float

    @property
    def num_forwards(self) -> int:
        """Forward passes."""
        return len(self.video) - 1


@dataclass(frozen=True, slots=True)
class LoopInputs:
    """Everything the loop needs, fixed over all steps."""

    layout: Layout
    text: TextRows
    condition_video: Tensor
    """Rows of visual conditions, noise mixed in."""
    condition_audio: Tensor
    target: LatentSize
    audio_t: int


def loop_inputs(
    text: TextRows, conditions: Conditions, target: LatentSize, audio_t: int, *, seed: int, noise_aug: float
) -> LoopInputs:
    """The packed sequence of a request, its conditions as noisy as `noise_aug` says."""
    anchors: Sequence[Literal["first", "last"]] = [kind for kind in conditions.kinds if kind in ("first", "last")]  # type: ignore[misc]
    blocks = [] if anchors else conditions.blocks()
    layout = pack(text.tags, target, audio_t, keyframes=anchors, references=blocks)
    mixed = [_mixed(latent, target, len(conditions.visual), seed, noise_aug) for latent in conditions.visual]
    sounds = [sound for sound in conditions.sounds if sound is not None]
    return LoopInputs(
        layout,
        text,
        torch.cat([rows.to_rows(latent) for latent in mixed]) if mixed else torch.empty(0),
        torch.cat(sounds) if sounds else torch.empty(0),
        target,
        audio_t,
    )


def _mixed(latent: Tensor, target: LatentSize, count: int, seed: int, noise_aug: float) -> Tensor:
    return rows.mix_condition(latent, rows.condition_noise(seed, latent, target.t, count), noise_aug)


def initial_state(seed: int, channels: int, audio_channels: int, target: LatentSize, audio_t: int) -> LoopState:
    """The noise everything starts from."""
    video = rows.to_rows(rows.video_noise(seed, channels, target.t, target.h, target.w))
    return LoopState(0, video, rows.audio_noise(seed, audio_channels, audio_t))


def denoise(
    dit: DiT,
    inputs: LoopInputs,
    schedule: Schedule,
    start: LoopState,
    *,
    on_prepared: Callable[[int], None] | None = None,
    on_block: Callable[[int], None] | None = None,
) -> Iterator[LoopState]:
    """The state after every remaining step. The callbacks are called after each block and may raise.

    What a step computes depends on the state before it alone, so a run that starts at a stored state goes on as the
    one that stored it would have.
    """
    times = schedule_timesteps(schedule.video, schedule.audio, schedule.noise_aug)
    modulations = dit.modulations([time for step in times for time in step.values()], on_prepared)
    text = dit.refine_text(inputs.text.embeds)
    rope = dit.rope(inputs.layout)
    video, audio = start.video, start.audio
    num_video, num_audio = len(inputs.condition_video), len(inputs.condition_audio)
    for step in range(start.step, schedule.num_forwards):
        velocities = dit.forward(
            inputs.layout,
            text,
            torch.cat([inputs.condition_video, video]) if num_video else video,
            torch.cat([inputs.condition_audio, audio]) if num_audio else audio,
            rope,
            modulations,
            times[step],
            None if on_block is None else lambda index, _: on_block(index),
        )
        video_velocity, audio_velocity = velocities[0][num_video:].cpu(), velocities[1][num_audio:].cpu()
        clean = video + schedule.video[step] * video_velocity
        video = euler_step(video, video_velocity, schedule.video[step], schedule.video[step + 1])
        audio = euler_step(audio, audio_velocity, schedule.audio[step], schedule.audio[step + 1])
        yield LoopState(step + 1, video, audio, clean)

"""What a user asks of the model, and where its files are. Values only; nothing is read or checked against a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vkit.errors import InvalidRequest

Task = Literal["t2va", "fl2va", "ref2va"]
"""Text only; first and/or last frame given; pictures, clips or sounds as references."""
Partition = Literal["fl2va", "ref2va"]
"""The two sets of weights. fl2va serves t2va and fl2va, ref2va serves ref2va."""
Fit = Literal["auto", "exact", "stretch", "crop"]
QkvLayout = Literal["grouped", "contiguous"]
Offload = Literal["none", "host", "disk"]
ComputeType = Literal["auto", "float32", "bfloat16"]

TASKS: tuple[Task, ...] = ("t2va", "fl2va", "ref2va")
TASKS_OF: dict[Partition, tuple[Task, ...]] = {"fl2va": ("t2va", "fl2va"), "ref2va": ("ref2va",)}
DEFAULT_STEPS, DEFAULT_SEED = 50, 42
MIN_STEPS, MAX_STEPS = 2, 1000
DEFAULT_FLOW_SHIFT, DEFAULT_AUDIO_FLOW_SHIFT = 12.0, 3.0
DEFAULT_NOISE_AUG = 0.999
MAX_IMAGES, MAX_CLIPS, MAX_SOUNDS, MAX_REFERENCES = 9, 3, 3, 12


@dataclass(frozen=True, slots=True)
class Reference:
    """One reference block, in the order of the request.

    `kind` says how `path` is read. `sound`, for a clip only, is a sound file that makes one block with it; the clip's
    own sound track is never used. A clip is a video file or a directory of `frame_%06d.ppm`.
    """

    kind: Literal["image", "video", "audio"]
    path: Path
    sound: Path | None = None


def attach_sound(references: tuple[Reference, ...]) -> tuple[Reference, ...]:
    """The references with a lone sound attached to the lone clip, so that they make one block, where the clip stood.

    With several clips or sounds nothing is attached: it could not be told to which.
    """
    clips = [item for item in references if item.kind == "video" and item.sound is None]
    sounds = [item for item in references if item.kind == "audio"]
    if len(clips) != 1 or len(sounds) != 1:
        return references
    joined = Reference("video", clips[0].path, sounds[0].path)
    return tuple(joined if item is clips[0] else item for item in references if item is not sounds[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoRequest:
    """One video. None means: the default of the task (see docs/video.md)."""

    prompt: str | None = None
    prompt_embeds: Path | None = None
    """Raw little-endian float32 `[L, text_dim]` instead of a prompt, with row tags in `<file>.tags.json` if present."""
    task: Task | None = None
    """None: fl2va with keyframes, ref2va with references, else t2va."""
    num_frames: int | None = None
    duration: float | None = None
    """Seconds."""
    width: int | None = None
    height: int | None = None
    steps: int = DEFAULT_STEPS
    """Points of the noise schedule, 2 to 1000; one forward pass less."""
    seed: int = DEFAULT_SEED
    flow_shift: float = DEFAULT_FLOW_SHIFT
    audio_flow_shift: float = DEFAULT_AUDIO_FLOW_SHIFT
    fit: Fit = "auto"
    noise_aug: float = DEFAULT_NOISE_AUG
    first_frame: Path | None = None
    last_frame: Path | None = None
    references: tuple[Reference, ...] = ()

    @property
    def resolved_task(self) -> Task:
        """The task, asked for or implied by the inputs.

        Raises:
            InvalidRequest: keyframes together with references, or a task that contradicts the inputs.
        """
        has_keyframes = self.first_frame is not None or self.last_frame is not None
        if has_keyframes and self.references:
            keyframe = "first_frame" if self.first_frame is not None else "last_frame"
            reference = f"a reference {self.references[0].kind}"
            raise InvalidRequest(
                f"{keyframe} and {reference} exclude each other: keyframe and reference conditioning cannot be mixed",
                param=keyframe,
            )
        implied: Task = "fl2va" if has_keyframes else "ref2va" if self.references else "t2va"
        if self.task is None or self.task == implied:
            return implied
        if self.task not in TASKS:
            raise InvalidRequest(f"task: got {self.task!r}, expected one of {', '.join(TASKS)}", param="task")
        inputs = {"t2va": "neither keyframes nor references", "fl2va": "keyframes", "ref2va": "references"}
        raise InvalidRequest(
            f"task {self.task} does not go with {inputs[implied]}", param="task", remedy=f"that is task {implied}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoModelPaths:
    """Where the parts of the model are. `dit` is a directory of shards, a `.safetensors` or a `.gguf` file.

    What a request does not need may be None: the encoder with `prompt_embeds`, the autoencoders with `denoise_only`.
    A configuration left out is looked for beside its weights (`config.json`).
    """

    dit: Path
    partition: Partition | None = None
    """None: what `model_index.json` or the file name says."""
    encoder: Path | None = None
    tokenizer: Path | None = None
    video_vae: Path | None = None
    video_vae_config: Path | None = None
    audio_vae: Path | None = None
    audio_vae_config: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """How the model is run."""

    qkv_layout: QkvLayout | None = None
    """Row order of the fused projection; None: by the kind of file."""
    dequant_bf16: bool = False
    """Packed weights are expanded to bfloat16 when they are loaded, instead of at every product."""
    offload: Offload = "none"
    """Where layers wait between uses: on the device, in host memory, or on disk."""
    device: str = "auto"
    dtype: ComputeType = "auto"
    """Type of the residual stream of DiT and encoder. auto: bfloat16 for weights of bfloat16 or float16 and for packed
    ones, else float32. The autoencoders always compute in float32."""
    silent: bool = False
    """Without a sound autoencoder make clips without sound, which else is refused."""
    vision_conditioning: bool = True
    """Whether pictures also pass through the encoder's vision tower."""

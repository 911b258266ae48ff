"""From a request to what the loop is conditioned on: text rows, and clean latents of pictures, clips and sounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vkit.errors import InvalidRequest
from vkit.video.errors import MediaError
from vkit.video.frames import Pixels
from vkit.video.h3 import rows
from vkit.video.h3.audio_vae import AudioVAE
from vkit.video.h3.encoder_weights import EncoderConfig
from vkit.video.h3.geometry import Size, trim_frames
from vkit.video.h3.inputs import ResolvedInputs, ResolvedReference
from vkit.video.h3.layout import TEXT, VIDEO, LatentSize, ReferenceBlock
from vkit.video.h3.model import H3Model
from vkit.video.h3.presentation import (
    Piece,
    Presentation,
    ShownReference,
    VisionTokens,
    keyframe_pieces,
    present,
    reference_pieces,
    without_vision,
)
from vkit.video.h3.text_tower import TextTower
from vkit.video.h3.video_vae import VideoVAE, normalise_pixels
from vkit.video.h3.vision import PatchShape, VisionTower, block_of, clip_size, features, image_size, patch_shape
from vkit.video.h3.weights import Residency

Check = Callable[[], None]
"""Called between units of work; raises to end it."""


@dataclass(frozen=True, slots=True)
class TextRows:
    """What the transformer reads as text: (L, text_dim) float32, and a tag for every row."""

    embeds: Tensor
    tags: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Clean, normalised latents in the order of the sequence."""

    visual: tuple[Tensor, ...]
    """(C, t, h, w) each: keyframes, or pictures and clips of the references."""
    sounds: tuple[Tensor | None, ...]
    """Per reference, rows (2 T, A) of its sound if it has one."""
    kinds: tuple[str, ...]
    """Per reference its kind; per keyframe its anchor."""

    def blocks(self) -> list[ReferenceBlock]:
        """The references as the layout wants them."""
        visual = iter(self.visual)
        blocks = []
        for kind, sound in zip(self.kinds, self.sounds, strict=True):
            size = None if kind == "audio" else LatentSize(*next(visual).shape[1:])
            audio_t = 0 if sound is None else len(sound) // 2
            blocks.append(ReferenceBlock(kind, size, audio_t))  # type: ignore[arg-type]
        return blocks


def pieces_of(prompt: str, inputs: ResolvedInputs, shape: PatchShape | None) -> list[Piece]:
    """What is said and shown. Without a `shape` the conditioner sees nothing: the prompt alone."""
    if inputs.task == "t2va" or shape is None:
        return without_vision([prompt])
    if inputs.task == "fl2va":
        block = block_of(image_size(inputs.size, shape), shape, is_clip=False)
        return keyframe_pieces(prompt, [block] * len(inputs.keyframes))
    return reference_pieces(prompt, [_shown(item, shape) for item in inputs.references])


def _shown(item: ResolvedReference, shape: PatchShape) -> ShownReference:
    has_sound = item.wave is not None
    if item.size is None:
        return ShownReference("audio", has_sound)
    if item.kind == "image":
        return ShownReference("image", has_sound, (block_of(image_size(item.size, shape), shape, is_clip=False),))
    pairs = item.frame_pairs
    block = block_of(clip_size(item.size, pairs, shape), shape, is_clip=True)
    return ShownReference("video", has_sound, (block,) * len(pairs), tuple(pair.label for pair in pairs))


def vision_shape(model: H3Model, inputs: ResolvedInputs) -> PatchShape | None:
    """The vision tower's sizes, None if the conditioner shall not see (or there is nothing to see)."""
    if model.encoder is None or not model.options.vision_conditioning or inputs.task == "t2va":
        return None
    if not model.encoder.has_vision:
        return None
    return patch_shape(model.encoder)


def vision_tokens(config: EncoderConfig) -> VisionTokens:
    """The ids of the conditioner's special tokens."""
    return VisionTokens(
        config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id
    )


def present_prompt(model: H3Model, prompt: str, inputs: ResolvedInputs) -> Presentation:
    """The tokens of a request.

    Raises:
        InvalidRequest: no tokenizer, no conditioner, or a prompt of no tokens.
    """
    if model.encoder is None:
        raise InvalidRequest("prompt: needs the text conditioner", param="prompt", remedy="give its files, --encoder")
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise InvalidRequest("prompt: needs a tokenizer", param="prompt", remedy="give tokenizer.json, --tokenizer")
    if not tokenizer.encode(prompt, add_special_tokens=False):
        raise InvalidRequest("prompt: expected at least one token, got an empty text", param="prompt")
    pieces = pieces_of(prompt, inputs, vision_shape(model, inputs))
    shown = present(
        pieces, lambda text: tokenizer.encode(text, add_special_tokens=False), vision_tokens(model.encoder.config)
    )
    if max(shown.token_ids) >= model.encoder.config.vocab_size:
        raise InvalidRequest(
            f"prompt: token {max(shown.token_ids)} is beyond the conditioner's {model.encoder.config.vocab_size}",
            param="prompt",
            remedy="the tokenizer belongs to another model",
        )
    return shown


def encode_text(
    model: H3Model, shown: Presentation, inputs: ResolvedInputs, on_layer: Callable[[int], None] | None = None
) -> TextRows:
    """The conditioner's hidden states of a presentation."""
    assert model.encoder is not None
    dtype, device = model.encoder_dtype, model.residency.device
    merged: Tensor | None = None
    deepstack: tuple[Tensor, ...] = ()
    shape = vision_shape(model, inputs)
    if len(shown.pads) and shape is not None:
        tower = VisionTower(model.encoder, device, dtype)
        merged, deepstack = tower([features(*part, shape) for part in _looks(inputs, shape)])
        del tower
        model.encoder.release_vision()
    # Every layer is used once: wherever the transformer's layers wait, these are read, used and let go.
    text = TextTower(model.encoder, Residency(device, "disk"), dtype)
    embeds = text(shown, merged, deepstack, None if on_layer is None else lambda index, _: on_layer(index))
    return TextRows(embeds, shown.tags)


def _looks(inputs: ResolvedInputs, shape: PatchShape) -> list[tuple[Pixels, Size]]:
    """Everything the tower sees, in order: frames and the size they are shown at."""
    if inputs.task == "fl2va":
        size = image_size(inputs.size, shape)
        return [(frame.load(), size) for frame in inputs.keyframes]
    looks = []
    for item in inputs.references:
        if item.size is None:
            continue
        if item.kind == "image":
            looks.append((item.load(), image_size(item.size, shape)))
            continue
        pairs = item.frame_pairs
        picked = [index for pair in pairs for index in (pair.first, pair.second)]
        looks.append((item.load()[picked], clip_size(item.size, pairs, shape)))
    return looks


def encode_conditions(
    inputs: ResolvedInputs, video_vae: VideoVAE | None, audio_vae: AudioVAE | None, check: Check
) -> Conditions:
    """Latents of all keyframes or references; `check` is called after each piece."""
    if inputs.keyframes:
        assert video_vae is not None
        visual = [encode_pixels(video_vae, frame.load(), check) for frame in inputs.keyframes]
        return Conditions(tuple(visual), (), tuple(frame.anchor for frame in inputs.keyframes))
    visual, sounds = [], []
    for item in inputs.references:
        sounds.append(None if item.wave is None or audio_vae is None else encode_sound(audio_vae, item.wave))
        if item.size is not None:
            assert video_vae is not None
            frames = item.load()
            visual.append(encode_pixels(video_vae, frames[: trim_frames(len(frames))], check))
        check()
    return Conditions(tuple(visual), tuple(sounds), tuple(item.kind for item in inputs.references))


def encode_pixels(vae: VideoVAE, frames: Pixels, check: Check | None = None) -> Tensor:
    """The clean, normalised latent (C, t, h, w) of frames (T, H, W, 3): a sample of the posterior."""
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    moments = vae.encode(normalise_pixels(torch.from_numpy(np.array(frames))), check)
    return rows.normalise(rows.sample_posterior(moments), mean, std, 0)


def encode_sound(vae: AudioVAE, wave: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    """Normalised rows (2 T, A) of a stereo wave (2, samples): the posterior's mean."""
    mean, std = vae.statistics()
    return rows.audio_to_rows(rows.normalise(vae.encode(torch.from_numpy(wave)), mean, std, 1))


# stored embeddings


def tags_path(embeds: Path) -> Path:
    """Where the row tags of stored embeddings lie."""
    return embeds.with_name(embeds.name + ".tags.json")


def count_embeds(path: Path, text_dim: int) -> int:
    """Rows of stored embeddings.

    Raises:
        MediaError: the file is missing, empty, or no whole number of rows.
    """
    try:
        size = path.stat().st_size
    except OSError as error:
        raise MediaError(f"{path}: cannot be read: {error.strerror or error}", param="prompt_embeds") from None
    if size == 0 or size % (4 * text_dim):
        raise MediaError(
            f"{path}: {size} bytes, expected a multiple of {4 * text_dim} (float32 rows of {text_dim})",
            param="prompt_embeds",
        )
    return size // (4 * text_dim)


def load_embeds(path: Path, text_dim: int) -> TextRows:
    """Embeddings and tags as `save_embeds` stored them; without tags all rows are text.

    Raises:
        MediaError: a file is damaged.
    """
    count = count_embeds(path, text_dim)
    values = np.fromfile(path, "<f4").reshape(count, text_dim)
    if not np.isfinite(values).all():
        raise MediaError(f"{path}: numbers that are not finite", param="prompt_embeds")
    tags = load_tags(path, count)
    return TextRows(torch.from_numpy(values.astype(np.float32)), (TEXT,) * count if tags is None else tags)


def load_tags(path: Path, count: int) -> tuple[int, ...] | None:
    """The tags stored beside embeddings of `count` rows; None if there are none.

    Raises:
        MediaError: the file is damaged.
    """
    sidecar = tags_path(path)
    if not sidecar.is_file():
        return None
    try:
        tags = json.loads(sidecar.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise MediaError(f"{sidecar}: cannot be read as JSON: {error}", param="prompt_embeds") from None
    is_whole = isinstance(tags, list) and len(tags) == count
    if not is_whole or not all(type(tag) is int and tag in (VIDEO, TEXT) for tag in tags):
        raise MediaError(f"{sidecar}: expected {count} tags of 0 or 1", param="prompt_embeds")
    return tuple(tags)


def save_embeds(path: Path, text: TextRows) -> None:
    """Store embeddings as raw float32, with their tags beside them."""
    path.write_bytes(text.embeds.to(torch.float32).numpy().astype("<f4").tobytes())
    tags_path(path).write_text(json.dumps(list(text.tags)))

"""A request resolved against a model: rows, steps, and time and memory of every stage. Reads headers only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from vkit.errors import InvalidRequest, UsageError
from vkit.quantization import BLOCK_FORMATS
from vkit.video.h3 import costs, geometry
from vkit.video.h3.conditioning import count_embeds, load_tags, pieces_of, present_prompt, vision_shape
from vkit.video.h3.costs import Work
from vkit.video.h3.inputs import ResolvedInputs, resolve_inputs
from vkit.video.h3.layout import VIDEO, LatentSize
from vkit.video.h3.model import H3Model
from vkit.video.h3.plan import RowPlan, StageName, StagePlan, VideoPlan
from vkit.video.h3.presentation import Presentation, VisionBlock
from vkit.video.h3.request import VideoRequest
from vkit.video.h3.sampler import check_schedule, sigmas

COARSE_BITS = 4.0
"""Packed weights of fewer bits damage the picture visibly."""
MUXED_SHARE = 4
"""The muxed file is at most about a quarter of the raw frames, even of noise."""


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A plan, and what it was made of."""

    request: VideoRequest
    plan: VideoPlan
    inputs: ResolvedInputs
    target: LatentSize
    shown: Presentation | None
    """The prompt's tokens; None with stored embeddings."""


def resolve_request(model: H3Model, request: VideoRequest, *, denoise_only: bool = False) -> ResolvedRequest:
    """The request resolved.

    Raises:
        InvalidRequest, MediaError, UsageError: what cannot be done with this model, or cannot be read.
    """
    _check_numbers(request)
    task = request.resolved_task
    model.check_task(task, denoise_only=denoise_only)
    inputs = resolve_inputs(request)
    _check_parts(model, inputs, denoise_only=denoise_only)
    shown = _present(model, request, inputs)
    ratio = geometry.CANVAS_STEP // 2
    target = LatentSize(
        geometry.latent_frames(inputs.num_frames), inputs.size.height // ratio, inputs.size.width // ratio
    )
    audio_t = geometry.audio_latents(inputs.num_frames)
    rows = _rows(model, request, inputs, shown, target, audio_t, ratio)
    num_forwards = len(sigmas(request.steps, request.flow_shift)) - 1
    if len(sigmas(request.steps, request.audio_flow_shift)) - 1 != num_forwards:
        raise InvalidRequest(
            f"flow_shift {request.flow_shift:g} and audio_flow_shift {request.audio_flow_shift:g} leave different "
            f"numbers of distinct steps of {request.steps}",
            param="flow_shift",
        )
    stages = _Stages(model, request, inputs, shown, target, audio_t, rows, num_forwards).all(denoise_only)
    plan = VideoPlan(
        task=task,
        partition=model.partition,
        width=inputs.size.width,
        height=inputs.size.height,
        num_frames=inputs.num_frames,
        fps=geometry.FPS,
        latent_t=target.t,
        latent_h=target.h,
        latent_w=target.w,
        audio_t=audio_t,
        steps=request.steps,
        num_forwards=num_forwards,
        seed=request.seed,
        rows=rows,
        stages=stages,
        disk_bytes=_disk_bytes(model, inputs, rows, audio_t, denoise_only=denoise_only),
        device=model.device.name,
        dtype=str(model.dtype).removeprefix("torch."),
        offload=model.options.offload,
        warnings=(*inputs.warnings, *_tag_warnings(request, inputs, rows.text), *_warnings(model, inputs, stages)),
    )
    return ResolvedRequest(request, plan, inputs, target, shown)


def _check_numbers(request: VideoRequest) -> None:
    check_schedule(request.steps, request.flow_shift)
    check_schedule(request.steps, request.audio_flow_shift, name="audio_flow_shift")
    if not (math.isfinite(request.noise_aug) and 0 <= request.noise_aug <= 1):
        raise InvalidRequest(f"noise_aug: got {request.noise_aug}, expected 0 to 1 (1: exact)", param="noise_aug")
    if not 0 <= request.seed < 1 << 63:
        raise InvalidRequest(f"seed: got {request.seed}, expected an integer of 0 to 2^63 - 1", param="seed")
    if request.fit not in ("auto", "exact", "stretch", "crop"):
        raise InvalidRequest(f"fit: got {request.fit!r}, expected auto, exact, stretch or crop", param="fit")
    if (request.prompt is None) == (request.prompt_embeds is None):
        given = "both were" if request.prompt is not None else "neither was"
        raise InvalidRequest(f"prompt and prompt_embeds: {given} given, expected one of them", param="prompt")


def _check_parts(model: H3Model, inputs: ResolvedInputs, *, denoise_only: bool) -> None:
    """Refuse a request that needs a part which was not opened."""
    sees = bool(inputs.keyframes) or any(item.size is not None for item in inputs.references)
    hears = any(item.wave is not None for item in inputs.references)
    needed = [
        ("--video-vae", model.video_vae is None, sees or not denoise_only, "pictures"),
        ("--audio-vae", model.audio_vae is None, hears or not (denoise_only or model.options.silent), "sound"),
    ]
    for flag, is_missing, is_needed, what in needed:
        if is_missing and is_needed:
            raise UsageError(f"{flag}: the autoencoder for {what} is missing", remedy=f"give its weights with {flag}")
    if sees and model.video_vae is not None and not model.video_vae.has_encoder:
        raise UsageError(f"--video-vae: {model.video_vae.path} has a decoder only, keyframes and references need both")


def _present(model: H3Model, request: VideoRequest, inputs: ResolvedInputs) -> Presentation | None:
    if request.prompt is not None:
        return present_prompt(model, request.prompt, inputs)
    return None


def _rows(
    model: H3Model,
    request: VideoRequest,
    inputs: ResolvedInputs,
    shown: Presentation | None,
    target: LatentSize,
    audio_t: int,
    ratio: int,
) -> RowPlan:
    if shown is not None:
        text = len(shown.token_ids)
    else:
        assert request.prompt_embeds is not None
        text = count_embeds(request.prompt_embeds, model.dit.config.text_dim)
    latents = [item.latent(ratio) for item in inputs.references]
    seen = len(inputs.keyframes) * target.rows_per_frame + sum(size.rows for size in latents if size is not None)
    heard = sum(2 * _sound_steps(model, item.wave.shape[1]) for item in inputs.references if item.wave is not None)
    return RowPlan(text, seen, heard, 2 * audio_t, target.rows)


def _sound_steps(model: H3Model, samples: int) -> int:
    hop = geometry.SAMPLE_RATE // geometry.LATENTS_PER_SECOND if model.audio_vae is None else model.audio_vae.config.hop
    return -(-samples // hop)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The stages of one request and what each costs."""

    model: H3Model
    request: VideoRequest
    inputs: ResolvedInputs
    shown: Presentation | None
    target: LatentSize
    audio_t: int
    rows: RowPlan
    num_forwards: int

    def all(self, denoise_only: bool) -> tuple[StagePlan, ...]:
        stages = []
        if self.shown is not None:
            stages.append(self._encode(self.shown))
        if self.inputs.keyframes or self.inputs.references:
            stages.append(self._condition())
        stages.append(self._denoise())
        if not denoise_only:
            stages.append(self._decode_video())
            if self.model.audio_vae is not None:
                stages.append(self._decode_audio())
        return tuple(stages)

    def _stage(self, name: StageName, work: Work, dtype: torch.dtype, weight_bytes: int, other_bytes: int) -> StagePlan:
        speed = costs.measured_speed(self.model.residency.device.type, dtype)
        return StagePlan(name, work.total, work.seconds(speed), weight_bytes, weight_bytes + other_bytes)

    def _encode(self, shown: Presentation) -> StagePlan:
        encoder = self.model.encoder
        assert encoder is not None
        dtype = self.model.encoder_dtype
        count = len(shown.token_ids)
        work = costs.text_work(encoder.config, count)
        weights = (1 if self.model.device.kind == "cpu" else 2) * encoder.layer_bytes()
        others = costs.text_activation_bytes(encoder.config, count, dtype.itemsize)
        shape = vision_shape(self.model, self.inputs)
        if shape is not None:
            vision: dict[str, Any] = dict(encoder.config.vision)
            blocks = [piece for piece in pieces_of("", self.inputs, shape) if isinstance(piece, VisionBlock)]
            for block in blocks:
                patches = block.num_pads * shape.merge**2
                work += costs.vision_work(vision, patches, patches)
            weights = max(weights, encoder.vision_bytes())
        return self._stage("encode", work, dtype, weights, others)

    def _condition(self) -> StagePlan:
        work, weights, others = Work(), 0, 0
        vae, audio = self.model.video_vae, self.model.audio_vae
        sizes = [(1, self.inputs.size)] * len(self.inputs.keyframes)
        sizes += [(geometry.trim_frames(i.num_frames), i.size) for i in self.inputs.references if i.size is not None]
        if sizes and vae is not None:
            weights += vae.num_bytes("encoder.", "quant_conv.")
            for count, size in sizes:
                work += costs.video_encode_work(vae.config, count, size.width, size.height)
                others = max(others, costs.video_encode_bytes(vae.config, count, size.width, size.height))
        for item in self.inputs.references:
            if item.wave is not None and audio is not None:
                work += costs.audio_encode_work(audio.config, item.wave.shape[1])
                others = max(others, costs.audio_encode_bytes(audio.config, item.wave.shape[1]))
                weights = max(weights, audio.num_bytes())
        return self._stage("condition", work, torch.float32, weights, others)

    def _denoise(self) -> StagePlan:
        model, c = self.model, self.model.dit.config
        size = model.dtype.itemsize
        timesteps = 2 * self.num_forwards + 2
        work = costs.dit_forward(c, self.rows.total).times(self.num_forwards)
        work += costs.dit_once(c, self.rows.text, timesteps)
        expanded = torch.bfloat16 if model.options.dequant_bf16 else None
        blocks = model.dit.block_bytes(expanded)
        if model.options.offload != "none":
            # On a card the next layer is there before the last one goes; on the host a layer is a view of the file.
            held = 1 if model.device.kind == "cpu" else 2
            blocks = held * blocks // (c.num_layers + c.token_refiner_num_layers)
        tables = costs.modulation_bytes(c, timesteps, size)
        others = costs.dit_activation_bytes(c, self.rows.total, size)
        modulating = 18 * c.hidden_size * c.time_embed_dim * size
        return self._stage("denoise", work, model.dtype, blocks + tables, max(others, modulating))

    def _decode_video(self) -> StagePlan:
        vae = self.model.video_vae
        assert vae is not None
        size = self.inputs.size
        work = costs.video_decode_work(vae.config, self.target.t, size.width, size.height)
        weights = vae.num_bytes("decoder.", "post_quant_conv.")
        others = costs.video_decode_bytes(vae.config, size.width, size.height)
        return self._stage("decode_video", work, torch.float32, weights, others)

    def _decode_audio(self) -> StagePlan:
        vae = self.model.audio_vae
        assert vae is not None
        work = costs.audio_decode_work(vae.config, self.audio_t)
        others = costs.audio_decode_bytes(vae.config, self.audio_t)
        return self._stage("decode_audio", work, torch.float32, vae.num_bytes(), others)


def _disk_bytes(model: H3Model, inputs: ResolvedInputs, rows: RowPlan, audio_t: int, *, denoise_only: bool) -> int:
    c = model.dit.config
    video_rows, audio_rows = rows.video + rows.condition_video, rows.audio + rows.condition_audio
    latents = 4 * (video_rows * 4 * c.latents_dim + audio_rows * c.audio_latents_dim + rows.text * c.text_dim)
    state = 3 * latents
    if denoise_only:
        return state
    frames = inputs.num_frames * (inputs.size.width * inputs.size.height * 3 + 32)
    return state + frames + frames // MUXED_SHARE + 4 * audio_t * 800


def _tag_warnings(request: VideoRequest, inputs: ResolvedInputs, count: int) -> list[str]:
    """Where stored embeddings were made for other pictures than those of the request."""
    if request.prompt_embeds is None:
        return []
    name = request.prompt_embeds.name
    tags = load_tags(request.prompt_embeds, count)
    has_pictures = bool(inputs.keyframes) or any(item.size is not None for item in inputs.references)
    if not has_pictures:
        if tags is not None and VIDEO in tags:
            return [f"{name}: was encoded with pictures (row tags), the request has none"]
    elif tags is None:
        return [f"{name}: has no row tags beside it, all rows are taken for text though there are pictures"]
    elif VIDEO not in tags:
        return [f"{name}: was encoded without pictures (row tags), the request has some"]
    return []


def _warnings(model: H3Model, inputs: ResolvedInputs, stages: tuple[StagePlan, ...]) -> list[str]:
    found = []
    bits = _coarsest_bits(model)
    if bits is not None and bits < COARSE_BITS:
        found.append(f"the transformer's weights have {bits:.1f} bits: below 4 the picture is visibly damaged")
    if inputs.task != "t2va" and model.encoder is not None and vision_shape(model, inputs) is None:
        reason = "vision conditioning is off" if model.encoder.has_vision else "the conditioner has no vision tower"
        found.append(f"{reason}: the prompt is encoded without the pictures")
    available = model.device.available_bytes
    for stage in stages:
        if stage.peak_bytes > available:
            need, free = stage.peak_bytes / 1e9, available / 1e9
            found.append(f"stage {stage.name} needs about {need:.1f} GB, {free:.1f} GB are free")
    return found


def _coarsest_bits(model: H3Model) -> float | None:
    """Bits per weight of the coarsest matrices of the first block, None if dense."""
    files = model.dit.files
    types = {files.info(name).qtype for name in files.names() if "blocks.0." in name}
    blocks = [BLOCK_FORMATS[name] for name in types if name is not None]
    return min((8 * block.num_bytes / block.num_elements for block in blocks), default=None)

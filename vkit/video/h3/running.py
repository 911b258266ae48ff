"""One run through all stages: reports, checkpoints, previews, cancelling. What the stages compute is elsewhere."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vkit.errors import CheckpointError, InvalidRequest, VkitError
from vkit.quantization import QuantizedTensor
from vkit.video.errors import DiskSpaceError, VideoCancelled, VideoFailed
from vkit.video.frames import frame_path, write_ppm
from vkit.video.h3 import rows
from vkit.video.h3.conditioning import Conditions, TextRows, encode_conditions, encode_text, load_embeds, save_embeds
from vkit.video.h3.costs import video_decode_units
from vkit.video.h3.denoising import LoopState, Schedule, denoise, initial_state, loop_inputs
from vkit.video.h3.dit import DiT
from vkit.video.h3.geometry import CLIP_FRAMES, CLIP_LATENTS, trim_frames
from vkit.video.h3.inputs import ResolvedInputs
from vkit.video.h3.model import H3Model
from vkit.video.h3.pipeline import Progress, RunOptions, VideoResult
from vkit.video.h3.plan import StageName, VideoPlan
from vkit.video.h3.planning import ResolvedRequest, resolve_request
from vkit.video.h3.request import VideoRequest
from vkit.video.h3.sampler import sigmas
from vkit.video.h3.state import WorkDir, fingerprint
from vkit.video.h3.video_vae import CHUNK_OVERLAP, denormalise_pixels, pixels_to_bytes
from vkit.video.mux import MuxJob
from vkit.video.sound import write_wav
from vkit.video.space import lack_of_space, write_fault

if TYPE_CHECKING:
    from collections.abc import Iterator

PREVIEW_NAME = "preview_{:06d}.ppm"


def run(model: H3Model, request: VideoRequest, workdir: Path, options: RunOptions) -> VideoResult:
    """The video of a request. See `VideoPipeline.generate`."""
    _check_options(options)
    resolved = resolve_request(model, request, denoise_only=options.denoise_only)
    place = WorkDir(workdir)
    _check_space(workdir, resolved.plan.disk_bytes)
    place.begin(fingerprint(model, request, denoise_only=options.denoise_only), resume=options.resume)
    return _Run(model, resolved, place, options).all()


def check_run(model: H3Model, request: VideoRequest, workdir: Path, options: RunOptions) -> VideoPlan:
    """The plan of a new run that could begin now. See `VideoPipeline.check_run`."""
    _check_options(options)
    resolved = resolve_request(model, request, denoise_only=options.denoise_only)
    _check_space(workdir, resolved.plan.disk_bytes)
    WorkDir(workdir).check_free()
    return resolved.plan


def read_weights(model: H3Model, progress: Callable[[int, int], None] | None) -> int:
    """Bytes of weights, each read once. See `VideoPipeline.read_weights`."""
    every = [(files, name) for _, files in model.files() for name in sorted(files.names())]
    total = sum(files.info(name).nbytes for files, name in every)
    done = 0
    for files, name in every:
        weight = files.load(name)
        stored = weight.data if isinstance(weight, QuantizedTensor) else weight
        if not bool(torch.isfinite(stored.sum(dtype=torch.float64))):
            raise CheckpointError(f"{files.path}: {name} holds numbers that are not finite")
        del weight, stored
        files.release(name)
        done += files.info(name).nbytes
        if progress is not None:
            progress(done, total)
    return total


def _check_options(options: RunOptions) -> None:
    for name, value, least in (
        ("preview_every", options.preview_every, 0),
        ("checkpoint_every", options.checkpoint_every, 1),
    ):
        if value < least:
            raise InvalidRequest(f"{name}: got {value}, expected at least {least}", param=name)
    if options.output is not None and options.muxer is None:
        raise InvalidRequest(f"output {options.output}: a muxer must write it, none was given", param="output")
    if options.output is not None and options.denoise_only:
        raise InvalidRequest("output: there is none with denoise_only", param="output")
    if options.output is not None and not options.output.absolute().parent.is_dir():
        raise InvalidRequest(f"output {options.output}: no such folder", param="output")
    if options.output is not None:
        fault = write_fault(options.output)
        if fault is not None:
            raise InvalidRequest(f"output {options.output}: cannot be written to: {fault}", param="output")
    if options.preview_every and options.denoise_only:
        raise InvalidRequest(
            "preview_every: previews need the autoencoder, denoise_only has none", param="preview_every"
        )


def _check_space(workdir: Path, needed: int) -> None:
    lack = lack_of_space(workdir, needed)
    if lack is not None:
        raise DiskSpaceError(f"{workdir}: {lack}", remedy="use another working directory")


@dataclass(slots=True)
class _Pace:
    """Progress of one stage."""

    name: StageName
    total: int
    report: Callable[[Progress], None] | None
    started: float = field(default_factory=time.monotonic)
    done: int = 0
    first: int = 0
    """Units done before this run."""

    def advance(self, count: int = 1, *, detail: str = "", preview: Path | None = None) -> None:
        self.done += count
        self.tell(detail=detail, preview=preview)

    def tell(self, *, detail: str = "", preview: Path | None = None) -> None:
        if self.report is None:
            return
        run, left = self.done - self.first, self.total - self.done
        eta = (time.monotonic() - self.started) / run * left if run > 0 else None
        self.report(Progress(self.name, self.done, self.total, eta, detail, preview))


class _Run:
    """A request on its way."""

    def __init__(self, model: H3Model, resolved: ResolvedRequest, place: WorkDir, options: RunOptions) -> None:
        self._model = model
        self._resolved = resolved
        self._request, self._plan, self._inputs = resolved.request, resolved.plan, resolved.inputs
        self._place = place
        self._options = options
        self._seconds: dict[StageName, float] = {}
        self._forwards = 0
        self._loop_seconds = 0.0
        self._loop_started = time.monotonic()

    def all(self) -> VideoResult:
        """Every stage in order."""
        self._write_job("running")
        try:
            with torch.inference_mode():
                result = self._stages()
        except VideoCancelled:
            self._write_job("cancelled")
            raise
        except VkitError as error:
            self._write_job("failed", error=str(error))
            raise
        self._write_job("succeeded", result)
        return result

    def _stages(self) -> VideoResult:
        text = self._text()
        if self._options.save_embeds is not None:
            save_embeds(self._options.save_embeds, text)
        conditions = self._conditions()
        last = self._denoised(text, conditions)
        frames, sound = 0, None
        if not self._options.denoise_only:
            frames = self._frames(last)
            sound = None if self._model.audio_vae is None else self._sound(last)
            self._mux(frames, sound)
        return VideoResult(
            plan=self._plan,
            workdir=self._place.path,
            output=self._options.output,
            audio=sound,
            num_frames=frames,
            latent_checksum=_checksum(last),
            stage_seconds=self._seconds,
            seconds_per_forward=self._loop_seconds / self._forwards if self._forwards else 0.0,
            num_forwards_run=self._forwards,
            warnings=self._plan.warnings,
        )

    # stages

    def _text(self) -> TextRows:
        kept = self._place.load_text()
        if kept is not None:
            return kept
        if self._request.prompt_embeds is not None:
            text = load_embeds(self._request.prompt_embeds, self._model.dit.config.text_dim)
        else:
            assert self._model.encoder is not None
            assert self._resolved.shown is not None
            with self._stage("encode", self._model.encoder.config.num_layers) as pace:
                text = encode_text(self._model, self._resolved.shown, self._inputs, self._ticker(pace))
        self._finite(text.embeds, "the conditioner")
        self._place.save_text(text)
        return text

    def _conditions(self) -> Conditions:
        if self._inputs.task == "t2va":
            return Conditions((), (), ())
        kept = self._place.load_conditions()
        if kept is not None:
            return kept
        with self._stage("condition", _condition_units(self._inputs)) as pace:
            tick = self._ticker(pace)
            vae, audio = self._model.video_vae, self._model.audio_vae
            conditions = encode_conditions(self._inputs, vae, audio, lambda: tick(0))
            for part in (vae, audio):
                if part is not None:
                    part.free()
        for latent in conditions.visual:
            self._finite(latent, "the video autoencoder")
        self._place.save_conditions(conditions)
        return conditions

    def _denoised(self, text: TextRows, conditions: Conditions) -> LoopState:
        c, request, target = self._model.dit.config, self._request, self._resolved.target
        schedule = Schedule(
            sigmas(request.steps, request.flow_shift),
            sigmas(request.steps, request.audio_flow_shift),
            request.noise_aug,
        )
        last = self._place.load_latents()
        if last is None:
            last = initial_state(request.seed, c.latents_dim, c.audio_latents_dim, target, self._plan.audio_t)
        if last.step >= schedule.num_forwards:
            return last
        inputs = loop_inputs(
            text, conditions, target, self._plan.audio_t, seed=request.seed, noise_aug=request.noise_aug
        )
        expanded = torch.bfloat16 if self._model.options.dequant_bf16 else None
        dit = DiT(self._model.dit, self._model.residency, self._model.dtype, dequant_to=expanded)
        units = schedule.num_forwards * c.num_layers
        saved = last.step
        with self._stage("denoise", units, first=last.step * c.num_layers) as pace:
            try:
                loop = denoise(
                    dit,
                    inputs,
                    schedule,
                    last,
                    on_prepared=lambda _: self._prepared(),
                    on_block=lambda _: self._block_done(pace, c.num_layers, schedule.num_forwards),
                )
                for state in self._clocked(loop):
                    self._finite(state.video, f"step {state.step}", state.audio)
                    last = state
                    if state.step % self._options.checkpoint_every == 0 or state.step == schedule.num_forwards:
                        self._place.save_latents(state)
                        saved = state.step
                    self._preview(pace, state, schedule)
            except (VideoCancelled, KeyboardInterrupt):
                if last.step > saved:
                    self._place.save_latents(last)
                raise
            finally:
                dit.free()
        return last

    def _prepared(self) -> None:
        """A block's modulation is there; steps are timed from the last of them on."""
        self._check_cancelled()
        self._loop_started = time.monotonic()

    def _clocked(self, loop: Iterator[LoopState]) -> Iterator[LoopState]:
        """The loop's states, the time of forward passes alone counted."""
        for state in loop:
            self._loop_seconds += time.monotonic() - self._loop_started
            self._forwards += 1
            yield state
            self._loop_started = time.monotonic()

    def _frames(self, last: LoopState) -> int:
        vae, size = self._model.video_vae, self._inputs.size
        assert vae is not None
        latent = self._video_latent(last.video)
        count = 0
        with self._stage(
            "decode_video", video_decode_units(vae.config, latent.shape[1], size.width, size.height)
        ) as pace:
            tick = self._ticker(pace)
            for piece in vae.decode(latent, lambda: tick(0)):
                self._finite(piece, "the video autoencoder")
                for frame in pixels_to_bytes(denormalise_pixels(piece)).numpy():
                    write_ppm(frame_path(self._place.path, count), frame)
                    count += 1
            vae.free()
        return count

    def _sound(self, last: LoopState) -> Path:
        vae = self._model.audio_vae
        assert vae is not None
        with self._stage("decode_audio", 1) as pace:
            latent = rows.denormalise(rows.audio_from_rows(last.audio), *vae.statistics(), 1)
            wave = vae.decode(latent)
            vae.free()
            self._finite(wave, "the sound autoencoder")
            if float((wave - wave[:, :1]).abs().max()) == 0.0:
                raise VideoFailed("the sound track is constant: the weights or the latents are damaged")
            write_wav(self._place.sound, wave.numpy())
            pace.advance()
        return self._place.sound

    def _mux(self, frames: int, sound: Path | None) -> None:
        if self._options.output is None or self._options.muxer is None:
            return
        with self._stage("mux", 1) as pace:
            self._options.muxer(MuxJob(self._place.path, frames, sound, self._options.output))
            pace.advance()

    # around the stages

    @contextmanager
    def _stage(self, name: StageName, units: int, *, first: int = 0) -> Iterator[_Pace]:
        pace = _Pace(name, units, self._options.progress, done=first, first=first)
        self._check_cancelled()
        pace.tell()
        try:
            yield pace
        finally:
            self._seconds[name] = time.monotonic() - pace.started
            _give_memory_back()

    def _ticker(self, pace: _Pace) -> Callable[[int], None]:
        """One unit done; asks whether to go on."""

        def tick(_: int) -> None:
            pace.advance()
            self._check_cancelled()

        return tick

    def _block_done(self, pace: _Pace, num_layers: int, num_forwards: int) -> None:
        pace.advance(detail=f"step {pace.done // num_layers + 1} of {num_forwards}")
        self._check_cancelled()

    def _check_cancelled(self) -> None:
        if self._options.cancelled is not None and self._options.cancelled():
            raise VideoCancelled("the video was cancelled", remedy="resume continues it")

    def _finite(self, tensor: Tensor, what: str, *others: Tensor) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in (tensor, *others)):
            raise VideoFailed(f"{what} made numbers that are not finite", remedy="are the weights complete?")

    def _preview(self, pace: _Pace, state: LoopState, schedule: Schedule) -> None:
        """A picture from the middle of the clip as it would look if the loop ended here."""
        every = self._options.preview_every
        if not every or state.step % every or state.step == schedule.num_forwards or state.clean_video is None:
            return
        vae = self._model.video_vae
        assert vae is not None
        latent = self._video_latent(state.clean_video)
        window = CLIP_LATENTS + CHUNK_OVERLAP
        start = max(0, (latent.shape[1] - window) // 2 // CLIP_LATENTS * CLIP_LATENTS)
        pieces = vae.decode(latent[:, start : start + window], self._check_cancelled)
        frame = pixels_to_bytes(denormalise_pixels(next(iter(pieces))[:, CLIP_FRAMES // 2 :][:, :1]))
        vae.free()
        path = self._place.path / PREVIEW_NAME.format(state.step)
        write_ppm(path, frame[0].numpy())
        pace.tell(detail=f"step {state.step} of {schedule.num_forwards}", preview=path)

    def _video_latent(self, video: Tensor) -> Tensor:
        assert self._model.video_vae is not None
        c, target = self._model.video_vae.config, self._resolved.target
        latent = rows.from_rows(video, target.t, target.h, target.w)
        return rows.denormalise(latent, torch.tensor(c.latents_mean), torch.tensor(c.latents_std), 0)

    def _write_job(self, status: str, result: VideoResult | None = None, error: str | None = None) -> None:
        job: dict[str, Any] = {
            "status": status,
            "model": "MiniMax-H3",
            "prompt": self._request.prompt,
            "seed": self._request.seed,
            "steps": self._request.steps,
            "flow_shift": self._request.flow_shift,
            "audio_flow_shift": self._request.audio_flow_shift,
            "noise_aug": self._request.noise_aug,
            "plan": self._plan.as_dict(),
        }
        if error is not None:
            job["error"] = error
        if result is not None:
            job |= {
                "output": None if result.output is None else str(result.output),
                "num_frames": result.num_frames,
                "latent_checksum": result.latent_checksum,
                "stage_seconds": {name: round(seconds, 3) for name, seconds in result.stage_seconds.items()},
            }
        self._place.write_job(job)


def _condition_units(inputs: ResolvedInputs) -> int:
    """How often the conditioning stage reports."""
    chunks = [-(-trim_frames(i.num_frames) // CLIP_FRAMES) if i.kind == "video" else 0 for i in inputs.references]
    return sum(chunks) + len(inputs.references)


def _checksum(state: LoopState) -> str:
    digest = hashlib.sha256()
    for part in (state.video, state.audio):
        digest.update(part.to(torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _give_memory_back() -> None:
    """Let freed memory go, so that the next stage does not count it."""
    from vkit.device import return_freed_memory

    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

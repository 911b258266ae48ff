"""The face of the model: open it, plan a request, make the video. Importing this costs no torch.

The stages run in order, each freeing what it held before the next begins: text to rows, pictures and sounds to latents,
the loop, latents to frames and sound, one file of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vkit.video.h3.plan import StageName, VideoPlan
from vkit.video.h3.request import VideoModelPaths, VideoOptions, VideoRequest
from vkit.video.mux import Muxer

if TYPE_CHECKING:
    from vkit.video.h3.model import H3Model


@dataclass(frozen=True, slots=True)
class Progress:
    """One report: `done` of `total` units of `stage` (layers, chunks, blocks of all steps, tiles)."""

    stage: StageName
    done: int
    total: int
    eta_s: float | None
    """Seconds left in this stage, from its own pace; None before the first unit."""
    detail: str = ""
    """In the loop: "step 3 of 49"."""
    preview: Path | None = None
    """A picture just written."""


@dataclass(frozen=True, slots=True)
class VideoResult:
    """What was made."""

    plan: VideoPlan
    workdir: Path
    output: Path | None
    """The muxed file, if one was asked for."""
    audio: Path | None
    num_frames: int
    """Frames in the working directory; 0 with `denoise_only`."""
    latent_checksum: str
    """SHA-256 of the final latents, video then audio, as float32: equal for equal runs."""
    stage_seconds: dict[StageName, float]
    seconds_per_forward: float
    num_forwards_run: int
    """Fewer than the plan's after a resume."""
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How one run goes: the keyword arguments of `VideoPipeline.generate`."""

    output: Path | None = None
    muxer: Muxer | None = None
    progress: Callable[[Progress], None] | None = None
    preview_every: int = 0
    checkpoint_every: int = 1
    resume: bool = False
    cancelled: Callable[[], bool] | None = None
    denoise_only: bool = False
    save_embeds: Path | None = None


class VideoPipeline:
    """One model, opened. Weights are read by `generate`, stage by stage. One run at a time."""

    def __init__(self, model: H3Model) -> None:
        """For `open`, which is the way in."""
        self._model = model

    @classmethod
    def open(cls, paths: VideoModelPaths, options: VideoOptions | None = None) -> Self:
        """The model at `paths`, all headers checked.

        Raises:
            CheckpointError, ModelLoadError: a part is missing, damaged, or does not go with the others.
            UsageError: an option that cannot do what it says here.
        """
        from vkit.video.h3.model import open_model

        return cls(open_model(paths, options or VideoOptions()))

    def plan(self, request: VideoRequest, *, denoise_only: bool = False) -> VideoPlan:
        """The request resolved against the model, from headers alone (and the request's own files).

        Raises:
            InvalidRequest, MediaError, UsageError: what the request asks for cannot be done.
        """
        from vkit.video.h3.planning import resolve_request

        return resolve_request(self._model, request, denoise_only=denoise_only).plan

    def check_run(
        self, request: VideoRequest, workdir: Path, *, output: Path | None = None, denoise_only: bool = False
    ) -> VideoPlan:
        """The plan of a new run that could begin now: folders, disk space and all; no weight is read, nothing is left.

        Raises:
            DiskSpaceError, InvalidRequest, MediaError, UsageError: why it could not.
        """
        from vkit.video.h3.running import check_run

        options = RunOptions(output=output, muxer=None if output is None else lambda _: None, denoise_only=denoise_only)
        return check_run(self._model, request, workdir, options)

    def read_weights(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Bytes of the weights of all parts, every one read once; `progress` gets (bytes done, bytes in all).

        Raises:
            CheckpointError: a file ends too soon, or holds numbers that are not finite.
        """
        from vkit.video.h3.running import read_weights

        return read_weights(self._model, progress)

    def parameters(self) -> dict[str, int]:
        """Sizes of the transformer under their published names."""
        return self._model.dit.config.as_params()

    def generate(
        self,
        request: VideoRequest,
        workdir: Path,
        *,
        output: Path | None = None,
        muxer: Muxer | None = None,
        progress: Callable[[Progress], None] | None = None,
        preview_every: int = 0,
        checkpoint_every: int = 1,
        resume: bool = False,
        cancelled: Callable[[], bool] | None = None,
        denoise_only: bool = False,
        save_embeds: Path | None = None,
    ) -> VideoResult:
        """The video: frames, `audio.wav` and `job.json` in `workdir`, and `output` by `muxer`.

        `cancelled` is asked between layers, blocks, chunks and tiles. `preview_every` N writes a picture every N steps,
        `checkpoint_every` N keeps the loop's state every N; `resume` continues from it to the identical result.
        `save_embeds` stores the prompt's rows for `VideoRequest.prompt_embeds`. `denoise_only` ends after the loop.

        Raises:
            VideoCancelled: `cancelled` returned True; `resume` continues.
            ResumeError, DiskSpaceError, MuxError, VideoFailed: as they say.
            InvalidRequest, MediaError, UsageError: what the request asks for cannot be done.
        """
        from vkit.video.h3.running import run

        options = RunOptions(
            output=output,
            muxer=muxer,
            progress=progress,
            preview_every=preview_every,
            checkpoint_every=checkpoint_every,
            resume=resume,
            cancelled=cancelled,
            denoise_only=denoise_only,
            save_embeds=save_embeds,
        )
        return run(self._model, request, workdir, options)

    def close(self) -> None:
        """Give the files back."""
        self._model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

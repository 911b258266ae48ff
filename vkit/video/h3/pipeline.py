"""From a request to frames, sound and a file: the stages in order, each freeing what it held before the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from vkit.errors import VkitError
from vkit.video.h3.plan import StageName, VideoPlan
from vkit.video.h3.request import VideoModelPaths, VideoOptions, VideoRequest
from vkit.video.mux import Muxer


@dataclass(frozen=True, slots=True)
class Progress:
    """One report. `done` of `total` units of `stage` (steps, chunks, layers); `preview`: a picture just written."""

    stage: StageName
    done: int
    total: int
    eta_s: float | None
    """Seconds left in this stage, from its own pace; None before the first unit."""
    preview: Path | None = None


@dataclass(frozen=True, slots=True)
class VideoResult:
    """What was made."""

    plan: VideoPlan
    workdir: Path
    output: Path | None
    """The muxed file; None without a muxer."""
    audio: Path | None
    num_frames: int
    latent_checksum: str
    """SHA-256 of the final latents, video then audio, as float32: equal for equal runs."""
    stage_seconds: dict[StageName, float]
    seconds_per_forward: float
    num_forwards_run: int
    """Fewer than the plan's after a resume."""
    warnings: tuple[str, ...]


class VideoPipeline:
    """One model, opened. Weights are read by `generate`, stage by stage."""

    @classmethod
    def open(cls, paths: VideoModelPaths, options: VideoOptions | None = None) -> Self:
        """The model at `paths`, all headers checked.

        Raises:
            CheckpointError, ModelLoadError, UsageError, InvalidRequest: what cannot be opened, by name.
        """
        raise VkitError("the video pipeline is not built yet")

    def plan(self, request: VideoRequest, *, denoise_only: bool = False) -> VideoPlan:
        """The request resolved against the model, from headers alone.

        Raises:
            InvalidRequest, MediaError: what the request asks for cannot be done.
        """
        raise VkitError("the video pipeline is not built yet")

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
        """The video: frames, `audio.wav`, `job.json` in `workdir`, and `output` by `muxer`.

        Raises:
            VideoCancelled: `cancelled` returned True; `resume` continues.
            ResumeError, DiskSpaceError, MuxError, VideoFailed, InvalidRequest, MediaError: as they say.
        """
        raise VkitError("the video pipeline is not built yet")

    def close(self) -> None:
        """Give the files back."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

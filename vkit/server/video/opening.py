"""From what an operator named to a queue of video jobs: everything checked from headers, before a port opens."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vkit.errors import UsageError
from vkit.metrics import MetricFamily
from vkit.server.video.jobs import VideoJobs
from vkit.video.h3.pipeline import VideoPipeline
from vkit.video.h3.request import VideoModelPaths, VideoOptions
from vkit.video.mux import in_process_muxer, program_muxer


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSettings:
    """What an operator decided about the video model."""

    paths: VideoModelPaths
    options: VideoOptions = field(default_factory=VideoOptions)
    prompt_embeds: Path | None = None
    workdir: Path | None = None
    """Folder of the jobs; they survive the process. None: a temporary one that goes with it."""
    ffmpeg: Path | None = None
    """Program that writes the files; None: in-process."""
    readable: tuple[Path, ...] = ()
    max_queued_jobs: int = 16


def open_jobs(settings: VideoSettings) -> VideoJobs:
    """The queue, its model opened.

    Raises:
        UsageError, MissingExtra: something needed is not there, or the folder cannot be written to.
        ModelLoadError: a fault of the checkpoint.
    """
    paths = settings.paths
    if paths.video_vae is None:
        raise UsageError("--video-vae: needed beside --video-dit")
    if settings.prompt_embeds is None and paths.encoder is None:
        raise UsageError("--video-encoder: needed beside --video-dit, or --video-prompt-embeds in its place")
    if settings.prompt_embeds is not None and not settings.prompt_embeds.is_file():
        raise UsageError(f"--video-prompt-embeds: {settings.prompt_embeds}: no such file")
    muxer = in_process_muxer() if settings.ffmpeg is None else program_muxer(settings.ffmpeg)
    root = _workdir(settings.workdir)
    return VideoJobs(
        VideoPipeline.open(paths, replace(settings.options, silent=paths.audio_vae is None)),
        muxer,
        root,
        max_queued=settings.max_queued_jobs,
        is_persistent=settings.workdir is not None,
        readable=settings.readable,
        prompt_embeds=settings.prompt_embeds,
        has_sound=paths.audio_vae is not None,
    )


def _workdir(given: Path | None) -> Path:
    if given is None:
        return Path(tempfile.mkdtemp(prefix="vkit-videos-"))
    try:
        given.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--video-workdir: {given}: {error.strerror or error}") from None
    if not os.access(given, os.W_OK | os.X_OK):
        raise UsageError(f"--video-workdir: {given}: cannot be written to")
    return given.resolve()


class VideoOnlyEngine:
    """Stands where a text model would, in a server that has none."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.max_model_len = 0
        self.max_num_seqs = 1
        self.chat_template = None
        self.generation_config: dict[str, Any] = {}
        self.tokenizer_info: dict[str, Any] = {}
        self.media = None
        self.media_limits: dict[Any, int] = {}
        self.is_healthy = True

    async def abort(self, request_id: str) -> None:
        """Nothing runs that has an id."""

    def metric_families(self) -> list[MetricFamily]:
        """Nothing is measured beside the requests themselves."""
        return []

    async def shutdown(self) -> None:
        """Nothing to stop."""
        self.is_healthy = False

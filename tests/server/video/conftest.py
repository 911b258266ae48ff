"""Servers of videos over a pipeline that is told what to do."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from vkit.errors import InvalidRequest, RequestFailed
from vkit.server.settings import ServerSettings
from vkit.server.video.jobs import VideoJobs
from vkit.server.video.opening import VideoSettings
from vkit.video.errors import MediaError, ResumeError, VideoCancelled
from vkit.video.h3.pipeline import Progress, VideoResult
from vkit.video.h3.plan import RowPlan, StagePlan, VideoPlan
from vkit.video.h3.request import VideoModelPaths, VideoRequest

FILE = bytes(range(256)) * 40
BROKEN = b"broken"


class ScriptedPipeline:
    """Plans by the rules of the lattice; takes `steps` steps that wait for `gate`, then writes FILE."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.seen: list[tuple[VideoRequest, bool]] = []
        self.failure: Exception | None = None
        self.is_closed = False
        self.can_resume = True
        self.at_end: Callable[[], None] = lambda: None
        self.disk_bytes = 1

    def plan(self, request: VideoRequest, *, denoise_only: bool = False) -> VideoPlan:
        """Sizes as the model would take them."""
        if request.first_frame is not None and request.first_frame.read_bytes() == BROKEN:
            raise MediaError(f"{request.first_frame}: is damaged", remedy="give it with --first-frame")
        task = request.resolved_task
        if task == "ref2va" and request.references[0].path.name == "refused":
            raise InvalidRequest("the partition fl2va serves t2va and fl2va, not ref2va", param="task")
        width, height = request.width or 1344, request.height or 768
        warnings = []
        if (width // 32 * 32, height // 32 * 32) != (width, height):
            warnings.append(f"size: {width}x{height} becomes {width // 32 * 32}x{height // 32 * 32}")
        num_frames = round((request.duration or 5) * 24) if request.num_frames is None else request.num_frames
        while num_frames % 17 != 5:
            num_frames += 1
        stages = tuple(StagePlan(name, 1.0, 1.0, 1, 1) for name in ("encode", "denoise", "decode_video", "mux"))
        return VideoPlan(
            task=task,
            partition="fl2va",
            width=width // 32 * 32,
            height=height // 32 * 32,
            num_frames=num_frames,
            fps=24,
            latent_t=1,
            latent_h=1,
            latent_w=1,
            audio_t=1,
            steps=request.steps,
            num_forwards=request.steps - 1,
            seed=request.seed,
            rows=RowPlan(*[1] * len(fields(RowPlan))),
            stages=stages,
            disk_bytes=self.disk_bytes,
            device="cpu",
            dtype="float32",
            offload="none",
            warnings=tuple(warnings),
        )

    def generate(self, request: VideoRequest, workdir: Path, **given: Any) -> VideoResult:
        """FILE, unless it is cancelled or told to fail."""
        self.seen.append((request, given["resume"]))
        if given["resume"] and not self.can_resume:
            raise ResumeError("nothing was saved")
        for step in range(4):
            given["progress"](Progress("denoise", step, 4, None))
            while not self.gate.wait(0.01):
                if given["cancelled"]():
                    raise VideoCancelled("cancelled")
            if given["cancelled"]():
                raise VideoCancelled("cancelled")
        if self.failure is not None:
            raise self.failure
        self.at_end()
        given["output"].write_bytes(FILE)
        plan = self.plan(request)
        return VideoResult(plan, workdir, given["output"], None, plan.num_frames, "0", {}, 0.0, 4, ("rendered",))

    def close(self) -> None:
        """Remembered."""
        self.is_closed = True


class Studio:
    """A server that makes videos."""

    def __init__(self, serve: Callable[..., Any], root: Path, **given: Any) -> None:
        self.pipeline = given.pop("pipeline", None) or ScriptedPipeline()
        jobs = {
            name: given.pop(name) for name in ("max_queued", "prompt_embeds", "has_sound", "readable") if name in given
        }
        self.root = root
        self.jobs = VideoJobs(self.pipeline, lambda job: None, root, is_persistent=True, **{"max_queued": 4, **jobs})
        video = VideoSettings(paths=VideoModelPaths(dit=Path("MiniMax-H3-FL2VA.gguf")))
        self.served = serve(video=video, **given)
        self.served.state.videos = self.jobs
        self.client = self.served.client

    @property
    def settings(self) -> ServerSettings:
        """The server's settings."""
        settings: ServerSettings = self.served.settings
        return settings

    async def create(self, **body: Any) -> dict[str, Any]:
        """A queued job."""
        reply = await self.client.post("/v1/videos", json={"prompt": "waves", **body})
        assert reply.status_code == 200, reply.text
        made: dict[str, Any] = reply.json()
        return made

    async def over(self, job_id: str) -> dict[str, Any]:
        """The job once it is over."""
        import asyncio

        await asyncio.to_thread(self.jobs.wait, self.jobs.get(job_id))
        shown: dict[str, Any] = (await self.client.get(f"/v1/videos/{job_id}")).json()
        return shown


@pytest.fixture
def studio(serve: Callable[..., Any], tmp_path: Path) -> Iterator[Callable[..., Studio]]:
    """Builds servers."""
    made: list[Studio] = []

    def build(**given: Any) -> Studio:
        made.append(Studio(serve, given.pop("root", tmp_path / "videos"), **given))
        return made[-1]

    yield build
    for one in made:
        one.pipeline.gate.set()
        one.jobs.close()


@pytest.fixture
def start_videos(start: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Starts a server with a socket, its states named as OpenAI names them."""

    def build() -> Any:
        video = VideoSettings(paths=VideoModelPaths(dit=Path("MiniMax-H3-FL2VA.gguf")))
        process = start(video=video, video_openai_status=True).ready()
        process.pipeline = ScriptedPipeline()
        root = tmp_path / "videos"
        process.state.videos = VideoJobs(process.pipeline, lambda job: None, root, max_queued=4, is_persistent=True)
        return process

    return build


@pytest.fixture
def failure() -> Exception:
    """What a stage may raise."""
    return RequestFailed("the latents are not finite")

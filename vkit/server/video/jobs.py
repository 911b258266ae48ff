"""Videos in the making: one at a time on a thread of its own, each with a folder that outlives the process."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from vkit.errors import InvalidRequest, VkitError
from vkit.server.problems import Problem, bad_request, not_found, unavailable
from vkit.server.video.numbering import PREFIX, Numbers, number_of
from vkit.server.video.parsing import AskedVideo, allowed_path
from vkit.server.video.wording import problem_for_client, words_for_client
from vkit.video.errors import ResumeError, VideoCancelled
from vkit.video.h3.pipeline import Progress, VideoResult
from vkit.video.h3.plan import VideoPlan
from vkit.video.h3.request import VideoRequest
from vkit.video.mux import Muxer
from vkit.video.space import bytes_below, lack_of_space

logger = logging.getLogger("vkit.server.video")

QUEUED, RUNNING, SUCCEEDED, FAILED = "queued", "running", "succeeded", "failed"
CANCELLED = "cancelled"
RECORD = "record.json"
RECORD_IN_WRITING = "record.tmp"
INPUTS = "inputs"
OUTPUT = "video.mp4"


class Pipeline(Protocol):
    """What makes the videos."""

    def plan(self, request: VideoRequest, *, denoise_only: bool = False) -> VideoPlan:
        """The request resolved, from headers alone."""

    def generate(
        self,
        request: VideoRequest,
        workdir: Path,
        *,
        output: Path | None = None,
        muxer: Muxer | None = None,
        progress: Callable[[Progress], None] | None = None,
        resume: bool = False,
        cancelled: Callable[[], bool] | None = None,
    ) -> VideoResult:
        """The video."""

    def close(self) -> None:
        """Give the files back."""


@dataclass(kw_only=True)
class VideoJob:
    """One video, from its request to its file. Written to its folder whenever its status changes."""

    number: int
    prompt: str
    model: str | None
    metadata: dict[str, str]
    request: VideoRequest
    width: int
    height: int
    duration: float
    created_at: int
    disk_bytes: int = 0
    """What it will have written by its end, about."""
    warnings: list[str] = field(default_factory=list)
    status: str = QUEUED
    completed_at: int | None = None
    progress: int = 0
    error: str | None = None

    @property
    def id(self) -> str:
        """Its name for clients."""
        return f"{PREFIX}{self.number}"

    @property
    def is_over(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status in (SUCCEEDED, FAILED)


class VideoJobs:
    """All jobs of a server. Called from any thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        muxer: Muxer,
        root: Path,
        *,
        max_queued: int,
        is_persistent: bool,
        readable: tuple[Path, ...] = (),
        prompt_embeds: Path | None = None,
        has_sound: bool = True,
    ) -> None:
        """`root`: the folder of job folders. `is_persistent`: jobs found there are gone on with, and stay at the end.
        `readable`: folders whose files requests may name, beside `root`."""
        self._pipeline = pipeline
        self._muxer = muxer
        self._root = root
        self._max_queued = max_queued
        self._is_persistent = is_persistent
        self._readable = (root, *readable)
        self._prompt_embeds = prompt_embeds
        self._has_sound = has_sound
        self._lock = threading.Condition()
        self._jobs: dict[str, VideoJob] = {}
        self._waiting: deque[VideoJob] = deque()
        self._current: VideoJob | None = None
        self._resumes: set[str] = set()
        self._stop_current = threading.Event()
        self._is_closed = False
        root.mkdir(parents=True, exist_ok=True)
        self._numbers = Numbers(root)
        if is_persistent:
            self._remove_orphans()
            self._read_records()
        self._thread = threading.Thread(target=self._run, name="vkit-video", daemon=True)
        self._thread.start()

    # For clients

    def submit(self, asked: AskedVideo, warnings: list[str]) -> VideoJob:
        """A new job, checked against the model and queued.

        Raises:
            Problem: 400 (also for what the model cannot do, or the disk cannot hold), 403, or 503 (also when the
                disk cannot hold it beside those before it).
            UsageError: a part of the model is missing that only the operator can give.
        """
        with self._lock:
            self._check_room()
            number = self._numbers.take()
        folder = self._folder(number)
        folder.mkdir(parents=True)
        try:
            request = asked.request(self._placed(asked, folder), prompt_embeds=self._prompt_embeds)
            if asked.sound is not None and not self._has_sound:
                raise bad_request(f"{asked.sound.field}: sound needs a server with --audio-vae", asked.sound.field)
            plan = self._planned(request, folder)
            job = VideoJob(
                number=number,
                prompt=asked.prompt,
                model=asked.model,
                metadata=asked.metadata,
                request=request,
                width=plan.width,
                height=plan.height,
                duration=plan.duration,
                created_at=int(time.time()),
                disk_bytes=plan.disk_bytes,
                warnings=list(dict.fromkeys([*warnings, *asked.warnings, *self._notes(plan)])),
            )
            with self._lock:
                self._check_room()
                self._check_disk(job)
                self._jobs[job.id] = job
                self._write(job)
                self._waiting.append(job)
                self._lock.notify_all()
            return job
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def get(self, job_id: str) -> VideoJob:
        """The job of that name.

        Raises:
            Problem: 404.
        """
        with self._lock:
            job = self._jobs.get(job_id)
        if job is None:
            raise not_found(f"No video has the id {job_id[:100]!r}.", "video_id")
        return job

    def listed(self) -> list[VideoJob]:
        """All jobs, oldest first."""
        with self._lock:
            return sorted(self._jobs.values(), key=lambda job: job.number)

    def delete(self, job_id: str) -> None:
        """End a job that is not over; forget one that is, files and all.

        Raises:
            Problem: 404.
        """
        job = self.get(job_id)
        with self._lock:
            if job.is_over:
                del self._jobs[job_id]
            elif job is self._current:
                self._stop_current.set()
                return
            else:
                self._waiting.remove(job)
                self._end(job, FAILED, error=CANCELLED)
                return
        shutil.rmtree(self._folder(job.number), ignore_errors=True)

    def wait(self, job: VideoJob) -> VideoJob:
        """The job once it is over, or the server stops."""
        with self._lock:
            self._lock.wait_for(lambda: job.is_over or self._is_closed)
        return job

    def output_of(self, job: VideoJob) -> Path:
        """Where the file of a job is, or will be."""
        return self._folder(job.number) / OUTPUT

    def close(self) -> None:
        """Stop at the next step. A persistent job is gone on with at the next start."""
        with self._lock:
            self._is_closed = True
            self._stop_current.set()
            self._lock.notify_all()
        self._thread.join()
        self._pipeline.close()
        if not self._is_persistent:
            shutil.rmtree(self._root, ignore_errors=True)

    # Inside

    def _folder(self, number: int) -> Path:
        return self._root / f"{PREFIX}{number}"

    def _check_room(self) -> None:
        if self._is_closed:
            raise unavailable("The server is shutting down.")
        if len(self._waiting) >= self._max_queued:
            raise unavailable(f"The queue is full: at most {self._max_queued} videos may wait.")

    def _check_disk(self, job: VideoJob) -> None:
        """Refuse a job for which the disk will have no place once those before it are made."""
        promised = sum(waiting.disk_bytes for waiting in self._waiting)
        if (current := self._current) is not None:
            promised += max(0, current.disk_bytes - bytes_below(self._folder(current.number)))
        lack = lack_of_space(self._root, promised + job.disk_bytes)
        if lack is not None:
            raise unavailable(f"The videos before this one will fill the disk: with it {lack}.")

    def _planned(self, request: VideoRequest, folder: Path) -> VideoPlan:
        try:
            plan = self._pipeline.plan(request)
        except InvalidRequest as error:
            raise problem_for_client(error, request, folder) from None
        lack = lack_of_space(folder, plan.disk_bytes)
        if lack is not None:
            raise bad_request(f"size: {plan.width}x{plan.height} of {plan.num_frames} frames: {lack}", "size")
        return plan

    def _notes(self, plan: VideoPlan) -> list[str]:
        notes = list(plan.warnings)
        if self._prompt_embeds is not None:
            notes.append("prompt: not read, this server renders fixed embeddings (--video-prompt-embeds)")
        if not self._has_sound:
            notes.append("the clip is silent: the server has no --audio-vae")
        return notes

    def _placed(self, asked: AskedVideo, folder: Path) -> dict[str, Path]:
        """Where each file of the request is; what came with it is written to the job's folder."""
        paths: dict[str, Path] = {}
        for file in asked.files():
            if file.content is None:
                paths[file.field] = allowed_path(file, self._readable)
                continue
            inputs = folder / INPUTS
            inputs.mkdir(exist_ok=True)
            paths[file.field] = inputs / (file.field.rpartition(".")[2] + _suffix(file.content))
            paths[file.field].write_bytes(file.content)
        return paths

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: bool(self._waiting) or self._is_closed)
                if self._is_closed:
                    return
                job = self._current = self._waiting.popleft()
                self._stop_current.clear()
                job.status = RUNNING
                self._write(job)
            try:
                self._make(job)
            except Exception as error:  # whatever broke, the next job runs
                logger.exception("%s failed", job.id)
                words = self._words(job, error)
                self._finish(job, FAILED, error=f"{type(error).__name__}: {words}" if words else None)
            with self._lock:
                self._current = None

    def _make(self, job: VideoJob) -> None:
        resumes = job.id in self._resumes
        try:
            watch = _Watch(job, self._pipeline.plan(job.request))
            self._generate(job, watch, resume=resumes)
        except ResumeError as error:
            logger.error("%s failed: %s", job.id, error)
            words = self._words(job, error)
            if resumes:
                words = f"the server stopped in mid-run, and it cannot go on: {words}"
            self._finish(job, FAILED, error=words)
        except VideoCancelled:
            with self._lock:
                if self._is_closed:  # its record still says running, so the next start goes on with it
                    return
            self._finish(job, FAILED, error=CANCELLED)
        except VkitError as error:
            logger.error("%s failed: %s", job.id, error)
            self._finish(job, FAILED, error=self._words(job, error))
        else:
            with self._lock:
                # Whoever asked for its end while it was finished off must not find it after all.
                was_cancelled = self._stop_current.is_set() and not self._is_closed
                self._end(job, FAILED if was_cancelled else SUCCEEDED, error=CANCELLED if was_cancelled else None)

    def _generate(self, job: VideoJob, watch: _Watch, *, resume: bool) -> None:
        result = self._pipeline.generate(
            job.request,
            self._folder(job.number),
            output=self.output_of(job),
            muxer=self._muxer,
            progress=watch,
            resume=resume,
            cancelled=self._stop_current.is_set,
        )
        job.warnings = list(dict.fromkeys([*job.warnings, *result.warnings]))

    def _words(self, job: VideoJob, error: Exception) -> str:
        return words_for_client(error, job.request, self._folder(job.number))

    def _finish(self, job: VideoJob, status: str, *, error: str | None = None) -> None:
        with self._lock:
            self._end(job, status, error=error)

    def _end(self, job: VideoJob, status: str, *, error: str | None) -> None:
        job.status = status
        job.completed_at = int(time.time())
        if status == FAILED:
            job.error = error or "unspecified error"
        else:
            job.progress = 100
        self._write(job)
        self._lock.notify_all()

    # Records

    def _write(self, job: VideoJob) -> None:
        """Put the record in place in one move."""
        path = self._folder(job.number) / RECORD
        record = {name: value for name, value in vars(job).items() if name != "request"}
        record["request"] = asdict(job.request)
        temporary = path.with_name(RECORD_IN_WRITING)
        try:
            temporary.write_bytes(msgspec.json.encode(record, enc_hook=str))
            os.replace(temporary, path)
        except OSError as error:
            logger.warning("%s: its record could not be written: %s", job.id, error)

    def _read_records(self) -> None:
        for path in sorted(self._root.glob(f"{PREFIX}*/{RECORD}"), key=lambda path: number_of(path.parent)):
            try:
                job = _job_of(msgspec.json.decode(path.read_bytes()))
            except (OSError, ValueError, TypeError, KeyError, msgspec.MsgspecError) as error:
                logger.warning("%s: not a job's record, left alone: %s", path, error)
                continue
            self._jobs[job.id] = job
            if not job.is_over:
                if job.status == RUNNING:
                    self._resumes.add(job.id)
                job.status = QUEUED
                self._waiting.append(job)

    def _remove_orphans(self) -> None:
        """Remove what submissions left that were cut off before their record: a folder of inputs at most."""
        for folder in self._root.glob(f"{PREFIX}*"):
            if not number_of(folder) or folder.is_symlink() or not folder.is_dir():
                continue
            try:
                names = {path.name for path in folder.iterdir()}
            except OSError as error:
                logger.warning("%s: cannot be read, left alone: %s", folder, error.strerror or error)
                continue
            if names <= {INPUTS, RECORD_IN_WRITING}:
                logger.info("%s: a request that was cut off, removed", folder)
                shutil.rmtree(folder, ignore_errors=True)


class _Watch:
    """Turns reports of a stage into percent of the whole, by the time each stage is expected to take."""

    def __init__(self, job: VideoJob, plan: VideoPlan) -> None:
        self._job = job
        total = plan.seconds
        count = max(1, len(plan.stages))
        self._shares = {stage.name: stage.seconds / total if total else 1 / count for stage in plan.stages}
        self._before: dict[str, float] = {}
        passed = 0.0
        for stage in plan.stages:
            self._before[stage.name] = passed
            passed += self._shares[stage.name]

    def __call__(self, report: Progress) -> None:
        done = report.done / report.total if report.total else 1.0
        share = self._before.get(report.stage, 0.0) + self._shares.get(report.stage, 0.0) * min(1.0, done)
        self._job.progress = max(self._job.progress, min(99, int(100 * share)))


def _job_of(record: Mapping[str, Any]) -> VideoJob:
    values = dict(record)
    values["request"] = msgspec.convert(values["request"], VideoRequest, dec_hook=_as_path)
    job = VideoJob(**values)
    if job.status not in (QUEUED, RUNNING, SUCCEEDED, FAILED) or type(job.number) is not int:
        raise ValueError(f"status {job.status!r}")
    return job


def _as_path(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"expected {kind.__name__}, got {value!r}")


_MAGIC = (
    *((b"\x89PNG", ".png"), (b"\xff\xd8", ".jpg"), (b"P6", ".ppm"), (b"fLaC", ".flac"), (b"OggS", ".ogg")),
    (b"ID3", ".mp3"),
)


def _suffix(content: bytes) -> str:
    """How such a file's name usually ends: readers look at the content, people at the name."""
    if content[:4] == b"RIFF":
        return ".webp" if content[8:12] == b"WEBP" else ".wav"
    return next((suffix for magic, suffix in _MAGIC if content.startswith(magic)), ".bin")


def problem_of(job: VideoJob) -> Problem | None:
    """Why the file of a job cannot be had, if it cannot."""
    if job.status == FAILED:
        return Problem(500, f"The video failed: {job.error}")
    if job.status != SUCCEEDED:
        return Problem(409, f"The video is not finished: its status is {job.status}.")
    return None

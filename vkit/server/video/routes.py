"""/v1/videos: jobs that make videos, as the OpenAI clients know them, and their files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from litestar.response import Stream
from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.forms import MULTIPART
from vkit.server.problems import Problem, bad_request, clip
from vkit.server.routes import Parameter, Route
from vkit.server.video.jobs import FAILED, QUEUED, RUNNING, SUCCEEDED, VideoJob, VideoJobs, problem_of
from vkit.server.video.parsing import FIELDS, AskedVideo, GivenFile, body_of_form, parsed
from vkit.server.video.ranges import UnsatisfiableRange, asked_range, part_of
from vkit.server.video.schemas import VideoBody, VideoDeleted, VideoList, VideoReply

MEDIA_TYPE = "video/mp4"
DEFAULT_LIMIT, MAX_LIMIT = 20, 100
OPENAI_STATUS = {QUEUED: "queued", RUNNING: "in_progress", SUCCEEDED: "completed", FAILED: "failed"}


def video_routes() -> list[Route]:
    """The routes of this family."""
    post, tag, one = ("POST",), "videos", "/v1/videos/{video_id:str}"
    return [
        Route(post, "/v1/videos", create_video, "Make a video", tag, body=VideoBody, reply=VideoReply),
        Route(
            post, "/v1/videos/sync", create_video_sync, "Make a video and wait", tag, body=VideoBody, reply=VideoReply
        ),
        Route(
            ("GET",),
            "/v1/videos",
            list_videos,
            "List videos",
            tag,
            reply=VideoList,
            parameters=(
                Parameter("limit", int, "Most videos, 1..100"),
                Parameter("after", str, "Begin after the video with this id"),
                Parameter("order", str, "asc or desc"),
            ),
        ),
        Route(("GET",), one, get_video, "Show a video's job", tag, reply=VideoReply),
        Route(("DELETE",), one, delete_video, "Cancel or delete a video", tag, reply=VideoDeleted),
        Route(
            ("GET",),
            f"{one}/content",
            video_content,
            "Download a video",
            tag,
            media_type=MEDIA_TYPE,
            parameters=(Parameter("variant", str, "video, the only one"),),
        ),
    ]


def _jobs(call: Call) -> VideoJobs:
    jobs = call.state.videos
    if jobs is None:
        raise Problem(500, "There is nothing that makes videos.")
    return jobs


async def create_video(call: Call) -> Response[Any]:
    """Queue a job."""
    job = await _submitted(call)
    return call.json(reply(call, job))


async def create_video_sync(call: Call) -> Response[Any]:
    """Run a job to its end; a client that leaves cancels it."""
    job = await _submitted(call)
    jobs = _jobs(call)
    try:
        await call.while_connected(asyncio.to_thread(jobs.wait, job))
    except BaseException:
        await asyncio.to_thread(_cancel, jobs, job)
        raise
    if job.status == FAILED:
        raise Problem(500, f"The video failed: {job.error}")
    if job.status != SUCCEEDED:
        raise Problem(503, "The server is shutting down.")
    return call.json(reply(call, job))


def _cancel(jobs: VideoJobs, job: VideoJob) -> None:
    if not job.is_over:
        jobs.delete(job.id)


async def _submitted(call: Call) -> VideoJob:
    asked = await _asked(call)
    warnings = []
    if asked.model is not None and asked.model not in call.settings.served_video_names:
        warnings.append(f"model: {clip(asked.model)} is not known here, {call.settings.served_video_names[0]} is used")
    return await asyncio.to_thread(_jobs(call).submit, asked, warnings)


async def _asked(call: Call) -> AskedVideo:
    media_type = (call.header("content-type") or "").split(";", 1)[0].strip().lower()
    if media_type != MULTIPART:
        return parsed(await call.body(VideoBody))
    body, file = body_of_form(await call.form(known=FIELDS))
    given: GivenFile | None = file
    return parsed(body, given)


async def get_video(call: Call) -> Response[Any]:
    """Where a job is."""
    return call.json(reply(call, _jobs(call).get(_id(call))))


async def list_videos(call: Call) -> Response[Any]:
    """Jobs, the newest first unless asked otherwise."""
    order = call.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise bad_request(f"order: expected asc or desc, got {clip(order)!r}", "order")
    limit = _limit(call.query("limit"))
    jobs = _jobs(call).listed()
    if order == "desc":
        jobs.reverse()
    after = call.query("after")
    if after is not None:
        ids = [job.id for job in jobs]
        if after not in ids:
            raise bad_request(f"after: no video has the id {clip(after)!r}", "after")
        jobs = jobs[ids.index(after) + 1 :]
    shown = [reply(call, job) for job in jobs[:limit]]
    return call.json(
        VideoList(
            data=shown,
            has_more=len(jobs) > limit,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
        )
    )


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not text.isdecimal() or not 1 <= int(text) <= MAX_LIMIT:
        raise bad_request(f"limit: expected 1 to {MAX_LIMIT}, got {clip(text)!r}", "limit")
    return int(text)


async def delete_video(call: Call) -> Response[Any]:
    """End or forget a job."""
    job_id = _id(call)
    await asyncio.to_thread(_jobs(call).delete, job_id)
    return call.json(VideoDeleted(id=job_id))


async def video_content(call: Call) -> Response[Any]:
    """The file, or the part of it that is asked for."""
    jobs = _jobs(call)
    job = jobs.get(_id(call))
    variant = call.query("variant") or "video"
    if variant != "video":
        raise bad_request(f"variant: only video is made here, got {clip(variant)!r}", "variant")
    problem = problem_of(job)
    if problem is not None:
        raise problem
    path = jobs.output_of(job)
    size = await asyncio.to_thread(_size, path)
    if not size:
        raise Problem(500, "The video's file is gone or empty.")
    try:
        part = asked_range(call.header("range"), size)
    except UnsatisfiableRange:
        header = {"content-range": f"bytes */{size}"}
        raise Problem(416, f"range: outside the file of {size} bytes", "range", headers=header) from None
    first, beyond = part or (0, size)
    headers = {"accept-ranges": "bytes", "content-length": str(beyond - first)}
    if part is not None:
        headers["content-range"] = f"bytes {first}-{beyond - 1}/{size}"
    return Stream(
        part_of(path, first, beyond),
        status_code=200 if part is None else 206,
        media_type=MEDIA_TYPE,
        headers=call.headers(headers),
    )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _id(call: Call) -> str:
    return str(call.request.path_params["video_id"])


def reply(call: Call, job: VideoJob) -> VideoReply:
    """The job as clients see it."""
    settings = call.settings
    shown = VideoReply(
        id=job.id,
        status=OPENAI_STATUS[job.status] if settings.video_openai_status else job.status,
        created_at=job.created_at,
        completed_at=job.completed_at,
        progress=job.progress,
        prompt=job.prompt,
        seconds=f"{job.duration:.6g}",
        size=f"{job.width}x{job.height}",
        seed=job.request.seed,
    )
    if job.model is not None:
        shown.model = job.model
    if job.warnings:
        shown.warning = "; ".join(job.warnings)
    if job.metadata:
        shown.metadata = job.metadata
    if job.status == SUCCEEDED and call.state.videos is not None:
        shown.output_path = str(call.state.videos.output_of(job))
    if job.status == FAILED:
        message = job.error or "unspecified error"
        shown.error = {"code": "failed", "message": message} if settings.video_openai_status else message
    return shown

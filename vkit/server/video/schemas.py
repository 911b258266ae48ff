"""Bodies and replies of /v1/videos: OpenAI's fields and the model's own."""

from __future__ import annotations

from typing import Any

import msgspec

from vkit.server.schema import Json

Number = int | float


class VideoBody(msgspec.Struct, kw_only=True):
    """POST /v1/videos and /v1/videos/sync."""

    prompt: str
    model: str | None = None
    size: str | None = None
    seconds: Number | str | None = None
    input_reference: str | Json | None = None
    metadata: dict[str, Any] | None = None
    task: str | None = None
    fit: str | None = None
    width: int | None = None
    height: int | None = None
    duration: Number | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    flow_shift: Number | None = None
    audio_flow_shift: Number | None = None
    noise_aug: Number | None = None
    seed: int | None = None
    fps: Number | None = None
    extra_params: Json | None = None


class VideoKnobs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What may also stand in `extra_params`."""

    duration: Number | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    flow_shift: Number | None = None
    audio_flow_shift: Number | None = None
    noise_aug: Number | None = None
    seed: int | None = None
    seconds: Number | str | None = None
    fit: str | None = None
    fps: Number | None = None


class VideoReply(msgspec.Struct, kw_only=True, omit_defaults=False):
    """A job."""

    id: str
    object: str = "video"
    status: str
    created_at: int
    completed_at: int | None = None
    progress: int = 0
    prompt: str
    seconds: str
    size: str
    seed: int
    expires_at: None = None
    remixed_from_video_id: None = None
    model: str | msgspec.UnsetType = msgspec.UNSET
    warning: str | msgspec.UnsetType = msgspec.UNSET
    output_path: str | msgspec.UnsetType = msgspec.UNSET
    error: Any = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class VideoList(msgspec.Struct, kw_only=True):
    """GET /v1/videos."""

    object: str = "list"
    data: list[VideoReply]
    has_more: bool
    first_id: str | None
    last_id: str | None


class VideoDeleted(msgspec.Struct, kw_only=True):
    """DELETE /v1/videos/{id}."""

    id: str
    object: str = "video.deleted"
    deleted: bool = True

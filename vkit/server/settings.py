"""What an operator decided about the server, complete and unchangeable. Engine settings live elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vkit.media.sources import MediaAccess
from vkit.parsers.registry import REASONING_PARSERS, TOOL_PARSERS
from vkit.server.video.opening import VideoSettings

DEFAULT_MAX_BODY_BYTES = 256 * 1024 * 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How hard a request may ask the model to think."""


class ModelKind(StrEnum):
    """What the loaded model makes."""

    TEXT = "text"
    EMBEDDING = "embedding"
    SPEECH = "speech"
    VIDEO = "video"
    """None: the server makes videos only."""


QUIET_PATHS = (
    "/health",
    "/ping",
    "/metrics",
    "/v1/metrics",
    "/v1/health/live",
    "/v1/health/ready",
)
"""Probed by machines every few seconds; left out of the access log unless asked for."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Refuse names that no parser has.

    Raises:
        UsageError: naming the flag and what there is.
    """
    TOOL_PARSERS.check(tool_call_parser)
    REASONING_PARSERS.check(reasoning_parser)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorsSettings:
    """Which browsers' pages may call the server."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSettings:
    """Everything the routes and their surroundings need to know."""

    served_model_names: tuple[str, ...]
    """The first is primary; all are accepted."""
    model_argument: str
    """What the operator passed as --model."""
    model_kind: ModelKind = ModelKind.TEXT
    enable_lora: bool = False
    """Whether requests may choose adapters by name."""
    api_keys: tuple[str, ...] = ()
    root_path: str = ""
    cors: CorsSettings | None = None
    max_request_body_size: int = DEFAULT_MAX_BODY_BYTES
    reject_unknown_fields: bool = False
    max_num_queued_reqs: int = 0
    """0 is no limit."""
    sse_keep_alive_interval: float = 0.0
    """Seconds; 0 is off."""
    enable_request_id_headers: bool = True
    enable_log_requests: bool = False
    enable_log_outputs: bool = False
    max_log_len: int = 256
    disable_access_log: bool = False
    access_log_excluded: tuple[str, ...] = QUIET_PATHS
    log_error_stack: bool = False
    disable_metrics: bool = False
    disable_docs: bool = False
    enable_tokenizer_info_endpoint: bool = False
    enable_prompt_tokens_details: bool = False
    enable_per_request_metrics: bool = False
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    max_logprobs: int = 20
    """-1 is no limit."""
    max_n: int = 128
    generation_config: Mapping[str, Any] | None = None
    """Replaces the checkpoint's generation_config.json; None takes the checkpoint's."""
    override_generation_config: Mapping[str, Any] = field(default_factory=dict)
    scheduling_policy: str = "fcfs"
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort_map: Mapping[str, Any] = field(default_factory=dict)
    """What the template is told in place of a reasoning effort."""
    reasoning_field: str = "both"
    trust_request_chat_template: bool = True
    exclude_tools_when_tool_choice_none: bool = False
    response_role: str = "assistant"
    responses_store_max_entries: int = 1000
    responses_store_ttl_s: float = 3600.0
    enable_responses_store: bool = True
    repository_override: str = ""
    video: VideoSettings | None = None
    """The model that makes videos; None: no video routes."""
    video_openai_status: bool = False
    """Whether jobs call their status what OpenAI calls it."""
    media_access: MediaAccess = field(default_factory=MediaAccess)
    """Where the media of requests may come from."""
    trust_request_mm_kwargs: bool = False
    """Whether requests may say how their media are prepared."""
    shutdown_timeout_s: float = 30.0

    @property
    def served_video_names(self) -> tuple[str, ...]:
        """Names by which requests may call the video model."""
        if self.video is None:
            return ()
        dit = self.video.paths.dit
        return (dit.stem if dit.suffix in (".gguf", ".safetensors") else dit.name, *self.served_model_names)

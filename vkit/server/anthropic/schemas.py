"""Request and reply shapes of the Messages routes."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from vkit.server.known_keys import unknown_in_blocks
from vkit.server.schema import UNSET, Int, Json, Unset


class CountTokensBody(Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    model: str
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None
    output_format: Json | None = None
    chat_template_kwargs: Json | None = None
    cache_control: Any = None

    def unknown_keys(self) -> list[str]:
        """Dotted names of unknown keys in blocks, tools and settings."""
        fields = {name: getattr(self, name) for name in ("thinking", "tool_choice", "output_config")}
        return list(unknown_in_blocks(self.messages, self.system, self.tools, fields))


class MessagesBody(CountTokensBody, kw_only=True):
    """POST /v1/messages."""

    max_tokens: Int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    stream: bool | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    container: Any = None
    context_management: Json | None = None
    mcp_servers: list[Json] | None = None
    speed: str | None = None
    inference_geo: str | None = None
    diagnostics: Any = None
    user_profile_id: str | None = None
    workspace_id: str | None = None
    cache_salt: str | None = None
    vllm_xargs: Json | None = None
    kv_transfer_params: Json | None = None


NO_EFFECT_FIELDS = (
    *("metadata", "service_tier", "container", "context_management", "mcp_servers", "cache_control"),
    *("speed", "inference_geo", "diagnostics", "user_profile_id", "workspace_id", "kv_transfer_params"),
)
"""Known fields that change nothing here: named in X-Vkit-Ignored-Fields when a request sets them."""


class ContentBlock(Struct, kw_only=True):
    """One block of a message; the keys depend on the type."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | Unset = UNSET
    thinking: str | Unset = UNSET
    signature: str | Unset = UNSET
    id: str | Unset = UNSET
    name: str | Unset = UNSET
    input: Json | Unset = UNSET


class MessageUsage(Struct, kw_only=True):
    """Token counts; input_tokens excludes those read from the cache."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessageReply(Struct, kw_only=True):
    """Reply of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class ContextManagement(Struct):
    """Nothing is ever edited out here."""

    original_input_tokens: int


class CountTokensReply(Struct):
    """How long a prompt is."""

    input_tokens: int
    context_management: ContextManagement

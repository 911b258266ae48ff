"""Request and reply shapes of the Responses routes. Output items are plain objects: their keys depend on their type."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from vkit.server.known_keys import unknown_in_items
from vkit.server.schema import UNSET, Int, Json, SamplingBody, StreamOptions, Unset


class TextFormat(Struct):
    """What the output text must be; the JSON schema is flat here, unlike chat."""

    type: str
    name: str | None = None
    schema: Json | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(Struct):
    """Settings of the output text."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningConfig(Struct):
    """Settings of the model's thoughts."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesBody(SamplingBody, kw_only=True):
    """POST /v1/responses."""

    input: str | list[Json] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Int | None = None
    max_tool_calls: Int | None = None
    top_logprobs: Int | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    include_reasoning: bool | None = None
    truncation: str | None = None
    prompt: Any = None
    conversation: Any = None
    prompt_cache_retention: str | None = None
    client_metadata: Json | None = None
    context_management: Any = None
    chat_template_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    media_io_kwargs: Json | None = None
    enable_response_messages: bool | None = None

    def unknown_keys(self) -> list[str]:
        """Dotted names of unknown keys in input items and tools."""
        return list(unknown_in_items(self.input, self.tools))


class InputTokensDetails(Struct):
    """How input tokens came about."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(Struct):
    """How output tokens were spent."""

    reasoning_tokens: int


class ResponseUsage(Struct):
    """Token counts of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class ResponseObject(Struct, kw_only=True):
    """One response."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    metadata: dict[str, str]
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    tool_choice: str | Json
    tools: list[Json]
    top_logprobs: int
    background: bool
    store: bool
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    previous_response_id: str | None = None
    prompt: Json | None = None
    prompt_cache_key: str | None = None
    reasoning: Json
    safety_identifier: str | None = None
    service_tier: str = "default"
    text: Json
    truncation: str
    user: str | None = None
    presence_penalty: float
    frequency_penalty: float
    usage: ResponseUsage | None = None
    kv_transfer_params: Json | None = None
    input_messages: list[Json] | Unset = UNSET
    output_messages: list[Json] | Unset = UNSET


class DeletedResponse(Struct, kw_only=True):
    """What DELETE answers."""

    id: str
    object: str = "response"
    deleted: bool = True


class ItemList(Struct, kw_only=True):
    """Input items of a response."""

    object: str = "list"
    data: list[Json]
    first_id: str | None
    last_id: str | None
    has_more: bool

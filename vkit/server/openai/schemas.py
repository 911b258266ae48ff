"""Request and reply shapes of completions, chat, render, models and tokenize."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from vkit.server.known_keys import unknown_in_chat
from vkit.server.schema import (
    UNSET,
    ChoiceBody,
    Int,
    Json,
    PromptLogprobs,
    RequestTimings,
    StreamOptions,
    Unset,
    Usage,
)


class CompletionBody(ChoiceBody, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Int | list[Int]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    logprobs: Int | None = None


class ChatBody(ChoiceBody, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Json]
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    documents: list[Json] | None = None
    return_prompt_text: bool | None = None
    mm_processor_kwargs: Json | None = None
    media_io_kwargs: Json | None = None
    mm_payload: str | None = None
    return_mm_kwargs: bool | None = None
    functions: list[Json] | None = None
    function_call: str | Json | None = None

    def unknown_keys(self) -> list[str]:
        """Dotted names of unknown keys in messages and tools."""
        return list(unknown_in_chat(self.messages, self.tools))


class LegacyLogprobs(Struct):
    """Log-probabilities of /v1/completions: four arrays of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct):
    """One choice."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionReply(Struct, kw_only=True):
    """Reply of /v1/completions."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[CompletionChoice]
    usage: Usage
    kv_transfer_params: Json | None = None
    metrics: RequestTimings | None = None


class CompletionChunkChoice(Struct):
    """What one choice gained."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | Unset = UNSET
    prompt_token_ids: list[int] | Unset = UNSET
    prompt_logprobs: PromptLogprobs | Unset = UNSET


class CompletionChunk(Struct, kw_only=True):
    """A frame of a /v1/completions stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    system_fingerprint: str | Unset = UNSET
    usage: Usage | Unset = UNSET
    metrics: RequestTimings | Unset = UNSET


class TokenLogprob(Struct):
    """One candidate."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(Struct):
    """One generated token and its rivals."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    """Log-probabilities of one chat choice."""

    content: list[ChatTokenLogprob] | None
    refusal: list[ChatTokenLogprob] | None = None


class FunctionCall(Struct):
    """What a tool call asks for."""

    name: str
    arguments: str


class ToolCallReply(Struct, kw_only=True):
    """One tool call."""

    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(Struct, kw_only=True):
    """The assistant's message."""

    role: str
    content: str | None
    refusal: str | None = None
    annotations: list[Json] | None = None
    audio: Json | None = None
    function_call: FunctionCall | None = None
    reasoning: str | Unset | None = None
    reasoning_content: str | Unset | None = None
    tool_calls: list[ToolCallReply] | Unset = UNSET


class ChatChoice(Struct):
    """One choice."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatReply(Struct, kw_only=True):
    """Reply of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    service_tier: str | None = None
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    kv_transfer_params: Json | None = None
    metrics: RequestTimings | None = None


class FunctionDelta(Struct):
    """More of a tool call's function."""

    name: str | Unset = UNSET
    arguments: str | Unset = UNSET


class ToolCallChunk(Struct):
    """More of one tool call."""

    index: int
    function: FunctionDelta
    id: str | Unset = UNSET
    type: str | Unset = UNSET


class ChatDelta(Struct):
    """What one choice gained."""

    role: str | Unset = UNSET
    content: str | Unset = UNSET
    reasoning: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[ToolCallChunk] | Unset = UNSET


class ChatChunkChoice(Struct):
    """One choice of a frame."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | Unset | None = UNSET
    token_ids: list[int] | Unset = UNSET


class ChatChunk(Struct, kw_only=True):
    """A frame of a /v1/chat/completions stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str | Unset = UNSET
    usage: Usage | Unset = UNSET
    prompt_token_ids: list[int] | Unset = UNSET
    prompt_text: str | Unset = UNSET
    prompt_logprobs: PromptLogprobs | Unset = UNSET
    metrics: RequestTimings | Unset = UNSET


class Rendered(Struct, kw_only=True):
    """A prompt exactly as its inference twin would run it; can be posted to /inference/v1/generate."""

    request_id: str
    model: str
    token_ids: list[int]
    token_offsets: list[list[int]] | None = None
    prompt_text: str | None = None
    features: Json | None = None
    sampling_params: Json
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
    return_token_ids: bool = False
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Json | None = None
    parse_context: Json | None = None
    kv_transfer_params: Json | None = None
    ec_transfer_params: Json | None = None


class ModelPermission(Struct, kw_only=True):
    """What may be done with a model; the same for all."""

    id: str
    object: str = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(Struct, kw_only=True):
    """One served name, readable by OpenAI and Anthropic clients."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "vkit"
    root: str
    parent: str | None = None
    max_model_len: int | None
    permission: list[ModelPermission]
    type: str = "model"
    display_name: str
    created_at: str


class ModelList(Struct, kw_only=True):
    """All served names."""

    object: str = "list"
    data: list[ModelCard]
    has_more: bool = False
    first_id: str | None
    last_id: str | None


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: a text (`prompt`) or a chat (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Json] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    media_io_kwargs: Json | None = None
    mm_processor_kwargs: Json | None = None
    return_token_strs: bool | None = None

    def unknown_keys(self) -> list[str]:
        """Dotted names of unknown keys in messages and tools."""
        return list(unknown_in_chat(self.messages, self.tools))


class TokenizeReply(Struct):
    """Token ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeBody(Struct):
    """POST /detokenize."""

    tokens: list[Int]
    model: str | None = None


class DetokenizeReply(Struct):
    """Text of token ids."""

    prompt: str

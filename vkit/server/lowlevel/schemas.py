"""Request and reply shapes of the token-level, scoring, health and administration routes."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from vkit.server.openai.schemas import ChatMessage
from vkit.server.schema import (
    UNSET,
    Int,
    Json,
    PromptLogprobs,
    RepetitionDetectionBody,
    RequestTimings,
    StreamOptions,
    StructuredOutputsBody,
    Unset,
    Usage,
)


class SamplingParamsBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Engine parameters by their own names."""

    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    max_tokens: Int | None = None
    min_tokens: Int | None = None
    logprobs: Int | None = None
    prompt_logprobs: Int | None = None
    logprob_token_ids: list[Int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    structured_outputs: StructuredOutputsBody | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    thinking_token_budget: Int | None = None
    detokenize: bool | None = None
    stream_interval: Int | None = None


class GenerateBody(Struct, kw_only=True):
    """POST /inference/v1/generate."""

    token_ids: list[Int]
    sampling_params: SamplingParamsBody
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    output_mode: str | None = None
    parse_context: Json | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Json | None = None
    token_offsets: list[list[Int]] | None = None
    features: Json | None = None
    content_parts: list[Json] | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    kv_transfer_params: Json | None = None
    ec_transfer_params: Json | None = None
    prompt_text: str | None = None


class Candidate(Struct, kw_only=True):
    """One candidate token: by id and rank in output_mode tokens, by text and bytes in the others."""

    logprob: float
    token_id: int | Unset = UNSET
    rank: int | Unset = UNSET
    token: str | Unset = UNSET
    bytes: list[int] | Unset = UNSET


class GeneratedLogprob(Candidate, kw_only=True):
    """One generated token and its candidates."""

    top_logprobs: list[Candidate]


class GenerateLogprobs(Struct):
    """Log-probabilities of one choice, one entry per generated token."""

    content: list[GeneratedLogprob]


class GenerateChoice(Struct, kw_only=True):
    """One choice."""

    index: int
    token_ids: list[int]
    text: str | Unset = UNSET
    message: ChatMessage | Unset = UNSET
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: GenerateLogprobs | None


class GenerateReply(Struct, kw_only=True):
    """Reply of /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    output_mode: str
    choices: list[GenerateChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Json | None = None
    metrics: RequestTimings | None = None
    kv_transfer_params: Json | None = None
    ec_transfer_params: Json | None = None


class GenerateChunk(Struct, kw_only=True):
    """A frame of a generate stream."""

    request_id: str
    output_mode: str
    choices: list[GenerateChoice]
    prompt_token_ids: list[int] | Unset = UNSET
    usage: Usage | Unset = UNSET


class AbortBody(Struct):
    """POST /inference/v1/abort_requests."""

    request_ids: list[str]


class AbortReply(Struct):
    """How many requests were aborted."""

    status: str
    aborted: int


class ScoringBody(Struct, kw_only=True):
    """POST /generative_scoring."""

    label_token_ids: list[Int]
    model: str | None = None
    prompt: str | list[str | Int | list[Int]] | None = None
    query: str | list[Int] | None = None
    items: list[str | list[Int]] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    request_id: str | None = None


class Score(Struct, kw_only=True):
    """One item's probabilities."""

    index: int
    object: str = "score"
    score: float
    label_probs: dict[str, float]
    label_logprobs: dict[str, float]


class ScoringReply(Struct, kw_only=True):
    """Reply of /generative_scoring."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: Usage


class VersionReply(Struct):
    """The server's version."""

    version: str


class LoadReply(Struct):
    """How busy the server is."""

    server_load: int


class ServerInfoReply(Struct):
    """Effective configuration and surroundings."""

    vllm_config: Any
    vllm_env: dict[str, str]
    system_env: Json


class ResetReply(Struct):
    """Whether the cache was emptied."""

    success: bool


class RootReply(Struct):
    """Tells a client what it is talking to."""

    object: str = "vkit"

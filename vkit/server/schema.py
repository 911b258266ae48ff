"""Request and reply shapes shared by the routes. Optional request fields are None when absent, as for null."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A JSON integer that fits in 64 bits."""

Json = dict[str, Any]


class RepetitionDetectionBody(Struct, forbid_unknown_fields=True):
    """Stop when the tail of the output repeats."""

    max_pattern_size: Int
    min_pattern_size: Int = 0
    min_count: Int = 0


class StructuredOutputsBody(Struct, forbid_unknown_fields=True):
    """A constraint on the output: exactly one of the first six keys."""

    json: Json | str | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: Json | str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """A named JSON schema."""

    name: str
    schema: Json | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """OpenAI's way to ask for structured output."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    format: Json | None = None
    structures: list[Json] | None = None
    triggers: list[str] | None = None


class StreamOptions(Struct):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingBody(Struct, kw_only=True):
    """Sampling fields shared by completions, chat and responses."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: Int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    repetition_detection: RepetitionDetectionBody | None = None
    logprob_token_ids: list[Int] | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: str | None = None
    cache_salt: str | None = None
    priority: Int | None = None
    thinking_token_budget: Int | None = None
    structured_outputs: StructuredOutputsBody | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_cached_tokens_details: bool | None = None
    stream: bool | None = None
    stream_interval: Int | None = None
    request_id: str | None = None
    session_id: str | None = None
    user: str | None = None
    kv_transfer_params: Json | None = None
    ec_transfer_params: Json | None = None
    vllm_xargs: Json | None = None
    metadata: Json | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    watermarking: Any = None


NO_EFFECT_FIELDS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "metadata",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "watermarking",
)
"""Known fields that change nothing here: named in X-Vkit-Ignored-Fields when a request sets them."""


class ChoiceBody(SamplingBody, kw_only=True):
    """Fields of completions and chat that responses does not have."""

    n: Int | None = None
    best_of: Int | None = None
    max_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    return_token_offsets: bool | None = None


class PromptTokensDetails(Struct):
    """How prompt tokens came about."""

    cached_tokens: int


class CompletionTokensDetails(Struct):
    """How completion tokens were spent."""

    reasoning_tokens: int


class Usage(Struct):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None


class RequestTimings(Struct):
    """Times of one request, measured by the engine."""

    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    queue_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None
    speculative_decoding: Json | None = None


class PromptLogprob(Struct):
    """One candidate at one prompt position."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]

Unset = msgspec.UnsetType
UNSET = msgspec.UNSET

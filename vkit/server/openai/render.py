"""Render twins: what an inference request would run, without running it."""

from __future__ import annotations

from typing import Any

from vkit.server.call import Call
from vkit.server.engine_protocol import Tokenizer
from vkit.server.inference import EnginePrompt
from vkit.server.openai.schemas import Rendered
from vkit.server.problems import bad_request
from vkit.server.prompts import token_offsets
from vkit.server.schema import ChoiceBody
from vkit.types import RepetitionDetection, SamplingParams, StructuredOutputs

_RENDERED_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("seed", "stop", "stop_token_ids", "ignore_eos", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs"),
    *("logprob_token_ids", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    *("include_stop_str_in_output", "logit_bias", "allowed_token_ids", "bad_words", "structured_outputs"),
    "repetition_detection",
)
_DEFAULT = SamplingParams()


def params_as_json(params: SamplingParams) -> dict[str, Any]:
    """The parameters by name, those at the engine's default left out; max_tokens is always there."""
    values: dict[str, Any] = {}
    for name in _RENDERED_FIELDS:
        value = getattr(params, name)
        if name == "max_tokens" or value != getattr(_DEFAULT, name):
            values[name] = _plain(value)
    return values


def _sampling_params(params: SamplingParams, body: ChoiceBody) -> dict[str, Any]:
    values = params_as_json(params)
    if body.thinking_token_budget is not None:
        # Where it begins, and whether there is anything to count, is for generate to find out again.
        values["thinking_token_budget"] = body.thinking_token_budget
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, StructuredOutputs):
        # Where it begins is for generate to find out again: `reasoning_ended` tells it to.
        names = [name for name in value.__slots__ if name != "begins_after"]
        return {name: _plain(getattr(value, name)) for name in names if getattr(value, name) not in (None, False)}
    if isinstance(value, RepetitionDetection):
        return {name: getattr(value, name) for name in value.__slots__ if getattr(value, name) is not None}
    if isinstance(value, tuple):
        return list(value)
    if isinstance(value, dict):
        return {str(key): item for key, item in value.items()}
    return value


def rendered(
    call: Call,
    request_id: str,
    model: str,
    prompt: EnginePrompt,
    tokenizer: Tokenizer,
    body: ChoiceBody,
    *,
    priority: int,
    parse_context: dict[str, Any] | None = None,
) -> Rendered:
    """One prompt as /inference/v1/generate takes it.

    Raises:
        Problem: 400 when token offsets are asked for and the tokenizer has none, and for media, which no token says.
    """
    if prompt.placed is not None:
        raise bad_request("messages: media cannot be rendered as a request of token ids", "messages")
    offsets = None
    if body.return_token_offsets and prompt.text is not None:
        offsets = token_offsets(tokenizer, prompt.text, prompt.token_ids)
    return Rendered(
        request_id=request_id,
        model=model,
        token_ids=prompt.token_ids,
        token_offsets=offsets,
        prompt_text=prompt.text,
        sampling_params=_sampling_params(prompt.params, body),
        stream=bool(body.stream),
        stream_options=body.stream_options,
        cache_salt=body.cache_salt,
        priority=priority,
        return_token_ids=bool(body.return_token_ids),
        parse_context=parse_context,
        kv_transfer_params=body.kv_transfer_params,
        ec_transfer_params=body.ec_transfer_params,
    )

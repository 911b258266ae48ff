"""Sampling fields of a request to SamplingParams: defaults, limits of this server, and what it cannot do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkit.errors import InvalidRequest
from vkit.server.engine_protocol import Engine, Tokenizer
from vkit.server.problems import ContextOverflow, bad_request
from vkit.server.schema import ChoiceBody, SamplingBody
from vkit.server.settings import ServerSettings
from vkit.types import MAX_LOGPROB_TOKEN_IDS, RepetitionDetection, SamplingParams, StructuredOutputs

MAX_STOP_STRINGS = 16
MAX_BAD_WORD_SEQUENCES = 128
MAX_CACHE_SALT_LEN = 128
WHOLE_VOCABULARY = -1

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TOKEN_ID = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Defaults:
    """Numeric defaults in force for requests that leave a field out."""

    values: Mapping[str, Any]
    max_tokens: int | None

    @classmethod
    def of(cls, settings: ServerSettings, engine: Engine) -> Defaults:
        """The operator's overrides over generation_config.json."""
        base = engine.generation_config if settings.generation_config is None else settings.generation_config
        merged = {**base, **settings.override_generation_config}
        values = {name: merged[name] for name in _DEFAULTED if merged.get(name) is not None}
        if merged.get("do_sample") is False and "temperature" not in values:
            values["temperature"] = 0.0
        return cls(values, merged.get("max_new_tokens", merged.get("max_tokens")))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Fields whose request name differs between routes, already brought to engine terms."""

    n: int = 1
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None


def room_for(num_prompt_tokens: int, max_model_len: int, param: str) -> int:
    """Tokens that may still be generated after the prompt.

    Raises:
        ContextOverflow: none.
    """
    if num_prompt_tokens >= max_model_len:
        raise ContextOverflow(num_prompt_tokens, max_model_len, param)
    return max_model_len - num_prompt_tokens


def check_max_tokens(asked: int | None, max_model_len: int, field: str, *, low: int = 1) -> int | None:
    """The limit asked for, None when unset (-1 too).

    Raises:
        Problem: 400 below `low` or above the context.
    """
    if asked is None or asked == -1:
        return None
    if asked < low:
        raise bad_request(f"{field}: must be at least {low}, got {asked}", field)
    if asked > max_model_len:
        raise bad_request(f"{field}: {asked} is above the maximum context length of {max_model_len} tokens", field)
    return asked


def check_logprobs(asked: int | None, settings: ServerSettings, field: str) -> int | None:
    """A number of candidates this server reports.

    Raises:
        Problem: 400.
    """
    if asked is None:
        return None
    limit = settings.max_logprobs
    if asked == WHOLE_VOCABULARY and limit == WHOLE_VOCABULARY:
        return asked
    if asked < 0 or (limit != WHOLE_VOCABULARY and asked > limit):
        allowed = "-1 or at least 0" if limit == WHOLE_VOCABULARY else f"in 0..{limit}"
        raise bad_request(f"{field}: must be {allowed}, got {asked}", field)
    return asked


def check_n(body: ChoiceBody, settings: ServerSettings) -> tuple[int, int]:
    """(choices returned, candidates generated).

    Raises:
        Problem: 400.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= settings.max_n:
        raise bad_request(f"n: must be in 1..{settings.max_n}, got {n}", "n")
    best_of = n if body.best_of is None else body.best_of
    if not n <= best_of <= settings.max_n:
        raise bad_request(f"best_of: must be in {n}..{settings.max_n} (n is {n}), got {best_of}", "best_of")
    if best_of > n and body.stream:
        raise bad_request("best_of: candidates cannot be ranked while streaming; set best_of = n", "best_of")
    return n, best_of


def check_common(body: SamplingBody, settings: ServerSettings) -> None:
    """Range checks that need neither prompt nor tokenizer.

    Raises:
        Problem: 400.
    """
    if isinstance(body.stop, list) and len(body.stop) > MAX_STOP_STRINGS:
        raise bad_request(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(body.stop)}", "stop")
    if body.stop == "":
        raise bad_request("stop: a stop string must not be empty", "stop")
    if body.truncation_side not in (None, "left", "right"):
        raise bad_request("truncation_side: must be 'left' or 'right'", "truncation_side")
    if body.stream_interval is not None and body.stream_interval < 1:
        raise bad_request(f"stream_interval: must be at least 1, got {body.stream_interval}", "stream_interval")
    check_cache_salt(body.cache_salt)
    check_priority(body.priority, settings)


def check_cache_salt(salt: str | None) -> None:
    """Refuse salts that could not be told apart from other cache keys.

    Raises:
        Problem: 400.
    """
    if salt is not None and (not 1 <= len(salt) <= MAX_CACHE_SALT_LEN or any(c in salt for c in "@/\\\0")):
        raise bad_request(
            f"cache_salt: expected 1..{MAX_CACHE_SALT_LEN} characters, none of @ / \\ or NUL", "cache_salt"
        )


def check_priority(priority: int | None, settings: ServerSettings) -> None:
    """Refuse a priority that the scheduler would not look at.

    Raises:
        Problem: 400.
    """
    if priority and settings.scheduling_policy != "priority":
        raise bad_request(
            f"priority: {priority} needs a server started with --scheduling-policy priority "
            f"(this one uses {settings.scheduling_policy})",
            "priority",
        )


def build_params(
    body: SamplingBody, wanted: Wanted, defaults: Mapping[str, Any], room: int, tokenizer: Tokenizer
) -> SamplingParams:
    """Engine parameters for a prompt that leaves room for `room` tokens.

    Raises:
        Problem: 400 naming the field as the client spelt it.
    """
    values: dict[str, Any] = {**defaults}
    for name in (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
        "ignore_eos",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "thinking_token_budget",
        "stop",
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "logprob_token_ids",
    ):
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.logit_bias is not None:
        values["logit_bias"] = logit_bias(body.logit_bias)
    if body.vllm_xargs is not None:
        values["extra_args"] = body.vllm_xargs
    if body.repetition_detection is not None:
        values["repetition_detection"] = repetition_detection(body)
    return finish_params(values, body.min_tokens, wanted, room, tokenizer)


def finish_params(
    values: dict[str, Any], min_tokens: int | None, wanted: Wanted, room: int, tokenizer: Tokenizer
) -> SamplingParams:
    """SamplingParams from plain values; checks what needs the vocabulary.

    Raises:
        Problem: 400 naming the field as the client spelt it.
    """
    floor = min_tokens or 0
    if floor < 0 or (wanted.max_tokens is not None and floor > max(wanted.max_tokens, 1)):
        limit = "" if wanted.max_tokens is None else f" and at most {wanted.max_tokens_field} ({wanted.max_tokens})"
        raise bad_request(f"min_tokens: must be at least 0{limit}, got {floor}", "min_tokens")
    limit_tokens = room if wanted.max_tokens is None else min(max(wanted.max_tokens, 1), room)
    if values.get("logprob_token_ids") is not None:
        if wanted.logprobs is None:
            raise bad_request(f"logprob_token_ids: needs {wanted.logprobs_field}", "logprob_token_ids")
        if len(values["logprob_token_ids"]) > MAX_LOGPROB_TOKEN_IDS:
            raise bad_request(f"logprob_token_ids: at most {MAX_LOGPROB_TOKEN_IDS} ids", "logprob_token_ids")
    try:
        params = SamplingParams(
            **values,
            n=wanted.n,
            max_tokens=limit_tokens,
            min_tokens=min(floor, limit_tokens),
            logprobs=wanted.logprobs,
            prompt_logprobs=wanted.prompt_logprobs,
            structured_outputs=wanted.structured_outputs,
        )
        params.check_vocabulary(tokenizer.vocab_size)
    except InvalidRequest as exc:
        renamed = {"max_tokens": wanted.max_tokens_field, "logprobs": wanted.logprobs_field}
        param = renamed.get(exc.param or "", exc.param)
        message = str(exc)
        if param and param != exc.param:
            message = message.replace(str(exc.param), param, 1)
        raise bad_request(message, param) from None
    check_bad_words(params.bad_words, tokenizer)
    return params


def logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    """Biases by token id.

    Raises:
        Problem: 400 for a key that is not a decimal id.
    """
    for key in bias:
        if not (key.isascii() and _TOKEN_ID.fullmatch(key)):
            raise bad_request(f"logit_bias: key {key[:50]!r} is not a decimal token id", "logit_bias")
    return {int(key): value for key, value in bias.items()}


def repetition_detection(body: SamplingBody) -> RepetitionDetection | None:
    """The detector asked for; None when max_pattern_size 0 turns it off.

    Raises:
        Problem: 400.
    """
    asked = body.repetition_detection
    if asked is None:
        return None
    if asked.max_pattern_size == 0 and asked.min_pattern_size == 0:
        return None
    if asked.min_pattern_size < 0 or asked.max_pattern_size < asked.min_pattern_size:
        raise bad_request(
            "repetition_detection: need 0 <= min_pattern_size <= max_pattern_size, got "
            f"{asked.min_pattern_size} and {asked.max_pattern_size}",
            "repetition_detection",
        )
    try:
        return RepetitionDetection(asked.max_pattern_size, asked.min_pattern_size or 1, asked.min_count)
    except InvalidRequest as exc:
        raise bad_request(str(exc), "repetition_detection") from None


def check_bad_words(words: tuple[str, ...], tokenizer: Tokenizer) -> None:
    """Refuse words that cannot be banned, and too many of them.

    Raises:
        Problem: 400.
    """
    num_sequences = 0
    for word in words:
        if not word.strip() and not tokenizer.encode(word, add_special_tokens=False):
            raise bad_request(f"bad_words: {word!r} has no tokens", "bad_words")
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        if not bare:
            raise bad_request(f"bad_words: {word!r} has no tokens", "bad_words")
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        num_sequences += 2 if len(spaced) == len(bare) and spaced[0] != bare[0] else 1
    if num_sequences > MAX_BAD_WORD_SEQUENCES:
        raise bad_request(f"bad_words: {num_sequences} token sequences, at most {MAX_BAD_WORD_SEQUENCES}", "bad_words")


def truncate_prompt(token_ids: list[int], body: SamplingBody, max_model_len: int) -> list[int]:
    """The prompt cut to truncate_prompt_tokens, on the side asked for.

    Raises:
        Problem: 400.
    """
    asked = body.truncate_prompt_tokens
    if asked is None:
        return token_ids
    if asked == -1:
        asked = max_model_len - 1
    elif not 1 <= asked <= max_model_len:
        raise bad_request(
            f"truncate_prompt_tokens: must be -1 or in 1..{max_model_len}, got {asked}", "truncate_prompt_tokens"
        )
    if len(token_ids) <= asked:
        return token_ids
    return token_ids[:asked] if body.truncation_side == "right" else token_ids[-asked:]

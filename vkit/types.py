"""What a request asks for and what it gets back. No torch, no engine, no text.

Field names, defaults and ranges are a contract shared by the command line, the library and every HTTP route.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from vkit.errors import InvalidRequest

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this pick the most likely token."""

MIN_TEMPERATURE = 0.01
"""Temperatures between greedy and this are raised to it: smaller ones overflow float32 logits."""

MAX_TEMPERATURE = 2.0
MAX_LOGPROB_TOKEN_IDS = 128
WHOLE_VOCABULARY = -1

LogitsProcessor = Callable[[Sequence[int], Any], None]
"""(output_token_ids, logits_row) -> None; edits the float32 row (V,) in place."""


GRAMMAR_FAULT = "the grammar"
"""How the error of an output begins whose constraint could not be followed to its end."""


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class OutputKind(StrEnum):
    """What each output of a request carries."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """Stop when the output's tail is a pattern of min..max_pattern_size tokens repeated min_count times."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        _check_int("repetition_detection.min_pattern_size", self.min_pattern_size, 1)
        _check_int("repetition_detection.max_pattern_size", self.max_pattern_size, self.min_pattern_size)
        _check_int("repetition_detection.min_count", self.min_count, 2)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts around a model's reasoning, as far as a constraint on what follows must know them."""

    end: str
    """The text that ends reasoning."""
    start: str | None = None
    """The text that begins it, for outputs that may or may not begin with reasoning."""
    repeated: str | None = None
    """A text that may still stand at the head of reasoning that has begun without it."""
    may_start_late: bool = False
    """Whether `start` may follow a part of the answer."""

    def __post_init__(self) -> None:
        for name in ("end", "start", "repeated"):
            value = getattr(self, name)
            if (value is not None or name == "end") and (not isinstance(value, str) or not value):
                raise InvalidRequest(
                    f"structured_outputs.begins_after: {name} must be a non-empty string, got {value!r}",
                    param="structured_outputs",
                )


CONSTRAINT_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
JSON_KINDS = ("json", "json_object", "structural_tag")
"""Constraints that hold JSON, so that the modifiers of JSON mean something."""


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """A constraint on the output: exactly one of the first six fields, and modifiers.

    Raises:
        InvalidRequest: none or several constraints, a value of the wrong type, or a modifier that would do nothing.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema: an object or boolean, or its JSON text."""
    regex: str | None = None
    """The whole output matches."""
    choice: Sequence[str] | None = None
    """The output is one of these."""
    grammar: str | None = None
    """GBNF (`root ::= ...`) or Lark (`start: ...`)."""
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    """Free text with constrained sections, see `vkit.structured.tags`."""
    disable_any_whitespace: bool = False
    """No blank between the tokens of JSON."""
    whitespace_pattern: str | None = None
    """A regex for the blanks between the tokens of JSON; by default one space or tab, or none."""
    disable_additional_properties: bool = False
    """Objects of a schema have no keys but the declared ones, unless the schema says otherwise."""
    begins_after: ReasoningMarks | None = None
    """Output up to and including the end mark is free: the model is reasoning. With a start mark, only if the output
    begins with that; without, in any case."""

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINT_KINDS if getattr(self, name) is not None]
        if self.json_object is False:
            raise _bad_constraint("json_object must be true")
        if len(given) != 1:
            raise _bad_constraint(f"expected exactly one of {', '.join(CONSTRAINT_KINDS)}; got {given or 'none'}")
        self._check_value(given[0])
        self._check_modifiers(given[0])

    @property
    def kind(self) -> str:
        """The name of the constraint's field."""
        return next(name for name in CONSTRAINT_KINDS if getattr(self, name) is not None)

    def _check_value(self, kind: str) -> None:
        value: Any = getattr(self, kind)
        types, expected = _CONSTRAINT_TYPES[kind]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _bad_constraint(f"{kind}: expected {expected}, got {type(value).__name__}")
        if kind == "grammar" and not value.strip():
            raise _bad_constraint("grammar: must not be empty")
        if kind == "regex" and "\0" in value:
            raise _bad_constraint("regex: must not contain NUL")
        if kind == "choice":
            if not value or not all(isinstance(item, str) for item in value):
                raise _bad_constraint("choice: expected a non-empty list of strings")
            object.__setattr__(self, "choice", tuple(value))  # normalisation happens once, before anyone sees the value

    def _check_modifiers(self, kind: str) -> None:
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(getattr(self, name), bool):
                raise _bad_constraint(f"{name}: expected true or false, got {getattr(self, name)!r}")
        if self.whitespace_pattern is not None and not isinstance(self.whitespace_pattern, str):
            raise _bad_constraint(f"whitespace_pattern: expected a string, got {self.whitespace_pattern!r}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise _bad_constraint("whitespace_pattern: contradicts disable_any_whitespace")
        allowed = {"disable_additional_properties": ("json", "structural_tag")}
        for name in ("disable_any_whitespace", "whitespace_pattern", "disable_additional_properties"):
            if getattr(self, name) not in (None, False) and kind not in allowed.get(name, JSON_KINDS):
                raise _bad_constraint(f"{name}: has no effect on {kind}")


_CONSTRAINT_TYPES: dict[str, tuple[tuple[type[Any], ...], str]] = {
    "json": ((str, bool, Mapping), "a JSON schema (an object, a boolean, or its JSON text)"),
    "regex": ((str,), "a string"),
    "choice": ((list, tuple), "a non-empty list of strings"),
    "grammar": ((str,), "a string"),
    "json_object": ((bool,), "true"),
    "structural_tag": ((str, Mapping), "an object or its JSON text"),
}


def _bad_constraint(message: str) -> InvalidRequest:
    return InvalidRequest(f"structured_outputs: {message}", param="structured_outputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose tokens and when to stop. Checked on construction.

    Raises:
        InvalidRequest: a value out of range; `param` names the field.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    structured_outputs: StructuredOutputs | None = None
    thinking_token_budget: int | None = None
    """Most tokens of reasoning; then its end is forced. -1: no limit. Needs marks: the engine's parser's, or these:"""
    reasoning_marks: ReasoningMarks | None = None
    """Texts around the reasoning of this request's outputs, where the engine's own reasoning parser shall not say."""
    repetition_detection: RepetitionDetection | None = None
    skip_reading_prefix_cache: bool | None = None
    logits_processors: tuple[LogitsProcessor, ...] = ()
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    output_kind: OutputKind = OutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        put = object.__setattr__  # normalisation happens once, here, before anyone sees the value
        put(self, "stop", _string_tuple("stop", self.stop))
        put(self, "bad_words", _string_tuple("bad_words", self.bad_words))
        put(self, "stop_token_ids", tuple(dict.fromkeys(_id_tuple("stop_token_ids", self.stop_token_ids))))
        put(self, "logprob_token_ids", _id_tuple("logprob_token_ids", self.logprob_token_ids))
        put(self, "logits_processors", _callable_tuple("logits_processors", self.logits_processors))
        put(self, "repetition_detection", _repetition_detection(self.repetition_detection))
        put(self, "output_kind", _output_kind(self.output_kind))
        self._check_flags_and_objects()
        _check_int("n", self.n, 1, 16384)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n)
        _check_number("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
            put(self, "seed", None if self.seed == -1 else self.seed)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens: {self.min_tokens} is above max_tokens {self.max_tokens}", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _check_int(name, value, WHOLE_VOCABULARY)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"logprob_token_ids: {len(self.logprob_token_ids)} ids, at most {MAX_LOGPROB_TOKEN_IDS}",
                param="logprob_token_ids",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop: stop strings need detokenize=true", param="stop")
        if self.logit_bias is not None:
            put(self, "logit_bias", _clamped_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            put(self, "allowed_token_ids", _id_tuple("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids: must not be empty", param="allowed_token_ids")
        if self.thinking_token_budget is not None:
            _check_int("thinking_token_budget", self.thinking_token_budget, -1)
        if self.is_greedy:
            put(self, "top_p", 1.0)
            put(self, "top_k", 0)
            put(self, "min_p", 0.0)
        elif self.temperature < MIN_TEMPERATURE:
            put(self, "temperature", MIN_TEMPERATURE)

    def _check_flags_and_objects(self) -> None:
        for name in _FLAGS:
            _check_bool(name, getattr(self, name))
        if self.skip_reading_prefix_cache is not None:
            _check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            raise _bad_constraint(f"expected StructuredOutputs, got {type(self.structured_outputs).__name__}")
        if self.reasoning_marks is not None and not isinstance(self.reasoning_marks, ReasoningMarks):
            raise InvalidRequest(
                f"reasoning_marks: expected ReasoningMarks, got {self.reasoning_marks!r}", param="reasoning_marks"
            )
        if not isinstance(self.extra_args, Mapping):
            raise InvalidRequest(f"extra_args: expected a mapping, got {self.extra_args!r}", param="extra_args")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids outside 0..vocab_size-1.

        Raises:
            InvalidRequest: naming the field and the id.
        """
        groups: tuple[tuple[str, Sequence[int]], ...] = (
            ("stop_token_ids", self.stop_token_ids),
            ("logprob_token_ids", self.logprob_token_ids),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("logit_bias", tuple(self.logit_bias or ())),
        )
        for name, ids in groups:
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token_id} is outside the vocabulary (0..{vocab_size - 1})", param=name
                    )

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields replaced, checked again."""
        return replace(self, **changes)


_FLAGS = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position. `rank` is 1 for the most likely; `text` is its own text, if decoded."""

    token_id: int
    logprob: float
    rank: int
    text: str | None = None


PositionLogprobs = list[Logprob]
"""The chosen token first, then the most likely ones in falling order."""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """How speculation fared."""

    num_verifications: int = 0
    """Steps that verified drafts of a sequence."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(
            self.num_verifications + other.num_verifications,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
        )

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the drafts that turned out right; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens that a verification brought on average, the one it samples included; None without any."""
        return 1 + self.num_accepted_tokens / self.num_verifications if self.num_verifications else None


NO_DRAFTS = DraftCounts()


@dataclass(slots=True)
class RequestMetrics:
    """Times of one request on the monotonic clock, in seconds; None until the event happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS
    """Of the sequences that have ended."""


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n outputs."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    """What went wrong, when finish_reason is ERROR."""


@dataclass(slots=True)
class RequestOutput:
    """What a request has produced so far (or since the last output, for OutputKind.DELTA)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    """What a cache connector has to say to the client; with the last output only."""
    embedding: list[float] | None = None
    """The prompt's vector, of length 1, from a model that embeds."""


def _check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name}: expected an integer, got {value!r}", param=name)
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in {low}..{high}"
        raise InvalidRequest(f"{name}: must be {limit}, got {value}", param=name)


def _check_number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"{name}: expected a number, got {value!r}", param=name)
    # Written so that NaN fails; infinity is refused even where the range has no upper end.
    inside = (low < value if open_low else low <= value) and value <= high and _is_finite(value)
    if not inside:
        expected = f"in {'(' if open_low else '['}{low:g}, {high:g}]"
        if math.isinf(high):
            expected = f"{'above' if open_low else 'at least'} {low:g} and finite"
        raise InvalidRequest(f"{name}: must be {expected}, got {value}", param=name)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{name}: expected true or false, got {value!r}", param=name)


def _callable_tuple(name: str, value: object) -> tuple[LogitsProcessor, ...]:
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name}: expected a list of callables, got {value!r}", param=name)
    for item in value:
        if not callable(item):
            raise InvalidRequest(f"{name}: every entry must be callable, got {item!r}", param=name)
    return tuple(value)


def _repetition_detection(value: object) -> RepetitionDetection | None:
    """The rule, from a rule or a mapping with its keys."""
    if value is None or isinstance(value, RepetitionDetection):
        return value
    known = {item.name for item in fields(RepetitionDetection)}
    if not isinstance(value, Mapping) or "max_pattern_size" not in value or not known.issuperset(value):
        raise InvalidRequest(
            f"repetition_detection: expected max_pattern_size and optionally min_pattern_size and min_count,"
            f" got {value!r}",
            param="repetition_detection",
        )
    return RepetitionDetection(**value)


def _output_kind(value: object) -> OutputKind:
    try:
        return OutputKind(value)  # type: ignore[arg-type]  # refused below
    except ValueError:
        kinds = ", ".join(OutputKind)
        raise InvalidRequest(f"output_kind: expected one of {kinds}, got {value!r}", param="output_kind") from None


def _string_tuple(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name}: expected a string or a list of strings, got {value!r}", param=name)
    for item in value:
        if not isinstance(item, str) or not item:
            raise InvalidRequest(f"{name}: every entry must be a non-empty string, got {item!r}", param=name)
    return tuple(value)


def _id_tuple(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise InvalidRequest(f"{name}: expected a list of token ids, got {value!r}", param=name)
    for item in value:
        _check_int(name, item, -(2**63), 2**63 - 1)
    return tuple(value)


def _clamped_bias(bias: object) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequest(
            f"logit_bias: expected a mapping of token ids to numbers, got {bias!r}", param="logit_bias"
        )
    clamped: dict[int, float] = {}
    for key, value in bias.items():
        try:
            if isinstance(key, bool):
                raise TypeError
            token_id = int(key) if isinstance(key, str) else operator.index(key)
        except (TypeError, ValueError):
            raise InvalidRequest(f"logit_bias: {key!r} is not a token id", param="logit_bias") from None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise InvalidRequest(
                f"logit_bias: bias of token {token_id} must be a finite number, got {value!r}", param="logit_bias"
            )
        clamped[token_id] = min(100.0, max(-100.0, float(value)))
    return clamped

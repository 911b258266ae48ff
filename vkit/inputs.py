"""Turns what a caller hands in into a request the engine can run: text to ids, limits checked, defaults filled.

Runs in the caller's thread, before the request reaches the engine: nothing here may slow a step down, and nothing a
client can send gets past it unchecked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

from vkit.errors import InvalidRequest
from vkit.media import Media, MediaInput, MediaLimits, MediaProcessor, PlacedMedia, PlacedPrompt, checked_media
from vkit.sequence import AdapterRef, Grammar, RopePositions
from vkit.thinking import ThinkingBudget, thinking_budget
from vkit.types import WHOLE_VOCABULARY, OutputKind, ReasoningMarks, SamplingParams, StructuredOutputs

Prompt = str | Sequence[int] | Mapping[str, Any] | PlacedPrompt
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}, the last two with an optional "cache_salt" and an
optional "multi_modal_data": {"image": [ImageMedia], "video": [VideoMedia], "audio": [AudioMedia]}. Each item has one
placeholder in the prompt, as the chat template writes it; the text that holds placeholders is encoded with special
tokens recognised. A `PlacedPrompt` is what `InputProcessor.place` made of token ids and media."""

MARKED_TAIL = 512
"""Tokens at the end of a prompt that may say whether it has begun the reasoning."""

TruncationSide = Literal["left", "right"]

GrammarCompiler = Callable[[StructuredOutputs], Future[Grammar]]
"""Compiles a constraint on another thread; the future fails with InvalidRequest when it cannot be enforced."""

RequestCheck = Callable[[SamplingParams], None]
"""Raises InvalidRequest for parameters a plug-in cannot serve."""


MarksOf = Callable[[str, Mapping[str, Any]], ReasoningMarks | None]
"""Texts around the reasoning after a prompt text written with these template variables; None: none follows."""


class TextEncoder(Protocol):
    """The part of a tokenizer that input processing needs."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def eos_token_id(self) -> int | None:
        """The primary end of sequence."""

    @property
    def eos_token_ids(self) -> Any:
        """All ids that end generation."""

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of the text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text."""


@dataclass(slots=True)
class EngineRequest:
    """A checked request. `id` is the caller's; the engine makes it unique for itself."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    max_total_tokens: int
    priority: int = 0
    cache_salt: str | None = None
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingBudget | None = None
    eos_token_id: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    compile_grammar: Callable[[], Future[Grammar]] | None = None
    """A grammar for one sequence; called once per sequence."""
    kv_transfer_params: dict[str, Any] | None = None
    """For the cache connector; without one it has no effect."""
    media: tuple[PlacedMedia, ...] = ()
    """Images, videos and sound, at their places among the prompt's tokens."""
    rope_positions: RopePositions | None = None
    position_delta: int = 0
    adapter: AdapterRef | None = None
    is_enforceable: Future[Grammar] | None = None
    """Done once the constraint is compiled; fails with InvalidRequest. To be waited for before queueing."""


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """How a prompt becomes token ids."""

    add_special_tokens: bool = True
    parse_special: bool = False
    truncate_prompt_tokens: int | None = None
    """Keep at most this many prompt tokens; -1 keeps as many as the context allows."""
    truncation_side: TruncationSide = "left"
    """The side that is cut: "left" keeps the last tokens, "right" the first."""
    max_logprobs: int | None = None
    """Overrides the engine's limit on log-probabilities; -1 lifts it."""
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    """What the chat template was told when it wrote the prompt; some reasoning parsers ask."""


DEFAULT_PROMPT_OPTIONS = PromptOptions()


def checked_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ids as a list.

    Raises:
        InvalidRequest: no list of integers (bytes are none), or an id outside 0..vocab_size-1; names `name`.
    """
    if isinstance(token_ids, str | bytes | bytearray | memoryview) or not isinstance(token_ids, Sequence):
        raise InvalidRequest(f"{name}: expected a list of token ids, got {type(token_ids).__name__}", param=name)
    for token_id in token_ids:
        if type(token_id) is not int:
            raise InvalidRequest(f"{name}: expected token ids, got {token_id!r}", param=name)
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        bad = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{name}: token id {bad} is outside the vocabulary (0..{vocab_size - 1})", param=name)
    return list(token_ids)


@dataclass(slots=True)
class InputProcessor:
    """Checks requests against one model's limits."""

    max_model_len: int
    vocab_size: int
    tokenizer: TextEncoder | None
    """None: prompts are token ids only."""
    max_logprobs: int = 20
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    compile_grammar: GrammarCompiler | None = None
    checks: tuple[RequestCheck, ...] = ()
    find_adapter: Callable[[str], AdapterRef] | None = None
    """The adapter of a name, or InvalidRequest; None: the engine runs without adapters."""
    embeds: bool = False
    """Whether the model makes embeddings, and generates nothing."""
    media: MediaProcessor | None = None
    """None: the model takes text only."""
    media_limits: MediaLimits = field(default_factory=dict)
    max_whole_media: int | None = None
    """Most tokens of one item that a step can hold."""
    max_encoded_media: int | None = None
    """Most tokens whose media one step encodes, where all of a prompt is computed in one step."""
    splits_media: bool = True
    """Whether several steps may share an item whose tokens do not see each other."""
    reasoning_marks: MarksOf | None = None
    """What the engine's reasoning parser says of a prompt; None: there is no such parser."""
    clock: Callable[[], float] = time.monotonic

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> EngineRequest:
        """A request ready for the engine.

        Raises:
            InvalidRequest: anything the engine could not serve; names the field.
        """
        arrival_time = self.clock()
        if self.embeds:
            raise InvalidRequest(
                "this model makes embeddings and generates no text",
                remedy="use LLM.embed, or vkit serve and POST /v1/embeddings",
            )
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params: expected SamplingParams, got {params!r}", param="params")
        text: str | None = None
        if isinstance(prompt, PlacedPrompt):
            placed = prompt
        else:
            media = self._read_media(prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None)
            text, token_ids, cache_salt = self._read_prompt(prompt, cache_salt, options, has_media=bool(media))
            token_ids = self._truncated(token_ids, options, self.max_model_len - 1)
            placed = self._placed(token_ids, media, options, self.media)
        token_ids = placed.token_ids
        self._check_prompt(placed, num_generated=1)
        self._check_params(params, options)
        _check_place(priority, cache_salt)
        if kv_transfer_params is not None and not isinstance(kv_transfer_params, Mapping):
            raise InvalidRequest(
                f"kv_transfer_params: expected an object, got {kv_transfer_params!r}", param="kv_transfer_params"
            )
        grammars = self._grammars_of(params)
        room = self.max_model_len - len(token_ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        return EngineRequest(
            id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=params,
            arrival_time=arrival_time,
            max_total_tokens=len(token_ids) + max_tokens,
            priority=priority,
            cache_salt=cache_salt,
            bad_word_ids=self._bad_word_ids(params),
            thinking=self._thinking(params, text, token_ids, options),
            eos_token_id=self.tokenizer.eos_token_id if self.tokenizer else None,
            stop_token_ids=self._stop_token_ids(params),
            compile_grammar=grammars,
            kv_transfer_params=None if kv_transfer_params is None else dict(kv_transfer_params),
            media=placed.media,
            rope_positions=placed.rope_positions,
            position_delta=placed.position_delta,
            adapter=self._adapter(lora),
            is_enforceable=grammars.first if grammars is not None else None,
        )

    def process_embedding(
        self,
        prompt: Prompt,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> EngineRequest:
        """A prompt to embed, ready for the engine.

        Raises:
            InvalidRequest: anything the engine could not serve; names the field.
        """
        arrival_time = self.clock()
        if not self.embeds:
            raise InvalidRequest("this model generates text and makes no embeddings", remedy="use generate or chat")
        media = self._read_media(prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None)
        if media:
            raise InvalidRequest("multi_modal_data: embeddings are made of text only", param="multi_modal_data")
        text, token_ids, cache_salt = self._read_prompt(prompt, cache_salt, options, has_media=False)
        token_ids = self._truncated(token_ids, options, self.max_model_len)
        self._check_prompt(PlacedPrompt(token_ids), num_generated=0)
        _check_place(priority, cache_salt)
        return EngineRequest(
            id=request_id,
            prompt=text,
            prompt_token_ids=token_ids,
            params=_EMBEDDING_PARAMS,
            arrival_time=arrival_time,
            max_total_tokens=len(token_ids) + 1,
            priority=priority,
            cache_salt=cache_salt,
            adapter=self._adapter(lora),
        )

    def _adapter(self, name: str | None) -> AdapterRef | None:
        if name is None:
            return None
        if self.find_adapter is None:
            raise InvalidRequest("lora: this engine runs without adapters", param="lora", remedy="use --enable-lora")
        return self.find_adapter(name)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Parameters with the model's own recommendations where `given` says nothing."""
        names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
        names |= {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        config = self.generation_config
        defaults = {ours: config[theirs] for theirs, ours in names.items() if config.get(theirs) is not None}
        return SamplingParams(**{**defaults, **given})

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: no text, or the engine runs without a tokenizer.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"text: expected a string, got {type(text).__name__}", param="text")
        if self.tokenizer is None:
            raise InvalidRequest("prompt: this engine has no tokenizer; pass prompt_token_ids", param="prompt")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)

    def place(
        self,
        token_ids: list[int],
        multi_modal_data: Mapping[str, Any],
        *,
        pixel_limits: tuple[int | None, int | None] = (None, None),
    ) -> PlacedPrompt:
        """The prompt with the placeholders of its media replaced: all the work that media need before a step.

        `pixel_limits`: least and most pixels of an item, in place of the model's own.

        Raises:
            InvalidRequest: media the model does not take, or that do not belong to the prompt's placeholders; `param`
                is multi_modal_data.KIND.N where the Nth item of a kind is to blame.
        """
        processor = self.media
        if processor is not None and pixel_limits != (None, None):
            processor = processor.with_pixel_limits(*pixel_limits)
        return self._placed(token_ids, self._read_media(multi_modal_data), DEFAULT_PROMPT_OPTIONS, processor)

    def _read_media(self, data: Any) -> list[Media]:
        if data is None:
            return []
        return checked_media(data, self.media.kinds if self.media is not None else (), self.media_limits)

    def _placed(
        self, token_ids: list[int], media: list[Media], options: PromptOptions, processor: MediaProcessor | None
    ) -> PlacedPrompt:
        """The prompt with the placeholders of its media replaced."""
        if processor is None or not media:
            return PlacedPrompt(token_ids)
        if options.truncate_prompt_tokens is not None:
            raise InvalidRequest(
                "truncate_prompt_tokens: a prompt with media cannot be cut", param="truncate_prompt_tokens"
            )
        checked_token_ids("prompt", token_ids, self.vocab_size)
        items = _prepared(processor, media)
        if self.max_encoded_media is not None:
            self._check_encoded(items, self.max_encoded_media)
        placed = processor.place(token_ids, items)
        if self.max_whole_media is not None:
            for entry in placed.media:
                if self.splits_media and not entry.item.sees_itself:
                    continue
                longest = max(stop - start for start, stop in entry.spans)
                if longest > self.max_whole_media:
                    raise InvalidRequest(
                        f"{entry.item.kind}: its {longest} tokens side by side are computed in one step, which holds at"
                        f" most {self.max_whole_media}",
                        param=entry.item.kind,
                        remedy="raise --max-num-batched-tokens or --long-prefill-token-threshold",
                    )
        return placed

    @staticmethod
    def _check_encoded(items: Sequence[MediaInput], limit: int) -> None:
        """One item may be longer than a step encodes, since it then has the step to itself; several may not."""
        sizes = {item.digest: item.num_rows for item in items}
        if len(sizes) > 1 and sum(sizes.values()) > limit:
            raise InvalidRequest(
                f"multi_modal_data: {sum(sizes.values())} tokens of media in a prompt that is computed in one step,"
                f" which encodes at most {limit}",
                param="multi_modal_data",
                remedy="raise --max-num-encoder-input-tokens, or let prompts be cut (--enable-chunked-prefill)",
            )

    def _read_prompt(
        self, prompt: Prompt, cache_salt: str | None, options: PromptOptions, *, has_media: bool
    ) -> tuple[str | None, list[int], str | None]:
        if isinstance(prompt, Mapping):
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"}
            if unknown or ("prompt" in prompt) == ("prompt_token_ids" in prompt):
                raise InvalidRequest(
                    "prompt: expected exactly one of the keys prompt and prompt_token_ids (and cache_salt,"
                    " multi_modal_data);"
                    f" got {sorted(map(str, prompt))}",
                    param="prompt",
                )
            cache_salt = prompt.get("cache_salt", cache_salt)
            prompt = prompt["prompt"] if "prompt" in prompt else prompt["prompt_token_ids"]
        if isinstance(prompt, str):
            parses = options.parse_special or has_media  # placeholders are special tokens
            ids = self.encode(prompt, add_special_tokens=options.add_special_tokens, parse_special=parses)
            return prompt, ids, cache_salt
        if isinstance(prompt, bytes | bytearray | memoryview) or not isinstance(prompt, Sequence):
            raise InvalidRequest(f"prompt: expected text or token ids, got {type(prompt).__name__}", param="prompt")
        return None, [*cast("Sequence[int]", prompt)], cache_salt

    def _truncated(self, token_ids: list[int], options: PromptOptions, longest: int) -> list[int]:
        limit = options.truncate_prompt_tokens
        if limit is None:
            return token_ids
        if isinstance(limit, bool) or not isinstance(limit, int) or (limit < 1 and limit != -1):
            raise InvalidRequest(
                f"truncate_prompt_tokens: must be at least 1, or -1 for the context's limit; got {limit!r}",
                param="truncate_prompt_tokens",
            )
        if options.truncation_side not in ("left", "right"):
            raise InvalidRequest(
                f"truncation_side: expected left or right, got {options.truncation_side!r}", param="truncation_side"
            )
        keep = longest if limit == -1 else limit
        return token_ids[-keep:] if options.truncation_side == "left" else token_ids[:keep]

    def _check_prompt(self, placed: PlacedPrompt, *, num_generated: int) -> None:
        token_ids = placed.token_ids
        if not token_ids:
            raise InvalidRequest(
                "prompt: no tokens; this tokenizer adds no beginning of sequence, so an empty text says nothing",
                param="prompt",
            )
        if len(token_ids) > self.max_model_len - num_generated:
            num_media = sum(item.item.num_rows for item in placed.media)
            of_media = f" ({num_media} of them for {len(placed.media)} media items)" if num_media else ""
            smaller = "send smaller media" if num_media else "shorten the prompt"
            to_generate = " and one to generate" if num_generated else ""
            raise InvalidRequest(
                f"prompt: {len(token_ids)} tokens{of_media}, but the context of {self.max_model_len} tokens leaves room"
                f" for at most {self.max_model_len - num_generated}{to_generate}",
                param="prompt",
                remedy=f"{smaller}, or raise --max-model-len where it is below the model's own limit",
            )
        checked_token_ids("prompt", token_ids, self.vocab_size)

    def _check_params(self, params: SamplingParams, options: PromptOptions) -> None:
        params.check_vocabulary(self.vocab_size)
        limit = self.max_logprobs if options.max_logprobs is None else options.max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(params, name)
            if wanted is None or limit == WHOLE_VOCABULARY:
                continue
            if wanted == WHOLE_VOCABULARY or wanted > limit:
                raise InvalidRequest(
                    f"{name}: {wanted} asked for, at most {limit} allowed here", param=name, remedy="raise max_logprobs"
                )
        if params.best_of is not None and params.best_of > params.n and params.output_kind is not OutputKind.FINAL_ONLY:
            raise InvalidRequest(
                "best_of: the best candidates are known at the end only; it cannot be streamed", param="best_of"
            )
        if self.tokenizer is None and (params.stop or params.bad_words):
            name = "stop" if params.stop else "bad_words"
            raise InvalidRequest(f"{name}: this engine has no tokenizer", param=name)
        for check in self.checks:
            try:
                check(params)
            except (TypeError, ValueError, LookupError) as error:  # plug-ins know no errors of ours
                raise InvalidRequest(f"extra_args (vllm_xargs): {error}", param="extra_args") from None

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word alone, and as it would follow a space where that only changes its first token."""
        found: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bare = tuple(self.encode(word, add_special_tokens=False))
            spaced = tuple(self.encode(" " + word, add_special_tokens=False))
            if not bare:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
            found.append(bare)
            if len(spaced) == len(bare) and spaced[0] != bare[0]:
                found.append(spaced)
        return tuple(dict.fromkeys(found))

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            configured = self.generation_config.get("eos_token_id")
            ids.update([configured] if isinstance(configured, int) else configured or ())
            if self.tokenizer is not None:
                ids.update(self.tokenizer.eos_token_ids)
                ids -= {self.tokenizer.eos_token_id}
        return frozenset(ids.union(params.stop_token_ids))

    def _thinking(
        self, params: SamplingParams, text: str | None, token_ids: list[int], options: PromptOptions
    ) -> ThinkingBudget | None:
        """How long the model may reason after this prompt; None: as long as it likes, or it does not."""
        limit = params.thinking_token_budget
        if limit is None:
            return None
        marks = params.reasoning_marks
        if marks is None and self.reasoning_marks is None:
            raise InvalidRequest(
                "thinking_token_budget: needs a reasoning parser, and none is configured",
                param="thinking_token_budget",
                remedy="set reasoning_parser (--reasoning-parser), or SamplingParams.reasoning_marks",
            )
        if self.tokenizer is None:
            raise InvalidRequest(
                "thinking_token_budget: this engine has no tokenizer to find the end of reasoning with",
                param="thinking_token_budget",
            )
        if marks is None and self.reasoning_marks is not None:
            if text is None:
                text = self.tokenizer.decode(token_ids[-MARKED_TAIL:], skip_special_tokens=False)
            marks = self.reasoning_marks(text, options.template_variables)
        return None if marks is None or limit < 0 else thinking_budget(limit, marks, self.tokenizer)

    def _grammars_of(self, params: SamplingParams) -> _Grammars | None:
        constraint = params.structured_outputs
        if constraint is None:
            return None
        if not isinstance(constraint, StructuredOutputs):
            raise InvalidRequest(
                f"structured_outputs: expected StructuredOutputs, got {type(constraint).__name__}",
                param="structured_outputs",
            )
        if self.compile_grammar is None:
            raise InvalidRequest("structured_outputs: this engine has no grammar backend", param="structured_outputs")
        return _Grammars(self.compile_grammar, constraint, self.compile_grammar(constraint))


_EMBEDDING_PARAMS = SamplingParams(
    max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=OutputKind.FINAL_ONLY
)
"""What the engine's own machinery needs to know of a prompt that generates nothing."""


def _check_place(priority: object, cache_salt: object) -> None:
    """Refuse a place in the queue or the cache that cannot be."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise InvalidRequest(f"priority: expected an integer, got {priority!r}", param="priority")
    if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
        raise InvalidRequest(f"cache_salt: expected a non-empty string, got {cache_salt!r}", param="cache_salt")


@dataclass(slots=True)
class _Grammars:
    """Grammars of one request: the one that was compiled to check the constraint, then new ones."""

    compile: GrammarCompiler
    constraint: StructuredOutputs
    first: Future[Grammar]
    is_first_taken: bool = False

    def __call__(self) -> Future[Grammar]:
        if self.is_first_taken:
            return self.compile(self.constraint)
        self.is_first_taken = True
        return self.first


def _prepared(processor: MediaProcessor, media: list[Media]) -> list[MediaInput]:
    """Each item as the model takes it; a refusal says in `param` which item it is about."""
    made: list[MediaInput] = []
    for i, item in enumerate(media):
        try:
            made.append(processor.prepare(item))
        except InvalidRequest as error:
            error.param = f"multi_modal_data.{item.kind}.{sum(other.kind == item.kind for other in media[:i])}"
            raise
    return made

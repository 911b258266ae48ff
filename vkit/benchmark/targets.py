"""What is measured: an engine in this process or a server elsewhere, behind one small protocol.

A target turns prompts into streams of token counts. It knows no clock: whoever consumes the stream notes the times.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, Protocol

from vkit.benchmark.datasets import (
    WORDS,
    DatasetKind,
    Prompt,
    random_sequences,
    shared_prefix_sequences,
    word_calibration,
)
from vkit.client import OpenAIClient, ServerError, StreamEvent, Usage
from vkit.errors import RequestFailed, UsageError
from vkit.types import NO_DRAFTS, DraftCounts, FinishReason, OutputKind, RequestOutput, SamplingParams

WARM_UP_TOKENS = 4
WARM_UP_SEED = 2**31 - 1
"""Prompts before the run are drawn from another seed, so that they leave nothing useful in a prefix cache."""

REFUSED_FIELD_STATUSES = (400, 422)


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a run, ready to send. Generation ends after exactly `max_tokens` where the target allows it."""

    index: int
    content: str | tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class TargetEvent:
    """One event of an answer.

    `num_tokens` is None where the target did not say how many tokens the event carries; `text_len` is then a hint. The
    last event has `usage`: the counts that are true of the whole request, and if the target tells how often it was
    preempted and how its drafts fared.
    """

    num_tokens: int | None = None
    text_len: int = 0
    token_ids: tuple[int, ...] | None = None
    usage: Usage | None = None
    num_preemptions: int = 0
    drafts: DraftCounts = NO_DRAFTS


@dataclass(frozen=True, slots=True)
class GeneratedPrompts:
    """Prompts to make up: how many, how long in tokens, how much of each is shared with others."""

    num_prompts: int
    input_len: int
    prefix_len: int = 0
    num_prefixes: int = 1
    seed: int = 0

    @property
    def kind(self) -> DatasetKind:
        """`shared-prefix` when there is something to share."""
        return DatasetKind.SHARED_PREFIX if self.prefix_len else DatasetKind.RANDOM


class Target(Protocol):
    """What a load can be put on."""

    async def start(self) -> list[str]:
        """Make ready and warm up; one line for each thing that will not be as asked.

        Raises:
            VkitError: it cannot be measured at all.
        """

    async def generate(self, wanted: GeneratedPrompts) -> list[Prompt]:
        """Made-up prompts, in the form that this target takes."""

    def prepare(self, prompt: Prompt) -> Prompt:
        """A prompt from a file, tokenised where the target allows it, so that this costs no measured time.

        Raises:
            UsageError: the target cannot take such a prompt.
        """

    def stream(self, request: Request) -> AsyncIterator[TargetEvent]:
        """The events of one answer, the last one with the usage.

        Raises:
            VkitError: the request failed.
        """

    async def close(self) -> None:
        """Free what `start` took."""


def _sequences(wanted: GeneratedPrompts, alphabet: Sequence[Any], length: int, prefix_len: int) -> list[list[Any]]:
    if wanted.kind is DatasetKind.SHARED_PREFIX:
        return shared_prefix_sequences(
            alphabet, wanted.num_prompts, length, prefix_len, wanted.num_prefixes, wanted.seed
        )
    return random_sequences(alphabet, [length] * wanted.num_prompts, wanted.seed)


class TokenizerLike(Protocol):
    """The part of a tokenizer that prompts are made with."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def special_ids(self) -> Any:
        """Ids that are no text."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`."""


class AsyncEngine(Protocol):
    """The part of `vkit.AsyncLLM` that a load needs."""

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer."""

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, *, request_id: str, lora: str | None
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request as they come."""

    async def shutdown(self) -> None:
        """Stop and free everything."""


class EngineTarget:
    """An engine in this process. Takes ownership: `close` shuts it down."""

    def __init__(self, engine: AsyncEngine, lora: str | None = None) -> None:
        """`lora`: the adapter that every request runs with."""
        self._engine = engine
        self._lora = lora
        tokenizer: TokenizerLike = engine.tokenizer
        self._tokenizer = tokenizer

    async def start(self) -> list[str]:
        """Warm up with one short request."""
        (prompt,) = await self.generate(GeneratedPrompts(1, WARM_UP_TOKENS, seed=WARM_UP_SEED))
        async for _ in self.stream(Request(-1, prompt.content, WARM_UP_TOKENS)):
            pass
        return []

    async def generate(self, wanted: GeneratedPrompts) -> list[Prompt]:
        """Random token ids, special ones left out.

        Raises:
            UsageError: prompts of that length leave no room in the context.
        """
        limit = self._engine.max_model_len
        if wanted.input_len >= limit:
            raise UsageError(
                f"--input-len: {wanted.input_len} tokens leave nothing to generate in the context of {limit}",
                remedy=f"at most {limit - 1}",
            )
        special = frozenset(self._tokenizer.special_ids)
        alphabet = [token_id for token_id in range(self._tokenizer.vocab_size) if token_id not in special]
        sequences = _sequences(wanted, alphabet, wanted.input_len, wanted.prefix_len)
        return [Prompt(tuple(sequence)) for sequence in sequences]

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt as token ids."""
        if isinstance(prompt.content, tuple):
            return prompt
        return Prompt(tuple(self._tokenizer.encode(prompt.content)), prompt.output_len)

    async def stream(self, request: Request) -> AsyncGenerator[TargetEvent, None]:
        """The tokens of each output of the engine.

        Raises:
            RequestFailed: the engine ended the request with an error.
        """
        params = SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            ignore_eos=True,
            output_kind=OutputKind.DELTA,
        )
        num_input = num_output = num_preemptions = 0
        drafts = NO_DRAFTS
        assert not isinstance(request.content, str), "prompts are tokenised before the run"
        prompt = {"prompt_token_ids": list(request.content)}
        request_id = f"bench-{request.index}"
        async for output in self._engine.generate(prompt, params, request_id=request_id, lora=self._lora):
            (completion,) = output.outputs
            if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise RequestFailed(completion.error or f"the engine ended the request: {completion.finish_reason}")
            num_input = len(output.prompt_token_ids)
            num_output += len(completion.token_ids)
            if output.metrics is not None:
                num_preemptions, drafts = output.metrics.num_preemptions, output.metrics.drafts
            yield TargetEvent(len(completion.token_ids), token_ids=tuple(completion.token_ids))
        usage = Usage(num_input, num_output)
        yield TargetEvent(0, usage=usage, num_preemptions=num_preemptions, drafts=drafts)

    async def close(self) -> None:
        """Shut the engine down."""
        await self._engine.shutdown()


class Endpoint(StrEnum):
    """The route of a server that gets the load."""

    COMPLETIONS = "completions"
    CHAT = "chat"


class HttpTarget:
    """An OpenAI-compatible server. Takes ownership of `client`. `model` None takes the first name the server lists."""

    def __init__(
        self,
        client: OpenAIClient,
        *,
        model: str | None = None,
        endpoint: Endpoint = Endpoint.COMPLETIONS,
        wants_token_ids: bool = False,
    ) -> None:
        self.model = model
        self._client = client
        self._endpoint = endpoint
        self._wants_token_ids = wants_token_ids
        self._extras: dict[str, object] = {}

    async def start(self) -> list[str]:
        """Find the model's name and what the server understands, with one short request.

        Raises:
            VkitError: the server cannot be reached, refuses, or does not count its tokens.
        """
        if self.model is None:
            names = await self._client.model_names()
            if not names:
                raise UsageError("the server lists no model", remedy="name one with --served-model-name")
            self.model = names[0]
        notes = await self._negotiate()
        if self._wants_token_ids:
            self._extras["return_token_ids"] = True
            if not any([event.token_ids async for event in self.stream(_probe(WORDS[:WARM_UP_TOKENS]))]):
                raise UsageError("--output-token-ids: this server sends no token ids")
        return notes

    async def _negotiate(self) -> list[str]:
        """Settle on the most exact request body that the server takes; one line for each field it refused."""
        ignore_eos: dict[str, object] = {"ignore_eos": True}
        counted: dict[str, object] = {"include_usage": True, "continuous_usage_stats": True}
        summed: dict[str, object] = {"include_usage": True}
        no_eos = "the server refuses ignore_eos ({}): answers may be shorter than asked for"
        no_counts = "the server refuses continuous_usage_stats ({}): gaps inside an event are estimated"
        refusal: ServerError | None = None
        for extras, options, notes in (
            (ignore_eos, counted, []),
            (ignore_eos, summed, [no_counts]),
            ({}, counted, [no_eos]),
            ({}, summed, [no_counts, no_eos]),
        ):
            self._extras = {**extras, "stream_options": options}
            try:
                await self._measure_prompt(WORDS[:WARM_UP_TOKENS])
            except ServerError as error:
                if error.status not in REFUSED_FIELD_STATUSES:
                    raise
                refusal = refusal or error
            else:
                return [note.format(refusal) for note in notes]
        assert refusal is not None
        raise refusal

    async def _measure_prompt(self, words: Sequence[str]) -> int:
        """Prompt tokens of `words`, by the server's own count."""
        async for event in self.stream(_probe(words)):
            if event.usage is not None:
                return event.usage.prompt_tokens
        raise RequestFailed("the server sends no usage (stream_options.include_usage): its tokens cannot be counted")

    async def generate(self, wanted: GeneratedPrompts) -> list[Prompt]:
        """Random words, as many as make about `input_len` tokens; two requests find out how many that is."""
        counts = [(num, await self._measure_prompt(_sample(num))) for num in _sample_sizes(wanted.input_len)]
        num_words_for = word_calibration(counts)
        num_words = num_words_for(wanted.input_len)
        # Rounding must leave a word of its own to each prompt, or all would be the same.
        prefix_words = min(num_words - 1, round(num_words * wanted.prefix_len / wanted.input_len))
        sequences = _sequences(wanted, WORDS, num_words, prefix_words)
        return [Prompt(" ".join(sequence)) for sequence in sequences]

    def prepare(self, prompt: Prompt) -> Prompt:
        """The prompt as it is: only the server has its tokenizer."""
        if self._endpoint is Endpoint.CHAT and not isinstance(prompt.content, str):
            raise UsageError("--endpoint chat takes prompts of text, and the file holds token ids")
        return prompt

    async def stream(self, request: Request) -> AsyncGenerator[TargetEvent, None]:
        """The token counts of each event of the server, as far as it states them.

        Raises:
            RequestFailed: the server refused or broke off.
        """
        num_seen = 0
        usage: Usage | None = None
        async for event in self._events(request):
            if event.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                raise RequestFailed(f"the server ended the request: {event.finish_reason}")
            usage = event.usage or usage
            if event.has_choices:
                num_tokens, num_seen = _count(event, num_seen)
                yield TargetEvent(num_tokens, len(event.text), event.token_ids)
        if usage is not None:
            yield TargetEvent(0, usage=usage)

    def _events(self, request: Request) -> AsyncIterator[StreamEvent]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            **({"seed": request.seed} if request.seed is not None else {}),
            **self._extras,
        }
        if self._endpoint is Endpoint.CHAT:
            return self._client.stream_chat({**body, "messages": [{"role": "user", "content": request.content}]})
        return self._client.stream_completion({**body, "prompt": request.content})

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


def _count(event: StreamEvent, num_seen: int) -> tuple[int | None, int]:
    """Tokens of this event as the server states them (None: it does not), and how many it has stated so far."""
    if event.token_ids is not None:
        return len(event.token_ids), num_seen + len(event.token_ids)
    if event.usage is not None:
        total = event.usage.completion_tokens
        return max(0, total - num_seen), max(total, num_seen)
    return None, num_seen


def _probe(words: Sequence[str]) -> Request:
    return Request(-1, " ".join(words), WARM_UP_TOKENS)


def _sample(num_words: int) -> list[str]:
    (words,) = random_sequences(WORDS, [num_words], WARM_UP_SEED + num_words)
    return words


def _sample_sizes(input_len: int) -> tuple[int, int]:
    """Two sizes, no longer than the prompts of the run: a server may take no longer ones."""
    return max(1, input_len // 2), max(1, input_len)


def requests_of(
    prompts: Sequence[Prompt], *, output_len: int | None, default_output_len: int, temperature: float, seed: int
) -> list[Request]:
    """A request for each prompt. `output_len` None leaves the length to the prompt's own wish, else the default.

    Sampled requests get a seed each, so that a run can be repeated; greedy ones need none.
    """
    seeds = chain((seed + i for i in range(len(prompts))), repeat(seed)) if temperature > 0 else repeat(None)
    return [
        Request(index, prompt.content, output_len or prompt.output_len or default_output_len, temperature, request_seed)
        for index, (prompt, request_seed) in enumerate(zip(prompts, seeds, strict=False))
    ]

"""The blocking face of the engine: lists in, lists out; streams as plain iterators.

Works inside a running event loop as well as outside: the engine has a thread of its own.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vkit.beam_search import BeamSearchParams, beam_search
from vkit.config import EngineArgs
from vkit.engine_thread import EngineThread, close_with
from vkit.errors import EngineDeadError, InvalidRequest, RequestFailed, UsageError
from vkit.inputs import DEFAULT_PROMPT_OPTIONS, EngineRequest, Prompt, PromptOptions, checked_token_ids
from vkit.loading import LoadedModel, check_model, load_model
from vkit.media import KINDS, Media, MediaKind
from vkit.media.conversation import split_media
from vkit.metrics import MetricFamily
from vkit.pooling import shortened
from vkit.resident import ProgressCallback
from vkit.scoring import LabelScores, continuation_logprob, label_scores
from vkit.text.tokenizer import Tokenizer
from vkit.types import FinishReason, OutputKind, RequestOutput, SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A loaded model. A context manager; every method may be called from any thread.

    Keywords are those of `EngineArgs`; an unknown one is a TypeError.
    """

    def __init__(self, model: str, *, on_load_progress: ProgressCallback | None = None, **engine_args: Any) -> None:
        self._open(load_model(EngineArgs(model=str(model), **engine_args), on_load_progress))

    @classmethod
    def for_text(cls, model: str, *, on_load_progress: ProgressCallback | None = None, **engine_args: Any) -> LLM:
        """The same, where only a model that generates text is of use: another is refused before its weights are read.

        Raises:
            UsageError: the model makes embeddings.
        """
        checked = check_model(EngineArgs(model=str(model), **engine_args), compiles_template=False)
        if checked.embedding is not None:
            raise UsageError(
                f"{checked.checkpoint.name} makes embeddings and generates no text",
                remedy="use LLM.embed, or vkit serve and POST /v1/embeddings",
            )
        return cls.from_loaded(checked.load(on_load_progress))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> LLM:
        """The same around a model that is loaded already; takes ownership."""
        self = cls.__new__(cls)
        self._open(loaded)
        return self

    def _open(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._inputs = loaded.inputs
        self._thread = EngineThread(loaded.engine)
        close_with(self, self._thread, loaded.close)
        self._names = itertools.count(1)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> list[RequestOutput]:
        """One output per prompt, in the same order. One `params` serves all prompts, a list gives each its own.

        `kv_transfer_params` are for the cache connector; without one they have no effect.

        Raises:
            InvalidRequest: before anything runs; names the field.
            EngineDeadError: the engine stopped.
        """
        listed = _prompt_list(prompts)
        if params is None:
            params = self._inputs.default_sampling_params(max_tokens=16)
        chosen = _one_each("params", params, len(listed), SamplingParams)
        priorities = _one_each("priority", priority, len(listed), int)
        requests = [
            self._inputs.process(
                prompt,
                own.with_(output_kind=OutputKind.FINAL_ONLY),
                request_id=self._name(),
                priority=place,
                cache_salt=cache_salt,
                kv_transfer_params=kv_transfer_params,
                lora=lora,
                options=options,
            )
            for prompt, own, place in zip(listed, chosen, priorities, strict=True)
        ]
        for request in requests:
            _check_enforceable(request)
        return self._run_all(requests)

    def _run_all(self, requests: list[EngineRequest]) -> list[RequestOutput]:
        """The last output of each request, in order."""
        inbox = _Inbox()
        keys = [self._thread.submit(request, _Slot(inbox, index)) for index, request in enumerate(requests)]
        results: list[RequestOutput | None] = [None] * len(keys)
        try:
            for _ in keys:
                index, output = inbox.get()
                results[index] = output
        finally:
            for key, result in zip(keys, results, strict=True):
                if result is None:
                    self._thread.abort_one(key)
        return [result for result in results if result is not None]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> Iterator[RequestOutput]:
        """What is new after each step. Closing the iterator early aborts the request.

        Raises:
            InvalidRequest: at once, before anything runs.
            EngineDeadError: the engine stopped; also from the iterator, once the model has been closed.
        """
        if params is None:
            params = self._inputs.default_sampling_params(max_tokens=16)
        _check_params(params)
        request = self._inputs.process(
            prompt,
            params.with_(output_kind=OutputKind.DELTA),
            request_id=self._name(),
            priority=priority,
            cache_salt=cache_salt,
            lora=lora,
            options=options,
        )
        _check_enforceable(request)
        inbox = _Inbox()
        key = self._thread.submit(request, _Slot(inbox, 0))
        return self._deltas(key, inbox)

    def _deltas(self, key: str, inbox: _Inbox) -> Iterator[RequestOutput]:
        finished = False
        try:
            while not finished:
                self._thread.check_open()  # what waits in the inbox of a closed model is no longer wanted
                _, output = inbox.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._thread.abort_one(key)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
    ) -> list[RequestOutput]:
        """One output per conversation; `messages` is one conversation or a list of them.

        Parts of a message's content may bring media: {"type": "image_url", "image_url": {"url": URL}}, or
        {"type": "image", "image": item} with an `ImageMedia`, a picture of Pillow, an array, a path or a URL.

        Raises:
            InvalidRequest: no chat template, no messages, or the template refused them.
        """
        conversations: Sequence[Any] = messages
        if not messages or isinstance(messages[0], Mapping):
            conversations = [messages]
        prompts = [
            self._chat_prompt(conversation, tools, add_generation_prompt, chat_template, chat_template_kwargs)
            for conversation in conversations
        ]
        return self.generate(
            prompts,
            params if params is not None else self._chat_params(),
            lora=lora,
            options=_told(chat_template_kwargs),
        )

    def chat_stream(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora: str | None = None,
    ) -> Iterator[RequestOutput]:
        """The answer to one conversation as it comes."""
        prompt = self._chat_prompt(messages, tools, add_generation_prompt, chat_template, chat_template_kwargs)
        return self.stream(
            prompt,
            params if params is not None else self._chat_params(),
            lora=lora,
            options=_told(chat_template_kwargs),
        )

    def with_placeholders(self, text: str, media: Mapping[MediaKind, Sequence[Media]]) -> str:
        """A prompt with a placeholder for every item: those that `text` lacks go before it.

        Raises:
            InvalidRequest: media of a kind the model does not take.
        """
        processor = self._inputs.media
        missing = []
        for kind in KINDS:
            items = media.get(kind, ())
            if items and (processor is None or kind not in processor.kinds):
                raise InvalidRequest(f"{kind}: this model takes no {kind} input", param=kind)
            if items and processor is not None:
                mark = processor.placeholder(kind)
                missing.extend([mark] * (len(items) - text.count(mark)))
        return "".join(missing) + text

    def beam_search(self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams) -> list[RequestOutput]:
        """The likeliest `beam_width` continuations of each prompt, best first.

        Raises:
            InvalidRequest: a prompt that cannot be served, or more beams than there are tokens.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params: expected BeamSearchParams, got {params!r}", param="params")
        params.check_vocabulary(self._inputs.vocab_size)
        eos_token_id = self._loaded.tokenizer.eos_token_id if self._loaded.tokenizer is not None else None
        found = []
        for prompt in _prompt_list(prompts):
            request = self._inputs.process(prompt, SamplingParams(), request_id=self._name())
            if request.media:
                raise InvalidRequest("multi_modal_data: beam search takes text only", param="multi_modal_data")
            found.append(
                beam_search(
                    request,
                    params,
                    self._next_tokens,
                    eos_token_id=eos_token_id,
                    decode=self.detokenize if self._loaded.tokenizer is not None else None,
                    max_model_len=self._inputs.max_model_len,
                )
            )
        return found

    def _next_tokens(self, prompts: list[list[int]], num_logprobs: int) -> list[RequestOutput]:
        """One token after each prompt, with the likeliest alternatives."""
        params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=num_logprobs, detokenize=False, ignore_eos=True)
        outputs = self.generate(list(prompts), params, options=PromptOptions(max_logprobs=-1))
        for output in outputs:
            _check(output)
        return outputs

    # Embeddings

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> list[list[float]]:
        """One vector of length 1 per prompt, in the same order; `dimensions` shortens it where the model allows that.

        Raises:
            InvalidRequest: the model generates text, a prompt it cannot take, or a size it was not trained for.
        """
        requests = [
            self._inputs.process_embedding(prompt, request_id=self._name(), lora=lora, options=options)
            for prompt in _prompt_list(prompts)
        ]
        form = self._loaded.embedding
        assert form is not None, "process_embedding refuses models that do not embed"
        form.check_dimensions(dimensions)
        outputs = self._run_all(requests)
        for output in outputs:
            _check(output)
        return [shortened(output.embedding or [], dimensions) for output in outputs]

    # Scoring

    def score(self, prompts: str | Sequence[str], continuations: str | Sequence[str]) -> list[float]:
        """Log-probability of each continuation after its prompt, in nats, summed over the continuation's tokens.

        One prompt may be paired with many continuations, or as many with as many. A continuation is tokenised by
        itself, so the boundary between the two is a token boundary.

        Raises:
            InvalidRequest: lists of different lengths, or an empty continuation.
        """
        befores = [prompts] if isinstance(prompts, str) else list(prompts)
        afters = [continuations] if isinstance(continuations, str) else list(continuations)
        if len(befores) == 1:
            befores *= len(afters)
        if len(befores) != len(afters):
            raise InvalidRequest(f"score: {len(befores)} prompts and {len(afters)} continuations do not pair up")
        pairs = []
        for before, after in zip(befores, afters, strict=True):
            head, tail = self._inputs.encode(before), self._inputs.encode(after, add_special_tokens=False)
            if not tail or not head:
                raise InvalidRequest("score: a prompt and a continuation need at least one token each")
            pairs.append((head, tail))
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        outputs = self.generate([head + tail for head, tail in pairs], params)
        for output in outputs:
            _check(output)
        return [continuation_logprob(output, len(tail)) for output, (_, tail) in zip(outputs, pairs, strict=True)]

    def score_labels(
        self, prompts: Prompt | Sequence[Prompt], label_token_ids: Sequence[int], *, apply_softmax: bool = True
    ) -> list[LabelScores]:
        """How likely each label token is to come next after each prompt.

        With `apply_softmax` probabilities are normalised over the labels only, else over the whole vocabulary.

        Raises:
            InvalidRequest: no labels, repeated ones, or ids outside the vocabulary.
        """
        ids = tuple(label_token_ids)
        if not ids or len(set(ids)) != len(ids):
            raise InvalidRequest("label_token_ids: expected at least one id and none twice", param="label_token_ids")
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=ids, detokenize=False)
        outputs = self.generate(prompts, params)
        for output in outputs:
            _check(output)
        return [label_scores(output, apply_softmax=apply_softmax) for output in outputs]

    # Text

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.required_tokenizer

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Raises:
            InvalidRequest: no text, or the engine runs without a tokenizer.
        """
        return self._inputs.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids.

        Raises:
            InvalidRequest: no list of ids, or ids outside the vocabulary.
        """
        tokenizer = self._loaded.required_tokenizer
        vocab_size = max(tokenizer.vocab_size, self._inputs.vocab_size)  # padded rows of the model have no text
        return tokenizer.decode(
            checked_token_ids("token_ids", token_ids, vocab_size), skip_special_tokens=skip_special_tokens
        )

    def apply_chat_template(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            InvalidRequest: no chat template, no messages, or the template refused them.
        """
        return self._loaded.render_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            variables=chat_template_kwargs,
        )

    # Adapters

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters, for `lora=` of the methods above."""
        return self._loaded.required_adapters.names()

    def load_lora(self, name: str, path: str) -> None:
        """Load an adapter in PEFT's layout under a name.

        Raises:
            InvalidRequest: the engine runs without adapters (`enable_lora`), or the name is taken.
            CheckpointError: the adapter is damaged, unsupported, or made for another model.
        """
        self._loaded.required_adapters.load(name, Path(path))

    def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests under way finish with it.

        Raises:
            InvalidRequest: there is none of that name.
        """
        self._loaded.required_adapters.unload(name)

    # Control

    def reset_prefix_cache(self) -> bool:
        """Forget all reusable prefixes; False while any request holds blocks."""
        return self._thread.call(lambda engine: engine.reset_prefix_cache()).result()

    def metrics(self) -> list[MetricFamily]:
        """A snapshot of everything the engine measures."""
        return self._loaded.engine.metric_families()

    def sleep(self, level: int = 1) -> None:
        """Abort what runs and give memory back: level 1 the cache, level 2 the weights too."""
        self._thread.call(lambda engine: engine.sleep(level)).result()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take the memory again."""
        self._thread.call(lambda engine: engine.wake_up(tags)).result()

    @property
    def is_sleeping(self) -> bool:
        """Whether memory was given back and not taken again."""
        return self._loaded.engine.sleep_level > 0

    def close(self) -> None:
        """End what runs, stop the engine's thread and free the model. May be called twice."""
        self._thread.close()
        self._loaded.close()

    def _name(self) -> str:
        return f"request-{next(self._names)}"

    def _chat_params(self) -> SamplingParams:
        given = {} if "max_new_tokens" in self._inputs.generation_config else {"max_tokens": None}
        return self._inputs.default_sampling_params(**given)

    def _chat_prompt(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        chat_template: str | None,
        variables: Mapping[str, Any] | None,
    ) -> dict[str, Any]:
        messages, media = split_media(messages)
        token_ids = self._loaded.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            variables=variables,
        )
        return {"prompt_token_ids": token_ids, "multi_modal_data": media or None}


def _told(chat_template_kwargs: Mapping[str, Any] | None) -> PromptOptions:
    """Prompt options of a conversation."""
    return PromptOptions(template_variables=chat_template_kwargs or {})


def _check_enforceable(request: EngineRequest) -> None:
    """Wait for the constraint to be compiled.

    Raises:
        InvalidRequest: it cannot be enforced.
    """
    if request.is_enforceable is not None:
        request.is_enforceable.result()


class _Inbox:
    """Where the outputs of one call arrive."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[int, RequestOutput | EngineDeadError]] = queue.SimpleQueue()

    def put(self, index: int, item: RequestOutput | EngineDeadError) -> None:
        self._queue.put((index, item))

    def get(self) -> tuple[int, RequestOutput]:
        """The next output and its slot.

        Raises:
            EngineDeadError: the engine stopped.
        """
        index, item = self._queue.get()
        if isinstance(item, EngineDeadError):
            raise item
        return index, item


@dataclass(slots=True)
class _Slot:
    """One request's place in an inbox."""

    inbox: _Inbox
    index: int
    mailbox: None = None

    def put(self, output: RequestOutput) -> None:
        """Take the next output."""
        self.inbox.put(self.index, output)

    def fail(self, error: EngineDeadError) -> None:
        """No more will come."""
        self.inbox.put(self.index, error)


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one prompt or several; a list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise InvalidRequest(
            f"prompt: expected text, token ids, or a list of prompts; got {type(prompts).__name__}", param="prompt"
        )
    listed: list[Any] = list(prompts)
    if not listed:
        raise InvalidRequest("prompt: an empty list; expected at least one prompt", param="prompt")
    return [listed] if isinstance(listed[0], int) else listed


def _one_each(name: str, value: Any, count: int, kind: type) -> list[Any]:
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, list | tuple):
        raise InvalidRequest(
            f"{name}: expected {kind.__name__}, or a list of one per prompt; got {value!r}", param=name
        )
    for item in value:
        if not isinstance(item, kind):
            raise InvalidRequest(f"{name}: every entry must be {kind.__name__}, got {item!r}", param=name)
    if len(value) != count:
        raise InvalidRequest(f"{name}: {len(value)} given for {count} prompts", param=name)
    return list(value)


def _check_params(params: object) -> None:
    if not isinstance(params, SamplingParams):
        raise InvalidRequest(f"params: expected SamplingParams, got {params!r}", param="params")


def _check(output: RequestOutput) -> None:
    for completion in output.outputs:
        if completion.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise RequestFailed(f"the request failed: {completion.error or completion.finish_reason}")

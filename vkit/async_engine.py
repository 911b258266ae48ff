"""The engine for asyncio: any number of consumers, one engine thread, no policy of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vkit.config import EngineArgs
from vkit.engine import Engine, PauseMode
from vkit.engine_thread import EngineThread, close_with
from vkit.errors import EngineDeadError, InvalidRequest, MissingExtra, RequestFailed
from vkit.inputs import DEFAULT_PROMPT_OPTIONS, Prompt, PromptOptions
from vkit.loading import LoadedModel, load_model
from vkit.media import MediaLimits, MediaProcessor, PlacedPrompt
from vkit.metrics import EngineStats, MetricFamily
from vkit.outputs import merge_outputs
from vkit.pooling import EmbeddingForm
from vkit.resident import ProgressCallback
from vkit.text.template import ChatTemplate
from vkit.text.tokenizer import Tokenizer
from vkit.types import OutputKind, RequestOutput, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from vkit.server.in_process import InProcessChat

_LONG_TEXT = 4096
"""Characters from which on tokenising leaves the event loop's thread."""


class AsyncLLM:
    """A loaded model behind one engine thread, for use from any number of event loops."""

    def __init__(self, args: EngineArgs, *, on_load_progress: ProgressCallback | None = None) -> None:
        self._open(load_model(args, on_load_progress))

    @classmethod
    def from_loaded(cls, loaded: LoadedModel) -> AsyncLLM:
        """The same around a model that is loaded already; takes ownership."""
        self = cls.__new__(cls)
        self._open(loaded)
        return self

    def _open(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._inputs = loaded.inputs
        self._thread = EngineThread(loaded.engine)
        close_with(self, self._thread, loaded.close)
        self._mailboxes: dict[asyncio.AbstractEventLoop, _LoopMailbox] = {}
        self._num_unnamed = 0
        self._chat: InProcessChat | None = None

    # What it is

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._loaded.required_tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own template, or the one given instead; None when there is none."""
        return self._loaded.chat_template

    def compile_template(self, source: str) -> ChatTemplate:
        """A template of a request's own, in the same sandbox.

        Raises:
            InvalidRequest: it does not compile.
        """
        return self._loaded.compile_template(source)

    @property
    def tokenizer_info(self) -> Mapping[str, Any]:
        """Settings of the tokenizer, for display."""
        return self._loaded.tokenizer_info

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._inputs.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most sequences in one batch."""
        return self._loaded.engine.settings.limits.max_num_seqs

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The checkpoint's generation_config.json, empty when absent."""
        return self._inputs.generation_config

    @property
    def settings(self) -> Mapping[str, Any]:
        """The engine's effective configuration, for display: plain JSON values only."""
        return self._loaded.settings

    @property
    def is_healthy(self) -> bool:
        """False once the step loop died."""
        return self._thread.is_healthy

    def check_health(self) -> None:
        """Raises:
        EngineDeadError: the step loop died or was shut down.
        """
        self._thread.call(lambda engine: None).result()

    # Requests

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come; closing the iterator early aborts the request.

        What each output holds is `params.output_kind`'s choice. A consumer slower than the engine gets several steps'
        news in one output.

        Raises:
            InvalidRequest: before anything is queued; names the field.
            EngineDeadError: the engine stopped.
        """
        if params is None:
            params = self._inputs.default_sampling_params(max_tokens=16)
        if request_id is None:
            self._num_unnamed += 1
            request_id = f"request-{self._num_unnamed}"
        keywords: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "lora": lora, "options": options}
        keywords["kv_transfer_params"] = kv_transfer_params
        if _is_long(prompt):
            request = await asyncio.to_thread(self._inputs.process, prompt, params, request_id=request_id, **keywords)
        else:
            request = self._inputs.process(prompt, params, request_id=request_id, **keywords)
        if request.is_enforceable is not None:
            await asyncio.wrap_future(request.is_enforceable)
        stream = _Stream(self._mailbox(), params.output_kind)
        key = self._thread.submit(request, stream)
        finished = False
        try:
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._thread.abort_one(key)

    @property
    def media(self) -> MediaProcessor | None:
        """How the model takes images, videos and sound; None: text only."""
        return self._inputs.media

    @property
    def media_limits(self) -> MediaLimits:
        """Most items of each kind in one prompt."""
        return self._inputs.media_limits

    async def place_media(
        self,
        token_ids: list[int],
        multi_modal_data: Mapping[str, Any],
        *,
        pixel_limits: tuple[int | None, int | None] = (None, None),
    ) -> PlacedPrompt:
        """The prompt with its media in place, for `generate`; computed in a thread.

        `pixel_limits`: least and most pixels of an item, in place of the model's own.

        Raises:
            InvalidRequest: media the model does not take, or that do not belong to the prompt's placeholders.
        """
        return await asyncio.to_thread(self._inputs.place, token_ids, multi_modal_data, pixel_limits=pixel_limits)

    @property
    def embedding(self) -> EmbeddingForm | None:
        """What the vectors are like, where the model makes embeddings."""
        return self._loaded.embedding

    async def embed(
        self,
        prompt: Prompt,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        lora: str | None = None,
        options: PromptOptions = DEFAULT_PROMPT_OPTIONS,
    ) -> RequestOutput:
        """The prompt's vector, as `embedding` of the output; cancelling the call aborts the request.

        Raises:
            InvalidRequest: before anything is queued; names the field.
            RequestFailed: the vector could not be made.
            EngineDeadError: the engine stopped.
        """
        if request_id is None:
            self._num_unnamed += 1
            request_id = f"request-{self._num_unnamed}"
        keywords: dict[str, Any] = {"priority": priority, "cache_salt": cache_salt, "lora": lora, "options": options}
        process = self._inputs.process_embedding
        if _is_long(prompt):
            request = await asyncio.to_thread(process, prompt, request_id=request_id, **keywords)
        else:
            request = process(prompt, request_id=request_id, **keywords)
        stream = _Stream(self._mailbox(), OutputKind.FINAL_ONLY)
        key = self._thread.submit(request, stream)
        output = None
        try:
            output = await stream.get()
        finally:
            if output is None:
                self._thread.abort_one(key)
        if output.embedding is None:
            (end,) = output.outputs
            raise RequestFailed(f"the request failed: {end.error or end.finish_reason}")
        return output

    async def chat(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a chat request: both are the objects of OpenAI's POST /v1/chat/completions.

        Tool calls and thoughts are read by the engine's `tool_parser` and `reasoning_parser`.

        Raises:
            InvalidRequest: the request cannot be served; names the field. Unknown fields are refused.
            MissingExtra: the extra `serve` is not installed.
        """
        return await self._in_process_chat().reply(request)

    def chat_stream(self, request: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The reply to a chat request in chunks as they come; closing the iterator early aborts the request.

        Raises:
            InvalidRequest: from the first step; the request cannot be served.
            MissingExtra: the extra `serve` is not installed.
        """
        return self._in_process_chat().chunks(request)

    def _in_process_chat(self) -> InProcessChat:
        if self._chat is None:
            try:
                from vkit.server.in_process import InProcessChat
            except ModuleNotFoundError as error:
                if error.name is None or error.name.split(".")[0] not in ("litestar", "prometheus_client"):
                    raise
                raise MissingExtra("AsyncLLM.chat", "serve") from None
            self._chat = InProcessChat(
                self,
                self._loaded.parsers,
                served_model_names=self._loaded.served_model_names,
                max_logprobs=self._inputs.max_logprobs,
                scheduling_policy=self._loaded.engine.settings.scheduling_policy,
                enable_lora=self._loaded.adapters is not None,
            )
        return self._chat

    async def check_structured(self, constraint: StructuredOutputs) -> None:
        """Compile a constraint away from the event loop; requests that bring it afterwards find it ready.

        Raises:
            InvalidRequest: it cannot be enforced; the message names the offender.
        """
        if self._inputs.compile_grammar is None:
            raise InvalidRequest("structured_outputs: this engine has no grammar backend", param="structured_outputs")
        await asyncio.wrap_future(self._inputs.compile_grammar(constraint))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests in whatever state they are; unknown and finished ids are passed over."""
        for name in [request_id] if isinstance(request_id, str) else request_id:
            self._thread.abort(name)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for `generate`.

        Raises:
            InvalidRequest: no template, or the template refused the messages.
        """
        return self._loaded.encode_chat(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template,
            variables=chat_template_kwargs,
        )

    # Adapters

    @property
    def loras(self) -> tuple[str, ...]:
        """Names of the loaded adapters, for `lora=` of the methods above; none where `enable_lora` is off."""
        return self._loaded.adapters.names() if self._loaded.adapters is not None else ()

    async def load_lora(self, name: str, path: str) -> None:
        """Load an adapter in PEFT's layout under a name, away from the event loop.

        Raises:
            InvalidRequest: the engine runs without adapters, or the name is taken.
            CheckpointError: the adapter is damaged, unsupported, or made for another model.
        """
        await asyncio.to_thread(self._loaded.required_adapters.load, name, Path(path))

    async def unload_lora(self, name: str) -> None:
        """Forget an adapter; requests under way finish with it.

        Raises:
            InvalidRequest: there is none of that name.
        """
        self._loaded.required_adapters.unload(name)

    # Control

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._thread.call(function))

    async def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_external: bool = False) -> bool:
        """Forget all reusable blocks. False when running requests still hold some.

        With `reset_running_requests` those give up their blocks and compute them again; with `reset_external` what a
        cache connector keeps is forgotten too.

        Raises:
            InvalidRequest: `reset_external` without a connector.
        """
        result: bool = await self._call(
            lambda engine: engine.reset_prefix_cache(
                reset_running_requests=reset_running_requests, reset_external=reset_external
            )
        )
        return result

    async def sleep(self, level: int = 1) -> None:
        """Abort what runs and give memory back: level 1 the cache, level 2 the weights too."""
        await self._call(lambda engine: engine.sleep(level))

    async def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take the memory again; requests that came meanwhile go on."""
        await self._call(lambda engine: engine.wake_up(tags))

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine gave memory back and has not taken it again."""
        return self._loaded.engine.sleep_level > 0

    async def pause_generation(self, mode: PauseMode | str = PauseMode.ABORT) -> None:
        """Hold new requests back; those under way are aborted, finished (waited for), or kept where they are."""
        chosen = PauseMode(mode)
        await self._call(lambda engine: engine.pause(chosen))
        while chosen is PauseMode.WAIT and await self._call(_has_running):
            await asyncio.sleep(0.005)

    async def resume_generation(self) -> None:
        """Go on after `pause_generation`."""
        await self._call(lambda engine: engine.resume())

    def metric_families(self) -> list[MetricFamily]:
        """A snapshot of everything the engine measures."""
        return self._loaded.engine.metric_families()

    def stats(self) -> EngineStats:
        """Gauges and counters in short."""
        return self._loaded.engine.stats()

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more requests, let running ones finish for at most `drain_s` seconds, end the rest, free all."""
        await asyncio.to_thread(self.close, drain_s)

    def close(self, drain_s: float = 0.0) -> None:
        """`shutdown` for callers without an event loop."""
        self._thread.close(drain_s=drain_s)
        self._loaded.close()

    def _mailbox(self) -> _LoopMailbox:
        loop = asyncio.get_running_loop()
        mailbox = self._mailboxes.get(loop)
        if mailbox is None:
            for closed in [other for other in self._mailboxes if other.is_closed()]:
                del self._mailboxes[closed]
            mailbox = self._mailboxes[loop] = _LoopMailbox(loop)
        return mailbox


class _LoopMailbox:
    """Wakes the streams of one event loop: one call into the loop per step, however many streams have news."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._waiting: list[_Stream] = []
        self._lock = threading.Lock()

    def add(self, stream: _Stream) -> None:
        """Have the stream woken at the next announcement."""
        with self._lock:
            self._waiting.append(stream)

    def announce(self) -> None:
        """Wake them, from the engine's thread."""
        try:
            self.loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            # The loop is closed: nobody is left to read these.
            with self._lock:
                self._waiting.clear()

    def _wake(self) -> None:
        with self._lock:
            streams, self._waiting = self._waiting, []
        for stream in streams:
            stream.event.set()


class _Stream:
    """One request's outputs between the engine's thread and its consumer; what is not taken yet is merged."""

    def __init__(self, mailbox: _LoopMailbox, kind: OutputKind) -> None:
        self.mailbox = mailbox
        self.event = asyncio.Event()
        self._kind = kind
        self._lock = threading.Lock()
        self._pending: RequestOutput | None = None
        self._error: EngineDeadError | None = None

    def put(self, output: RequestOutput) -> None:
        """Take the next output, on the engine's thread."""
        with self._lock:
            pending = self._pending
            self._pending = output if pending is None else merge_outputs(pending, output, self._kind)
        if pending is None:
            self.mailbox.add(self)

    def fail(self, error: EngineDeadError) -> None:
        """Nothing more will come."""
        self._error = error
        self.mailbox.add(self)

    async def get(self) -> RequestOutput:
        """Everything that came since the last call, as one output."""
        while True:
            with self._lock:
                output, self._pending = self._pending, None
                self.event.clear()
            if output is not None:
                return output
            if self._error is not None:
                raise self._error
            await self.event.wait()


def _has_running(engine: Engine) -> bool:
    return engine.scheduler.has_unfinished


def _is_long(prompt: Prompt) -> bool:
    """Whether preparing the prompt may take longer than an event loop should wait."""
    if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):
        return True
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return isinstance(text, str) and len(text) >= _LONG_TEXT

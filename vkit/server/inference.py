"""Requests in the engine on behalf of one HTTP call: submit, merge, count, and abort when nobody waits any more."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vkit.errors import InvalidRequest, RequestFailed
from vkit.media import PlacedPrompt
from vkit.server.engine_protocol import Engine
from vkit.server.state import ServerState
from vkit.types import (
    GRAMMAR_FAULT,
    CompletionOutput,
    FinishReason,
    OutputKind,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)

logger = logging.getLogger("vkit.server.requests")

_unique = itertools.count()


@dataclass(slots=True)
class EnginePrompt:
    """One prompt as the engine gets it. `text` is what it was tokenized from, if it was text."""

    token_ids: list[int]
    text: str | None
    params: SamplingParams
    placed: PlacedPrompt | None = None
    """The same tokens with their media, if there are any."""
    lora: str | None = None
    """The adapter to run with."""


@dataclass(slots=True)
class Delta:
    """What one choice gained."""

    prompt_index: int
    index: int
    """Among the choices of its prompt."""
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    is_first: bool


@dataclass(slots=True)
class Choice:
    """One whole choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float = 0.0


@dataclass(slots=True)
class PromptResult:
    """What became known about one prompt."""

    num_cached_tokens: int = 0
    logprobs: list[PositionLogprobs | None] | None = None
    times: RequestMetrics | None = None


def has_connector(engine: Engine) -> bool:
    """Whether the engine keeps cache entries beyond itself."""
    return engine.settings.get("kv_transfer_config") is not None


class Run:
    """The engine's work for one HTTP call. Iterate `deltas` once; closing it early aborts everything unfinished."""

    def __init__(
        self,
        state: ServerState,
        client_id: str,
        prompts: Sequence[EnginePrompt],
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        kv_transfer_params: Mapping[str, Any] | None = None,
    ) -> None:
        """`kv_transfer_params` are for the engine's cache connector; without one they have no effect."""
        self.state = state
        self.engine: Engine = state.engine
        self.client_id = client_id
        self.prompts = prompts
        self.results = [PromptResult() for _ in prompts]
        self.num_completion_tokens = 0
        self._priority = priority
        self._cache_salt = cache_salt
        self._transfer_params = kv_transfer_params if has_connector(self.engine) else None
        self.kv_transfer_params: Mapping[str, Any] | None = None
        """What the connector says to the client, once everything has finished."""
        self._ids = [f"{client_id}#{next(_unique)}" for _ in prompts]
        self._num_tokens = {(i, k): 0 for i, prompt in enumerate(prompts) for k in range(prompt.params.n)}
        self._unfinished = set(self._num_tokens)
        if state.settings.enable_log_requests:
            self._log_request()

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever its number of choices."""
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(result.num_cached_tokens for result in self.results)

    def num_tokens_of(self, prompt_index: int, index: int) -> int:
        """Tokens generated so far for one choice."""
        return self._num_tokens[prompt_index, index]

    async def deltas(self, interval: int = 1, *, kind: OutputKind = OutputKind.DELTA) -> AsyncGenerator[Delta, None]:
        """What each choice gains, as it comes; at most one delta per `interval` tokens, first and last at once.

        Raises:
            RequestFailed: a sequence ended in an error of its own.
        """
        held: dict[tuple[int, int], Delta] = {}
        outputs = self._outputs(kind)
        try:
            async for delta in outputs:
                if interval > 1:
                    key = (delta.prompt_index, delta.index)
                    merged = _merge(held.pop(key, None), delta)
                    if not (merged.is_first or merged.finish_reason or len(merged.token_ids) >= interval):
                        held[key] = merged
                        continue
                    delta = merged
                yield delta
        finally:
            await outputs.aclose()

    async def whole(self) -> list[list[Choice]]:
        """All choices of all prompts, finished."""
        choices = [[Choice() for _ in range(prompt.params.n)] for prompt in self.prompts]
        deltas = self.deltas(kind=OutputKind.FINAL_ONLY)
        try:
            async for delta in deltas:
                _extend(choices[delta.prompt_index][delta.index], delta)
        finally:
            await deltas.aclose()
        return choices

    async def _outputs(self, kind: OutputKind) -> AsyncGenerator[Delta, None]:
        state = self.state
        state.admit(len(self._unfinished))
        state.running.setdefault(self.client_id, set()).update(self._ids)
        state.num_sequences += len(self._unfinished)
        sources = [self._one(i, kind) for i in range(len(self.prompts))]
        source = sources[0] if len(sources) == 1 else _merged(sources)
        try:
            async for prompt_index, output in source:
                self._note_prompt(prompt_index, output)
                for part in output.outputs:
                    delta = self._note_part(prompt_index, part)
                    if delta is not None:
                        yield delta
            for prompt_index, index in sorted(self._unfinished):
                # The engine ended without a last word: an abort.
                yield self._end_aborted(prompt_index, index)
        finally:
            await source.aclose()
            await self._leave()

    async def _one(self, index: int, kind: OutputKind) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        prompt = self.prompts[index]
        keywords = {} if prompt.lora is None else {"lora": prompt.lora}
        outputs = self.engine.generate(
            {"prompt_token_ids": prompt.token_ids} if prompt.placed is None else prompt.placed,
            prompt.params.with_(output_kind=kind),
            request_id=self._ids[index],
            priority=self._priority,
            cache_salt=self._cache_salt,
            **keywords,
            kv_transfer_params=self._transfer_params,
        )
        try:
            async for output in outputs:
                yield index, output
        finally:
            await _close(outputs)

    async def _leave(self) -> None:
        """Free in the engine what did not finish."""
        state = self.state
        left = sorted(self._unfinished)
        for key in left:
            self._finish(key)
        for index in sorted({prompt_index for prompt_index, _ in left}):
            await self.engine.abort(self._ids[index])
        ids = state.running.get(self.client_id)
        if ids is not None:
            ids.difference_update(self._ids)
            if not ids:
                del state.running[self.client_id]

    def _log_request(self) -> None:
        limit = self.state.settings.max_log_len
        for prompt in self.prompts:
            shown = prompt.token_ids[:limit] if prompt.text is None else prompt.text[:limit]
            logger.info("%s prompt: %r, params: %s", self.client_id, shown, prompt.params)

    def _note_prompt(self, index: int, output: RequestOutput) -> None:
        result = self.results[index]
        if output.prompt_logprobs is not None:
            result.logprobs = output.prompt_logprobs
        if output.metrics is not None:
            result.times = output.metrics
        if output.kv_transfer_params is not None:
            self.kv_transfer_params = output.kv_transfer_params
        result.num_cached_tokens = max(result.num_cached_tokens, output.num_cached_tokens)

    def _note_part(self, prompt_index: int, part: CompletionOutput) -> Delta | None:
        key = (prompt_index, part.index)
        if key not in self._unfinished:
            return None
        is_first = self._num_tokens[key] == 0
        self._num_tokens[key] += len(part.token_ids)
        self.num_completion_tokens += len(part.token_ids)
        if part.finish_reason is not None:
            self._finish(key)
            if part.finish_reason is FinishReason.ERROR and part.error:
                if part.error.startswith(GRAMMAR_FAULT):  # the client's own constraint: it is told which limit it met
                    raise InvalidRequest(f"structured_outputs: {part.error}", param="structured_outputs")
                raise RequestFailed(part.error)
        elif not part.token_ids and not part.text:
            return None
        return Delta(
            prompt_index,
            part.index,
            part.text,
            part.token_ids,
            part.logprobs,
            part.finish_reason,
            part.stop_reason,
            is_first,
        )

    def _end_aborted(self, prompt_index: int, index: int) -> Delta:
        key = (prompt_index, index)
        self._finish(key)
        return Delta(prompt_index, index, "", [], None, FinishReason.ABORT, None, self._num_tokens[key] == 0)

    def _finish(self, key: tuple[int, int]) -> None:
        self._unfinished.discard(key)
        self.state.num_sequences -= 1


async def _merged(
    sources: list[AsyncGenerator[tuple[int, RequestOutput], None]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Items of all sources in the order they come."""
    queue: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue()

    async def feed(source: AsyncGenerator[tuple[int, RequestOutput], None]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as exc:  # carried to the reader, who raises it
            queue.put_nowait(exc)
        finally:
            await source.aclose()

    tasks = [asyncio.ensure_future(feed(source)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _close(outputs: AsyncIterator[RequestOutput]) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()


def _merge(before: Delta | None, delta: Delta) -> Delta:
    if before is None:
        return delta
    logprobs = before.logprobs
    if delta.logprobs is not None:
        logprobs = [*(logprobs or []), *delta.logprobs]
    return Delta(
        delta.prompt_index,
        delta.index,
        before.text + delta.text,
        [*before.token_ids, *delta.token_ids],
        logprobs,
        delta.finish_reason,
        delta.stop_reason,
        before.is_first,
    )


def _extend(choice: Choice, delta: Delta) -> None:
    choice.text += delta.text
    choice.token_ids.extend(delta.token_ids)
    if delta.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = []
        choice.logprobs.extend(delta.logprobs)
        choice.cumulative_logprob += sum(position[0].logprob for position in delta.logprobs)
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason


def best_choices(choices: list[Choice], n: int) -> list[Choice]:
    """The n choices of highest mean token log-probability, best first; all of them, in order, when there are n."""
    if len(choices) <= n:
        return choices
    ranked = sorted(choices, key=lambda choice: -choice.cumulative_logprob / max(1, len(choice.token_ids)))
    return ranked[:n]

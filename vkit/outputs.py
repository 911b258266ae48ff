"""Turns token ids back into what the caller sees: text, stop strings, deltas, log-probabilities, timings.

Knows nothing of blocks or steps. Sequences that a stop string ends are reported, so that the engine can end them too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from vkit.inputs import EngineRequest
from vkit.metrics import EngineMetrics, SequenceTimes
from vkit.sequence import Sequence, SequenceUpdate
from vkit.text.detokenizer import Detokenizer
from vkit.text.stops import StopMatcher
from vkit.text.tokenizer import Tokenizer
from vkit.types import (
    CompletionOutput,
    DraftCounts,
    FinishReason,
    Logprob,
    OutputKind,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
)


@dataclass(slots=True)
class StopFound:
    """A sequence whose text reached a stop string."""

    sequence: Sequence
    stop: str


class _Text:
    """The text of one sequence as it grows, cut at stop strings."""

    def __init__(self, tokenizer: Tokenizer, sequence: Sequence) -> None:
        params = sequence.params
        self._detokenizer = Detokenizer(
            tokenizer,
            sequence.token_ids[: sequence.num_prompt_tokens],
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
        )
        self._matcher = (
            StopMatcher(params.stop, include_stop=params.include_stop_str_in_output) if params.stop else None
        )
        self._min_tokens = params.min_tokens
        self._num_tokens = 0

    def push(self, token_id: int) -> tuple[str, str | None]:
        """New text that may be shown, and the stop string found, if any."""
        self._num_tokens += 1
        piece = self._detokenizer.push(token_id)
        if self._matcher is None or not piece:
            return piece, None
        return self._matched(piece)

    def finish(self) -> tuple[str, str | None]:
        """Text held back until now."""
        piece = self._detokenizer.finish()
        if self._matcher is None:
            return piece, None
        shown, stop = self._matched(piece) if piece else ("", None)
        return (shown, stop) if stop is not None else (shown + self._matcher.finish(), None)

    def _matched(self, piece: str) -> tuple[str, str | None]:
        assert self._matcher is not None
        push = self._matcher.push(piece, armed=self._num_tokens >= self._min_tokens)
        return push.emit, push.matched


class _Child:
    """One of a request's outputs."""

    __slots__ = (
        "cumulative_logprob",
        "finish_reason",
        "first_token_time",
        "index",
        "last_token_time",
        "logprobs",
        "sent_text",
        "sent_tokens",
        "sequence",
        "stop_reason",
        "text",
        "text_state",
        "token_ids",
    )

    def __init__(self, index: int, sequence: Sequence, text_state: _Text | None) -> None:
        self.index = index
        self.sequence = sequence
        self.text_state = text_state
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[PositionLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.first_token_time: float | None = None
        self.last_token_time: float | None = None
        self.sent_text = 0
        self.sent_tokens = 0


@dataclass(slots=True)
class RequestState:
    """A request in flight, seen from outside."""

    request: EngineRequest
    children: list[_Child]
    keeps_logprobs: bool
    """Whether the caller asked for log-probabilities (and not only the choice of the best)."""
    times: RequestMetrics
    num_unfinished: int
    sent_prompt_logprobs: bool = False
    changed: list[_Child] = field(default_factory=list)

    @property
    def num_tokens_longest(self) -> int:
        """Tokens of the longest output."""
        return max(len(child.token_ids) for child in self.children)


class OutputProcessor:
    """Follows every request from its first token to its last output."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        metrics: EngineMetrics,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._clock = clock
        self._by_sequence: dict[str, tuple[RequestState, _Child]] = {}

    @property
    def num_requests(self) -> int:
        """Sequences followed."""
        return len(self._by_sequence)

    def add(self, request: EngineRequest, sequences: list[Sequence], *, keeps_logprobs: bool) -> None:
        """Follow a request whose outputs the sequences will produce."""
        children = []
        for index, sequence in enumerate(sequences):
            has_text = self._tokenizer is not None and sequence.params.detokenize
            text = _Text(self._tokenizer, sequence) if has_text and self._tokenizer else None
            children.append(_Child(index, sequence, text))
        times = RequestMetrics(arrival_time=request.arrival_time)
        state = RequestState(request, children, keeps_logprobs, times, len(children))
        for child in children:
            self._by_sequence[child.sequence.id] = (state, child)
        params = request.params
        self._metrics.params_n.observe(params.n)
        if params.max_tokens is not None:
            self._metrics.params_max_tokens.observe(params.max_tokens)

    def process(self, updates: list[SequenceUpdate]) -> tuple[list[RequestOutput], list[StopFound]]:
        """What one step means to the callers, and the sequences that a stop string ended."""
        now = self._clock()
        stops: list[StopFound] = []
        touched: dict[int, RequestState] = {}
        for update in updates:
            entry = self._by_sequence.get(update.sequence.id)
            if entry is None:
                continue  # ended by a stop string while its next step was under way
            state, child = entry
            stop = self._advance(state, child, update, now)
            if stop is not None:
                stops.append(StopFound(child.sequence, stop))
            state.changed.append(child)
            touched[id(state)] = state
        outputs = []
        for state in touched.values():
            output = self._output(state)
            if output is not None:
                outputs.append(output)
        return outputs, stops

    def _advance(self, state: RequestState, child: _Child, update: SequenceUpdate, now: float) -> str | None:
        """Take in one sequence's news; the stop string it ran into, if any."""
        sequence = child.sequence
        if update.token_ids:
            self._observe_tokens(state, child, len(update.token_ids), now)
        stop: str | None = None
        last = len(update.token_ids) - 1
        for index, token_id in enumerate(update.token_ids):
            child.token_ids.append(token_id)
            if update.logprobs is not None:
                self._take_logprobs(child, update.logprobs[index])
            if child.text_state is None or (index == last and _is_silent(sequence, token_id)):
                continue
            piece, stop = child.text_state.push(token_id)
            if piece:
                child.text += piece
            if stop is not None:
                break
        if stop is not None:
            self._finish(state, child, FinishReason.STOP, stop, now)
        elif sequence.is_finished:
            return self._end(state, child, now)
        return stop

    def _end(self, state: RequestState, child: _Child, now: float) -> str | None:
        """The engine ended the sequence: release what was held back, unless that completes a stop string."""
        sequence = child.sequence
        assert sequence.finish_reason is not None
        reason, stop_reason = sequence.finish_reason, sequence.stop_reason
        if sequence.embedding is not None:
            self._observe_prefill(state, child)
        if child.text_state is not None:
            piece, stop = child.text_state.finish()
            child.text += piece
            if stop is not None:
                reason, stop_reason = FinishReason.STOP, stop
        self._finish(state, child, reason, stop_reason, now)
        return None

    def _finish(
        self, state: RequestState, child: _Child, reason: FinishReason, stop_reason: int | str | None, now: float
    ) -> None:
        sequence = child.sequence
        child.finish_reason, child.stop_reason = reason, stop_reason
        del self._by_sequence[sequence.id]
        state.num_unfinished -= 1
        times = state.times
        times.num_preemptions += sequence.num_preemptions
        times.drafts += DraftCounts(sequence.num_verifications, sequence.num_draft_tokens, sequence.num_accepted_tokens)
        self._metrics.observe_finished(
            SequenceTimes(
                reason=reason,
                arrival=times.arrival_time,
                first_scheduled=sequence.first_scheduled_time,
                first_token=child.first_token_time,
                last_token=child.last_token_time,
                finished=now,
                num_output_tokens=len(child.token_ids),
                num_preemptions=sequence.num_preemptions,
            )
        )
        if state.num_unfinished == 0:
            times.finished_time = now
            self._metrics.request_max_tokens.observe(state.num_tokens_longest)

    def _observe_tokens(self, state: RequestState, child: _Child, count: int, now: float) -> None:
        metrics = self._metrics
        metrics.generation_tokens.value += count
        times = state.times
        if child.last_token_time is None:
            child.first_token_time = now
            metrics.first_token.observe(now - times.arrival_time)
            if times.first_token_time is None:
                self._observe_prefill(state, child)
                times.first_token_time = now
        else:
            metrics.inter_token.observe((now - child.last_token_time) / count, count)
        child.last_token_time = times.last_token_time = now

    def _observe_prefill(self, state: RequestState, child: _Child) -> None:
        """Book the request's prompt, once, when the first of its sequences has computed it."""
        sequence = child.sequence
        metrics = self._metrics
        num_prompt, num_cached = sequence.num_prompt_tokens, sequence.num_cached_tokens
        state.times.first_scheduled_time = sequence.first_scheduled_time
        metrics.prompt_tokens.add(num_prompt)
        metrics.prompt_tokens_by_source.add(num_prompt - num_cached, "local_compute")
        num_external = min(sequence.num_external_tokens, num_cached)
        metrics.prompt_tokens_by_source.add(num_cached - num_external, "local_cache_hit")
        metrics.prompt_tokens_by_source.add(num_external, "external_kv_transfer")
        metrics.prompt_tokens_cached.add(num_cached)
        metrics.prompt_tokens_cached_by_source.add(num_cached - num_external, "device")
        metrics.prompt_tokens_cached_by_source.add(num_external, sequence.external_source)
        metrics.request_prompt_tokens.observe(num_prompt)
        metrics.computed_tokens.observe(num_prompt - num_cached)

    def _take_logprobs(self, child: _Child, position: PositionLogprobs) -> None:
        child.cumulative_logprob += position[0].logprob
        child.logprobs.append(self._with_text(position))

    def _with_text(self, position: PositionLogprobs) -> PositionLogprobs:
        if self._tokenizer is None:
            return position
        text = self._tokenizer.token_text
        return [Logprob(entry.token_id, entry.logprob, entry.rank, text(entry.token_id)) for entry in position]

    # What goes out

    def _output(self, state: RequestState) -> RequestOutput | None:
        changed, state.changed = state.changed, []
        finished = state.num_unfinished == 0
        kind = state.request.params.output_kind
        if kind is OutputKind.FINAL_ONLY:
            if not finished:
                return None
            shown = self._ranked(state)
            completions = [self._completion(state, child, index) for index, child in enumerate(shown)]
        elif kind is OutputKind.CUMULATIVE:
            completions = [self._completion(state, child, child.index) for child in state.children]
        else:
            completions = [self._delta(state, child) for child in dict.fromkeys(changed)]
        first = state.children[0].sequence
        return RequestOutput(
            request_id=state.request.id,
            prompt=state.request.prompt,
            prompt_token_ids=state.request.prompt_token_ids,
            outputs=completions,
            finished=finished,
            prompt_logprobs=self._prompt_logprobs(state, first),
            num_cached_tokens=first.num_cached_tokens,
            metrics=state.times,
            kv_transfer_params=first.kv_transfer_reply if finished else None,
            embedding=first.embedding,
        )

    @staticmethod
    def _ranked(state: RequestState) -> list[_Child]:
        """The n outputs to return: all, or the likeliest of best_of, best first."""
        params = state.request.params
        if params.best_of is None or params.best_of <= params.n:
            return state.children

        def mean_logprob(child: _Child) -> float:
            return child.cumulative_logprob / max(1, len(child.token_ids))

        return sorted(state.children, key=mean_logprob, reverse=True)[: params.n]

    @staticmethod
    def _completion(state: RequestState, child: _Child, index: int) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text=child.text,
            token_ids=list(child.token_ids),
            cumulative_logprob=child.cumulative_logprob if state.keeps_logprobs else None,
            logprobs=list(child.logprobs) if state.keeps_logprobs else None,
            finish_reason=child.finish_reason,
            stop_reason=child.stop_reason,
            error=child.sequence.error,
        )

    @staticmethod
    def _delta(state: RequestState, child: _Child) -> CompletionOutput:
        text, child.sent_text = child.text[child.sent_text :], len(child.text)
        start, child.sent_tokens = child.sent_tokens, len(child.token_ids)
        return CompletionOutput(
            index=child.index,
            text=text,
            token_ids=child.token_ids[start:],
            cumulative_logprob=child.cumulative_logprob if state.keeps_logprobs else None,
            logprobs=child.logprobs[start:] if state.keeps_logprobs else None,
            finish_reason=child.finish_reason,
            stop_reason=child.stop_reason,
            error=child.sequence.error,
        )

    def _prompt_logprobs(self, state: RequestState, first: Sequence) -> list[PositionLogprobs | None] | None:
        """Once complete; with deltas, in the first output only."""
        if first.params.prompt_logprobs is None or first.wants_prompt_logprobs:
            return None
        if state.request.params.output_kind is OutputKind.DELTA and state.sent_prompt_logprobs:
            return None
        state.sent_prompt_logprobs = True
        return [None if entry is None else self._with_text(entry) for entry in first.prompt_logprobs]


def _is_silent(sequence: Sequence, token_id: int) -> bool:
    """Whether the last token only ended the output and has no text of its own."""
    if sequence.finish_reason is not FinishReason.STOP:
        return False
    if sequence.stop_reason is None:
        return token_id == sequence.eos_token_id  # else a grammar is complete, and the token is its last
    return not sequence.params.include_stop_str_in_output


def merge_outputs(earlier: RequestOutput, later: RequestOutput, kind: OutputKind) -> RequestOutput:
    """One output that stands for two that a slow consumer has not taken yet."""
    if kind is not OutputKind.DELTA:
        return later
    merged = {completion.index: completion for completion in earlier.outputs}
    for completion in later.outputs:
        before = merged.get(completion.index)
        if before is not None:
            logprobs = None if completion.logprobs is None else (before.logprobs or []) + completion.logprobs
            completion = replace(
                completion,
                text=before.text + completion.text,
                token_ids=before.token_ids + completion.token_ids,
                logprobs=logprobs,
            )
        merged[completion.index] = completion
    return replace(
        later,
        outputs=[merged[index] for index in sorted(merged)],
        prompt_logprobs=later.prompt_logprobs if later.prompt_logprobs is not None else earlier.prompt_logprobs,
    )

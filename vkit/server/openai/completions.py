"""POST /v1/completions and its render twin: text or token ids in, text out, for lists of prompts."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.inference import Choice, Delta, EnginePrompt, Run, best_choices
from vkit.server.openai.beam import beam_search
from vkit.server.openai.logprobs import LogprobWriter, floored, prompt_logprobs
from vkit.server.openai.render import rendered
from vkit.server.openai.schemas import (
    CompletionBody,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionReply,
    LegacyLogprobs,
)
from vkit.server.openai.shared import (
    check_stream_options,
    check_thinking_budget,
    effective_priority,
    note_no_effect,
    now,
    timings_of,
    usage_of,
    wants_usage,
    with_load_header,
    with_thinking_marks,
)
from vkit.server.parsing import ReplyContext
from vkit.server.problems import bad_request
from vkit.server.prompts import check_token_ids, encode
from vkit.server.sampling import (
    Wanted,
    build_params,
    check_common,
    check_logprobs,
    check_max_tokens,
    check_n,
    check_priority,
    room_for,
    truncate_prompt,
)
from vkit.server.schema import UNSET, Unset, Usage
from vkit.server.stream import data_frame, ending_with_done
from vkit.server.structured import asked_by, check_enforceable
from vkit.types import PositionLogprobs

logger = logging.getLogger("vkit.server.requests")

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 1024


@dataclass(slots=True)
class Prepared:
    """A validated request."""

    body: CompletionBody
    model: str
    prompts: list[EnginePrompt]
    echoes: list[str]
    """Text that `echo` repeats, per prompt; empty strings without echo."""
    n: int
    priority: int
    is_echo_only: bool
    """Nothing is generated: echo with max_tokens 0."""


async def completions(call: Call) -> Response[Any]:
    """Generate after each prompt."""
    body = await call.body(CompletionBody)
    prepared = await prepare(call, body)
    if body.use_beam_search:
        return await _beam_reply(call, prepared)
    if prepared.is_echo_only and not _wants_prompt_values(body):
        return _echo_reply(call, prepared)
    run = Run(
        call.state,
        f"cmpl-{call.rid}",
        prepared.prompts,
        priority=prepared.priority,
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )
    if body.stream:
        return await call.events(_chunks(call, prepared, run), ending_with_done)
    choices = await call.while_connected(run.whole())
    reply = _whole_reply(call, prepared, run, choices)
    return call.json(reply, headers=with_load_header(call, {}))


async def render_completions(call: Call) -> Response[Any]:
    """The prompts and parameters that /v1/completions would run."""
    body = await call.body(CompletionBody)
    if body.use_beam_search:
        raise bad_request("use_beam_search: cannot be rendered as one generate request", "use_beam_search")
    prepared = await prepare(call, body)
    tokenizer = call.state.engine.tokenizer
    many = len(prepared.prompts) > 1
    items = [
        rendered(
            call,
            f"cmpl-{call.rid}-{i}" if many else f"cmpl-{call.rid}",
            prepared.model,
            prompt,
            tokenizer,
            body,
            priority=prepared.priority,
        )
        for i, prompt in enumerate(prepared.prompts)
    ]
    return call.json(items)


async def prepare(call: Call, body: CompletionBody) -> Prepared:
    """The request, validated and tokenized.

    Raises:
        Problem: 400 or 404.
    """
    state = call.state
    model = state.served_name(body.model)
    check_common(body, call.settings)
    check_stream_options(body)
    check_thinking_budget(call, body.thinking_token_budget)
    _refuse_unsupported(body)
    n, best_of = check_n(body, call.settings)
    note_no_effect(call, body)
    priority = effective_priority(call, body.priority)
    check_priority(priority, call.settings)
    asked = asked_by(body)
    if asked is not None and body.use_beam_search:
        raise bad_request(f"use_beam_search: cannot be combined with {asked.field}", "use_beam_search")
    wanted = _wanted(call, body, best_of)
    engine = state.engine
    texts_or_ids = _prompt_list(body)
    wanted = replace(wanted, structured_outputs=await check_enforceable(call, asked))
    prompts: list[EnginePrompt] = []
    echoes: list[str] = []
    for item in texts_or_ids:
        text, token_ids = await _tokenized(call, body, item)
        if not token_ids:
            raise bad_request("prompt: must have at least one token", "prompt")
        token_ids = truncate_prompt(token_ids, body, engine.max_model_len)
        room = room_for(len(token_ids), engine.max_model_len, "prompt")
        params = build_params(body, wanted, state.defaults.values, room, engine.tokenizer)
        if params.thinking_token_budget is not None:
            seen = engine.tokenizer.decode(token_ids, skip_special_tokens=False) if text is None else text
            params = with_thinking_marks(call, params, ReplyContext(seen, token_ids))
        prompts.append(EnginePrompt(token_ids, text, params, lora=state.lora_of(body.model)))
        if body.echo:
            echoes.append(engine.tokenizer.decode(token_ids, skip_special_tokens=False) if text is None else text)
        else:
            echoes.append("")
    return Prepared(body, model, prompts, echoes, n, priority, bool(body.echo) and body.max_tokens == 0)


def _refuse_unsupported(body: CompletionBody) -> None:
    if body.prompt_embeds is not None:
        raise bad_request("prompt_embeds: embeddings as prompts are not supported", "prompt_embeds")
    if body.suffix is not None:
        # No tokenizer tells us its fill-in-the-middle tokens, so text after the prompt cannot be shown to the model.
        raise bad_request("suffix: this model has no fill-in-the-middle tokens", "suffix")
    if body.stream and body.prompt_logprobs not in (None, 0):
        raise bad_request("prompt_logprobs: not available with stream: true", "prompt_logprobs")
    if body.use_beam_search:
        for name, clash in (
            ("stream", body.stream),
            ("logprob_token_ids", body.logprob_token_ids),
            ("echo", body.echo),
            ("thinking_token_budget", body.thinking_token_budget is not None),
        ):
            if clash:
                raise bad_request(f"use_beam_search: cannot be combined with {name}", "use_beam_search")
    elif body.length_penalty is not None:
        raise bad_request("length_penalty: only used with use_beam_search", "length_penalty")


def _wanted(call: Call, body: CompletionBody, best_of: int) -> Wanted:
    engine = call.state.engine
    low = 0 if body.echo else 1
    max_tokens = check_max_tokens(body.max_tokens, engine.max_model_len, "max_tokens", low=low)
    if max_tokens is None:
        max_tokens = DEFAULT_MAX_TOKENS
    logprobs = check_logprobs(body.logprobs, call.settings, "logprobs")
    asked_prompt = check_logprobs(body.prompt_logprobs, call.settings, "prompt_logprobs")
    if body.echo and logprobs is not None:
        asked_prompt = logprobs if asked_prompt is None else max(asked_prompt, logprobs)
    if best_of > (body.n or 1) and logprobs is None:
        logprobs = 0  # candidates are ranked by the log-probability of their tokens
    return Wanted(
        n=best_of,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=asked_prompt,
    )


def _prompt_list(body: CompletionBody) -> list[str | list[int]]:
    prompt = body.prompt
    if prompt is None:
        raise bad_request("prompt: this field is required", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt: must not be an empty list", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise bad_request("prompt: a list must hold only strings, only token ids or only lists of token ids", "prompt")
    if kinds == {int}:
        return [[int(item) for item in prompt if isinstance(item, int)]]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt: at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return [item for item in prompt if not isinstance(item, int)]


async def _tokenized(call: Call, body: CompletionBody, item: str | list[int]) -> tuple[str | None, list[int]]:
    tokenizer = call.state.engine.tokenizer
    if isinstance(item, str):
        adds_special = body.add_special_tokens is not False
        return item, await encode(tokenizer, item, add_special_tokens=adds_special, parse_special=True)
    check_token_ids(item, tokenizer.vocab_size, "prompt")
    return None, list(item)


def _wants_prompt_values(body: CompletionBody) -> bool:
    return body.logprobs is not None or body.prompt_logprobs is not None


class _Writer:
    """Turns choices and deltas of one request into reply parts."""

    def __init__(self, call: Call, prepared: Prepared) -> None:
        body = prepared.body
        self.body = body
        self.prepared = prepared
        self.tokenizer = call.state.engine.tokenizer
        self.as_token_ids = bool(body.return_tokens_as_token_ids or call.settings.return_tokens_as_token_ids)
        self._by_choice: dict[tuple[int, int], LogprobWriter] = {}

    def _logprob_writer(self, key: tuple[int, int]) -> LogprobWriter:
        if key not in self._by_choice:
            self._by_choice[key] = LogprobWriter(
                self.tokenizer,
                self.body.logprobs,
                as_token_ids=self.as_token_ids,
                only_listed=self.body.logprob_token_ids is not None,
            )
        return self._by_choice[key]

    def logprobs(
        self,
        key: tuple[int, int],
        token_ids: list[int],
        positions: list[PositionLogprobs] | None,
        echoed: list[PositionLogprobs | None] | None,
    ) -> LegacyLogprobs | None:
        """The legacy object over echoed prompt tokens, then generated ones."""
        if self.body.logprobs is None:
            return None
        prompt_ids = self.prepared.prompts[key[0]].token_ids if echoed is not None else []
        all_positions: list[PositionLogprobs | None] = [*(echoed or []), *(positions or [])]
        return self._logprob_writer(key).legacy(all_positions, [*prompt_ids, *token_ids])

    def prompt_values(self, run: Run, prompt_index: int) -> Any:
        """`prompt_logprobs` of a choice, when asked for by name."""
        if self.body.prompt_logprobs is None:
            return None
        return prompt_logprobs(run.results[prompt_index].logprobs, self.tokenizer, as_token_ids=self.as_token_ids)


def _whole_reply(call: Call, prepared: Prepared, run: Run, choices: list[list[Choice]]) -> CompletionReply:
    writer = _Writer(call, prepared)
    replies: list[CompletionChoice] = []
    for i, candidates in enumerate(choices):
        for k, choice in enumerate(best_choices(candidates, prepared.n)):
            replies.append(_choice_reply(writer, run, i, k, choice))
    num_completion = 0 if prepared.is_echo_only else run.num_completion_tokens
    usage = usage_of(call, prepared.body, run.num_prompt_tokens, num_completion, run.num_cached_tokens)
    log_outputs(call, [choice.text for choice in replies])
    return _reply(call, prepared, replies, usage, run)


def _choice_reply(writer: _Writer, run: Run, i: int, k: int, choice: Choice) -> CompletionChoice:
    prepared, body = writer.prepared, writer.body
    if prepared.is_echo_only:  # one token was computed to get at the prompt's values; it is not part of the reply
        choice = Choice(finish_reason=choice.finish_reason)
    echoed = run.results[i].logprobs if body.echo else None
    return CompletionChoice(
        index=i * prepared.n + k,
        text=prepared.echoes[i] + choice.text,
        logprobs=writer.logprobs((i, k), choice.token_ids, choice.logprobs, echoed),
        finish_reason="length" if prepared.is_echo_only else choice.finish_reason,
        stop_reason=choice.stop_reason,
        token_ids=choice.token_ids if body.return_token_ids else None,
        prompt_token_ids=prepared.prompts[i].token_ids if body.return_token_ids else None,
        prompt_logprobs=writer.prompt_values(run, i),
    )


def _reply(
    call: Call, prepared: Prepared, choices: list[CompletionChoice], usage: Usage, run: Run | None
) -> CompletionReply:
    return CompletionReply(
        id=f"cmpl-{call.rid}",
        created=now(),
        model=prepared.model,
        system_fingerprint=call.state.system_fingerprint,
        choices=choices,
        usage=usage,
        metrics=None if run is None else timings_of(call, run),
        kv_transfer_params=None if run is None or run.kv_transfer_params is None else dict(run.kv_transfer_params),
    )


def _echo_reply(call: Call, prepared: Prepared) -> Response[Any]:
    """The prompts back, with nothing computed."""
    body = prepared.body
    choices = [
        CompletionChoice(
            index=i * prepared.n + k,
            text=prepared.echoes[i],
            logprobs=None,
            finish_reason="length",
            stop_reason=None,
            token_ids=[] if body.return_token_ids else None,
            prompt_token_ids=prompt.token_ids if body.return_token_ids else None,
        )
        for i, prompt in enumerate(prepared.prompts)
        for k in range(prepared.n)
    ]
    num_prompt = sum(len(prompt.token_ids) for prompt in prepared.prompts)
    usage = usage_of(call, body, num_prompt, 0, 0)
    if not body.stream:
        return call.json(_reply(call, prepared, choices, usage, None))

    async def frames() -> AsyncGenerator[bytes, None]:
        base = _Chunk(call, prepared)
        for choice in choices:
            part = CompletionChunkChoice(choice.index, choice.text, None, "length", None)
            if body.return_token_ids:
                part.token_ids, part.prompt_token_ids = [], choice.prompt_token_ids or []
            yield data_frame(base.chunk([part], is_last=True))
        if wants_usage(call, body)[0]:
            yield data_frame(base.chunk([], usage=usage))

    from vkit.server.stream import EventStream

    return EventStream(ending_with_done(frames()), call.headers())


class _Chunk:
    """What all chunks of one stream share."""

    def __init__(self, call: Call, prepared: Prepared) -> None:
        self.id = f"cmpl-{call.rid}"
        self.created = now()
        self.model = prepared.model
        self.fingerprint = call.state.system_fingerprint

    def chunk(
        self, choices: list[CompletionChunkChoice], *, usage: Usage | Unset = UNSET, is_last: bool = False
    ) -> CompletionChunk:
        """One frame's payload."""
        return CompletionChunk(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
            system_fingerprint=self.fingerprint if is_last else UNSET,
        )


async def _chunks(call: Call, prepared: Prepared, run: Run) -> AsyncGenerator[bytes, None]:
    body = prepared.body
    writer = _Writer(call, prepared)
    base = _Chunk(call, prepared)
    with_usage, always_usage = wants_usage(call, body)
    shows_every_token = body.logprobs is not None or bool(body.return_token_ids) or always_usage
    outputs: dict[tuple[int, int], list[str]] = {}
    deltas = run.deltas(body.stream_interval or 1)
    try:
        async for delta in deltas:
            if not (delta.text or delta.is_first or delta.finish_reason or shows_every_token):
                continue
            outputs.setdefault((delta.prompt_index, delta.index), []).append(delta.text)
            part = _chunk_choice(writer, run, delta)
            usage: Usage | Unset = UNSET
            if always_usage:
                num_prompt = len(prepared.prompts[delta.prompt_index].token_ids)
                num_tokens = 0 if prepared.is_echo_only else run.num_tokens_of(delta.prompt_index, delta.index)
                cached = run.results[delta.prompt_index].num_cached_tokens
                usage = usage_of(call, body, num_prompt, num_tokens, cached)
            chunk = base.chunk([part], usage=usage, is_last=delta.finish_reason is not None)
            if delta.finish_reason is not None:
                timed = timings_of(call, run)
                chunk.metrics = UNSET if timed is None else timed
            yield data_frame(chunk)
    finally:
        await deltas.aclose()
        log_outputs(call, ["".join(parts) for parts in outputs.values()])
    if with_usage:
        num_completion = 0 if prepared.is_echo_only else run.num_completion_tokens
        usage = usage_of(call, body, run.num_prompt_tokens, num_completion, run.num_cached_tokens)
        yield data_frame(base.chunk([], usage=usage))


def _chunk_choice(writer: _Writer, run: Run, delta: Delta) -> CompletionChunkChoice:
    prepared, body = writer.prepared, writer.body
    i = delta.prompt_index
    text, token_ids, positions = delta.text, delta.token_ids, delta.logprobs
    finish_reason: str | None = delta.finish_reason
    if prepared.is_echo_only:
        text, token_ids, positions = "", [], None
        finish_reason = None if finish_reason is None else "length"
    echoed = run.results[i].logprobs if body.echo and delta.is_first else None
    part = CompletionChunkChoice(
        index=i * prepared.n + delta.index,
        text=prepared.echoes[i] + text if delta.is_first else text,
        logprobs=writer.logprobs((i, delta.index), token_ids, positions, echoed),
        finish_reason=finish_reason,
        stop_reason=delta.stop_reason,
    )
    if body.return_token_ids:
        part.token_ids = token_ids
    if delta.is_first:
        if body.return_token_ids:
            part.prompt_token_ids = prepared.prompts[i].token_ids
        values = writer.prompt_values(run, i)
        if values is not None:
            part.prompt_logprobs = values
    return part


async def _beam_reply(call: Call, prepared: Prepared) -> Response[Any]:
    writer = _Writer(call, prepared)
    choices: list[CompletionChoice] = []
    num_completion = 0
    for i, prompt in enumerate(prepared.prompts):
        beams = await call.while_connected(
            beam_search(call.state, f"cmpl-{call.rid}", prompt, prepared.n, prepared.body, prepared.priority)
        )
        for k, beam in enumerate(beams):
            num_completion += len(beam.token_ids)
            choices.append(
                CompletionChoice(
                    index=i * prepared.n + k,
                    text=beam.text,
                    logprobs=writer.logprobs((i, k), beam.token_ids, beam.logprobs, None),
                    finish_reason=beam.finish_reason,
                    stop_reason=None,
                    token_ids=beam.token_ids if prepared.body.return_token_ids else None,
                    prompt_token_ids=prompt.token_ids if prepared.body.return_token_ids else None,
                )
            )
    num_prompt = sum(len(prompt.token_ids) for prompt in prepared.prompts)
    usage = usage_of(call, prepared.body, num_prompt, num_completion, 0)
    return call.json(_reply(call, prepared, choices, usage, None))


def log_outputs(call: Call, texts: list[str]) -> None:
    """Log what was generated, when the operator asked for it."""
    if call.settings.enable_log_outputs:
        limit = call.settings.max_log_len
        for text in texts:
            logger.info("%s output: %r", call.rid, text[:limit])


__all__ = ["completions", "floored", "prepare", "render_completions"]

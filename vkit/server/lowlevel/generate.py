"""POST /inference/v1/generate: token ids in, token ids out. POST /inference/v1/abort_requests."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.inference import Choice, Delta, EnginePrompt, Run, has_connector
from vkit.server.lowlevel.schemas import (
    AbortBody,
    AbortReply,
    Candidate,
    GenerateBody,
    GenerateChoice,
    GenerateChunk,
    GeneratedLogprob,
    GenerateLogprobs,
    GenerateReply,
    SamplingParamsBody,
)
from vkit.server.openai.logprobs import LogprobWriter, floored, prompt_logprobs
from vkit.server.openai.schemas import ChatMessage, ChatTokenLogprob, FunctionCall, ToolCallReply
from vkit.server.openai.shared import (
    check_thinking_budget,
    effective_priority,
    now,
    timings_of,
    usage_of,
    with_load_header,
    with_thinking_marks,
)
from vkit.server.parsing import ReplyContext
from vkit.server.problems import bad_request
from vkit.server.prompts import check_token_ids
from vkit.server.sampling import (
    Wanted,
    check_cache_salt,
    check_logprobs,
    check_max_tokens,
    check_priority,
    finish_params,
    logit_bias,
    repetition_detection,
    room_for,
)
from vkit.server.schema import SamplingBody
from vkit.server.stream import data_frame, ending_with_done
from vkit.server.structured import Asked, after_reasoning, check_enforceable, from_body
from vkit.types import FinishReason, PositionLogprobs, SamplingParams

OUTPUT_MODES = ("tokens", "text", "derender")
ID_PREFIXES = ("", "cmpl-", "chatcmpl-", "generate-tokens-", "msg_", "resp_", "generative-scoring-")

_PLAIN_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "logprob_token_ids"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words"),
    *("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"),
    *("thinking_token_budget", "detokenize"),
)


@dataclass(slots=True)
class Prepared:
    """A validated request."""

    body: GenerateBody
    model: str
    mode: str
    prompt: EnginePrompt
    priority: int


async def generate(call: Call) -> Response[Any]:
    """Continue token ids."""
    body = await call.body(GenerateBody)
    prepared = await _prepare(call, body)
    run = Run(
        call.state,
        f"generate-tokens-{call.rid}",
        [prepared.prompt],
        priority=prepared.priority,
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )
    if body.stream:
        return await call.events(_chunks(call, prepared, run), ending_with_done)
    choices = (await call.while_connected(run.whole()))[0]
    return call.json(_whole_reply(call, prepared, run, choices), headers=with_load_header(call, {}))


async def _prepare(call: Call, body: GenerateBody) -> Prepared:
    state = call.state
    model = state.served_name(body.model)
    mode = body.output_mode or "tokens"
    if mode not in OUTPUT_MODES:
        raise bad_request(f"output_mode: expected one of {', '.join(OUTPUT_MODES)}, got {mode[:50]!r}", "output_mode")
    _refuse_unsupported(call, body, mode)
    check_cache_salt(body.cache_salt)
    priority = effective_priority(call, body.priority)
    check_priority(priority, call.settings)
    if body.kv_transfer_params is not None and not has_connector(state.engine):
        call.ignored.append("kv_transfer_params")
    if body.ec_transfer_params is not None:
        call.ignored.append("ec_transfer_params")
    engine = state.engine
    if not body.token_ids:
        raise bad_request("token_ids: must not be empty", "token_ids")
    check_token_ids(body.token_ids, engine.tokenizer.vocab_size, "token_ids")
    room = room_for(len(body.token_ids), engine.max_model_len, "token_ids")
    params = _params(call, body.sampling_params, room)
    if params.thinking_token_budget is not None:
        params = _with_budget(call, body, params)
    constraint = from_body(body.sampling_params.structured_outputs)
    if constraint is not None:
        asked = Asked(constraint, "structured_outputs")
        if body.reasoning_ended is False:
            asked = after_reasoning(call, asked, _context_of(body))
        params = params.with_(structured_outputs=await check_enforceable(call, asked))
    return Prepared(
        body,
        model,
        mode,
        EnginePrompt(list(body.token_ids), body.prompt_text, params, lora=state.lora_of(body.model)),
        priority,
    )


def _refuse_unsupported(call: Call, body: GenerateBody, mode: str) -> None:
    detokenizes = body.sampling_params.detokenize is not False
    if mode in ("text", "derender") and not detokenizes:
        raise bad_request(f"output_mode: {mode} needs detokenize: true", "output_mode")
    if mode == "derender":
        if body.stream:
            raise bad_request("output_mode: derender cannot be streamed", "output_mode")
        parsers = call.state.parsers
        if body.parse_context is None and (parsers.parses_tools or parsers.parses_reasoning):
            raise bad_request("parse_context: derender needs the parse_context of render", "parse_context")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options: only allowed with stream: true", "stream_options")
    if body.features is not None and body.content_parts is not None:
        raise bad_request("features: cannot be combined with content_parts", "features")
    for name in ("features", "content_parts"):
        if getattr(body, name):
            raise bad_request(f"{name}: this model takes no media", name)
    check_thinking_budget(
        call, body.sampling_params.thinking_token_budget, field="sampling_params.thinking_token_budget"
    )


def _with_budget(call: Call, body: GenerateBody, params: SamplingParams) -> SamplingParams:
    """The parameters with the marks to count between: those of the rendered request, as far as it says."""
    if body.reasoning_ended:
        return params.with_(thinking_token_budget=None)
    context = _context_of(body)
    if not context.prompt_text:
        text = call.state.engine.tokenizer.decode(body.token_ids, skip_special_tokens=False)
        context = replace(context, prompt_text=text)
    return with_thinking_marks(call, params, context)


def _params(call: Call, body: SamplingParamsBody, room: int) -> Any:
    """Engine parameters; engine defaults apply, not the checkpoint's."""
    settings, engine = call.settings, call.state.engine
    n = 1 if body.n is None else body.n
    if not 1 <= n <= settings.max_n:
        raise bad_request(f"n: must be in 1..{settings.max_n}, got {n}", "n")
    if body.stream_interval is not None and body.stream_interval < 1:
        raise bad_request("stream_interval: must be at least 1", "stream_interval")
    if isinstance(body.stop, list) and len(body.stop) > 16:
        raise bad_request(f"stop: at most 16 strings, got {len(body.stop)}", "stop")
    values: dict[str, Any] = {name: getattr(body, name) for name in _PLAIN_FIELDS if getattr(body, name) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = logit_bias(body.logit_bias)
    if body.repetition_detection is not None:
        values["repetition_detection"] = repetition_detection(
            SamplingBody(repetition_detection=body.repetition_detection)
        )
    wanted = Wanted(
        n=n,
        max_tokens=check_max_tokens(body.max_tokens, engine.max_model_len, "max_tokens"),
        logprobs=check_logprobs(body.logprobs, settings, "logprobs"),
        prompt_logprobs=check_logprobs(body.prompt_logprobs, settings, "prompt_logprobs"),
    )
    return finish_params(values, body.min_tokens, wanted, room, engine.tokenizer)


class _Writer:
    """Choices of one request, in the mode asked for."""

    def __init__(self, call: Call, prepared: Prepared) -> None:
        self.call = call
        self.prepared = prepared
        self.tokenizer = call.state.engine.tokenizer
        self.as_token_ids = call.settings.return_tokens_as_token_ids

    def logprobs(self, positions: list[PositionLogprobs] | None) -> GenerateLogprobs | None:
        """By token id, or as strings in text mode."""
        num_top = self.prepared.prompt.params.logprobs
        if num_top is None or positions is None:
            return None
        if self.prepared.mode != "tokens":
            writer = LogprobWriter(self.tokenizer, num_top, as_token_ids=self.as_token_ids, only_listed=True)
            return GenerateLogprobs([_text_logprob(writer.chat_token(position)) for position in positions])
        return GenerateLogprobs([_token_id_logprob(position) for position in positions])

    def choice(self, index: int, choice: Choice | Delta) -> GenerateChoice:
        """One choice, or what it gained."""
        made = GenerateChoice(
            index=index,
            token_ids=choice.token_ids,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            logprobs=self.logprobs(choice.logprobs),
        )
        if self.prepared.prompt.params.detokenize:
            made.text = choice.text
        return made

    def message(self, choice: Choice) -> ChatMessage:
        """The choice as a parsed chat message."""
        prepared = self.prepared
        context = prepared.body.parse_context or {}
        parser = self.call.state.parsers.open(_context_of(prepared.body))
        parsed = parser.parse(choice.text, choice.token_ids, was_cut=choice.finish_reason is FinishReason.LENGTH)
        reasoning = parsed.reasoning if context.get("include_reasoning") is not False else None
        message = ChatMessage(
            role="assistant", content=parsed.content, reasoning=reasoning, reasoning_content=reasoning
        )
        if parsed.tool_calls:
            message.tool_calls = [
                ToolCallReply(id=item.id, function=FunctionCall(item.name, item.arguments))
                for item in parsed.tool_calls
            ]
        return message


def _context_of(body: GenerateBody) -> ReplyContext:
    """The chat request that was rendered to this one, as far as it says."""
    context = body.parse_context or {}
    return ReplyContext(
        body.prompt_text or "",
        body.token_ids,
        tuple(context.get("tools") or ()),
        str(context.get("tool_choice") or "none"),
        context.get("tool_name"),
        context.get("parallel_tool_calls") is not False,
        context.get("chat_template_kwargs") or {},
    )


def _token_id_logprob(position: PositionLogprobs) -> GeneratedLogprob:
    own = position[0]
    candidates = list({item.token_id: item for item in reversed(position)}.values())
    others = sorted((item for item in candidates if item.token_id != own.token_id), key=lambda item: item.rank)
    listed = [
        Candidate(token_id=item.token_id, logprob=floored(item.logprob), rank=item.rank) for item in (own, *others)
    ]
    return GeneratedLogprob(token_id=own.token_id, logprob=floored(own.logprob), rank=own.rank, top_logprobs=listed)


def _text_logprob(entry: ChatTokenLogprob) -> GeneratedLogprob:
    listed = [Candidate(token=item.token, logprob=item.logprob, bytes=item.bytes or []) for item in entry.top_logprobs]
    return GeneratedLogprob(token=entry.token, logprob=entry.logprob, bytes=entry.bytes or [], top_logprobs=listed)


def _whole_reply(call: Call, prepared: Prepared, run: Run, choices: list[Choice]) -> GenerateReply:
    writer = _Writer(call, prepared)
    replies: list[GenerateChoice] = []
    for k, choice in enumerate(choices):
        made = writer.choice(k, choice)
        if prepared.mode == "derender":
            made.message = writer.message(choice)
        replies.append(made)
    return GenerateReply(
        request_id=f"generate-tokens-{call.rid}",
        model=prepared.model,
        created=now(),
        output_mode=prepared.mode,
        choices=replies,
        usage=usage_of(call, None, run.num_prompt_tokens, run.num_completion_tokens, run.num_cached_tokens),
        prompt_logprobs=prompt_logprobs(run.results[0].logprobs, writer.tokenizer, as_token_ids=writer.as_token_ids)
        if prepared.prompt.params.prompt_logprobs is not None
        else None,
        prompt_token_ids=prepared.prompt.token_ids if prepared.body.return_token_ids else None,
        metrics=timings_of(call, run),
        kv_transfer_params=None if run.kv_transfer_params is None else dict(run.kv_transfer_params),
    )


async def _chunks(call: Call, prepared: Prepared, run: Run) -> AsyncGenerator[bytes, None]:
    body = prepared.body
    writer = _Writer(call, prepared)
    options = body.stream_options
    with_usage = call.settings.enable_force_include_usage or (options is not None and bool(options.include_usage))
    always = with_usage and (
        call.settings.enable_force_include_usage or (options is not None and bool(options.continuous_usage_stats))
    )
    is_first = True

    def chunk(choices: list[GenerateChoice]) -> GenerateChunk:
        return GenerateChunk(request_id=f"generate-tokens-{call.rid}", output_mode=prepared.mode, choices=choices)

    deltas = run.deltas(body.sampling_params.stream_interval or 1)
    try:
        async for delta in deltas:
            made = chunk([writer.choice(delta.index, delta)])
            if is_first and body.return_token_ids:
                made.prompt_token_ids = prepared.prompt.token_ids
            is_first = False
            if always:
                made.usage = usage_of(
                    call, None, run.num_prompt_tokens, run.num_tokens_of(0, delta.index), run.num_cached_tokens
                )
            yield data_frame(made)
    finally:
        await deltas.aclose()
    if with_usage:
        made = chunk([])
        made.usage = usage_of(call, None, run.num_prompt_tokens, run.num_completion_tokens, run.num_cached_tokens)
        yield data_frame(made)


async def abort_requests(call: Call) -> Response[Any]:
    """End requests by the ids their clients see, with or without the endpoint's prefix."""
    body = await call.body(AbortBody)
    state = call.state
    num_aborted = 0
    for request_id in dict.fromkeys(body.request_ids):
        engine_ids = [i for prefix in ID_PREFIXES for i in state.running.get(prefix + request_id, ())]
        for engine_id in engine_ids:
            await state.engine.abort(engine_id)
        num_aborted += bool(engine_ids)
    return call.json(AbortReply("aborted", num_aborted))

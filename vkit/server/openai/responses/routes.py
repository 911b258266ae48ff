"""The Responses routes: create, retrieve, follow, cancel, delete, input items, render."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call, new_id
from vkit.server.openai.chat.request import Prepared, prepare, render_context
from vkit.server.openai.render import rendered
from vkit.server.openai.responses.items import chat_messages, continues_last, normalised_items
from vkit.server.openai.responses.job import ResponseJob
from vkit.server.openai.responses.schemas import DeletedResponse, ItemList, ResponseObject, ResponsesBody
from vkit.server.openai.responses.store import ResponseStore
from vkit.server.openai.responses.tools import ResponseTools, response_tools
from vkit.server.openai.schemas import ChatBody
from vkit.server.openai.shared import now
from vkit.server.problems import ContextOverflow, Problem, bad_request, clip, not_found
from vkit.server.sampling import check_logprobs, check_max_tokens
from vkit.server.schema import Json, JsonSchemaFormat, ResponseFormat, SamplingBody
from vkit.server.stream import Frames

KNOWN_INCLUDES = frozenset(
    {
        *("message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs"),
        *("computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url"),
        "web_search_call.action.sources",
    }
)
NO_EFFECT_FIELDS = (
    *("prompt_cache_retention", "client_metadata", "context_management", "kv_transfer_params"),
    *("ec_transfer_params", "watermarking", "return_token_ids", "service_tier"),
)
MAX_METADATA_PAIRS = 16
MAX_METADATA_KEY_LEN = 64
MAX_METADATA_VALUE_LEN = 512
MAX_LIST = 100

_NOT_COPIED = frozenset(
    {
        *("model", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "watermarking", "user"),
        *("kv_transfer_params", "ec_transfer_params", "request_id", "session_id", "return_token_ids"),
        "stream",
    }
)

CHAT_FIELDS = {
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "max_tokens": "max_output_tokens",
    "tool_calls": "input.function_call",
}
"""Chat's name for a field -> this route's."""


async def create_response(call: Call) -> Response[Any]:
    """Answer; at once, as a stream, or in the background."""
    body = await call.body(ResponsesBody)
    job, is_stored = await _open_job(call, body)
    store = response_store(call)
    streams, in_background = bool(body.stream), bool(body.background)
    call.state.admit(1)
    if is_stored and (streams or in_background):
        store.put(job)
    job.start()
    if streams:
        ending = _as_is if in_background else _ending(job)
        return await call.events(job.follow(), ending, wait_for_first=False)
    if in_background:
        return call.json(job.response)
    try:
        await call.while_connected(job.wait())
    except BaseException:
        if job.task is not None:
            job.task.cancel()
        raise
    if job.failure is not None:
        raise job.failure
    job.forget_events()
    if is_stored:
        store.put(job)
    return call.json(job.response)


def response_store(call: Call) -> ResponseStore:
    """The store of this server."""
    state = call.state
    if state.response_store is None:
        state.response_store = ResponseStore(
            state.settings.responses_store_max_entries, state.settings.responses_store_ttl_s
        )
    return state.response_store


async def _as_is(frames: Frames) -> Frames:
    try:
        async for frame in frames:
            yield frame
    finally:
        await frames.aclose()


def _ending(job: ResponseJob) -> Callable[[Frames], Frames]:
    """Ends the work when the client leaves a stream that is not in the background."""

    async def ending(frames: Frames) -> AsyncGenerator[bytes, None]:
        try:
            async for frame in frames:
                yield frame
        finally:
            await frames.aclose()
            if not job.is_done:
                job.is_cancelled = True
                if job.task is not None:
                    job.task.cancel()
            job.forget_events()

    return ending


async def _open_job(call: Call, body: ResponsesBody) -> tuple[ResponseJob, bool]:
    """A job ready to start, and whether its response is kept.

    Raises:
        Problem: 400 or 404.
    """
    state = call.state
    model = state.served_name(body.model)
    _check_fields(call, body)
    is_stored = body.store is not False and call.settings.enable_responses_store
    if body.background and not is_stored:
        raise bad_request("background: needs store: true and a server that stores responses", "background")
    store = response_store(call)
    response_id = body.request_id or f"resp_{new_id()}"
    if response_id in store:
        raise bad_request(f"request_id: a response with the id {clip(response_id)!r} is stored already", "request_id")
    tools = response_tools(call, body)
    prepared, items = await _prepare(call, body, tools)
    response = _response_object(body, response_id, model, prepared, tools, is_stored)
    job = ResponseJob(
        call,
        response,
        prepared,
        items,
        streams=bool(body.stream),
        custom_names=tools.custom_names,
        namespaces=tools.namespaces,
        with_messages=bool(body.enable_response_messages),
    )
    return job, is_stored


async def _prepare(call: Call, body: ResponsesBody, tools: ResponseTools) -> tuple[Prepared, list[Json]]:
    """The prompt, and the input items it was made of."""
    items = _history(call, body)
    items += normalised_items(body.input if body.input is not None else [], response_store(call).find_item)
    if not any(item.get("type") for item in items) and body.instructions is None:
        raise bad_request("input: must not be empty", "input")
    kept = list(items)
    while True:
        chat = _chat_body(call, body, kept)
        num_ignored = len(call.ignored)
        try:
            return await prepare(call, chat, tool_use=tools.tool_use, names=CHAT_FIELDS), items
        except ContextOverflow as exc:
            if body.truncation != "auto":
                raise ContextOverflow(exc.num_tokens, exc.max_model_len, "input") from None
            del call.ignored[num_ignored:]
            if not _drop_oldest(kept):
                chat.truncate_prompt_tokens = -1
                return await prepare(call, chat, tool_use=tools.tool_use, names=CHAT_FIELDS), items


def _drop_oldest(items: list[Json]) -> bool:
    """Remove the oldest item that is no system message; False when only one is left."""
    removable = [i for i, item in enumerate(items) if item.get("role") not in ("system", "developer")]
    if len(removable) < 2:
        return False
    del items[removable[0]]
    # An answer to a call that is gone would confuse the model and the template.
    while len(items) > 1 and items[min(removable[0], len(items) - 1)].get("type") in (
        "function_call_output",
        "custom_tool_call_output",
    ):
        del items[min(removable[0], len(items) - 1)]
    return True


def _history(call: Call, body: ResponsesBody) -> list[Json]:
    if body.previous_response_id is None:
        return []
    previous = response_store(call).get(body.previous_response_id)
    if previous is None:
        raise not_found(
            f"previous_response_id: no response {clip(body.previous_response_id)!r} is stored", "previous_response_id"
        )
    return [*previous.input_items, *previous.response.output]


def _check_fields(call: Call, body: ResponsesBody) -> None:
    for name in ("prompt", "conversation"):
        if getattr(body, name) is not None:
            raise bad_request(f"{name}: not supported by this server", name)
    if body.input is None:
        raise bad_request("input: this field is required", "input")
    if body.input in ("", []) and body.previous_response_id is None and body.instructions is None:
        raise bad_request("input: must not be empty without previous_response_id or instructions", "input")
    for i, name in enumerate(body.include or ()):
        if name not in KNOWN_INCLUDES:
            raise bad_request(f"include.{i}: unknown value {clip(name)!r}", f"include.{i}")
    if body.truncation not in (None, "auto", "disabled"):
        raise bad_request("truncation: expected auto or disabled", "truncation")
    if body.max_tool_calls is not None and body.max_tool_calls < 1:
        raise bad_request("max_tool_calls: must be at least 1", "max_tool_calls")
    if body.text is not None and body.text.verbosity not in (None, "low", "medium", "high"):
        raise bad_request("text.verbosity: expected low, medium or high", "text.verbosity")
    if body.text is not None and body.text.verbosity is not None:
        call.ignored.append("text.verbosity")
    if body.top_logprobs and "message.output_text.logprobs" not in (body.include or ()):
        call.ignored.append("top_logprobs")
    summary = None if body.reasoning is None else body.reasoning.summary or body.reasoning.generate_summary
    if summary not in (None, "auto", "concise", "detailed"):
        raise bad_request("reasoning.summary: expected auto, concise or detailed", "reasoning.summary")
    if summary is not None:
        call.ignored.append("reasoning.summary")
    if body.stream_options is not None:
        if not body.stream:
            raise bad_request("stream_options: only allowed with stream: true", "stream_options")
        if body.stream_options.include_obfuscation:
            call.ignored.append("stream_options.include_obfuscation")
    _check_metadata(body.metadata)
    for name in NO_EFFECT_FIELDS:
        if getattr(body, name) is not None:
            call.ignored.append(name)


def _check_metadata(metadata: Json | None) -> None:
    for key, value in (metadata or {}).items():
        if not isinstance(value, str) or len(key) > MAX_METADATA_KEY_LEN or len(value) > MAX_METADATA_VALUE_LEN:
            raise bad_request(
                f"metadata: expected strings, keys of at most {MAX_METADATA_KEY_LEN} characters and values of at most "
                f"{MAX_METADATA_VALUE_LEN}",
                "metadata",
            )
    if metadata is not None and len(metadata) > MAX_METADATA_PAIRS:
        raise bad_request(f"metadata: at most {MAX_METADATA_PAIRS} pairs, got {len(metadata)}", "metadata")


def _chat_body(call: Call, body: ResponsesBody, items: list[Json]) -> ChatBody:
    """The same request as chat sends it, tools left out."""
    chat = ChatBody(
        model=body.model,
        messages=chat_messages(items, body.instructions, call.ignored),
        continue_final_message=continues_last(items) or None,
        chat_template_kwargs=body.chat_template_kwargs,
        mm_processor_kwargs=body.mm_processor_kwargs,
        media_io_kwargs=body.media_io_kwargs,
        include_reasoning=body.include_reasoning,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_response_format(body),
    )
    for name in SamplingBody.__struct_fields__:
        if name not in _NOT_COPIED:
            setattr(chat, name, getattr(body, name))
    max_model_len = call.state.engine.max_model_len
    chat.max_tokens = check_max_tokens(body.max_output_tokens, max_model_len, "max_output_tokens")
    top = check_logprobs(body.top_logprobs, call.settings, "top_logprobs")
    if "message.output_text.logprobs" in (body.include or ()):
        chat.logprobs, chat.top_logprobs = True, top
    return chat


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    if form.type == "json_schema":
        if not form.name:
            raise bad_request("text.format.name: this field is required", "text.format.name")
        return ResponseFormat("json_schema", JsonSchemaFormat(form.name, form.schema, form.strict, form.description))
    raise bad_request(
        f"text.format.type: expected text, json_object or json_schema, got {clip(form.type)!r}", "text.format.type"
    )


def _response_object(
    body: ResponsesBody, response_id: str, model: str, prepared: Prepared, tools: ResponseTools, is_stored: bool
) -> ResponseObject:
    params = prepared.prompt.params
    reasoning = body.reasoning
    response = ResponseObject(
        id=response_id,
        created_at=now(),
        status="queued" if body.background else "in_progress",
        instructions=body.instructions,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        temperature=params.temperature,
        top_p=params.top_p,
        tool_choice=tools.choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        background=bool(body.background),
        store=is_stored,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=body.safety_identifier,
        service_tier=body.service_tier or "default",
        text=_text_echo(body),
        truncation=body.truncation or "disabled",
        user=body.user,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
    )
    if body.enable_response_messages:
        message = {
            "type": "raw_message_tokens",
            "message": prepared.prompt.text,
            "tokens": prepared.prompt.token_ids,
        }
        response.input_messages, response.output_messages = [message], []
    return response


def _text_echo(body: ResponsesBody) -> Json:
    text: Json = {"format": {"type": "text"}}
    if body.text is None:
        return text
    form = body.text.format
    if form is not None and form.type != "text":
        values = {name: getattr(form, name) for name in form.__struct_fields__}
        text["format"] = {name: value for name, value in values.items() if value is not None}
    if body.text.verbosity is not None:
        text["verbosity"] = body.text.verbosity
    return text


def _stored(call: Call) -> ResponseJob:
    response_id = str(call.request.path_params["response_id"])
    job = response_store(call).get(response_id)
    if job is None:
        raise not_found(f"No response {clip(response_id)!r} is stored.", "response_id")
    return job


async def get_response(call: Call) -> Response[Any]:
    """A stored response, or its events."""
    job = _stored(call)
    for name in call.request.query_params.getall("include[]", []) + call.request.query_params.getall("include", []):
        if name not in KNOWN_INCLUDES:
            raise bad_request(f"include: unknown value {clip(name)!r}", "include")
    after = _query_int(call, "starting_after", -1, low=-1, high=2**31)
    if not call.query_bool("stream"):
        return call.json(job.response)
    return await call.events(job.follow(after), _as_is, wait_for_first=False)


async def list_input_items(call: Call) -> Response[Any]:
    """The input of a stored response."""
    items = list(_stored(call).input_items)
    order = call.query("order") or "desc"
    if order not in ("asc", "desc"):
        raise bad_request("order: expected asc or desc", "order")
    if order == "desc":
        items.reverse()
    limit = _query_int(call, "limit", 20, low=1, high=MAX_LIST)
    after = call.query("after")
    if after is not None:
        places = [i for i, item in enumerate(items) if item.get("id") == after]
        if not places:
            raise bad_request(f"after: no item has the id {clip(after)!r}", "after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [str(item.get("id")) for item in page]
    return call.json(
        ItemList(
            data=page,
            first_id=ids[0] if ids else None,
            last_id=ids[-1] if ids else None,
            has_more=len(items) > limit,
        )
    )


def _query_int(call: Call, name: str, default: int, *, low: int, high: int) -> int:
    text = call.query(name)
    if text is None:
        return default
    if not text.lstrip("-").isdigit() or not low <= int(text) <= high:
        raise bad_request(f"{name}: expected an integer in {low}..{high}, got {clip(text)!r}", name)
    return int(text)


async def cancel_response(call: Call) -> Response[Any]:
    """Stop a response that runs in the background or as a stream."""
    job = _stored(call)
    if job.response.status == "cancelled":
        return call.json(job.response)
    if job.is_done or not (job.response.background or job.streams):
        raise Problem(400, "Cannot cancel a synchronous response.", "response_id")
    await job.cancel()
    return call.json(job.response)


async def delete_response(call: Call) -> Response[Any]:
    """Forget a response, stopping it first."""
    job = _stored(call)
    await job.cancel()
    response_store(call).delete(job.response.id)
    return call.json(DeletedResponse(id=job.response.id))


async def render_response(call: Call) -> Response[Any]:
    """The prompt and parameters that /v1/responses would run."""
    body = await call.body(ResponsesBody)
    if body.previous_response_id is not None:
        raise bad_request("previous_response_id: cannot be rendered", "previous_response_id")
    call.state.served_name(body.model)
    _check_fields(call, body)
    prepared, _ = await _prepare(call, body, response_tools(call, body))
    return call.json(
        rendered(
            call,
            f"resp_{call.rid}",
            prepared.model,
            prepared.prompt,
            call.state.engine.tokenizer,
            prepared.body,
            priority=prepared.priority,
            parse_context=render_context(prepared),
        )
    )

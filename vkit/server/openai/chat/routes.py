"""POST /v1/chat/completions and its render twin: messages through the model's template, replies through its parsers."""

from __future__ import annotations

from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.inference import Run, best_choices
from vkit.server.openai.chat.reply import beam_reply, whole_reply
from vkit.server.openai.chat.request import prepare, render_context
from vkit.server.openai.chat.stream import chat_chunks
from vkit.server.openai.render import rendered
from vkit.server.openai.schemas import (
    ChatBody,
)
from vkit.server.openai.shared import (
    with_load_header,
)
from vkit.server.problems import bad_request
from vkit.server.stream import ending_with_done


async def chat_completions(call: Call) -> Response[Any]:
    """Answer a conversation."""
    body = await call.body(ChatBody)
    prepared = await prepare(call, body)
    if body.use_beam_search:
        return await beam_reply(call, prepared)
    run = Run(
        call.state,
        f"chatcmpl-{call.rid}",
        [prepared.prompt],
        priority=prepared.priority,
        cache_salt=body.cache_salt,
        kv_transfer_params=body.kv_transfer_params,
    )
    if body.stream:
        return await call.events(chat_chunks(call, prepared, run), ending_with_done)
    choices = (await call.while_connected(run.whole()))[0]
    reply = whole_reply(call, prepared, run, best_choices(choices, prepared.n))
    return call.json(reply, headers=with_load_header(call, {}))


async def render_chat_completions(call: Call) -> Response[Any]:
    """The prompt and parameters that /v1/chat/completions would run."""
    body = await call.body(ChatBody)
    if body.use_beam_search:
        raise bad_request("use_beam_search: cannot be rendered as one generate request", "use_beam_search")
    prepared = await prepare(call, body)
    item = rendered(
        call,
        f"chatcmpl-{call.rid}",
        prepared.model,
        prepared.prompt,
        call.state.engine.tokenizer,
        body,
        priority=prepared.priority,
        parse_context=render_context(prepared),
    )
    item.reasoning_ended = not call.state.parsers.starts_reasoning(prepared.context)
    return call.json(item)

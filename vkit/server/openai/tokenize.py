"""POST /tokenize, POST /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any

from litestar.response.base import Response

from vkit.server.call import Call
from vkit.server.media import place_media
from vkit.server.openai.chat.request import (
    asked_media_options,
    chat_prompt,
    check_template_source,
)
from vkit.server.openai.schemas import ChatBody, DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply
from vkit.server.openai.tools import ToolUse, check_tools
from vkit.server.problems import bad_request
from vkit.server.prompts import check_token_ids, encode, encode_rendered, off_loop, render_chat


async def tokenize(call: Call) -> Response[Any]:
    """Token ids of a text or of a rendered chat."""
    body = await call.body(TokenizeBody)
    call.state.served_name(body.model)
    if body.messages is not None:
        token_ids = await _chat_ids(call, body)
    elif body.prompt is not None:
        adds_special = body.add_special_tokens is not False
        tokenizer = call.state.engine.tokenizer
        token_ids = await encode(tokenizer, body.prompt, add_special_tokens=adds_special, parse_special=True)
    else:
        raise bad_request("prompt: either prompt or messages is required", "prompt")
    engine = call.state.engine
    strings = [engine.tokenizer.token_piece(i) for i in token_ids] if body.return_token_strs else None
    return call.json(TokenizeReply(len(token_ids), engine.max_model_len, token_ids, strings))


async def _chat_ids(call: Call, body: TokenizeBody) -> list[int]:
    if body.prompt is not None:
        call.ignored.append("prompt")
    if body.add_generation_prompt and body.continue_final_message:
        raise bad_request("continue_final_message: contradicts add_generation_prompt: true", "continue_final_message")
    options = asked_media_options(call, body)
    check_template_source(call, body.chat_template)
    tools = check_tools(body.tools)
    chat = ChatBody(
        messages=body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        add_special_tokens=body.add_special_tokens,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    engine = call.state.engine
    prompt = chat_prompt(call, chat, ToolUse(tools=tools, offered=tools))
    text = await render_chat(engine, prompt, engine.compile_template)
    ids = await encode_rendered(engine.tokenizer, text, add_special_tokens=bool(body.add_special_tokens))
    placed = await call.while_connected(place_media(engine, call.state.media, ids, prompt.media, options))
    return ids if placed is None else placed.token_ids


async def detokenize(call: Call) -> Response[Any]:
    """Text of token ids, special tokens kept."""
    body = await call.body(DetokenizeBody)
    call.state.served_name(body.model)
    tokenizer = call.state.engine.tokenizer
    check_token_ids(body.tokens, tokenizer.vocab_size, "tokens")
    tokens = body.tokens
    text = await off_loop(lambda: tokenizer.decode(tokens, skip_special_tokens=False), len(tokens))
    return call.json(DetokenizeReply(text))


async def tokenizer_info(call: Call) -> Response[Any]:
    """The tokenizer's configuration."""
    return call.json(dict(call.state.engine.tokenizer_info))

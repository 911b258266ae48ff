"""AsyncLLM.chat and chat_stream: OpenAI's objects in and out, without a server."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import openai.types.chat as openai_types
import pytest

from tests.fakes import ScriptedRunner, byte_tokenizer, make_loaded
from vkit.async_engine import AsyncLLM
from vkit.config import EngineArgs
from vkit.errors import EngineDeadError, InvalidRequest, UsageError
from vkit.parsers.output import open_parsers

TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools {% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = 'hm</think>Now. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def engine(script: str, *, reasoning: str = "none", step_s: float = 0.0) -> AsyncLLM:
    tokenizer = byte_tokenizer(chat_template=TEMPLATE)
    runner = ScriptedRunner([*script.encode(), 257], tokenizer.vocab_size)
    runner.on_step = lambda step: time.sleep(step_s)
    limits = {"max_model_len": 512, "max_num_batched_tokens": 64}
    loaded = make_loaded(runner, tokenizer=tokenizer, num_blocks=128, block_size=16, limits=limits)
    loaded.parsers = open_parsers("hermes", reasoning)
    loaded.served_model_names = ("mine", "alias")
    return AsyncLLM.from_loaded(loaded)


async def test_a_reply_is_what_the_route_would_have_answered() -> None:
    llm = engine("hello")
    reply = await llm.chat({"messages": USER, "temperature": 0, "max_tokens": 20})
    typed = openai_types.ChatCompletion.model_validate(reply, strict=True)
    assert (typed.model, typed.choices[0].message.content, typed.choices[0].finish_reason) == ("mine", "hello", "stop")
    assert typed.usage is not None
    assert typed.usage.completion_tokens == 6
    two = await llm.chat({"model": "alias", "messages": USER, "temperature": 0, "n": 2, "logprobs": True})
    assert [choice["message"]["content"] for choice in two["choices"]] == ["hello", "hello"]
    assert two["choices"][0]["logprobs"]["content"][0]["token"] == "h"
    await llm.shutdown()


async def test_thoughts_and_calls_streamed_and_whole() -> None:
    llm = engine(CALL, reasoning="deepseek_r1")
    request = {"messages": USER, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
    message = (await llm.chat(request))["choices"][0]["message"]
    assert (message["reasoning"], message["content"].strip()) == ("hm", "Now.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    chunks = [chunk async for chunk in llm.chat_stream({**request, "stream_options": {"include_usage": True}})]
    for chunk in chunks:
        openai_types.ChatCompletionChunk.model_validate(chunk, strict=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm"
    assert "".join(delta.get("content") or "" for delta in deltas).strip() == "Now."
    pieces = [call["function"]["arguments"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert json.loads("".join(pieces)) == {"a": 1}
    assert chunks[-1]["usage"]["completion_tokens"] == len(CALL) + 1
    await llm.shutdown()


async def test_leaving_a_stream_aborts_the_request() -> None:
    llm = engine("x" * 400, step_s=0.005)
    stream: Any = llm.chat_stream({"messages": USER, "temperature": 0, "max_tokens": 400})
    first = await anext(stream)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    await stream.aclose()
    for _ in range(200):
        if not llm.stats().num_running:
            break
        await asyncio.sleep(0.01)
    assert llm.stats().num_running == 0
    task = asyncio.ensure_future(llm.chat({"messages": USER, "temperature": 0, "max_tokens": 400}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await llm.shutdown()


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "temperature": 3}, "temperature"),
        ({"messages": USER, "model": "other"}, "model"),
        ({"messages": USER, "max_tokns": 3}, "max_tokns"),
        ({"messages": USER, "stream": True}, "stream"),
        ({"messages": USER, "stop": object()}, "request"),
        ({"messages": USER, "priority": 3}, "priority"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
        ([USER], "request"),
    ],
)
async def test_bad_requests_are_refused_by_name(request_: Any, field: str) -> None:
    llm = engine("hello")
    with pytest.raises(InvalidRequest) as caught:
        await llm.chat(request_)
    assert caught.value.param == field
    if field not in ("stream",):
        with pytest.raises(InvalidRequest) as caught:
            await anext(llm.chat_stream(request_))  # type: ignore[call-overload]
        assert caught.value.param == field
    assert (await llm.chat({"messages": USER, "temperature": 0}))["choices"][0]["message"]["content"] == "hello"
    await llm.shutdown()


async def test_a_closed_engine_says_so() -> None:
    llm = engine("hello")
    await llm.shutdown()
    with pytest.raises(EngineDeadError):
        await llm.chat({"messages": USER})


def test_names_the_model_is_served_under() -> None:
    assert EngineArgs(model="m", served_model_name="a").served_model_name == ("a",)
    assert EngineArgs(model="m", served_model_name=["a", "b", "a"]).served_model_name == ("a", "b")
    for bad in ("", [], ["a", ""], [1]):
        with pytest.raises(UsageError, match="--served-model-name"):
            EngineArgs(model="m", served_model_name=bad)  # type: ignore[arg-type]

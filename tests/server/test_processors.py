"""vllm_xargs: arguments of logits processors, on every route that takes them."""

from __future__ import annotations

from typing import Any

import pytest

ROUTES = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "a"}]},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_arguments_reach_the_processors(serve: Any, path: str) -> None:
    served = serve()
    served.engine.settings["logits_processors"] = ["m:C"]
    reply = await served.post(path, {**ROUTES[path], "vllm_xargs": {"strength": 2}})
    assert reply.status_code == 200, reply.text
    assert "vllm_xargs" not in reply.headers.get("x-vkit-ignored-fields", "")
    assert served.engine.seen[-1][1].extra_args == {"strength": 2}


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_processor_they_are_named_as_ignored(serve: Any, path: str) -> None:
    reply = await serve().post(path, {**ROUTES[path], "vllm_xargs": {"strength": 2}})
    assert reply.status_code == 200, reply.text
    assert "vllm_xargs" in reply.headers["x-vkit-ignored-fields"]


async def test_tools_without_a_parser_are_answered_in_plain_text(serve: Any, toys: Any) -> None:
    """tool_choice auto leaves it to the model; nobody reads its calls, so its text is content."""
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    served = serve(toys.FakeAsyncLLM(lambda prompt: text.encode()))
    tool = {"name": "f", "parameters": {"type": "object"}}
    bodies = {
        "/v1/chat/completions": {
            **ROUTES["/v1/chat/completions"],
            "tools": [{"type": "function", "function": tool}],
        },
        "/v1/responses": {**ROUTES["/v1/responses"], "tools": [{"type": "function", **tool}]},
        "/v1/messages": {**ROUTES["/v1/messages"], "max_tokens": 90, "tools": [{"name": "f", "input_schema": {}}]},
    }
    for path, body in bodies.items():
        for choice in ({}, {"tool_choice": {"type": "auto"} if path == "/v1/messages" else "auto"}):
            reply = await served.post(path, {**body, **choice, "temperature": 0})
            assert reply.status_code == 200, reply.text
            assert "<tool_call>" in reply.text
            assert '"tool_calls":[' not in reply.text
            assert '"type":"function_call"' not in reply.text

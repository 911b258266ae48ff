"""POST /v1/messages and count_tokens over the scripted engine."""

from __future__ import annotations

import json

import pytest

MESSAGES = "/v1/messages"
USER = {"role": "user", "content": "hi"}
TOOL = {"name": "f", "description": "d", "input_schema": {"properties": {"a": {"type": "integer"}}}}


def body(**extra):
    return {"model": "toy", "max_tokens": 50, "messages": [USER], "temperature": 0, **extra}


def prompt_text(served) -> str:
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


async def events(served, request):
    reply = await served.post(MESSAGES, {**request, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        first, second = block.split("\n")
        payload = json.loads(second.removeprefix("data: "))
        assert first == f"event: {payload['type']}"
        found.append(payload)
    return found


def check_blocks(found):
    """Blocks never overlap, indices count up, every block is stopped; returns their texts."""
    open_index, contents = None, []
    for event in found:
        if event["type"] == "content_block_start":
            assert open_index is None
            assert event["index"] == len(contents)
            open_index = event["index"]
            contents.append([event["content_block"], ""])
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_index
            delta = event["delta"]
            contents[open_index][1] += delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_index
            open_index = None
    assert open_index is None
    return contents


async def test_whole_reply(serve):
    served = serve()
    reply = (await served.post(MESSAGES, body(), **{"x-request-id": "r"})).json()
    assert reply == {
        "id": "msg_r",
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 19,
            "output_tokens": 12,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
        },
    }


async def test_stream(serve):
    served = serve()
    found = await events(served, body())
    assert [event["type"] for event in found[:2]] == ["message_start", "content_block_start"]
    assert [event["type"] for event in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert found[0]["message"]["content"] == []
    assert found[0]["message"]["usage"]["input_tokens"] == 19
    assert check_blocks(found) == [[{"type": "text", "text": ""}, "hello world"]]
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 12


async def test_stop_reasons(serve):
    served = serve()
    cut = (await served.post(MESSAGES, body(max_tokens=3))).json()
    assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "hel")
    stopped = (await served.post(MESSAGES, body(stop_sequences=["wor"]))).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "wor")
    assert stopped["content"][0]["text"] == "hello "
    found = await events(served, body(stop_sequences=["wor"]))
    assert found[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "wor"}


async def test_large_max_tokens_is_clamped(serve):
    served = serve()
    assert (await served.post(MESSAGES, body(max_tokens=100_000))).status_code == 200
    assert served.engine.seen[-1][1].max_tokens == 256 - 19


async def test_conversation(serve):
    served = serve()
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "calling"},
                {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                {"type": "tool_use", "id": "c2", "name": "g", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "42"},
                {
                    "type": "tool_result",
                    "tool_use_id": "c2",
                    "content": [{"type": "text", "text": "x"}],
                    "is_error": True,
                },
                {"type": "text", "text": "go"},
            ],
        },
    ]
    system = [{"type": "text", "text": "be"}, {"type": "text", "text": "x-anthropic-billing-header: z"}]
    request = body(messages=messages, system=system, max_tokens=5)
    assert (await served.post(MESSAGES, request)).status_code == 200
    assert prompt_text(served) == (
        '[system]be[user]a\nb[assistant]calling(call f {"a": 1})(call g {})[tool]42[tool]Error: x[user]go[assistant]'
    )


async def test_a_document_keeps_its_title_and_context(serve):
    served = serve()
    document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "words"}}
    content = [{**document, "title": "A tale", "context": "for children"}, {**document}]
    reply = await served.post(MESSAGES, body(messages=[{"role": "user", "content": content}]))
    assert reply.status_code == 200
    assert prompt_text(served) == "[user]A tale\nfor children\nwords\nwords[assistant]"
    content[0]["title"] = 5
    refused = await served.post(MESSAGES, body(messages=[{"role": "user", "content": content}]))
    assert refused.json()["error"]["message"].startswith("messages.0.content.0.title: expected a string")


async def test_inner_system_stays_or_moves(serve, toys):
    served = serve()
    messages = [USER, {"role": "system", "content": "now"}, {"role": "user", "content": "b"}]
    await served.post(MESSAGES, body(messages=messages, system="be"))
    assert prompt_text(served) == "[system]be[user]hi[system]now[user]b[assistant]"
    strict = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    served = serve(toys.FakeAsyncLLM(template=strict))
    await served.post(MESSAGES, body(messages=messages, system="be"))
    assert prompt_text(served) == "[system]be\nnow[user]hi[user]b"


async def test_prefill_is_continued(serve):
    served = serve()
    messages = [USER, {"role": "assistant", "content": "so far"}]
    await served.post(MESSAGES, body(messages=messages))
    assert prompt_text(served) == "[user]hi[assistant]so far"


async def test_count_tokens(serve):
    served = serve()
    request = body(system="be", tools=[TOOL], tool_choice={"type": "none"})
    usage = (await served.post(MESSAGES, request)).json()["usage"]
    num_seen = len(served.engine.seen)
    del request["max_tokens"], request["temperature"]
    reply = (await served.post(MESSAGES + "/count_tokens?beta=true", request)).json()
    assert reply == {
        "input_tokens": usage["input_tokens"],
        "context_management": {"original_input_tokens": usage["input_tokens"]},
    }
    assert len(served.engine.seen) == num_seen
    long = {"model": "toy", "messages": [{"role": "user", "content": "a" * 1000}]}
    assert (await served.post(MESSAGES + "/count_tokens", long)).json()["input_tokens"] == 1017


async def test_render(serve):
    served = serve()
    item = (await served.post(MESSAGES + "/render", body())).json()
    assert item["prompt_text"] == "[user]hi[assistant]"
    reply = await served.post("/inference/v1/generate", item)
    assert reply.json()["choices"][0]["text"] == "hello world"


@pytest.mark.parametrize(
    ("extra", "status", "kind", "words"),
    [
        ({"model": "X"}, 404, "not_found_error", "does not exist"),
        ({"model": ""}, 400, "invalid_request_error", "model"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "invalid_request_error", "messages.0.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "what"}]}]},
            400,
            "invalid_request_error",
            "messages.0.content.0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]},
            400,
            "invalid_request_error",
            "image",
        ),
        ({"messages": [{"role": "user", "content": "a" * 400}]}, 400, "invalid_request_error", ""),
        ({"tools": [{"name": "f"}]}, 400, "invalid_request_error", "tools.0.input_schema"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tool_choice": {"type": "what"}}, 400, "invalid_request_error", "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "invalid_request_error", "thinking"),
        ({"thinking": {"type": "what"}}, 400, "invalid_request_error", "thinking.type"),
        ({"output_config": {"effort": "what"}}, 400, "invalid_request_error", "output_config.effort"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}},
            400,
            "invalid_request_error",
            "output_config.format: json: the keyword 'not' cannot be enforced",
        ),
        (
            {"output_format": {"type": "json_schema", "schema": {"not": {}}}},
            400,
            "invalid_request_error",
            "output_format: json: the keyword 'not' cannot be enforced",
        ),
        ({"output_format": {"type": "xml"}}, 400, "invalid_request_error", "output_format: expected"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            400,
            "invalid_request_error",
            "output_format: cannot be combined",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}]},
            400,
            "invalid_request_error",
            "there are only system messages",
        ),
        ({"temperature": 3}, 400, "invalid_request_error", "temperature"),
    ],
)
async def test_failures_have_the_anthropic_shape(serve, extra, status, kind, words):
    reply = await serve().post(MESSAGES, body(**extra))
    assert reply.status_code == status, reply.text
    payload = reply.json()
    assert payload["type"] == "error"
    assert payload["error"]["type"] == kind
    assert words in payload["error"]["message"]
    assert payload["request_id"].startswith("req_")


async def test_overflow_wording(serve):
    reply = await serve().post(MESSAGES, body(messages=[{"role": "user", "content": "a" * 400}]))
    assert reply.json()["error"]["message"].endswith("prompt is too long: 417 tokens > 255 maximum")


async def test_malformed_json(serve):
    served = serve()
    reply = await served.client.post(MESSAGES, content=b"{", headers={"content-type": "application/json"})
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert (await served.get(MESSAGES)).json()["error"]["type"] == "invalid_request_error"


async def test_fields_without_effect_are_named(serve):
    served = serve()
    tools = [{"type": "web_search_20250305", "name": "web_search"}]
    extra = {"metadata": {"user_id": "u"}, "tools": tools, "thinking": {"type": "adaptive", "display": "summarized"}}
    reply = await served.post(MESSAGES, body(**extra))
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == {"metadata", "tools.0", "thinking.display"}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = await served.post(MESSAGES, body(max_tokens=2000, thinking=thinking))
    assert reply.headers["x-vkit-ignored-fields"] == "thinking.budget_tokens"


SCRIPT = b'<think>hm</think>I call <call>f {"a": 1}</call><call>g {}</call>'


async def test_parsed_reply_streamed_and_whole(serve, toys, parsers):
    served = serve(toys.FakeAsyncLLM(lambda prompt: SCRIPT))
    served.state.parsers = parsers
    request = body(tools=[TOOL, {"name": "g", "input_schema": {}}], max_tokens=200)
    reply = (await served.post(MESSAGES, request)).json()
    thinking, text, first, second = reply["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "hm")
    assert int(thinking["signature"], 16)
    assert text == {"type": "text", "text": "I call "}
    assert (first["name"], first["input"]) == ("f", {"a": 1})
    assert (second["name"], second["input"]) == ("g", {})
    assert reply["stop_reason"] == "tool_use"
    found = await events(served, request)
    contents = check_blocks(found)
    assert [block["type"] for block, _ in contents] == ["thinking", "text", "tool_use", "tool_use"]
    assert [value for _, value in contents] == ["hm", "I call ", '{"a": 1}', "{}"]
    assert [e["delta"]["signature"] for e in found if e.get("delta", {}).get("type") == "signature_delta"] == [
        thinking["signature"]
    ]
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    one = body(tools=[TOOL], tool_choice={"type": "auto", "disable_parallel_tool_use": True}, max_tokens=200)
    assert [b["type"] for b in (await served.post(MESSAGES, one)).json()["content"]].count("tool_use") == 1
    assert len(check_blocks(await events(served, one))) == 3


async def test_nothing_generated(serve, toys):
    served = serve(toys.FakeAsyncLLM(lambda prompt: b""))
    assert (await served.post(MESSAGES, body())).json()["content"] == [{"type": "text", "text": ""}]
    found = await events(served, body())
    assert check_blocks(found) == [[{"type": "text", "text": ""}, ""]]


async def test_failure_inside_a_stream(serve, toys):
    engine = toys.FakeAsyncLLM()
    engine.fail_after = 3
    served = serve(engine)
    found = await events(served, body())
    assert [e["type"] for e in found[-2:]] == ["content_block_stop", "error"]
    assert found[-1]["error"] == {"type": "api_error", "message": "Internal server error"}
    check_blocks(found)


async def test_cache_details(serve):
    served = serve(enable_prompt_tokens_details=True)
    request = body(messages=[{"role": "user", "content": "a" * 60}])
    await served.post(MESSAGES, request)
    usage = (await served.post(MESSAGES, request)).json()["usage"]
    assert usage["cache_read_input_tokens"] == 64
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == 77


async def test_chat_s_names_of_fields_are_never_shown(serve):
    reply = await serve().post(MESSAGES, body(stop_sequences=[""]))
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith("stop_sequences: ")


async def test_what_the_template_never_shows_is_named(serve, toys):
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]}
    request = body(messages=[USER, called, result], tools=[TOOL], output_config={"effort": "low"})
    reply = await serve(toys.FakeAsyncLLM(template=plain)).post(MESSAGES, request)
    assert reply.status_code == 200, reply.text
    names = {"tools", "messages.tool_use", "output_config.effort"}
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == names
    whole = plain + "{{ tools }}{{ tool_calls }}{{ reasoning_effort }}"
    reply = await serve(toys.FakeAsyncLLM(template=whole)).post(MESSAGES, request)
    assert "x-vkit-ignored-fields" not in reply.headers

"""POST /v1/chat/completions over the scripted engine."""

from __future__ import annotations

import pytest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CHAT = "/v1/chat/completions"


def prompt_text(served) -> str:
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


def joined(frames, index=0):
    """The message that a stream's deltas make, and its finish reasons."""
    message, calls, reasons = {}, {}, []
    for frame in frames:
        for choice in frame["choices"]:
            if choice["index"] != index:
                continue
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for part in value:
                        call = calls.setdefault(part["index"], {"arguments": ""})
                        call.update({k: part[k] for k in ("id", "type") if k in part})
                        if "name" in part["function"]:
                            call["name"] = part["function"]["name"]
                        call["arguments"] += part["function"].get("arguments", "")
                elif key == "role":
                    message["role"] = value
                else:
                    message[key] = message.get(key, "") + value
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
    return message, list(calls.values()), reasons


async def test_whole_reply_has_every_key(serve):
    served = serve()
    reply = (await served.post(CHAT, {"messages": [USER], "temperature": 0})).json()
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hello world",
                "refusal": None,
                "annotations": None,
                "audio": None,
                "function_call": None,
                "reasoning": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
        }
    ]
    assert set(reply) == {
        *("id", "object", "created", "model", "system_fingerprint", "service_tier", "choices", "usage"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params", "metrics"),
    }
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["usage"]["prompt_tokens"] == len("[user]hi[assistant]")
    assert prompt_text(served) == "[user]hi[assistant]"


async def test_default_limit_is_the_rest_of_the_context(serve):
    served = serve()
    await served.post(CHAT, {"messages": [USER]})
    assert served.engine.seen[-1][1].max_tokens == 256 - 19
    await served.post(CHAT, {"messages": [USER], "max_tokens": 3, "max_completion_tokens": 5})
    assert served.engine.seen[-1][1].max_tokens == 5
    reply = await served.post(CHAT, {"messages": [USER], "max_completion_tokens": 300})
    assert reply.json()["error"]["param"] == "max_completion_tokens"


async def test_stream_order(serve):
    served = serve()
    body = {"messages": [USER], "temperature": 0, "n": 2, "return_token_ids": True, "return_prompt_text": True}
    frames = await served.frames(CHAT, {**body, "stream_options": {"include_usage": True}})
    for index in range(2):
        own = [f for f in frames if f["choices"] and f["choices"][0]["index"] == index]
        assert own[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert own[0]["prompt_token_ids"] == served.engine.seen[-1][0]
        assert own[0]["prompt_text"] == "[user]hi[assistant]"
        assert own[-1]["choices"][0]["finish_reason"] == "stop"
        message, _, reasons = joined(own, index)
        assert message == {"role": "assistant", "content": "hello world"}
        assert reasons == ["stop"]
        ids = [i for f in own for i in f["choices"][0].get("token_ids", [])]
        assert ids == [*b"hello world", 257]
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 24
    assert not any("usage" in frame for frame in frames[:-1])


async def test_logprobs(serve):
    served = serve()
    body = {"messages": [USER], "temperature": 0, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    whole = (await served.post(CHAT, body)).json()["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"]] == ["h", "e", "l"]
    for entry in whole["content"]:
        assert entry["bytes"] == list(entry["token"].encode())
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert len(values) == 2
        assert values == sorted(values, reverse=True)
    frames = await served.frames(CHAT, body)
    entries = [e for f in frames for e in (f["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert entries == whole["content"]
    zero = (await served.post(CHAT, {**body, "top_logprobs": None})).json()["choices"][0]["logprobs"]
    assert all(entry["top_logprobs"] == [] for entry in zero["content"])


async def test_sampled_token_is_not_forced_into_the_top(serve):
    served = serve()
    body = {"messages": [USER], "temperature": 0, "max_tokens": 1, "logprobs": True, "logprob_token_ids": [97]}
    content = (await served.post(CHAT, body)).json()["choices"][0]["logprobs"]["content"]
    assert {entry["token"] for entry in content[0]["top_logprobs"]} == {"h", "a"}


@pytest.mark.parametrize("part", [{"type": "text", "text": "hi"}, {"type": "input_text", "text": "hi"}])
async def test_text_parts(serve, part):
    served = serve()
    await served.post(CHAT, {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "you"}]}]})
    assert prompt_text(served) == "[user]hi\nyou[assistant]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "what"}]}], "messages.0.content.0.type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.0.content.0"),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
            "messages.0.content.0.input_audio.data",
        ),
        (["x"], "messages.0"),
        ("x", "messages"),
        (
            [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{"}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0"),
    ],
)
async def test_bad_messages(serve, messages, param):
    reply = await serve().post(CHAT, {"messages": messages})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_history_with_tools(serve):
    served = serve()
    messages = [
        USER,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assert (await served.post(CHAT, {"messages": messages})).status_code == 200
    assert prompt_text(served) == '[user]hi[assistant](call f {"a": 1})[tool]42[assistant]'


async def test_developer_is_system_for_templates_without_it(serve):
    served = serve()
    await served.post(CHAT, {"messages": [{"role": "developer", "content": "be"}, USER]})
    assert prompt_text(served) == "[system]be[user]hi[assistant]"


async def test_continue_final_message(serve):
    served = serve()
    messages = [USER, {"role": "assistant", "content": "so far"}]
    await served.post(CHAT, {"messages": messages, "continue_final_message": True})
    assert prompt_text(served) == "[user]hi[assistant]so far"
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert (await served.post(CHAT, body)).json()["error"]["param"] == "continue_final_message"
    await served.post(CHAT, {"messages": messages, "add_generation_prompt": False})
    assert prompt_text(served) == "[user]hi[assistant]so far"


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(serve, stream):
    served = serve()
    messages = [USER, {"role": "assistant", "content": "so far: "}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "temperature": 0}
    if stream:
        frames = await served.frames(CHAT, body)
        assert frames[1]["choices"][0]["delta"] == {"content": "so far: "}
        content = joined(frames)[0]["content"]
    else:
        content = (await served.post(CHAT, body)).json()["choices"][0]["message"]["content"]
    assert content == "so far: hello world"


async def test_template_of_the_request(serve):
    served = serve()
    template = "{{ greeting }}:{{ messages[0].content }}{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    body = {"messages": [USER], "chat_template": template, "chat_template_kwargs": {"greeting": "yo"}}
    assert (await served.post(CHAT, {**body, "documents": [{"text": "doc"}]})).status_code == 200
    assert prompt_text(served) == "yo:hi(doc)"
    for bad in ("{{", "{{ messages.__class__.__mro__ }}", "{{ raise_exception('no good') }}"):
        reply = await served.post(CHAT, {"messages": [USER], "chat_template": bad})
        assert reply.status_code == 400, reply.text
    assert "no good" in reply.json()["error"]["message"]
    strict = serve(trust_request_chat_template=False)
    assert (await strict.post(CHAT, body)).json()["error"]["param"] == "chat_template"
    for name in ("chat_template", "tokenize", "messages"):
        reply = await served.post(CHAT, {"messages": [USER], "chat_template_kwargs": {name: "x"}})
        assert reply.json()["error"]["param"] == "chat_template_kwargs"


async def test_no_template_is_400_naming_the_flag(serve, toys):
    served = serve(toys.FakeAsyncLLM(template=None))
    for path in (CHAT, "/tokenize"):
        reply = await served.post(path, {"messages": [USER]})
        assert reply.status_code == 400
        assert "--chat-template" in reply.json()["error"]["message"]
    assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 200


async def test_thinking_is_defined_only_when_asked(serve):
    served = serve()
    await served.post(CHAT, {"messages": [USER]})
    assert "thinking" not in prompt_text(served)
    await served.post(CHAT, {"messages": [USER], "reasoning_effort": "none"})
    assert "[thinking=False]" in prompt_text(served)
    await served.post(CHAT, {"messages": [USER], "reasoning_effort": "high"})
    assert "[thinking=True]" in prompt_text(served)
    kwargs = {"enable_thinking": False}
    await served.post(CHAT, {"messages": [USER], "reasoning_effort": "high", "chat_template_kwargs": kwargs})
    assert "[thinking=False]" in prompt_text(served)
    assert (await served.post(CHAT, {"messages": [USER], "reasoning_effort": "x"})).status_code == 400


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tools": [{"type": "x"}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools.0.function.parameters",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "response_format",
        ),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
        ({"tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "use_beam_search": True}, "use_beam_search"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "x": 1}}, "response_format"),
        ({"structured_outputs": {"json": {}, "x": 1}}, "structured_outputs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"mm_processor_kwargs": {"a": 1}}, "mm_processor_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
    ],
)
async def test_refusals_name_the_field(serve, extra, param):
    reply = await serve().post(CHAT, {"messages": [USER], **extra})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_tools_with_choice_none_are_shown_but_not_parsed(serve, toys):
    served = serve(toys.FakeAsyncLLM(lambda prompt: b'<call>f {"a": 1}</call>'))
    body = {"messages": [USER], "tools": [TOOL], "tool_choice": "none", "temperature": 0}
    message = (await served.post(CHAT, body)).json()["choices"][0]["message"]
    assert message["content"] == '<call>f {"a": 1}</call>'
    assert "[tools]f;[/tools]" in prompt_text(served)
    hidden = serve(exclude_tools_when_tool_choice_none=True)
    await hidden.post(CHAT, body)
    assert "tools" not in prompt_text(hidden)
    legacy = {"messages": [USER], "functions": [TOOL["function"]], "function_call": "none"}
    await served.post(CHAT, legacy)
    assert "[tools]f;[/tools]" in prompt_text(served)


REPLY = b'<think>hm</think>I call <call>f {"a": 1}</call><call>g {}</call>'


async def test_parsed_reply_streamed_and_whole(serve, toys, parsers):
    served = serve(toys.FakeAsyncLLM(lambda prompt: REPLY))
    served.state.parsers = parsers
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    body = {"messages": [USER], "tools": tools, "temperature": 0}
    reply = (await served.post(CHAT, body)).json()
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "I call ")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "f", "arguments": '{"a": 1}'},
        {"name": "g", "arguments": "{}"},
    ]
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 17}
    frames = await served.frames(CHAT, {**body, "stream_options": {"include_usage": True}})
    streamed, calls, reasons = joined(frames)
    assert streamed == {k: message[k] for k in ("role", "content", "reasoning", "reasoning_content")}
    assert [(call["name"], call["arguments"]) for call in calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert reasons == ["tool_calls"]
    assert frames[-1]["usage"] == reply["usage"]


@pytest.mark.parametrize("limit", range(1, len(REPLY) + 2))
async def test_cut_calls_agree(serve, toys, parsers, limit):
    served = serve(toys.FakeAsyncLLM(lambda prompt: REPLY))
    served.state.parsers = parsers
    body = {"messages": [USER], "tools": [TOOL], "temperature": 0, "max_tokens": limit}
    choice = (await served.post(CHAT, body)).json()["choices"][0]
    reasons = joined(await served.frames(CHAT, body))[2]
    assert reasons == [choice["finish_reason"]]
    assert choice["finish_reason"] == ("tool_calls" if limit > len(REPLY) else "length")


async def test_reasoning_options(serve, toys, parsers):
    engine = toys.FakeAsyncLLM(lambda prompt: b"<think>hm</think>ok")
    served = serve(engine, reasoning_field="reasoning")
    served.state.parsers = parsers
    body = {"messages": [USER], "temperature": 0, "logprobs": True, "return_token_ids": True}
    message = (await served.post(CHAT, body)).json()["choices"][0]["message"]
    assert message["reasoning"] == "hm"
    assert "reasoning_content" not in message
    hidden = {**body, "include_reasoning": False}
    choice = (await served.post(CHAT, hidden)).json()["choices"][0]
    assert choice["message"]["reasoning"] is None
    assert choice["message"]["content"] == "ok"
    assert bytes(choice["token_ids"][:-1]) == b"ok"
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["o", "k", "</s>"]
    frames = await served.frames(CHAT, hidden)
    assert joined(frames)[0] == {"role": "assistant", "content": "ok"}
    assert all("h" not in str(frame["choices"][0].get("logprobs")) for frame in frames)


async def test_parallel_tool_calls_false_keeps_the_first(serve, toys, parsers):
    served = serve(toys.FakeAsyncLLM(lambda prompt: REPLY))
    served.state.parsers = parsers
    body = {"messages": [USER], "tools": [TOOL], "temperature": 0, "parallel_tool_calls": False}
    message = (await served.post(CHAT, body)).json()["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert len(joined(await served.frames(CHAT, body))[1]) == 1


async def test_beam_search(serve, toys):
    served = serve(toys.FakeAsyncLLM(lambda prompt: b"hello"[len(prompt) - 19 :]))
    body = {"messages": [USER], "use_beam_search": True, "n": 2, "max_tokens": 3}
    reply = (await served.post(CHAT, body)).json()
    assert [choice["message"]["content"] for choice in reply["choices"]] == ["hel", "hem"]


async def test_efforts_are_translated_for_the_template(serve, toys):
    engine = toys.FakeAsyncLLM(template="[{{ reasoning_effort }}][{{ enable_thinking }}]")
    served = serve(engine, reasoning_effort_map={"high": "deep", "none": 0})
    for effort, shown in (("high", "[deep][True]"), ("low", "[low][True]"), ("none", "[0][False]")):
        body = {"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": effort}
        rendered = (await served.post("/v1/chat/completions/render", body)).json()
        assert rendered["prompt_text"] == shown


async def test_render_is_what_runs(serve):
    served = serve()
    body = {"messages": [USER], "temperature": 0, "stop": "w", "return_token_offsets": True}
    item = (await served.post(CHAT + "/render", body, **{"x-request-id": "r1"})).json()
    assert served.engine.seen == []
    assert item["request_id"] == "chatcmpl-r1"
    assert item["prompt_text"] == "[user]hi[assistant]"
    assert len(item["token_offsets"]) == len(item["token_ids"])
    assert item["sampling_params"]["max_tokens"] == 256 - 19
    whole = (await served.post(CHAT, body)).json()["choices"][0]
    reply = await served.post("/inference/v1/generate", item)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == whole["message"]["content"]
    assert served.engine.seen[0][:2] == served.engine.seen[1][:2]
    derendered = await served.post("/inference/v1/generate", {**item, "output_mode": "derender"})
    assert derendered.json()["choices"][0]["message"]["content"] == whole["message"]["content"]


async def test_tokenize_chat_is_the_same_prompt(serve):
    served = serve()
    await served.post(CHAT, {"messages": [USER], "tools": [TOOL], "tool_choice": "none"})
    reply = (await served.post("/tokenize", {"messages": [USER], "tools": [TOOL]})).json()
    assert reply["tokens"] == served.engine.seen[-1][0]
    assert reply["count"] == len(reply["tokens"])


async def test_one_bos(serve, toys):
    """A template that writes BOS and a tokenizer that adds it: one BOS."""
    engine = toys.FakeAsyncLLM(template="{{ bos_token }}{{ messages[0].content }}")
    served = serve(engine)
    await served.post(CHAT, {"messages": [USER]})
    assert engine.seen[-1][0] == [256, *b"hi"]
    await served.post("/v1/completions", {"prompt": "hi"})
    assert engine.seen[-1][0] == [256, *b"hi"]
    await served.post(CHAT, {"messages": [USER], "add_special_tokens": True})
    assert engine.seen[-1][0].count(256) == 1


async def test_what_the_template_never_shows_is_named(serve, toys):
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {
        "messages": [USER, {"role": "assistant", "tool_calls": [call]}, USER],
        "tools": [TOOL],
        "documents": [{"title": "a"}],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"style": "x"},
    }
    reply = await serve(toys.FakeAsyncLLM(template=plain)).post(CHAT, body)
    assert reply.status_code == 200, reply.text
    names = {"tools", "documents", "messages.1.tool_calls", "reasoning_effort", "chat_template_kwargs.style"}
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == names
    whole = plain + "{{ tools }}{{ documents }}{{ tool_calls }}{{ reasoning_effort }}{{ style }}"
    reply = await serve(toys.FakeAsyncLLM(template=whole)).post(CHAT, body)
    assert "x-vkit-ignored-fields" not in reply.headers

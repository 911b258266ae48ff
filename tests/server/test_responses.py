"""The Responses routes over the scripted engine."""

from __future__ import annotations

import asyncio
import json

import pytest

RESPONSES = "/v1/responses"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCRIPT = b'<think>hm</think>I call <call>f {"a": 1}</call><call>g {"input": "free"}</call>'


def prompt_text(served) -> str:
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


def events_of(text):
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        first, second = block.split("\n")
        payload = json.loads(second.removeprefix("data: "))
        assert first == f"event: {payload['type']}"
        found.append(payload)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def events(served, request):
    reply = await served.post(RESPONSES, {**request, "stream": True})
    assert reply.status_code == 200, reply.text
    return events_of(reply.text)


def rebuilt(found):
    """Output items put together from the events; every added item and part must be done, deltas must join."""
    items = []
    text = ""
    for event in found:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(None)
            text = ""
        elif kind.endswith(".delta"):
            text += event["delta"]
        elif kind in ("response.output_text.done", "response.reasoning_text.done"):
            assert event["text"] == text
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "response.custom_tool_call_input.done":
            assert event["input"] == text
        elif kind == "response.output_item.done":
            assert items[event["output_index"]] is None
            items[event["output_index"]] = event["item"]
    assert None not in items
    return items


async def test_whole_reply_has_every_key(serve):
    served = serve()
    reply = (await served.post(RESPONSES, {"input": "hi", "temperature": 0, "metadata": {"a": "b"}})).json()
    assert reply["status"] == "completed"
    assert set(reply) == {
        *("id", "object", "created_at", "completed_at", "status", "error", "incomplete_details", "instructions"),
        *("metadata", "model", "output", "parallel_tool_calls", "temperature", "top_p", "tool_choice", "tools"),
        *("top_logprobs", "background", "store", "max_output_tokens", "max_tool_calls", "previous_response_id"),
        *("prompt", "prompt_cache_key", "reasoning", "safety_identifier", "service_tier", "text", "truncation"),
        *("user", "presence_penalty", "frequency_penalty", "usage", "kv_transfer_params"),
    }
    (message,) = reply["output"]
    assert message["id"].startswith("msg_")
    assert message["content"] == [{"type": "output_text", "text": "hello world", "annotations": [], "logprobs": []}]
    assert reply["usage"] == {
        "input_tokens": 19,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 12,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 31,
    }
    assert reply["metadata"] == {"a": "b"}
    assert reply["id"].startswith("resp_")


async def test_text_sequence(serve):
    served = serve()
    found = await events(served, {"input": "hi", "temperature": 0})
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["usage"] is None
    final = found[-1]["response"]
    assert rebuilt(found) == final["output"]
    assert final["output"][0]["content"][0]["text"] == "hello world"
    assert final["usage"]["output_tokens"] == 12
    stored = (await served.get(f"{RESPONSES}/{final['id']}")).json()
    assert stored == final


async def test_incomplete(serve):
    served = serve()
    reply = (await served.post(RESPONSES, {"input": "hi", "temperature": 0, "max_output_tokens": 3})).json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert reply["output"][-1]["status"] == "incomplete"
    found = await events(served, {"input": "hi", "temperature": 0, "max_output_tokens": 3})
    assert found[-1]["type"] == "response.incomplete"


async def test_nothing_generated(serve, toys):
    served = serve(toys.FakeAsyncLLM(lambda prompt: b""))
    reply = (await served.post(RESPONSES, {"input": "hi", "temperature": 0})).json()
    assert reply["output"][0]["content"] == []
    found = await events(served, {"input": "hi", "temperature": 0})
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]


async def test_own_id(serve):
    served = serve()
    body = {"input": "hi", "request_id": "mine", "temperature": 0}
    assert (await served.post(RESPONSES, body)).json()["id"] == "mine"
    again = await served.post(RESPONSES, body)
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "request_id"


async def test_reasoning_text_and_calls(serve, toys, parsers):
    served = serve(toys.FakeAsyncLLM(lambda prompt: SCRIPT))
    served.state.parsers = parsers
    request = {"input": "hi", "temperature": 0, "tools": [TOOL, {"type": "custom", "name": "g"}]}
    reply = (await served.post(RESPONSES, request)).json()
    thought, message, call, custom = reply["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"][0]["text"] == "I call "
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "g", "free")
    assert custom["id"].startswith("ctc_")
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 17
    found = await events(served, request)
    final = found[-1]["response"]
    assert rebuilt(found) == final["output"]

    def bare(items):
        return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in items]

    assert bare(final["output"]) == bare(reply["output"])
    kinds = {event["type"] for event in found}
    assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
    assert {"response.function_call_arguments.delta", "response.custom_tool_call_input.done"} <= kinds
    replay = events_of((await served.get(f"{RESPONSES}/{final['id']}?stream=true")).text)
    assert rebuilt(replay) == final["output"]
    hidden = (await served.post(RESPONSES, {**request, "include_reasoning": False})).json()
    assert [item["type"] for item in hidden["output"]] == ["message", "function_call", "custom_tool_call"]
    one = (await served.post(RESPONSES, {**request, "parallel_tool_calls": False})).json()
    assert [item["type"] for item in one["output"]] == ["reasoning", "message", "function_call"]


async def test_logprobs(serve):
    served = serve()
    include = ["message.output_text.logprobs"]
    body = {"input": "hi", "temperature": 0, "top_logprobs": 2, "max_output_tokens": 3}
    plain = (await served.post(RESPONSES, body)).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []
    whole = (await served.post(RESPONSES, {**body, "include": include})).json()["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in whole] == ["h", "e", "l"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in whole)
    found = await events(served, {**body, "include": include})
    joined = [entry for e in found if e["type"] == "response.output_text.delta" for entry in e["logprobs"]]
    assert joined == whole


async def test_conversation(serve, toys, parsers):
    served = serve(toys.FakeAsyncLLM(lambda prompt: SCRIPT))
    served.state.parsers = parsers
    tools = [TOOL, {"type": "custom", "name": "g"}]
    first = (
        await served.post(RESPONSES, {"input": "hi", "instructions": "be", "temperature": 0, "tools": tools})
    ).json()
    _, _, call, custom = first["output"]
    outputs = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "42"},
        {
            "type": "custom_tool_call_output",
            "call_id": custom["call_id"],
            "output": [{"type": "input_text", "text": "x"}],
        },
    ]
    second = await served.post(
        RESPONSES, {"input": outputs, "previous_response_id": first["id"], "temperature": 0, "tools": tools}
    )
    assert second.status_code == 200, second.text
    assert prompt_text(served) == (
        '[tools]f;g;[/tools][user]hi[assistant]I call (call f {"a": 1})(call g {"input": "free"})[tool]42[tool]x'
        "[assistant]"
    )
    listed = (await served.get(f"{RESPONSES}/{second.json()['id']}/input_items?order=asc")).json()
    kinds = ["message", "reasoning", "message", "function_call", "custom_tool_call", "function_call_output"]
    assert [item["type"] for item in listed["data"]] == [*kinds, "custom_tool_call_output"]
    assert all(item["id"] for item in listed["data"])
    page = (await served.get(f"{RESPONSES}/{second.json()['id']}/input_items?limit=2")).json()
    assert [item["id"] for item in page["data"]] == [item["id"] for item in listed["data"][::-1][:2]]
    assert page["has_more"] is True
    rest = (await served.get(f"{RESPONSES}/{second.json()['id']}/input_items?after={page['last_id']}")).json()
    assert len(rest["data"]) == 5
    missing = await served.post(RESPONSES, {"input": "x", "previous_response_id": "resp_no"})
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "previous_response_id"


async def test_replayed_items(serve):
    served = serve()
    items = [
        {"role": "developer", "content": "be"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "zz"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "run", "namespace": "ns", "arguments": "{}"},
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "function_call_output", "call_id": "c", "output": "done"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so far"}], "status": "incomplete"},
    ]
    reply = await served.post(RESPONSES, {"input": items, "temperature": 0})
    assert reply.status_code == 200, reply.text
    assert prompt_text(served) == "[system]be[user]hi[assistant](call ns__run {})[tool]done[assistant]so far"
    again = await served.post(
        RESPONSES, {"input": [{"type": "item_reference", "id": reply.json()["output"][0]["id"]}, items[1]]}
    )
    assert again.status_code == 200
    assert prompt_text(served) == "[assistant]hello world[user]hi[assistant]"
    lost = await served.post(RESPONSES, {"input": [{"type": "item_reference", "id": "no"}]})
    assert lost.status_code == 404


async def test_settings_of_no_effect_are_named(serve):
    body = {"input": "hi", "top_logprobs": 2, "text": {"verbosity": "low"}, "service_tier": "flex"}
    reply = await serve().post(RESPONSES, body)
    assert reply.status_code == 200
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == {"top_logprobs", "text.verbosity", "service_tier"}
    body = {"input": "hi", "top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    assert "x-vkit-ignored-fields" not in (await serve().post(RESPONSES, body)).headers


async def test_tools_of_other_kinds_are_echoed_and_named(serve):
    served = serve()
    tools = [{"type": "web_search"}, {"type": "local_shell"}]
    reply = await served.post(RESPONSES, {"input": "hi", "tools": tools})
    assert reply.status_code == 200
    assert reply.headers["x-vkit-ignored-fields"] == "tools.0,tools.1"
    assert reply.json()["tools"] == tools


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "what"}]}, "input.0"),
        ({"input": [{"role": "what", "content": "x"}]}, "input.0.role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}]},
            "input.0.content.0.file_id",
        ),
        ({"input": "a" * 400}, "input"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"conversation": "x"}, "conversation"),
        ({"include": ["what"]}, "include.0"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 300}, "max_output_tokens"),
        ({"max_tool_calls": 0}, "max_tool_calls"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "what"}, "truncation"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name"),
        ({"tools": [{"type": "custom", "name": "g", "format": {"type": "grammar"}}]}, "tools.0.format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "text.format"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"text": {"format": {"type": "what"}}}, "text.format.type"),
        ({"text": {"verbosity": "what"}}, "text.verbosity"),
        ({"reasoning": {"effort": "what"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "what"}}, "reasoning.summary"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "(["}}, "structured_outputs"),
    ],
)
async def test_refusals_name_the_field(serve, extra, param):
    reply = await serve().post(RESPONSES, {"input": "hi", **extra})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_truncation_auto_drops_the_oldest(serve):
    served = serve()
    items = [{"role": "system", "content": "be"}] + [{"role": "user", "content": f"{i}" * 60} for i in range(6)]
    refused = await served.post(RESPONSES, {"input": items})
    assert refused.json()["error"]["param"] == "input"
    assert (await served.post(RESPONSES, {"input": items, "truncation": "auto"})).status_code == 200
    text = prompt_text(served)
    assert text.startswith("[system]be[user]")
    assert "0" not in text
    assert "5" * 60 in text
    long = await served.post(RESPONSES, {"input": "z" * 500, "truncation": "auto"})
    assert long.json()["usage"]["input_tokens"] == 255


async def test_store_options(serve):
    served = serve()
    kept = (await served.post(RESPONSES, {"input": "hi"})).json()
    assert kept["store"] is True
    dropped = (await served.post(RESPONSES, {"input": "hi", "store": False})).json()
    assert dropped["store"] is False
    reply = await served.get(f"{RESPONSES}/{dropped['id']}")
    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": f"No response '{dropped['id']}' is stored.".replace("'", "'"),
        "type": "NotFoundError",
        "param": "response_id",
        "code": 404,
    }
    deleted = await served.client.delete(f"{RESPONSES}/{kept['id']}")
    assert deleted.json() == {"id": kept["id"], "object": "response", "deleted": True}
    assert (await served.get(f"{RESPONSES}/{kept['id']}")).status_code == 404
    off = serve(enable_responses_store=False)
    off_reply = (await off.post(RESPONSES, {"input": "hi"})).json()
    assert off_reply["store"] is False
    assert (await off.post(RESPONSES, {"input": "hi", "background": True})).status_code == 400


async def test_store_is_bounded(serve):
    served = serve(responses_store_max_entries=2)
    ids = [(await served.post(RESPONSES, {"input": "hi"})).json()["id"] for _ in range(3)]
    codes = [(await served.get(f"{RESPONSES}/{i}")).status_code for i in ids]
    assert codes == [404, 200, 200]
    brief = serve(responses_store_ttl_s=0.05)
    kept = (await brief.post(RESPONSES, {"input": "hi"})).json()["id"]
    await asyncio.sleep(0.1)
    assert (await brief.get(f"{RESPONSES}/{kept}")).status_code == 404


async def wait_for(served, response_id, *states):
    for _ in range(500):
        reply = (await served.get(f"{RESPONSES}/{response_id}")).json()
        if reply["status"] in states:
            return reply
        await asyncio.sleep(0.01)
    raise AssertionError(reply["status"])


async def test_background(serve, toys):
    served = serve(toys.FakeAsyncLLM(delay_s=0.002))
    queued = (await served.post(RESPONSES, {"input": "hi", "background": True, "temperature": 0})).json()
    assert queued["status"] == "queued"
    assert queued["output"] == []
    following = asyncio.ensure_future(served.get(f"{RESPONSES}/{queued['id']}?stream=true"))
    done = await wait_for(served, queued["id"], "completed")
    assert done["output"][0]["content"][0]["text"] == "hello world"
    for reply in (await following, await served.get(f"{RESPONSES}/{queued['id']}?stream=true")):
        found = events_of(reply.text)
        assert found[0]["type"] == "response.created"
        assert rebuilt(found) == done["output"]
        assert found[-1]["response"] == done
    again = await served.client.post(f"{RESPONSES}/{queued['id']}/cancel")
    assert again.status_code == 400
    assert again.json()["error"]["message"] == "Cannot cancel a synchronous response."


async def test_background_stream_is_replayed(serve):
    served = serve()
    found = await events(served, {"input": "hi", "background": True, "temperature": 0})
    assert [event["type"] for event in found[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    assert found[0]["response"]["status"] == "queued"
    response_id = found[0]["response"]["id"]
    replay = events_of((await served.get(f"{RESPONSES}/{response_id}?stream=true")).text)
    assert replay == found
    tail = (await served.get(f"{RESPONSES}/{response_id}?stream=true&starting_after=5")).text
    numbers = [json.loads(line[6:])["sequence_number"] for line in tail.splitlines() if line.startswith("data: ")]
    assert numbers == list(range(6, len(found)))
    assert (await served.get(f"{RESPONSES}/{response_id}?stream=true&starting_after=x")).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_cancel(serve, toys, stream):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 1000, max_model_len=4000, delay_s=0.005)
    served = serve(engine)
    body = {"input": "hi", "background": True, "temperature": 0, "stream": stream, "request_id": "mine"}
    task = asyncio.ensure_future(served.post(RESPONSES, body))
    for _ in range(500):
        if engine._running:
            break
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)
    cancelled = (await served.client.post(f"{RESPONSES}/mine/cancel")).json()
    assert cancelled["status"] == "cancelled"
    assert engine._running == 0
    if stream:
        assert cancelled["output"][0]["content"][0]["text"].startswith("x")
    reply = await task
    if stream:
        last = events_of(reply.text)[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["status"] == "cancelled"
    assert (await served.client.post(f"{RESPONSES}/mine/cancel")).json() == cancelled
    assert (await served.client.post(f"{RESPONSES}/no/cancel")).status_code == 404
    done = (await served.post(RESPONSES, {"input": "hi", "max_output_tokens": 2})).json()
    refused = await served.client.post(f"{RESPONSES}/{done['id']}/cancel")
    assert refused.json()["error"]["message"] == "Cannot cancel a synchronous response."


async def test_delete_stops_the_work(serve, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 1000, max_model_len=4000, delay_s=0.005)
    served = serve(engine)
    made = (await served.post(RESPONSES, {"input": "hi", "background": True, "temperature": 0})).json()
    assert (await served.client.delete(f"{RESPONSES}/{made['id']}")).json()["deleted"] is True
    assert engine._running == 0
    assert served.state.num_sequences == 0


async def test_failures(serve, toys):
    engine = toys.FakeAsyncLLM()
    engine.fail_after = 3
    served = serve(engine)
    found = await events(served, {"input": "hi", "temperature": 0})
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"] == {"code": "server_error", "message": "Internal server error"}
    assert [event["type"] for event in found].count("response.failed") == 1
    rebuilt(found)
    engine.fail_after = 0
    assert (await served.post(RESPONSES, {"input": "hi", "temperature": 0})).status_code == 500


async def test_raw_messages(serve):
    served = serve()
    reply = (await served.post(RESPONSES, {"input": "hi", "enable_response_messages": True, "temperature": 0})).json()
    assert reply["input_messages"][0]["message"] == "[user]hi[assistant]"
    assert reply["output_messages"][0]["message"] == "hello world"
    assert bytes(reply["output_messages"][0]["tokens"][:-1]) == b"hello world"


async def test_render(serve):
    served = serve()
    item = (await served.post(RESPONSES + "/render", {"input": "hi", "instructions": "be", "temperature": 0})).json()
    assert item["prompt_text"] == "[system]be[user]hi[assistant]"
    assert (await served.post("/inference/v1/generate", item)).json()["choices"][0]["text"] == "hello world"
    refused = await served.post(RESPONSES + "/render", {"input": "hi", "previous_response_id": "x"})
    assert refused.json()["error"]["param"] == "previous_response_id"


def test_leaving_a_stream_cancels_and_background_goes_on(start, toys):
    import socket

    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 100_000, max_model_len=200_000, delay_s=0.005)
    server = start(engine).ready()
    host, port = server.url.removeprefix("http://").split(":")

    def leave(body):
        raw = json.dumps(body).encode()
        sock = socket.create_connection((host, int(port)))
        head = f"POST {RESPONSES} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}"
        sock.sendall(head.encode() + b"\r\n\r\n" + raw)
        server.wait(lambda: engine._running == 1)
        sock.close()

    for stream in (False, True):
        leave({"input": "hi", "temperature": 0, "stream": stream})
        server.wait(lambda: engine._running == 0, 1.5)
    leave({"input": "hi", "temperature": 0, "stream": True, "background": True, "request_id": "bg"})
    import time

    time.sleep(0.3)
    assert engine._running == 1
    import httpx

    assert httpx.get(f"{server.url}{RESPONSES}/bg").json()["status"] == "in_progress"
    assert httpx.post(f"{server.url}{RESPONSES}/bg/cancel").json()["status"] == "cancelled"
    server.wait(lambda: engine._running == 0, 1.5)


async def test_what_the_template_never_shows_is_named(serve, toys):
    plain = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "r"},
    ]
    request = {"input": items, "tools": [TOOL], "reasoning": {"effort": "low"}}
    reply = await serve(toys.FakeAsyncLLM(template=plain)).post(RESPONSES, request)
    assert reply.status_code == 200, reply.text
    names = {"tools", "input.function_call", "reasoning.effort"}
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == names
    whole = plain + "{{ tools }}{{ tool_calls }}{{ reasoning_effort }}"
    reply = await serve(toys.FakeAsyncLLM(template=whole)).post(RESPONSES, request)
    assert "x-vkit-ignored-fields" not in reply.headers

"""The client reads event streams however they are cut, and tells what a server did wrong."""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmark.replay import (
    DONE,
    Answer,
    Hang,
    Raw,
    ReplayServer,
    Wait,
    answer,
    chat_chunk,
    error_answer,
    event,
    last_chunk,
    text_chunk,
    usage,
)
from vkit.client import OpenAIClient, ServerError, ServerSentEvent, SseParser, StreamEvent, Usage, api_root, parse_event
from vkit.errors import UsageError

STREAM = (
    '\ufeffdata: {"a":1}\n\n'
    ": keep-alive\n\n"
    "event: error\ndata: two\ndata:  lines é😀\nid: 4\nretry: 10\n\n"
    "\n\n"
    "data\n\n"
    "unknown: x\n\n"
    "data: [DONE]\n\n"
)
EVENTS = [
    ServerSentEvent('{"a":1}'),
    ServerSentEvent("two\n lines é😀", "error"),
    ServerSentEvent(""),
    ServerSentEvent("[DONE]"),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_for_every_line_end_and_cut(line_end: str, size: int) -> None:
    raw = STREAM.replace("\n", line_end).encode()
    parser = SseParser()
    found = [item for i in range(0, len(raw), size) for item in parser.feed(raw[i : i + size])]
    assert found == EVENTS
    assert parser.finish() == []


@given(st.lists(st.integers(1, 9), max_size=60))
def test_events_survive_any_cut(sizes: list[int]) -> None:
    raw = STREAM.replace("\n", "\r\n").encode()
    parser = SseParser()
    found, at = [], 0
    for size in [*sizes, len(raw)]:
        found += parser.feed(raw[at : at + size])
        at += size
    assert found == EVENTS


def test_an_event_without_its_last_blank_line_comes_out_at_the_end() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: [DO") == [ServerSentEvent("a")]
    assert parser.feed(b"NE]") == []
    assert parser.finish() == [ServerSentEvent("[DONE]")]


def test_two_blank_lines_after_a_crlf_cut_in_two_are_both_seen() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\r") == []
    assert parser.feed(b"\n") == []
    assert parser.feed(b"\n") == [ServerSentEvent("a")]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        ({"choices": [{"text": "ab", "finish_reason": None}]}, StreamEvent("ab", True)),
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, StreamEvent("", True)),
        (
            {"choices": [{"delta": {"content": "x"}, "finish_reason": "stop"}]},
            StreamEvent("x", True, finish_reason="stop"),
        ),
        ({"choices": [{"delta": {"reasoning": "r", "reasoning_content": "r"}}]}, StreamEvent("r", True)),
        ({"choices": [{"delta": {"reasoning_content": "r"}}]}, StreamEvent("r", True)),
        (
            {"choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": '{"a'}}]}}]},
            StreamEvent('f{"a', True),
        ),
        ({"choices": [{"text": "a", "token_ids": [5, 6]}]}, StreamEvent("a", True, token_ids=(5, 6))),
        ({"choices": [], "usage": usage(5, 8)}, StreamEvent("", False, usage=Usage(5, 8))),
        ({"choices": [{"text": "a"}], "usage": None}, StreamEvent("a", True)),
    ],
)
def test_what_an_event_says(payload: dict[str, object], expected: StreamEvent) -> None:
    assert parse_event(ServerSentEvent(json.dumps(payload))) == expected


@pytest.mark.parametrize(
    ("sse", "message"),
    [
        (ServerSentEvent("{nonsense"), "no answer"),
        (ServerSentEvent("[1]"), "no answer"),
        (ServerSentEvent('{"choices": [{"text": 3}]}'), "no answer"),
        (ServerSentEvent('{"error": {"message": "out of blocks"}}'), "out of blocks"),
        (ServerSentEvent('{"type": "error", "message": "gone"}', "error"), "gone"),
    ],
)
def test_an_event_that_is_no_answer_is_an_error(sse: ServerSentEvent, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        parse_event(sse)


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/v1"),
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/api/paas/v4", "https://host/api/paas/v4"),
        ("https://host/openai", "https://host/openai/v1"),
        ("http://[::1]:80", "http://[::1]:80/v1"),
    ],
)
def test_the_root_of_an_address(url: str, root: str) -> None:
    assert api_root(url) == root


@pytest.mark.parametrize(
    "url",
    [
        *("", "host:8000", "127.0.0.1", "ftp://host", "http://", "http://h:x", "http://h:0", "http://h:99999"),
        *("http://[::1", "http://h/v1/chat/completions", "http://h/v1/completions/", "http://h/v1/models"),
        *("http://h/?a=1", "http://h#x"),
    ],
)
def test_an_address_that_is_no_server_is_refused_by_flag(url: str) -> None:
    with pytest.raises(UsageError, match="--url"):
        api_root(url)


async def stream_of(reply: Answer) -> list[StreamEvent]:
    async with ReplayServer(lambda _: reply) as server, OpenAIClient(server.url) as client:
        return [item async for item in client.stream_completion({"prompt": "a"})]


async def test_a_completion_comes_event_by_event() -> None:
    found = await stream_of(answer([(0, "a"), (0, "bc")], 3, 8))
    assert [item.text for item in found] == ["a", "bc", ""]
    assert found[-1].usage == Usage(3, 8)


async def test_the_request_is_what_was_asked_plus_stream_and_the_key() -> None:
    async with (
        ReplayServer(lambda _: answer([(0, "a")], 1, 1)) as server,
        OpenAIClient(server.url, api_key="secret") as client,
    ):
        assert await client.model_names() == ["replay"]
        [item async for item in client.stream_completion({"prompt": [1, 2]})]
        [item async for item in client.stream_chat({"messages": []})]
    first, second = server.seen
    assert (first.path, first.body) == ("/v1/completions", {"prompt": [1, 2], "stream": True})
    assert (second.path, second.body) == ("/v1/chat/completions", {"messages": [], "stream": True})
    assert first.headers["authorization"] == "Bearer secret"


async def test_the_connection_is_used_again() -> None:
    async with ReplayServer(lambda _: answer([(0, "a")], 1, 1)) as server, OpenAIClient(server.url) as client:
        for _ in range(3):
            [item async for item in client.stream_completion({})]
        assert server.num_connections == 1


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (error_answer(400, "bad prompt"), 400, "HTTP 400: bad prompt"),
        (error_answer(503, "full"), 503, "HTTP 503: full"),
        (Answer([Raw(b"<html>\n gateway </html>")], status=502), 502, "HTTP 502: <html> gateway </html>"),
        (Answer([Raw(b'{"detail": [{"loc": "x"}]}')], status=422), 422, 'HTTP 422: \\[{"loc":"x"}\\]'),
        (Answer([Raw(b"x" * 1000)], status=500), 500, "HTTP 500: x{300} …"),
        (Answer([], status=404), 404, "HTTP 404: no message"),
    ],
)
async def test_an_http_error_keeps_its_status_and_message(reply: Answer, status: int, message: str) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        await stream_of(reply)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Answer([text_chunk("a"), Hang()]), "POST /completions"),
        (Answer([text_chunk("a")]), "ended without"),
        (Answer([]), "ended without"),
        (Answer([text_chunk("a"), event({"error": {"message": "engine died"}}), DONE]), "engine died"),
        (Answer([event("{")]), "no answer"),
    ],
)
async def test_a_stream_that_breaks_is_an_error(reply: Answer, message: str) -> None:
    with pytest.raises(ServerError, match=message) as caught:
        await stream_of(reply)
    assert caught.value.status is None


@pytest.mark.parametrize(
    "reply",
    [
        Answer([text_chunk("a"), last_chunk(1, 1)]),
        Answer([text_chunk("a"), last_chunk(1, 1), Raw(b"data: [DONE]")]),
        Answer([text_chunk("a"), last_chunk(1, 1), DONE, Hang()]),
        Answer([text_chunk("a"), Raw(b": keep-alive\n\n"), Wait(0), last_chunk(1, 1), DONE]),
    ],
)
async def test_sloppy_ends_are_still_ends(reply: Answer) -> None:
    found = await stream_of(reply)
    assert [item.text for item in found] == ["a", ""]


async def test_chat_chunks_have_texts() -> None:
    reply = Answer(
        [chat_chunk({"role": "assistant", "content": ""}), chat_chunk({"content": "hi"}), last_chunk(2, 1), DONE]
    )
    found = await stream_of(reply)
    assert [(item.text, item.has_choices) for item in found] == [("", True), ("hi", True), ("", False)]


async def test_nobody_there_is_one_clear_error() -> None:
    async with ReplayServer(lambda _: answer([], 0, 0)) as server:
        url = server.url
    async with OpenAIClient(url) as client:
        with pytest.raises(ServerError, match=r"GET http://127\.0\.0\.1:\d+/v1/models: "):
            await client.model_names()
        with pytest.raises(ServerError, match="POST /completions: "):
            [item async for item in client.stream_completion({})]


@pytest.mark.parametrize("body", [b"[]", b'{"data": [{"name": "x"}]}', b"<html>", b"\xff"])
async def test_a_model_list_that_is_none_is_an_error(body: bytes) -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(200, content=body))
    async with OpenAIClient("http://server", transport=transport) as client:
        with pytest.raises(ServerError, match="not a model list"):
            await client.model_names()

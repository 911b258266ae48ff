"""Fields that other front ends accept and drop, or refuse: each one does what it says, on every route that has it."""

from __future__ import annotations

import pytest

USER = [{"role": "user", "content": "hi"}]
ROUTES = {
    "completions": ("/v1/completions", {"prompt": "hi"}),
    "chat": ("/v1/chat/completions", {"messages": USER}),
    "responses": ("/v1/responses", {"input": "hi"}),
    "generate": ("/inference/v1/generate", {"token_ids": [104, 105]}),
}


async def ask(served, route, **fields):
    """(text, stop reason) of the first choice."""
    path, body = ROUTES[route]
    if route == "generate":
        own = {key: fields.pop(key) for key in ("cache_salt", "priority") if key in fields}
        body = {**body, **own, "sampling_params": {"temperature": 0, **fields}}
    else:
        body = {**body, "temperature": 0, **fields}
    reply = await served.post(path, body)
    assert reply.status_code == 200, reply.text
    assert "x-vkit-ignored-fields" not in reply.headers
    payload = reply.json()
    if route == "responses":
        return payload["output"][0]["content"][0]["text"], None
    choice = payload["choices"][0]
    text = choice["message"]["content"] if route == "chat" else choice["text"]
    return text, choice["stop_reason"]


@pytest.mark.parametrize("route", ROUTES)
async def test_include_stop_str_in_output(serve, route):
    served = serve()
    text, reason = await ask(served, route, stop="wor")
    assert text == "hello "
    assert reason in ("wor", None if route == "responses" else "wor")
    text, _ = await ask(served, route, stop="wor", include_stop_str_in_output=True)
    assert text == "hello wor"


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
async def test_stop_reason(serve, toys, route):
    served = serve()
    assert (await ask(served, route, stop_token_ids=[32]))[1] == 32
    assert (await ask(served, route, stop=["o w"]))[1] == "o w"
    assert (await ask(served, route))[1] is None
    assert (await ask(served, route, max_tokens=2))[1] is None
    repeating = serve(toys.FakeAsyncLLM(lambda prompt: b"abababab"))
    detection = {"max_pattern_size": 2, "min_count": 3}
    assert (await ask(repeating, route, repetition_detection=detection))[1] == "repetition_detected"


@pytest.mark.parametrize("route", ROUTES)
async def test_every_sampling_field_reaches_the_engine(serve, route):
    served = serve()
    fields = {
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "repetition_penalty": 1.5,
        "seed": 3,
        "stop": ["zz"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "min_tokens": 1,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True,
        "logit_bias": {"5": 200},
        "bad_words": ["no"],
        "allowed_token_ids": [*range(97, 123)],
    }
    limit = {"max_output_tokens": 4} if route == "responses" else {"max_tokens": 4}
    await ask(served, route, **{**fields, **limit, "temperature": 0.7})
    params = served.engine.seen[-1][1]
    for name, value in fields.items():
        expected = {5: 100.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(params, name) == expected, name
    assert (params.temperature, params.max_tokens) == (0.7, 4)


@pytest.mark.parametrize("route", ROUTES)
async def test_cache_salt_and_priority(serve, route):
    served = serve(scheduling_policy="priority")
    await ask(served, route, cache_salt="pepper", priority=-4)
    assert served.engine.seen[-1][2:] == (-4, "pepper")


@pytest.mark.parametrize("route", ["completions", "chat", "generate"])
async def test_prompt_logprobs(serve, route):
    served = serve()
    path, body = ROUTES[route]
    extra = {"prompt_logprobs": 1, "max_tokens": 1}
    body = {**body, "sampling_params": extra} if route == "generate" else {**body, **extra}
    reply = (await served.post(path, body)).json()
    entries = reply["choices"][0]["prompt_logprobs"] if route == "completions" else reply["prompt_logprobs"]
    assert entries[0] is None
    assert len(entries) == len(served.engine.seen[-1][0])
    assert set(next(iter(entries[1].values()))) == {"logprob", "rank", "decoded_token"}


async def test_chat_echo_defaults_prompt_logprobs_to_top_logprobs(serve):
    served = serve()
    body = {"messages": USER, "echo": True, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    reply = (await served.post("/v1/chat/completions", body)).json()
    assert len(reply["prompt_logprobs"][1]) == 2


@pytest.mark.parametrize("route", ["completions", "chat"])
async def test_return_token_ids_and_cached_tokens(serve, route):
    served = serve()
    path, body = ROUTES[route]
    body = {**body, "temperature": 0, "return_token_ids": True, "return_cached_tokens_details": True}
    reply = (await served.post(path, body)).json()
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert bytes(reply["choices"][0]["token_ids"][:-1]) == b"hello world"
    prompt = reply["choices"][0]["prompt_token_ids"] if route == "completions" else reply["prompt_token_ids"]
    assert prompt == served.engine.seen[-1][0]


async def test_request_ids(serve):
    served = serve()
    expected = {"completions": "cmpl-r", "chat": "chatcmpl-r", "responses": "r", "generate": "generate-tokens-r"}
    for route, (path, body) in ROUTES.items():
        extra = {"sampling_params": {}} if route == "generate" else {}
        reply = (await served.post(path, {**body, **extra, "request_id": "r"})).json()
        assert reply.get("id", reply.get("request_id")) == expected[route]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", ["x", [None], [10**9], [-1], {"a": 1}])
async def test_bad_stop_token_ids(serve, route, value):
    served = serve()
    path, body = ROUTES[route]
    fields = {"stop_token_ids": value}
    body = {**body, "sampling_params": fields} if route == "generate" else {**body, **fields}
    reply = await served.post(path, body)
    assert reply.status_code == 400
    assert "stop_token_ids" in reply.json()["error"]["param"]


@pytest.mark.parametrize("route", ["completions", "chat", "responses"])
async def test_truncation_and_special_tokens(serve, route):
    served = serve()
    await ask(served, route, truncate_prompt_tokens=2)
    assert len(served.engine.seen[-1][0]) == 2
    if route != "responses":
        await ask(served, route, add_special_tokens=route == "chat")
        assert (served.engine.seen[-1][0][0] == 256) == (route == "chat")

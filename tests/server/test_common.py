"""Rules that hold on every route: errors, identity, ignored fields, keys, CORS, limits, models, documents."""

from __future__ import annotations

import json

import pytest
import yaml

from vkit.server.openai.shared import timings
from vkit.types import DraftCounts, RequestMetrics

USER = {"role": "user", "content": "hi"}
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "empty"),
        (b"{", "truncated"),
        (b'{"prompt": 1,\n}', "line 2 column 1"),
        (b"[1]", "object"),
        (b"null", "object"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "a", "temperature": NaN}', "Invalid JSON body:"),
        (b'{"prompt": "a", "temperature": 1e999}', ""),
    ],
)
async def test_bad_json(serve, body, words):
    served = serve()
    reply = await served.client.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "BadRequestError"
    assert words in error["message"]
    if b"1e999" not in body:
        assert error["param"] is None
        assert error["message"].startswith("Invalid JSON body:")


@pytest.mark.parametrize("content_type", [None, "text/plain", "multipart/form-data"])
async def test_content_type(serve, content_type):
    served = serve()
    headers = {} if content_type is None else {"content-type": content_type}
    reply = await served.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "Unsupported Media Type: Only 'application/json' is allowed"
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await served.client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)).status_code == 200


async def test_unknown_paths_and_methods(serve):
    served = serve()
    for path in ("/nope", "/v1/videos", "/v1/embeddings", "/tokenizer_info", "/v1/responses/x/y/z"):
        reply = await served.get(path)
        assert reply.status_code == 404, path
        assert reply.json()["error"]["type"] == "NotFoundError"
    reply = await served.get(COMPLETIONS)
    assert reply.status_code == 405
    assert reply.json()["error"]["type"] == "MethodNotAllowedError"
    assert "POST" in reply.headers["allow"]
    reply = await served.get("/v1/messages/batches")
    assert reply.status_code == 404
    assert reply.json()["error"]["type"] == "not_found_error"
    assert reply.json()["type"] == "error"


async def test_trailing_slashes_are_not_redirected(serve):
    served = serve()
    assert (await served.get("/v1/models/")).json() == (await served.get("/v1/models")).json()
    assert (await served.post(COMPLETIONS + "/", {"prompt": "a"})).status_code == 200


async def test_head(serve):
    served = serve()
    for path in ("/", "/health", "/v1/models", "/version", "/metrics", "/docs", "/openapi.json", "/v1/metadata"):
        reply = await served.client.head(path)
        assert reply.status_code == 200, path
        assert reply.content == b""
    assert (await served.get("/")).json() == {"object": "vkit"}


async def test_unknown_model(serve):
    served = serve()
    reply = await served.post(COMPLETIONS, {"prompt": "a", "model": "X"})
    assert reply.status_code == 404
    assert reply.json()["error"] == {
        "message": "The model `X` does not exist. Valid aliases: toy, alias/with/slash.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert (await served.post(COMPLETIONS, {"prompt": "a", "model": ""})).json()["model"] == "toy"
    reply = await served.post(COMPLETIONS, {"prompt": "a", "model": "alias/with/slash"})
    assert reply.json()["model"] == "alias/with/slash"
    schema_first = await served.post(COMPLETIONS, {"prompt": 5, "model": "X"})
    assert schema_first.status_code == 400


async def test_models(serve):
    served = serve()
    listed = (await served.get("/v1/models")).json()
    assert [card["id"] for card in listed["data"]] == ["toy", "alias/with/slash"]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("toy", "alias/with/slash", False)
    card = (await served.get("/v1/models/alias/with/slash")).json()
    assert card == listed["data"][1]
    assert card["max_model_len"] == 256
    assert card["root"] == "toys/toy"
    assert card["permission"][0]["id"].startswith("modelperm-")
    assert (await served.get("/v1/models/alias%2Fwith%2Fslash")).json() == card
    missing = await served.get("/v1/models/what")
    assert missing.status_code == 404
    assert missing.json()["error"]["param"] == "model"


async def test_identity(serve):
    served = serve()
    reply = await served.post(COMPLETIONS, {"prompt": "a", "request_id": "body"}, **{"x-request-id": "head"})
    assert reply.json()["id"] == "cmpl-head"
    assert reply.headers["x-request-id"] == "head"
    reply = await served.post(COMPLETIONS, {"prompt": "a", "request_id": "body"})
    assert reply.json()["id"] == "cmpl-body"
    assert reply.headers["x-request-id"] == "body"
    reply = await served.post(COMPLETIONS, {"prompt": "a"})
    assert len(reply.json()["id"]) == len("cmpl-") + 32
    assert reply.headers["x-request-id"] in reply.json()["id"]
    quiet = serve(enable_request_id_headers=False)
    assert "x-request-id" not in (await quiet.get("/health")).headers


async def test_equal_ids_do_not_meet(serve, toys):
    import asyncio

    served = serve(toys.FakeAsyncLLM(delay_s=0.005))
    body = {"prompt": "a", "temperature": 0, "request_id": "same"}
    replies = await asyncio.gather(*(served.post(COMPLETIONS, body) for _ in range(3)))
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {"hello world"}
    assert {reply.json()["id"] for reply in replies} == {"cmpl-same"}
    assert served.engine.num_aborts == 0


async def test_ignored_fields_are_named(serve):
    served = serve()
    body = {"prompt": "a", "wibble": 1, "metadata": {"a": "b"}, "user": "u", "nothing": None, "kv_transfer_params": {}}
    reply = await served.post(COMPLETIONS, body, **{"x-data-parallel-rank": "0", "x-vllm-priority": "high"})
    assert reply.status_code == 200
    ignored = set(reply.headers["x-vkit-ignored-fields"].split(","))
    expected = {"wibble", "metadata", "kv_transfer_params", "header:x-data-parallel-rank", "header:x-vllm-priority"}
    assert ignored == expected
    clean = await served.post(COMPLETIONS, {"prompt": "a", "user": "u", "session_id": "s"})
    assert "x-vkit-ignored-fields" not in clean.headers
    stream = await served.post(COMPLETIONS, {"prompt": "a", "wibble": 1, "stream": True})
    assert stream.headers["x-vkit-ignored-fields"] == "wibble"
    strict = serve(reject_unknown_fields=True)
    reply = await strict.post(COMPLETIONS, {"prompt": "a", "wibble": 1})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "wibble"
    assert (await strict.post(COMPLETIONS, {"prompt": "a", "metadata": {}})).status_code == 200


SAID = [{"role": "user", "content": "hi"}]
NESTED = [
    ("/v1/chat/completions", {"messages": [{**SAID[0], "zz": 1}]}, "messages.0.zz"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zz": 1}]}]},
        "messages.0.content.0.zz",
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID, "stream": True, "stream_options": {"include_usage": True, "zz": 1}},
        "stream_options.zz",
    ),
    (
        "/v1/chat/completions",
        {"messages": SAID, "tools": [{"type": "function", "function": {"name": "f", "zz": 1}}]},
        "tools.0.function.zz",
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": [{"role": "user", "content": [{"type": "text", "text": "a", "zz": 1}]}]},
        "messages.0.content.0.zz",
    ),
    (
        "/v1/messages",
        {"max_tokens": 9, "messages": SAID, "tools": [{"name": "f", "input_schema": {}, "zz": 1}]},
        "tools.0.zz",
    ),
    ("/v1/messages", {"max_tokens": 9, "messages": SAID, "thinking": {"type": "disabled", "zz": 1}}, "thinking.zz"),
    ("/v1/responses", {"input": "a", "reasoning": {"zz": 1}}, "reasoning.zz"),
    ("/v1/responses", {"input": "a", "text": {"format": {"type": "text", "zz": 1}}}, "text.format.zz"),
    ("/v1/responses", {"input": [{**SAID[0], "zz": 1}]}, "input.0.zz"),
    (
        "/v1/responses",
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "zz": 1}]}]},
        "input.0.content.0.zz",
    ),
]


@pytest.mark.parametrize(("path", "body", "name"), NESTED)
async def test_unknown_keys_inside_are_named_or_refused(serve, path, body, name):
    body = {"model": "toy", **body}
    reply = await serve().post(path, body)
    assert reply.status_code == 200, reply.text
    assert name in reply.headers["x-vkit-ignored-fields"].split(",")
    refused = await serve(reject_unknown_fields=True).post(path, body)
    assert refused.status_code == 400
    assert f"{name}: unknown field" in refused.json()["error"]["message"]


async def test_hostile_field_names_cannot_break_headers(serve):
    served = serve()
    reply = await served.post(COMPLETIONS, {"prompt": "a", "x\r\nset-cookie: a": 1, "ünï": 1, "y" * 9000: 1})
    assert reply.status_code == 200
    assert "set-cookie" not in reply.headers
    assert len(reply.headers["x-vkit-ignored-fields"]) <= 4096


async def test_context_overflow(serve):
    served = serve()
    for stream in (False, True):
        reply = await served.post(COMPLETIONS, {"prompt": "a" * 300, "stream": stream})
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert error["param"] == "prompt"
        assert error["message"] == (
            "This model's maximum context length is 256 tokens. However, your prompt contains 301 tokens. "
            "Please reduce the length of the input."
        )
    assert (await served.post(COMPLETIONS, {"prompt": "a" * 255})).status_code == 400
    assert (await served.post(COMPLETIONS, {"prompt": "a" * 254})).status_code == 200
    reply = await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]})
    assert reply.json()["error"]["param"] == "messages"
    reply = await served.post("/inference/v1/generate", {"token_ids": [97] * 256, "sampling_params": {}})
    assert reply.json()["error"]["param"] == "token_ids"


GUARDED = {
    "GET": ("/v1/models", "/v1/models/x", "/server_info"),
    "POST": (
        *("/v1/completions", "/v1/completions/render", "/v1/chat/completions", "/v1/chat/completions/render"),
        *("/tokenize", "/detokenize", "/inference/v1/generate", "/inference/v1/abort_requests"),
        *("/generative_scoring", "/reset_prefix_cache", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    ),
}
OPEN = (
    *("/", "/health", "/ping", "/version", "/load", "/metrics", "/v1/metrics", "/v1/health/live", "/v1/health/ready"),
    *("/v1/version", "/v1/metadata", "/v1/license", "/v1/manifest", "/docs", "/openapi.json"),
)


async def test_every_route_is_in_the_inventory(serve):
    from vkit.server.app import all_routes

    served = serve()
    for route in all_routes(served.state):
        path = route.template
        known = path in OPEN or any(path.startswith(prefix) for paths in GUARDED.values() for prefix in paths)
        assert known, path
        assert route.needs_key == (path not in OPEN), path


async def test_keys(serve):
    served = serve(api_keys=("k1", "k2"))
    for method, paths in GUARDED.items():
        for path in paths:
            for headers in ({}, {"authorization": "Bearer no"}, {"x-api-key": "k"}, {"authorization": "k1"}):
                reply = await served.client.request(method, path, json={}, headers=headers)
                assert reply.status_code == 401, (path, headers)
                assert reply.headers["www-authenticate"] == "Bearer"
                body = reply.json()
                kind = body["error"]["type"]
                assert kind == ("authentication_error" if "messages" in path else "AuthenticationError")
            for headers in ({"authorization": "bEARER k1"}, {"x-api-key": "k2"}):
                reply = await served.client.request(method, path + "/", json={}, headers=headers)
                assert reply.status_code != 401
    for path in OPEN:
        assert (await served.get(path)).status_code == 200, path
    unguarded = serve()
    assert (await unguarded.get("/v1/models", **{"x-api-key": "whatever"})).status_code == 200


async def test_cors(serve):
    from vkit.server.settings import CorsSettings

    plain = serve()
    origin = {"origin": "http://page"}
    assert not [name for name in (await plain.get("/health", **origin)).headers if name.startswith("access-control")]
    served = serve(cors=CorsSettings(origins=("*",)), api_keys=("k",))
    assert (await served.get("/health", **origin)).headers["access-control-allow-origin"] == "*"
    preflight = {
        **origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    reply = await served.client.options(COMPLETIONS, headers=preflight)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-methods"] == "POST"
    assert reply.headers["access-control-allow-headers"] == "content-type"
    one = serve(cors=CorsSettings(origins=("http://page",), allow_credentials=True, methods=("GET",)))
    reply = await one.get("/health", **origin)
    assert reply.headers["access-control-allow-origin"] == "http://page"
    assert reply.headers["access-control-allow-credentials"] == "true"
    assert reply.headers["vary"] == "Origin"
    assert "access-control-allow-origin" not in (await one.get("/health", origin="http://other")).headers


async def test_body_limit(serve):
    served = serve(max_request_body_size=1000)
    reply = await served.post(COMPLETIONS, {"prompt": "a" * 2000})
    assert reply.status_code == 413
    assert reply.json()["error"]["type"] == "RequestEntityTooLargeError"

    async def chunks():
        for _ in range(20):
            yield b"a" * 100

    reply = await served.client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert reply.status_code == 413
    big = serve()
    reply = await big.post("/tokenize", {"prompt": "a", "picture": "a" * 11_000_000})
    assert reply.status_code == 200


async def test_root_path(serve):
    served = serve(root_path="/x")
    assert (await served.get("/x/v1/models")).status_code == 200
    assert (await served.get("/x/v1/messages/what")).json()["type"] == "error"
    assert (await served.get("/x/openapi.json")).json()["servers"] == [{"url": "/x"}]
    guarded = serve(root_path="/x", api_keys=("k",))
    assert (await guarded.get("/x/v1/models")).status_code == 401


async def test_priority(serve):
    served = serve(scheduling_policy="priority")
    await served.post(COMPLETIONS, {"prompt": "a", "priority": -3})
    assert served.engine.seen[-1][2] == -3
    await served.post(COMPLETIONS, {"prompt": "a", "priority": -3}, **{"x-vllm-priority": "7"})
    assert served.engine.seen[-1][2] == 7
    fcfs = serve()
    reply = await fcfs.post(COMPLETIONS, {"prompt": "a"}, **{"x-vllm-priority": "7"})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "priority"


async def test_admission_limit(serve, toys):
    import asyncio

    engine = toys.FakeAsyncLLM(delay_s=0.01, max_num_seqs=1)
    served = serve(engine, max_num_queued_reqs=1)
    replies = await asyncio.gather(*(served.post(COMPLETIONS, {"prompt": "a"}) for _ in range(4)))
    codes = sorted(reply.status_code for reply in replies)
    assert codes == [200, 200, 503, 503]
    refused = next(reply for reply in replies if reply.status_code == 503)
    assert refused.headers["retry-after"]
    text = (await served.get("/metrics")).text
    assert 'vllm:admission_rejections_total{model_name="toy",reason="max_num_queued_reqs"} 2.0' in text
    assert (await served.post(COMPLETIONS, {"prompt": "a"})).status_code == 200


async def test_load_metrics_header(serve):
    served = serve()
    reply = await served.post(COMPLETIONS, {"prompt": "a"}, **{"endpoint-load-metrics-format": "text"})
    expected = "TEXT named_metrics.kv_cache_usage_perc=0.0, named_metrics.num_requests_waiting=0"
    assert reply.headers["endpoint-load-metrics"] == expected
    reply = await served.post(COMPLETIONS, {"prompt": "a"}, **{"endpoint-load-metrics-format": "json"})
    name, _, text = reply.headers["endpoint-load-metrics"].partition(" ")
    assert name == "JSON"
    assert json.loads(text) == {"named_metrics": {"kv_cache_usage_perc": 0.0, "num_requests_waiting": 0}}


async def test_cached_tokens(serve):
    served = serve()
    body = {"prompt": "a" * 40, "return_cached_tokens_details": True, "max_tokens": 1}
    first = (await served.post(COMPLETIONS, body)).json()["usage"]
    again = (await served.post(COMPLETIONS, body)).json()["usage"]
    salted = (await served.post(COMPLETIONS, {**body, "cache_salt": "s"})).json()["usage"]
    details = [usage["prompt_tokens_details"]["cached_tokens"] for usage in (first, again, salted)]
    assert details == [0, 32, 0]
    always = serve(enable_prompt_tokens_details=True)
    assert (await always.post(COMPLETIONS, {"prompt": "a"})).json()["usage"]["prompt_tokens_details"] is not None


async def test_request_timings(serve):
    served = serve(enable_per_request_metrics=True)
    metrics = (await served.post(COMPLETIONS, {"prompt": "a", "temperature": 0})).json()["metrics"]
    assert set(metrics) == {
        *("time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"),
        "speculative_decoding",
    }
    assert metrics["time_to_first_token_ms"] > 0
    assert metrics["speculative_decoding"] is None
    assert (await served.post(COMPLETIONS, {"prompt": "a", "n": 2})).json()["metrics"] is None


def test_timings_tell_how_drafts_fared():
    times = RequestMetrics(0.0, 0.1, 0.2, 1.2, drafts=DraftCounts(4, 12, 6))
    assert timings(times, 11).speculative_decoding == {
        "num_drafts": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "acceptance_rate": 0.5,
        "mean_acceptance_length": 2.5,
    }


async def test_tokenize_and_detokenize(serve):
    served = serve()
    reply = (await served.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json()
    assert reply["tokens"] == [256, *"hé".encode()]
    assert reply["count"] == 4
    assert reply["max_model_len"] == 256
    assert len(reply["token_strs"]) == 4
    bare = (await served.post("/tokenize", {"prompt": "hé", "add_special_tokens": False})).json()["tokens"]
    assert (await served.post("/detokenize", {"tokens": bare})).json() == {"prompt": "hé"}
    assert (await served.post("/tokenize", {"prompt": ""})).json()["tokens"] == [256]
    assert (await served.post("/detokenize", {"tokens": []})).json() == {"prompt": ""}
    assert (await served.post("/detokenize", {"tokens": [256, 104]})).json() == {"prompt": "<s>h"}
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None, "messages": None}, "prompt"),
        ("/detokenize", {"tokens": [100000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        reply = await served.post(path, body)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
    assert (await served.post("/tokenize", {"prompt": "a", "model": "X"})).status_code == 404
    told = serve(enable_tokenizer_info_endpoint=True)
    assert (await told.get("/tokenizer_info")).json()["tokenizer_class"] == "ToyTokenizer"


async def test_generate(serve):
    served = serve()
    params = {"temperature": 0, "logprobs": 2, "prompt_logprobs": 0, "max_tokens": 3}
    body = {"token_ids": [97, 98], "sampling_params": params, "return_token_ids": True}
    reply = (await served.post("/inference/v1/generate", body)).json()
    assert reply["request_id"].startswith("generate-tokens-")
    assert reply["output_mode"] == "tokens"
    assert reply["prompt_token_ids"] == [97, 98]
    assert len(reply["prompt_logprobs"]) == 2
    (choice,) = reply["choices"]
    assert choice["token_ids"] == [*b"hel"]
    assert choice["text"] == "hel"
    first = choice["logprobs"]["content"][0]
    assert (first["token_id"], first["rank"]) == (104, 1)
    assert [entry["token_id"] for entry in first["top_logprobs"]] == [104, 105]
    frames = await served.frames("/inference/v1/generate", {**body, "stream_options": {"include_usage": True}})
    assert frames[0]["prompt_token_ids"] == [97, 98]
    assert [i for f in frames for c in f["choices"] for i in c["token_ids"]] == [*b"hel"]
    assert frames[-1]["usage"] == reply["usage"]
    bare = {**body, "sampling_params": {"detokenize": False, "max_tokens": 3, "temperature": 0}}
    assert "text" not in (await served.post("/inference/v1/generate", bare)).json()["choices"][0]
    text = (await served.post("/inference/v1/generate", {**body, "output_mode": "text"})).json()["choices"][0]
    assert text["logprobs"]["content"][0]["token"] == "h"


async def test_generate_keeps_engine_defaults(serve, toys):
    engine = toys.FakeAsyncLLM(generation_config={"temperature": 0.2, "top_k": 5})
    served = serve(engine)
    await served.post("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}})
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (1.0, 0, 255)


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [99999]}, "token_ids"),
        ({"sampling_params": {"temprature": 1}}, "sampling_params"),
        ({"sampling_params": {"stop": "a", "detokenize": False}}, "stop"),
        ({"sampling_params": {"n": 0}}, "n"),
        ({"output_mode": "x"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"detokenize": False}}, "output_mode"),
        ({"output_mode": "derender", "stream": True}, "output_mode"),
        ({"features": {"a": 1}}, "features"),
        ({"features": {}, "content_parts": []}, "features"),
        ({"stream_options": {}}, "stream_options"),
        ({"sampling_params": None}, "sampling_params"),
    ],
)
async def test_generate_refusals(serve, extra, param):
    reply = await serve().post("/inference/v1/generate", {"token_ids": [97], "sampling_params": {}, **extra})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


async def test_scoring(serve):
    served = serve()
    body = {"query": "is ", "items": ["a", "b"], "label_token_ids": [104, 105]}
    reply = (await served.post("/generative_scoring", body)).json()
    assert reply["object"] == "list"
    assert [entry["index"] for entry in reply["data"]] == [0, 1]
    first = reply["data"][0]
    assert sum(first["label_probs"].values()) == pytest.approx(1)
    assert first["score"] == first["label_probs"]["104"] > first["label_probs"]["105"]
    assert first["label_logprobs"]["104"] < 0
    assert [seen[0] for seen in served.engine.seen] == [[256, *b"is a"], [256, *b"is b"]]
    assert reply["usage"]["completion_tokens"] == 2
    full = (await served.post("/generative_scoring", {**body, "apply_softmax": False})).json()["data"][0]
    assert sum(full["label_probs"].values()) < 1
    await served.post("/generative_scoring", {**body, "item_first": True, "items": [[1, 2]], "query": [3]})
    assert served.engine.seen[-1][0] == [1, 2, 3]
    for prompt in ("a", [97], ["a", "b"], [[97]]):
        assert (await served.post("/generative_scoring", {"prompt": prompt, "label_token_ids": [1]})).status_code == 200
    assert (await served.post("/generative_scoring", {"prompt": "a" * 255, "label_token_ids": [1]})).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a"}, "label_token_ids"),
        ({"prompt": "a", "label_token_ids": []}, "label_token_ids"),
        ({"prompt": "a", "label_token_ids": [1, 1]}, "label_token_ids"),
        ({"prompt": "a", "label_token_ids": [99999]}, "label_token_ids"),
        ({"label_token_ids": [1]}, "prompt"),
        ({"prompt": "a", "query": "b", "items": ["c"], "label_token_ids": [1]}, "prompt"),
        ({"query": "b", "items": [], "label_token_ids": [1]}, "items"),
        ({"items": ["a"], "label_token_ids": [1]}, "query"),
        ({"query": "b", "items": ["a", [1]], "label_token_ids": [1]}, "items"),
    ],
)
async def test_scoring_refusals(serve, body, param):
    reply = await serve().post("/generative_scoring", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


async def test_metrics_are_valid_and_equal_on_both_paths(serve):
    from prometheus_client.parser import text_string_to_metric_families

    served = serve()
    usage = (await served.post(COMPLETIONS, {"prompt": "abc", "n": 3, "temperature": 0})).json()["usage"]
    reply = await served.get("/metrics")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = {family.name: family for family in text_string_to_metric_families(reply.text)}
    assert families["vllm:generation_tokens"].samples[0].value == usage["completion_tokens"]
    assert families["vllm:prompt_tokens"].samples[0].value == usage["prompt_tokens"]
    done = {s.labels["finished_reason"]: s.value for s in families["vllm:request_success"].samples}
    assert done == {"stop": 3, "length": 0, "abort": 0, "error": 0, "repetition": 0}
    for family in families.values():
        assert family.documentation
        assert family.type != "unknown"
        if family.name.startswith("vllm:") and "rejections" not in family.name:
            assert all(s.labels["model_name"] == "toy" and s.labels["engine"] == "0" for s in family.samples)
    http = families["http_requests"].samples
    assert [(s.labels["handler"], s.value) for s in http if s.name.endswith("_total")] == [(COMPLETIONS, 1)]
    twin = (await served.get("/v1/metrics")).text
    own = [line for line in reply.text.splitlines() if "vllm:" in line]
    assert own == [line for line in twin.splitlines() if "vllm:" in line]
    quiet = serve(disable_metrics=True)
    assert (await quiet.get("/metrics")).status_code == 404
    assert (await quiet.get("/v1/metrics")).status_code == 404
    loading = serve(is_loaded=False)
    assert "vllm:num_requests_running" in (await loading.get("/metrics")).text


async def test_probes(serve):
    from vkit import __version__

    served = serve()
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        reply = await served.client.request(method, path)
        assert (reply.status_code, reply.content) == (200, b"")
    assert (await served.get("/version")).json() == {"version": __version__}
    assert (await served.get("/load")).json() == {"server_load": 0}


async def test_server_info(serve, monkeypatch):
    served = serve()
    monkeypatch.setenv("VKIT_API_KEY", "hidden")
    monkeypatch.setenv("VLLM_SOMETHING", "shown")
    text = (await served.get("/server_info")).json()
    assert "architecture='ToyForCausalLM'" in text["vllm_config"]
    assert text["vllm_env"] == {"VLLM_SOMETHING": "shown"}
    assert text["system_env"]["python_version"]
    nested = (await served.get("/server_info?config_format=json")).json()
    assert nested["vllm_config"]["dtype"] == "float32"
    assert (await served.get("/server_info?config_format=xml")).json()["error"]["param"] == "config_format"


async def test_reset_prefix_cache(serve):
    served = serve()
    await served.post(COMPLETIONS, {"prompt": "a" * 40})
    reply = await served.client.post("/reset_prefix_cache", content=b"whatever")
    assert reply.json() == {"success": True}
    usage = (await served.post(COMPLETIONS, {"prompt": "a" * 40, "return_cached_tokens_details": True})).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert (await served.client.post("/reset_prefix_cache?reset_running_requests=maybe")).status_code == 400


async def test_management(serve):
    from vkit import __version__

    served = serve(repository_override="over")
    metadata = (await served.get("/v1/metadata")).json()
    assert metadata["modelInfo"] == [
        {"shortName": "toy", "modelUrl": "toys/toy"},
        {"shortName": "alias/with/slash", "modelUrl": "toys/toy"},
    ]
    assert metadata["repository_override"] == "over"
    assert metadata["selectedModelProfileName"] == "vkit-float32-tp1"
    assert len(metadata["selectedModelProfileId"]) == 64
    license_ = (await served.get("/v1/license")).json()
    assert metadata["licenseInfo"] == license_
    assert set(license_) == {"name", "path", "sha", "size", "url", "type", "content"}
    assert license_["size"] == len(license_["content"]) > 1000
    manifest = (await served.get("/v1/manifest")).json()
    assert manifest["repository_override"] == "over"
    document = yaml.safe_load(manifest["manifest_file"])
    assert document["schema_version"] == "1.0"
    assert metadata["selectedModelProfileId"] in document["profiles"]
    document_version = (await served.get("/openapi.json")).json()["info"]["version"]
    assert (await served.get("/v1/version")).json() == {"release": __version__, "api": document_version}


async def test_document(serve):
    from vkit.server.app import all_routes

    served = serve()
    document = (await served.get("/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    for route in all_routes(served.state):
        for method in route.methods:
            operation = document["paths"][route.template][method.lower()]
            assert operation["responses"]["200"]
            if route.streams:
                assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    text = json.dumps(document)
    for name in document["components"]["schemas"]:
        assert f"#/components/schemas/{name}" in text
    page = (await served.get("/docs")).text.replace("http://www.w3.org/2000/svg", "")  # a name, never fetched
    assert "http://" not in page
    assert "https://" not in page
    assert "//cdn" not in page
    hidden = serve(disable_docs=True)
    assert (await hidden.get("/docs")).status_code == 404
    assert (await hidden.get("/openapi.json")).status_code == 404


async def test_log_never_has_keys_or_prompts(serve, caplog):
    import logging

    caplog.set_level(logging.DEBUG)
    served = serve(api_keys=("sesame",))
    await served.post(COMPLETIONS, {"prompt": "open-up"}, **{"x-api-key": "sesame"})
    await served.post(COMPLETIONS, {"prompt": "open-up"}, **{"x-api-key": "wrong-sesame"})
    assert "sesame" not in caplog.text
    assert "open-up" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name == "vkit.server.access"]
    assert [line.split(" ")[:3] for line in lines] == [["POST", COMPLETIONS, "200"], ["POST", COMPLETIONS, "401"]]
    caplog.clear()
    await served.get("/health")
    assert not [record for record in caplog.records if record.name == "vkit.server.access"]
    told = serve(enable_log_requests=True, enable_log_outputs=True, max_log_len=4)
    await told.post(COMPLETIONS, {"prompt": "open-up", "temperature": 0})
    assert "'open'" in caplog.text
    assert "open-up" not in caplog.text
    assert "'hell'" in caplog.text

"""POST /v1/completions over the scripted engine."""

from __future__ import annotations

from itertools import chain

import pytest

from vkit.types import GRAMMAR_FAULT, FinishReason


async def test_whole_reply_has_every_key(serve):
    served = serve()
    reply = (await served.post("/v1/completions", {"prompt": "abc", "temperature": 0})).json()
    assert reply["choices"] == [
        {
            "index": 0,
            "text": "hello world",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
            "token_ids": None,
            "prompt_token_ids": None,
            "prompt_logprobs": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 12,
        "total_tokens": 16,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }
    assert set(reply) == {
        *("id", "object", "created", "model", "system_fingerprint", "service_tier", "choices", "usage"),
        *("kv_transfer_params", "metrics"),
    }
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["model"] == "toy"


async def test_stream_joins_to_the_whole(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0}
    whole = (await served.post("/v1/completions", body)).json()
    frames = await served.frames("/v1/completions", body)
    assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["choices"][0]["text"]
    reasons = [frame["choices"][0]["finish_reason"] for frame in frames]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert len({frame["id"] for frame in frames}) == 1
    assert "system_fingerprint" in frames[-1]
    assert not any("usage" in frame for frame in frames)


async def test_usage_chunk_only_on_request(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0}
    frames = await served.frames("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert frames[-1]["choices"] == []
    assert frames[-1]["usage"]["completion_tokens"] == 12
    assert not any("usage" in frame for frame in frames[:-1])
    frames = await served.frames("/v1/completions", {**body, "stream_options": {}})
    assert not any("usage" in frame for frame in frames)
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = await served.frames("/v1/completions", {**body, "stream_options": options})
    assert [frame["usage"]["completion_tokens"] for frame in frames[:-1]] == list(range(1, 13))
    frames = await served.frames("/v1/completions", {**body, "stream_options": {"continuous_usage_stats": True}})
    assert not any("usage" in frame for frame in frames)


async def test_stream_options_without_stream_is_refused(serve):
    reply = await serve().post("/v1/completions", {"prompt": "a", "stream_options": {}})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "stream_options"


async def test_forced_usage(serve):
    served = serve(enable_force_include_usage=True)
    frames = await served.frames("/v1/completions", {"prompt": "abc", "temperature": 0})
    assert all("usage" in frame for frame in frames)
    assert frames[-1]["choices"] == []


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [("abc", 1), (["abc"], 1), (["abc", "de"], 2), ([97, 98], 1), ([[97], [98, 99], [100]], 3)],
)
async def test_prompt_forms(serve, prompt, num_choices):
    served = serve()
    reply = (await served.post("/v1/completions", {"prompt": prompt, "temperature": 0, "n": 2})).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * num_choices))
    ids = [seen[0] for seen in served.engine.seen]
    expected = {"abc": [[256, 97, 98, 99]]}.get(prompt) if isinstance(prompt, str) else None
    if expected is not None:
        assert ids == expected
    assert reply["usage"]["prompt_tokens"] == sum(len(i) for i in ids)
    assert reply["usage"]["completion_tokens"] == 12 * 2 * num_choices
    frames = await served.frames("/v1/completions", {"prompt": prompt, "temperature": 0, "n": 2})
    joined = {}
    for frame in frames:
        (choice,) = frame["choices"]
        joined[choice["index"]] = joined.get(choice["index"], "") + choice["text"]
    assert joined == {choice["index"]: choice["text"] for choice in reply["choices"]}


@pytest.mark.parametrize("prompt", [None, [], [[]], ["a", 1], [-1], [10**6], [["a"]], 5, [True], {"a": 1}])
async def test_bad_prompts(serve, prompt):
    served = serve()
    reply = await served.post("/v1/completions", {"prompt": prompt})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].split(".")[0] == "prompt"
    assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 200


async def test_add_special_tokens(serve):
    served = serve()
    await served.post("/v1/completions", {"prompt": "ab", "add_special_tokens": False})
    assert served.engine.seen[-1][0] == [97, 98]


async def test_max_tokens_default_and_limits(serve):
    served = serve()
    await served.post("/v1/completions", {"prompt": "ab"})
    assert served.engine.seen[-1][1].max_tokens == 16
    await served.post("/v1/completions", {"prompt": "ab", "max_tokens": -1})
    assert served.engine.seen[-1][1].max_tokens == 16
    await served.post("/v1/completions", {"prompt": "ab", "max_tokens": 256})
    assert served.engine.seen[-1][1].max_tokens == 253
    for bad in (257, 0, -2, 1.5, "3", True):
        reply = await served.post("/v1/completions", {"prompt": "ab", "max_tokens": bad})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "max_tokens"
    assert (await served.post("/v1/completions", {"prompt": "ab", "max_tokens": 4.0})).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_echo(serve, stream):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "echo": True, "max_tokens": 5}
    if stream:
        frames = await served.frames("/v1/completions", body)
        assert frames[0]["choices"][0]["text"].startswith("abc")
        text = "".join(frame["choices"][0]["text"] for frame in frames)
    else:
        text = (await served.post("/v1/completions", body)).json()["choices"][0]["text"]
    assert text == "abchello"


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_without_generation(serve, logprobs, stream):
    served = serve()
    body = {"prompt": "abc", "echo": True, "max_tokens": 0, "logprobs": logprobs}
    if stream:
        frames = await served.frames("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        choice, usage = frames[0]["choices"][0], frames[-1]["usage"]
        assert choice["finish_reason"] == "length" or frames[-2]["choices"][0]["finish_reason"] == "length"
    else:
        reply = (await served.post("/v1/completions", body)).json()
        choice, usage = reply["choices"][0], reply["usage"]
        assert choice["finish_reason"] == "length"
    assert choice["text"] == "abc"
    assert usage["completion_tokens"] == 0
    assert usage["prompt_tokens"] == 4
    if logprobs is None:
        assert served.engine.seen == []
    else:
        assert len(choice["logprobs"]["tokens"]) == 4


async def test_echo_logprobs_cover_prompt_and_output(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "echo": True, "max_tokens": 2, "logprobs": 2}
    whole = (await served.post("/v1/completions", body)).json()["choices"][0]["logprobs"]
    assert whole["tokens"] == ["<s>", "a", "b", "c", "h", "e"]
    assert whole["token_logprobs"][0] is None
    assert whole["top_logprobs"][0] is None
    assert all(isinstance(value, float) for value in whole["token_logprobs"][1:])
    assert whole["text_offset"] == [0, 3, 4, 5, 6, 7]
    frames = await served.frames("/v1/completions", body)
    joined = {key: list(chain.from_iterable(f["choices"][0]["logprobs"][key] for f in frames)) for key in whole}
    assert joined == whole


async def test_logprobs_shape(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 3}
    zero = (await served.post("/v1/completions", {**body, "logprobs": 0})).json()["choices"][0]["logprobs"]
    assert [list(top) for top in zero["top_logprobs"]] == [["h"], ["e"], ["l"]]
    three = (await served.post("/v1/completions", {**body, "logprobs": 3})).json()["choices"][0]["logprobs"]
    for top in three["top_logprobs"]:
        assert len(top) == 3
        assert list(top.values()) == sorted(top.values(), reverse=True)
    ids = (await served.post("/v1/completions", {**body, "logprobs": 1, "return_tokens_as_token_ids": True})).json()
    assert ids["choices"][0]["logprobs"]["tokens"] == ["token_id:104", "token_id:101", "token_id:108"]


async def test_sampled_token_is_added_to_the_top(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "max_tokens": 1, "logprobs": 0, "logprob_token_ids": [97, 98]}
    top = (await served.post("/v1/completions", body)).json()["choices"][0]["logprobs"]["top_logprobs"][0]
    assert set(top) == {"h", "a", "b"}
    reply = await served.post("/v1/completions", {"prompt": "abc", "logprob_token_ids": [97]})
    assert reply.json()["error"]["param"] == "logprob_token_ids"


async def test_prompt_logprobs(serve):
    served = serve()
    body = {"prompt": "abc", "prompt_logprobs": 1, "max_tokens": 1}
    entries = (await served.post("/v1/completions", body)).json()["choices"][0]["prompt_logprobs"]
    assert entries[0] is None
    assert [list(entry) for entry in entries[1:]] == [["97"], ["98"], ["99"]]
    assert entries[1]["97"] == {"logprob": pytest.approx(-0.93, abs=0.01), "rank": 1, "decoded_token": "a"}
    reply = await served.post("/v1/completions", {**body, "stream": True})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "prompt_logprobs"


async def test_return_token_ids(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "return_token_ids": True}
    choice = (await served.post("/v1/completions", body)).json()["choices"][0]
    assert choice["prompt_token_ids"] == [256, 97, 98, 99]
    assert choice["token_ids"] == [*b"hello world", 257]
    frames = await served.frames("/v1/completions", body)
    assert list(chain.from_iterable(f["choices"][0]["token_ids"] for f in frames)) == choice["token_ids"]
    assert [("prompt_token_ids" in f["choices"][0]) for f in frames] == [True] + [False] * (len(frames) - 1)


async def test_best_of_returns_the_best(serve):
    served = serve()
    body = {"prompt": "abc", "best_of": 4, "n": 2, "seed": 3, "max_tokens": 4}
    reply = (await served.post("/v1/completions", body)).json()
    assert len(reply["choices"]) == 2
    assert reply["usage"]["completion_tokens"] == 16
    assert served.engine.seen[-1][1].n == 4
    assert reply["choices"][0]["logprobs"] is None
    for bad in ({"best_of": 1, "n": 2}, {"best_of": 3, "stream": True}):
        refused = await served.post("/v1/completions", {"prompt": "a", **bad})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "best_of"


async def test_stream_interval_groups_tokens(serve):
    served = serve()
    body = {"prompt": "abc", "temperature": 0, "stream_interval": 4, "return_token_ids": True}
    frames = await served.frames("/v1/completions", body)
    assert [len(f["choices"][0]["token_ids"]) for f in frames] == [1, 4, 4, 3]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "x"),
        ("prompt_embeds", "x"),
        ("structured_outputs", {"regex": "(["}),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}),
        ("structured_outputs", {"regex": "a", "choice": ["b"]}),
        ("structured_outputs", {}),
        ("structured_outputs", {"json_object": False}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}),
        ("guided_json", {}),
        ("guided_regex", "a"),
        ("thinking_token_budget", 5),
        ("priority", 1),
        ("cache_salt", "a/b"),
        ("cache_salt", ""),
        ("truncate_prompt_tokens", 0),
        ("truncation_side", "middle"),
        ("stop", ["a"] * 17),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop_token_ids", [100000]),
        ("stop_token_ids", "x"),
        ("stop_token_ids", [None]),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("bad_words", ["a"] * 200),
        ("logit_bias", {"abc": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"259": 1}),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", 1.5),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("seed", 2**63),
        ("n", 0),
        ("n", 129),
        ("min_tokens", 17),
        ("min_tokens", -1),
        ("logprobs", 21),
        ("logprobs", -1),
        ("prompt_logprobs", 21),
        ("stream_interval", 0),
        ("echo", 1),
        ("stream", "yes"),
        ("length_penalty", 1.0),
    ],
)
async def test_refusals_name_the_field(serve, field, value):
    served = serve()
    reply = await served.post("/v1/completions", {"prompt": "abc", field: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["param"].split(".")[0] == field, error
    assert (await served.post("/v1/completions", {"prompt": "abc"})).status_code == 200


@pytest.mark.parametrize(
    "value",
    [
        {"min_pattern_size": 3, "max_pattern_size": 2, "min_count": 2},
        {"max_pattern_size": 2, "min_count": 1},
        {"max_pattern_size": 2, "min_count": 2, "x": 1},
    ],
)
async def test_bad_repetition_detection(serve, value):
    reply = await serve().post("/v1/completions", {"prompt": "abc", "repetition_detection": value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith("repetition_detection")


async def test_repetition_detection(serve, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"xyababababab")
    served = serve(engine)
    detection = {"max_pattern_size": 3, "min_pattern_size": 2, "min_count": 3}
    body = {"prompt": "abc", "temperature": 0, "repetition_detection": detection}
    choice = (await served.post("/v1/completions", body)).json()["choices"][0]
    assert choice["text"] == "xyababab"
    assert choice["finish_reason"] == "repetition"
    assert choice["stop_reason"] == "repetition_detected"


async def test_null_means_absent(serve):
    served = serve()
    names = ("n", "max_tokens", "stop", "temperature", "top_p", "logprobs", "seed", "echo", "stream", "stream_options")
    reply = await served.post("/v1/completions", {"prompt": "abc", **dict.fromkeys(names)})
    assert reply.status_code == 200
    assert served.engine.seen[-1][1].max_tokens == 16
    assert (await served.post("/v1/completions", {"prompt": "abc", "top_k": 0, "seed": -1})).status_code == 200


async def test_generation_config_defaults(serve, toys):
    engine = toys.FakeAsyncLLM(generation_config={"temperature": 0.5, "top_k": 7, "max_new_tokens": 3})
    served = serve(engine, override_generation_config={"top_k": 9})
    await served.post("/v1/completions", {"prompt": "abc"})
    params = engine.seen[-1][1]
    assert (params.temperature, params.top_k, params.max_tokens) == (0.5, 9, 16)
    await served.post("/v1/completions", {"prompt": "abc", "temperature": 0.7})
    assert engine.seen[-1][1].temperature == 0.7


async def test_truncation(serve):
    served = serve()
    body = {"prompt": "abcdef", "add_special_tokens": False}
    await served.post("/v1/completions", {**body, "truncate_prompt_tokens": 2})
    assert served.engine.seen[-1][0] == [*b"ef"]
    await served.post("/v1/completions", {**body, "truncate_prompt_tokens": 2, "truncation_side": "right"})
    assert served.engine.seen[-1][0] == [*b"ab"]
    reply = await served.post("/v1/completions", {"prompt": "a" * 400, "truncate_prompt_tokens": -1})
    assert reply.json()["usage"]["prompt_tokens"] == 255


async def test_failure_before_the_first_token_keeps_its_status(serve, toys):
    engine = toys.FakeAsyncLLM()
    engine.fail_after = 0
    served = serve(engine)
    for stream in (False, True):
        reply = await served.post("/v1/completions", {"prompt": "abc", "temperature": 0, "stream": stream})
        assert reply.status_code == 500
        assert reply.json()["error"] == {
            "message": "Internal server error",
            "type": "InternalServerError",
            "param": None,
            "code": 500,
        }


async def test_a_grammar_that_cannot_be_followed_is_told_to_the_client(serve, toys):
    class Stuck(toys.FakeAsyncLLM):
        def _tokens(self, *args):
            for part in super()._tokens(*args):
                if part is not None:
                    part.finish_reason, part.error = FinishReason.ERROR, f"{GRAMMAR_FAULT} refused token 7"
                yield part
                return

    reply = await serve(Stuck()).post("/v1/completions", {"prompt": "abc", "temperature": 0})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "structured_outputs: the grammar refused token 7"


async def test_failure_inside_a_stream_is_a_frame(serve, toys):
    engine = toys.FakeAsyncLLM()
    engine.fail_after = 3
    served = serve(engine)
    frames = await served.frames("/v1/completions", {"prompt": "abc", "temperature": 0})
    assert [frame["choices"][0]["text"] for frame in frames[:-1]] == ["h", "e", "l"]
    assert frames[-1]["error"]["code"] == 500
    assert "secret" not in str(frames)


async def test_beam_search(serve, toys):
    served = serve(toys.FakeAsyncLLM(lambda prompt: b"hello"[len(prompt) - 4 :]))
    body = {"prompt": "abc", "use_beam_search": True, "n": 2, "max_tokens": 3, "logprobs": 1}
    reply = (await served.post("/v1/completions", body)).json()
    assert len(reply["choices"]) == 2
    # The toy's next-best token always is the following id.
    assert [choice["text"] for choice in reply["choices"]] == ["hel", "hem"]
    assert [choice["finish_reason"] for choice in reply["choices"]] == ["length", "length"]
    assert reply["choices"][1]["logprobs"]["tokens"] == ["h", "e", "m"]
    for clash in ({"stream": True}, {"logprob_token_ids": [1], "logprobs": 0}):
        refused = await served.post("/v1/completions", {**body, **clash})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "use_beam_search"


async def test_render_is_what_runs(serve):
    served = serve()
    body = {"prompt": ["abc", "de"], "temperature": 0, "max_tokens": 7, "stop": "z", "seed": 5, "cache_salt": "s"}
    items = (await served.post("/v1/completions/render", body, **{"x-request-id": "r1"})).json()
    assert served.engine.seen == []
    assert [item["request_id"] for item in items] == ["cmpl-r1-0", "cmpl-r1-1"]
    assert items[0]["token_ids"] == [256, *b"abc"]
    assert items[0]["sampling_params"]["max_tokens"] == 7
    assert items[0]["prompt_text"] == "abc"
    assert items[0]["cache_salt"] == "s"
    whole = (await served.post("/v1/completions", body)).json()
    for item, choice in zip(items, whole["choices"], strict=True):
        reply = await served.post("/inference/v1/generate", item)
        assert reply.status_code == 200, reply.text
        assert "x-vkit-ignored-fields" not in reply.headers
        assert reply.json()["choices"][0]["text"] == choice["text"]
    assert served.engine.seen[0][1] == served.engine.seen[2][1]


async def test_token_offsets(serve, toys):
    engine = toys.FakeAsyncLLM(merged=["bé"])
    served = serve(engine)
    body = {"prompt": "abé😀c", "return_token_offsets": True}
    (item,) = (await served.post("/v1/completions/render", body)).json()
    assert item["token_offsets"] == [[0, 0], [0, 1], [1, 3], [3, 4], [3, 4], [3, 4], [3, 4], [4, 5]]

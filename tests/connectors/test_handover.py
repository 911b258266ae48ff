"""A prompt computed by one server and decoded by another: what is promised, waited for, and refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.connected import Store, config_of, connected_engine, context_of, store_connector
from tests.connectors.conftest import MODELS, PROMPT
from tests.fakes import make_request
from vkit.connectors.identity import identity_digest
from vkit.types import FinishReason, SamplingParams

OURS = identity_digest(context_of().identity)


def promise(num_tokens: int, identity: str = OURS) -> dict[str, Any]:
    return {"do_remote_prefill": True, "remote_num_tokens": num_tokens, "remote_identity": identity}


def outcome(store: Store, params: dict[str, Any], policy: str = "fail") -> Any:
    """The one completion of a request with these parameters."""
    config = config_of("kv_consumer", policy)
    engine = connected_engine(store_connector(store, config=config), config=config)
    sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    engine.add_request(make_request(engine, list(range(2, 20)), sampling, kv_transfer_params=params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.close()
    return outputs[-1]


def test_a_promise_of_another_identity_is_refused() -> None:
    (completion,) = outcome(Store(), promise(16, "theirs")).outputs
    assert completion.finish_reason is FinishReason.ERROR
    assert "remote_identity" in completion.error


@pytest.mark.parametrize("num_tokens", [None, -1, True, "16"])
def test_a_promise_that_makes_no_sense_is_refused(num_tokens: Any) -> None:
    (completion,) = outcome(Store(), promise(num_tokens)).outputs
    assert completion.finish_reason is FinishReason.ERROR
    assert "remote_num_tokens" in completion.error


def test_a_promise_not_kept_fails_or_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vkit.connectors.planning.PROMISE_TIMEOUT_S", 0.05)
    (completion,) = outcome(Store(), promise(16)).outputs
    assert completion.finish_reason is FinishReason.ERROR
    assert "16 tokens were promised, 0 came" in completion.error
    output = outcome(Store(), promise(16), "recompute")
    assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert output.num_cached_tokens == 0


def test_what_was_promised_is_waited_for() -> None:
    store, filled = Store(), Store()
    producer = store_connector(filled, config=config_of("kv_producer"))
    engine = connected_engine(producer, config=config_of("kv_producer"))
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    engine.add_request(
        make_request(engine, list(range(2, 20)), sampling, kv_transfer_params={"do_remote_decode": True})
    )
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    reply = dict(outputs[-1].kv_transfer_params)
    assert reply == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "vkit",
        "remote_num_tokens": 16,
        "remote_identity": OURS,
    }
    engine.close()
    threading.Timer(0.2, lambda: store.chunks.update(filled.chunks)).start()
    assert outcome(store, reply).num_cached_tokens == 16


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for name in ("llama/config.json", "llama/model.safetensors", "byte_tokenizer/tokenizer.json"):
        shutil.copyfile(MODELS / name, folder / Path(name).name)
    shutil.copyfile(MODELS / "byte_tokenizer" / "tokenizer_config.json", folder / "tokenizer_config.json")
    return folder


@pytest.fixture
def serve(tiny: Path) -> Iterator[Callable[..., str]]:
    """Starts `vkit serve` processes; gives their addresses."""
    running: list[subprocess.Popen[str]] = []

    def start(*flags: str) -> str:
        command = [sys.executable, "-m", "vkit", "serve", "--model", str(tiny), "--host", "127.0.0.1", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--threads", "1", "--block-size", "16", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if not key.startswith("VKIT_")},
        )
        running.append(process)
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("ready after "):
                threading.Thread(target=process.stderr.read, daemon=True).start()
                return next(known.split()[-1] for known in lines if known.startswith("listening on "))
        raise AssertionError("".join(lines))

    yield start
    for process in running:
        process.terminate()
    for process in running:
        process.wait(120)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("litestar") is None, reason="needs the extra serve")
def test_two_servers_share_the_work_of_one(serve: Callable[..., str], tmp_path: Path) -> None:
    def config(role: str) -> str:
        extra = {"root_dir": str(tmp_path / "shared")}
        return json.dumps(
            {"kv_connector": "FileConnector", "kv_role": role, "engine_id": role, "kv_connector_extra_config": extra}
        )

    def generate(url: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        sampling = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling, **more}
        reply = httpx.post(f"{url}/inference/v1/generate", json=body, timeout=200)
        assert reply.status_code == 200, reply.text
        result: dict[str, Any] = reply.json()
        return result

    alone = serve()
    producer = serve("--kv-transfer-config", config("kv_producer"))
    consumer = serve("--kv-transfer-config", config("kv_consumer"))
    expected = generate(alone, 12)
    assert expected["kv_transfer_params"] is None
    first = generate(producer, 1, kv_transfer_params={"do_remote_decode": True})
    handed = first["kv_transfer_params"]
    assert (handed["remote_engine_id"], handed["remote_num_tokens"]) == ("kv_producer", 64)
    second = generate(consumer, 12, kv_transfer_params=handed)
    assert second["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]
    metrics = httpx.get(f"{consumer}/metrics").text
    assert 'source="external_kv_transfer"} 64.0' in metrics
    assert "vllm:external_prefix_cache_hits_total{" in metrics
    assert "vllm:kv_offload_load_bytes_total{" in metrics
    assert "vllm:kv_offload" not in httpx.get(f"{alone}/metrics").text
    reset = httpx.post(f"{consumer}/reset_prefix_cache?reset_external=true")
    assert reset.json() == {"success": True}
    assert httpx.post(f"{alone}/reset_prefix_cache?reset_external=true").status_code == 400
    broken = httpx.post(
        f"{consumer}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": 2, "kv_transfer_params": {**handed, "remote_identity": "other"}},
        timeout=200,
    )
    assert broken.status_code == 500

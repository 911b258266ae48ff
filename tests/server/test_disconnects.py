"""Clients that go away, and servers that do. Over real sockets."""

from __future__ import annotations

import json
import socket
import threading
import time

import httpx
import pytest


def raw_request(url: str, path: str, body: dict) -> socket.socket:
    """Send a request by hand and keep the connection."""
    host, port = url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    sock.sendall(head.encode() + raw)
    return sock


def metric(url: str, name: str) -> float:
    """The value of one sample."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith(name):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(name)


PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {}},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_leaving_aborts(start, toys, path, stream):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 100_000, max_model_len=200_000, delay_s=0.005)
    server = start(engine).ready()
    limits = {"max_tokens": 100_000}
    extra = {"sampling_params": {**limits, "n": 2}} if "generate" in path else {**limits, "n": 2}
    sock = raw_request(server.url, path, {**PATHS[path], **extra, "stream": stream})
    server.wait(lambda: engine._running == 2)
    sock.close()
    server.wait(lambda: engine._running == 0, 1.0)
    server.wait(lambda: server.state.num_sequences == 0 and server.state.num_http_requests == 0, 1.0)
    assert server.state.running == {}
    assert metric(server.url, 'vllm:request_success_total{model_name="toy",engine="0",finished_reason="abort"}') == 2
    assert metric(server.url, "vllm:num_requests_running") == 0


def test_finished_requests_are_not_aborted(start):
    server = start().ready()
    for stream in (False, True):
        body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200
    assert server.engine.num_aborts == 0
    assert metric(server.url, 'vllm:request_success_total{model_name="toy",engine="0",finished_reason="abort"}') == 0


def post_in_thread(server, request_id: str) -> tuple[threading.Thread, list[httpx.Response]]:
    replies: list[httpx.Response] = []
    body = {"prompt": "a", "max_tokens": 100_000, "temperature": 0}
    headers = {"x-request-id": request_id}

    def work() -> None:
        replies.append(httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=20))

    thread = threading.Thread(target=work)
    thread.start()
    return thread, replies


def test_abort_requests(start, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 100_000, max_model_len=200_000, delay_s=0.005)
    server = start(engine).ready()
    for given in ("r7", "cmpl-r7"):
        thread, replies = post_in_thread(server, "r7")
        server.wait(lambda: engine._running == 1)
        reply = httpx.post(f"{server.url}/inference/v1/abort_requests", json={"request_ids": [given, "unknown"]})
        assert reply.json() == {"status": "aborted", "aborted": 1}
        thread.join(120)
        assert replies[0].json()["choices"][0]["finish_reason"] == "abort"
    missing = httpx.post(f"{server.url}/inference/v1/abort_requests", json={})
    assert missing.status_code == 400
    assert missing.json()["error"]["param"] == "request_ids"


def test_socket_is_open_while_the_model_loads(start):
    gate = threading.Event()
    server = start(gate=gate)
    for path in ("/health", "/ping", "/version", "/v1/health/live", "/v1/version", "/v1/license", "/docs", "/metrics"):
        assert httpx.get(server.url + path).status_code == 200, path
    ready = httpx.get(server.url + "/v1/health/ready")
    assert ready.status_code == 503
    assert ready.json()["error"]["type"] == "ServiceUnavailableError"
    for path, body in PATHS.items():
        reply = httpx.post(server.url + path, json=body)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "5"
    gate.set()
    server.ready()
    assert httpx.get(server.url + "/v1/health/ready").json() == {
        "object": "health.response",
        "message": "Service is ready.",
        "status": "ready",
    }


def stream_in_thread(server, body) -> tuple[threading.Thread, list[str]]:
    lines: list[str] = []

    def work() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True}, timeout=20) as reply:
            lines.extend(line for line in reply.iter_lines() if line)

    thread = threading.Thread(target=work)
    thread.start()
    return thread, lines


def test_drain_lets_requests_finish(start, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 60, delay_s=0.01)
    server = start(engine, shutdown_timeout_s=10.0).ready()
    thread, lines = stream_in_thread(server, {"prompt": "a", "max_tokens": 200, "temperature": 0})
    server.wait(lambda: engine._running == 1)
    server.stop()
    server.wait(lambda: server.state.phase == "draining")
    refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert httpx.get(f"{server.url}/v1/health/ready").status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/v1/health/live").status_code == 200
    thread.join(120)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "stop"
    server.thread.join(120)
    assert server.service.exit_status == 0


def test_drain_aborts_after_the_timeout(start, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"x" * 100_000, max_model_len=200_000, delay_s=0.01)
    server = start(engine, shutdown_timeout_s=0.2).ready()
    thread, lines = stream_in_thread(server, {"prompt": "a", "max_tokens": 100_000, "temperature": 0})
    server.wait(lambda: engine._running == 1)
    begin = time.monotonic()
    server.stop()
    thread.join(120)
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "abort"
    server.thread.join(120)
    assert time.monotonic() - begin < 100, "the answer would take a thousand seconds"
    assert server.service.exit_status == 0


def test_dead_engine_ends_the_process(start, toys):
    engine = toys.FakeAsyncLLM()
    server = start(engine).ready()
    engine.is_healthy = False
    server.thread.join(120)
    assert not server.thread.is_alive()
    assert server.service.exit_status == 1


async def test_dead_engine_is_unavailable(serve, toys):
    engine = toys.FakeAsyncLLM()
    served = serve(engine)
    engine.is_healthy = False
    health = await served.get("/health")
    assert (health.status_code, health.content) == (503, b"")
    assert (await served.get("/v1/health/ready")).status_code == 503
    assert (await served.get("/v1/health/live")).status_code == 200
    assert (await served.post("/v1/completions", {"prompt": "a"})).status_code == 503


def test_keep_alive_comments(start, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"ab", delay_s=0.3)
    server = start(engine, sse_keep_alive_interval=0.1).ready()
    body = {"prompt": "a", "temperature": 0, "stream": True}
    text = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).text
    blocks = text.split("\n\n")
    assert blocks.count(": keep-alive") >= 4
    assert [block for block in blocks if block and not block.startswith(":")][-1] == "data: [DONE]"


def test_unix_socket(start, tmp_path):
    path = tmp_path / "vkit.sock"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(path))
    stale.close()
    server = start(network={"uds": str(path)}).ready()
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(transport=transport, base_url="http://x") as client:
        assert client.get("/health").status_code == 200
    with pytest.raises(Exception, match="another process"):
        start(network={"uds": str(path)})
    plain = tmp_path / "file"
    plain.write_text("x")
    with pytest.raises(Exception, match="not a socket"):
        start(network={"uds": str(plain)})
    server.close()
    assert not path.exists()


def test_taken_port_is_one_line(start):
    server = start()
    port = int(server.url.rsplit(":", 1)[1])
    with pytest.raises(Exception, match="cannot listen on"):
        start(network={"port": port})


def test_64_streams_with_random_departures(start, toys):
    engine = toys.FakeAsyncLLM(lambda prompt: b"0123456789" * 3, delay_s=0.002, max_num_seqs=16)
    server = start(engine).ready()
    results: dict[int, str] = {}

    def client(number: int) -> None:
        body = {"prompt": f"p{number}", "temperature": 0, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as reply:
            text = ""
            for count, line in enumerate(line for line in reply.iter_lines() if line.startswith("data: {")):
                if number % 5 == 0 and count == number % 7:
                    return
                text += json.loads(line[6:])["choices"][0]["text"]
            results[number] = text

    threads = [threading.Thread(target=client, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(results.values()) == {"0123456789" * 3}
    assert len(results) == 51
    server.wait(lambda: engine._running == 0 and engine._waiting == 0 and server.state.num_sequences == 0)
    assert metric(server.url, "vllm:num_requests_running") == 0
    assert metric(server.url, "vllm:num_requests_waiting") == 0
    assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}


def test_headers_too_large(start):
    server = start().ready()
    reply = httpx.get(f"{server.url}/v1/models", headers={"x-long": "a" * 70_000})
    assert reply.status_code == 431
    assert reply.json()["error"]["code"] == 431
    reply = httpx.get(f"{server.url}/v1/models", headers=[(f"x-{i}", "a") for i in range(300)])
    assert reply.status_code == 431

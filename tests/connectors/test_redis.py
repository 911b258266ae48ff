"""The Redis connector against a real server: sharing, forgetting, damage, and a server that dies."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vkit.errors import UsageError
from vkit.types import FinishReason

redis = pytest.importorskip("redis", reason="needs the extra redis")
PROGRAM = shutil.which("redis-server") or shutil.which("valkey-server")
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="neither redis-server nor valkey-server is installed")


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str

    def client(self) -> Any:
        return redis.Redis.from_url(self.url)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert PROGRAM is not None
    command = [PROGRAM, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    running = Server(subprocess.Popen(command, stdout=subprocess.DEVNULL), f"redis://127.0.0.1:{port}/0")
    deadline = time.monotonic() + 200
    while True:
        try:
            running.client().ping()
            break
        except redis.ConnectionError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
    yield running
    running.kill()


def names(server: Server) -> list[bytes]:
    return sorted(key for key in server.client().keys("vkit:kv:*") if not key.endswith((b":uses", b":bytes")))


def test_one_engine_reads_what_another_wrote(
    open_tiny: Callable[..., Any], server: Server, plain_tokens: list[int]
) -> None:
    first = open_tiny("RedisConnector", url=server.url)
    assert first.tokens() == plain_tokens
    first.settle()
    assert len(names(server)) == 4
    output = first.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
    first.close()
    second = open_tiny("RedisConnector", role="kv_consumer", url=server.url)
    output = second.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain_tokens, 64)
    assert second.counters()["prompt_tokens_cached_by_source/external_unspecified"] == 64
    assert second.counters()["kv_offload_load_bytes"] > 0
    assert second._thread.call(lambda engine: engine.reset_prefix_cache(reset_external=True)).result()
    assert names(server) == []


@pytest.mark.parametrize("damage", ["changed", "cut", "foreign"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_value_that_turns_out_bad_is_a_load_failure(
    open_tiny: Callable[..., Any], server: Server, plain_tokens: list[int], damage: str, policy: str
) -> None:
    model = open_tiny("RedisConnector", policy=policy, url=server.url)
    model.tokens()
    model.settle()
    client = server.client()
    keys = names(server)
    for name in keys[:2]:
        value = bytearray(client.get(name))
        value[len(value) // 2] ^= 1
        client.set(name, {"changed": bytes(value), "cut": bytes(value[:-9]), "foreign": b"hello"}[damage])
    (output,) = [model.answer()]
    completion = output.outputs[0]
    if policy == "fail":
        assert completion.finish_reason is FinishReason.ERROR
        assert "could not be loaded" in completion.error
    else:
        assert completion.token_ids == plain_tokens
        assert output.num_cached_tokens < 64
    del output
    model.settle()
    assert set(names(server)) <= set(keys)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_server_that_dies_in_mid_load(
    open_tiny: Callable[..., Any],
    server: Server,
    plain_tokens: list[int],
    policy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = open_tiny("RedisConnector", policy=policy, url=server.url)
    model.tokens()
    model.settle()
    store = model._loaded.engine._transfer.worker.store
    count = store.count_leading

    def count_then_die(keys: Any) -> int:
        found: int = count(keys)
        server.kill()
        return found

    monkeypatch.setattr(store, "count_leading", count_then_die)
    output = model.answer()
    if policy == "fail":
        assert output.outputs[0].finish_reason is FinishReason.ERROR
        assert "could not be loaded: tokens from 0 on" in output.outputs[0].error
    else:
        assert output.outputs[0].token_ids == plain_tokens
    monkeypatch.undo()
    model.settle()
    assert model.tokens() == plain_tokens  # nobody promises anything now, so the prompt is computed


def test_time_to_live_and_a_limit_of_bytes(open_tiny: Callable[..., Any], server: Server) -> None:
    model = open_tiny("RedisConnector", url=server.url, ttl_s=100)
    model.tokens()
    model.settle()
    client = server.client()
    assert all(0 < client.ttl(name) <= 100 for name in names(server))
    size = client.strlen(names(server)[0])
    client.flushall()
    model.close()
    limited = open_tiny("RedisConnector", url=server.url, max_bytes=2 * size)
    limited.tokens()
    limited.settle()
    limited.tokens([9, *range(3, 73)])
    limited.settle()
    assert len(names(server)) == 2
    assert sum(client.strlen(name) for name in names(server)) <= 2 * size


def test_what_cannot_be_is_refused(open_tiny: Callable[..., Any], server: Server) -> None:
    for settings, message in (
        ({}, "url is required"),
        ({"url": "http://x"}, "url: Redis URL must specify"),
        ({"url": "redis://127.0.0.1:1/0"}, "no server answers"),
        ({"url": server.url, "ttl": 3}, "did you mean ttl_s"),
        ({"url": server.url, "ttl_s": 0}, "ttl_s: must be at least 1"),
    ):
        with pytest.raises(UsageError, match=message):
            open_tiny("RedisConnector", **settings)

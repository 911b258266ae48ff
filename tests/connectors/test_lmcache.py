"""The LMCache client against a peer written from the protocol: names, bytes on the wire, lies, and a peer that dies."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.connectors.conftest import PROMPT
from vkit import kernels
from vkit.connectors.blake3 import blake3
from vkit.connectors.lmcache import Naming, PeerForm
from vkit.errors import UsageError
from vkit.sequence import Sequence
from vkit.types import FinishReason, SamplingParams


@dataclass
class Peer:
    """A server of one thread per client: keys to (format, dtype, sizes, bytes)."""

    chunks: dict[str, tuple[int, int, tuple[int, ...], bytes]] = field(default_factory=dict)
    commands: list[int] = field(default_factory=list)
    loses: bool = False
    cuts: bool = False
    port: int = 0

    def __post_init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._clients: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def holds(self, count: int) -> bool:
        """Whether that many chunks have come; PUT has no answer, so the last one may still be on its way."""
        deadline = time.monotonic() + 200
        while len(self.chunks) < count and time.monotonic() < deadline:
            time.sleep(0.005)
        return len(self.chunks) == count

    def stop(self) -> None:
        """Go away in the middle of whatever is under way."""
        self._socket.close()
        for client in self._clients:
            try:
                client.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self._clients.append(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        stream = client.makefile("rb")
        try:
            while len(head := stream.read(9 * 4 + 150)) == 186:
                command, length, form, dtype, _, *sizes, key = struct.unpack("<iiiii4i150s", head)
                name = key.decode().rstrip(" ")
                self.commands.append(command)
                if command == 1:
                    self.chunks[name] = (form, dtype, tuple(sizes), stream.read(length))
                elif command == 3:
                    client.sendall(struct.pack("<9i", 200 if name in self.chunks else 400, 0, 1, 2, 0, 0, 0, 0, 0))
                elif command == 2:
                    self._give(client, name)
        except OSError:
            return

    def _give(self, client: socket.socket, name: str) -> None:
        if self.loses or name not in self.chunks:
            client.sendall(struct.pack("<9i", 400, 0, 1, 2, 0, 0, 0, 0, 0))
            return
        form, dtype, sizes, data = self.chunks[name]
        client.sendall(struct.pack("<9i", 200, len(data), form, dtype, *sizes, 0))
        client.sendall(data[:-7] if self.cuts else data)
        if self.cuts:
            client.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.stop()


def sequence_of(token_ids: list[int], salt: str | None = None) -> Sequence:
    return Sequence(f"s{salt}", token_ids, len(token_ids), SamplingParams(), 0.0, cache_salt=salt)


# Names


@pytest.mark.parametrize(
    ("size", "digest"),
    [
        (0, "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"),
        (1, "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"),
        (1024, "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7"),
        (1025, "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444"),
        (2048, "e776b6028c7cd22a4d0ba182a8bf62205d2ef576467e838ed6f2529b85fba24a"),
        (3072, "b98cb0ff3623be03326b373de6b9095218513e64f1ee2edd2525c7ad1e5cffd2"),
    ],
)
def test_blake3_against_its_published_vectors(size: int, digest: str) -> None:
    assert blake3(bytes(i % 251 for i in range(size))).hex() == digest


def test_peer_names_are_sha256_of_cbor() -> None:
    naming = Naming(4, 0, is_peer=True, block_size=4)
    none = hashlib.sha256(b"\x61\x30").digest()  # the text "0"
    first = hashlib.sha256(b"\x83\x58\x20" + none + b"\x84\x01\x02\x18\x63\x19\x01\x00" + b"\xf6").digest()
    second = hashlib.sha256(b"\x83\x58\x20" + first + b"\x84\x05\x06\x07\x08" + b"\xf6").digest()
    sequence = sequence_of([1, 2, 99, 256, 5, 6, 7, 8, 9])
    assert naming(sequence, 1, 2) == [second]
    assert naming(sequence, 0, 2) == [first, second]


@pytest.mark.parametrize("is_peer", [True, False])
def test_salts_share_nothing(is_peer: bool) -> None:
    naming = Naming(4, 0, is_peer=is_peer, block_size=4)
    names = {naming(sequence_of([1, 2, 3, 4], salt), 0, 1)[0] for salt in (None, "a", "b")}
    assert len(names) == 3
    other = Naming(4, 1, is_peer=is_peer, block_size=4)
    assert other(sequence_of([1, 2, 3, 4]), 0, 1)[0] not in names


def test_tokens_alone_do_not_name_what_an_adapter_computed() -> None:
    naming = Naming(8, 0, is_peer=True, block_size=4)
    plain, adapted = sequence_of(list(range(8))), sequence_of(list(range(8)))
    adapted.adapter, adapted.block_hashes = object(), [b"a" * 32, b"b" * 32]  # type: ignore[assignment]
    assert naming(adapted, 0, 1) == [hashlib.sha256(hashlib.sha256(b"\x61\x30").digest() + b"b" * 32).digest()]
    assert naming(adapted, 0, 1) != naming(plain, 0, 1)


# The form of a peer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_pages_in_a_peers_form(dtype: torch.dtype, block_size: int) -> None:
    heads, dim, layers, blocks = 3, 16, 2, 2
    page_bytes = 2 * block_size * heads * dim * dtype.itemsize
    chunk = torch.zeros((layers, blocks, page_bytes), dtype=torch.uint8)
    tokens = blocks * block_size
    values = torch.randn(2, layers, tokens, heads, dim).to(dtype)
    for layer in range(layers):
        k, v = kernels.kv_layout(chunk[layer], block_size, heads, (dim, dim), dtype)
        slots = torch.arange(tokens)
        x = values[:, layer].to(torch.float32)  # exact: written back as what it came from
        kernels.write_kv(x[0], x[1], k, v, slots)
    form = PeerForm(block_size, heads, dim, dtype)
    form.num_layers, form.chunk_blocks, form.page_bytes = layers, blocks, page_bytes
    payload = form.pack(chunk)
    assert bytes(payload) == values.contiguous().view(torch.uint8).numpy().tobytes()
    assert torch.equal(form.unpack(payload), chunk)


# Behind a model


@pytest.mark.parametrize("algorithm", ["blake3", "vllm", "sha256_cbor"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_engines_share_through_a_peer(open_tiny: Callable[..., Any], peer: Peer, algorithm: str, dtype: str) -> None:
    plain = open_tiny(kv_cache_dtype=dtype).tokens()
    settings = {"port": peer.port, "hash_algo": algorithm, "chunk_tokens": 32, "model_name": "org/tiny"}
    first = open_tiny("LMCacheConnector", kv_cache_dtype=dtype, **settings)
    assert first.tokens() == plain
    first.settle()
    assert peer.holds(2)
    name, (form, number, sizes, data) = next(iter(peer.chunks.items()))
    parts = name.split("@")
    assert parts[1:3] == ["1", "0"]
    assert (len(parts[3]), parts[4]) == (64, {"float32": "float", "bfloat16": "bfloat16"}[dtype])
    assert number == {"float32": 4, "bfloat16": 3}[dtype]
    if algorithm == "blake3":
        assert form == 4
    else:
        assert (parts[0], form) == ("org/tiny", 1)
        assert sizes[:3] == (2, 3, 32)
        assert len(data) == 2 * 3 * 32 * sizes[3] * (4 if dtype == "float32" else 2)
        none = hashlib.sha256(b"\x61\x30").digest()
        ids = b"".join(bytes([i]) if i < 24 else b"\x18" + bytes([i]) for i in PROMPT[:32])
        assert parts[3] == hashlib.sha256(b"\x83\x58\x20" + none + b"\x98\x20" + ids + b"\xf6").hexdigest()
    second = open_tiny("LMCacheConnectorV1", role="kv_consumer", kv_cache_dtype=dtype, **settings)
    output = second.answer()
    assert (output.outputs[0].token_ids, output.num_cached_tokens) == (plain, 64)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("fault", ["loses", "cuts", "short"])
def test_a_chunk_reported_and_then_missing(
    open_tiny: Callable[..., Any],
    peer: Peer,
    plain_tokens: list[int],
    policy: str,
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = open_tiny("LMCacheConnector", policy=policy, port=peer.port, hash_algo="vllm", chunk_tokens=16)
    model.tokens()
    model.settle()
    assert peer.holds(4)
    if fault == "short":
        peer.chunks = {name: (*rest, data[:-4]) for name, (*rest, data) in peer.chunks.items()}  # type: ignore[misc]
    else:
        setattr(peer, fault, True)
    output = model.answer()
    if policy == "fail":
        assert output.outputs[0].finish_reason is FinishReason.ERROR
        assert "could not be loaded" in output.outputs[0].error
    else:
        assert output.outputs[0].token_ids == plain_tokens
        assert "they are computed" in caplog.text


def test_a_peer_that_goes_away_is_no_promise(
    open_tiny: Callable[..., Any], peer: Peer, plain_tokens: list[int]
) -> None:
    model = open_tiny("LMCacheConnector", port=peer.port)
    assert model.tokens() == plain_tokens
    model.settle()
    peer.stop()
    assert model.tokens() == plain_tokens
    assert model.tokens(PROMPT[::-1])


def test_settings_from_the_environment(
    open_tiny: Callable[..., Any], peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VKIT_LMCACHE_PORT", str(peer.port))
    monkeypatch.setenv("VKIT_LMCACHE_HASH_ALGO", "vllm")
    monkeypatch.setenv("VKIT_LMCACHE_HOST", "127.0.0.1")
    model = open_tiny("LMCacheConnector", chunk_tokens=64)
    model.tokens()
    model.settle()
    assert peer.holds(1)
    assert [key.split("@")[0] for key in peer.chunks] == ["llama"]
    monkeypatch.setenv("VKIT_LMCACHE_PORT", "many")
    with pytest.raises(UsageError, match=r"VKIT_LMCACHE_PORT: expected a port, 1\.\.65535, got 'many'"):
        open_tiny("LMCacheConnector")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 0}, "port: must be in 1..65535"),
        ({"hash_algo": "md5"}, "expected one of blake3, vllm, sha256_cbor"),
        ({"chunk_tokens": 24}, "no multiple of the block size"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk: chunks that are not full are not stored"),
        ({"model_name": "m" * 99, "hash_algo": "vllm"}, "model_name: keys may have 150 bytes"),
        ({"hots": "x"}, "unknown key 'hots', did you mean host"),
        ({"port": 1}, "the LMCache server at 127.0.0.1:1"),
    ],
)
def test_settings_that_cannot_be(
    open_tiny: Callable[..., Any], peer: Peer, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        open_tiny("LMCacheConnector", **{"port": peer.port, **settings})


def test_a_cache_without_a_peers_form_is_refused(open_tiny: Callable[..., Any], peer: Peer) -> None:
    with pytest.raises(UsageError, match="blake3 serves it"):
        open_tiny("LMCacheConnector", model="deepseek_v2", port=peer.port, hash_algo="vllm")
    assert open_tiny("LMCacheConnector", model="deepseek_v2", port=peer.port).tokens()

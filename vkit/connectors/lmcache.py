"""`LMCacheConnector`: chunks at an LMCache server, spoken to over its own wire protocol. Nothing of LMCache is needed.

A request is nine int32 (command, length, format, dtype, location, four sizes) and the key in 150 bytes, padded with
blanks; PUT is followed by the bytes and has no answer. A reply is nine int32, of which code and length matter here, and
for GET the bytes. A key is `model@world_size@worker_id@hash@dtype`.

With `hash_algo: vllm` names and bytes are those of a Python vLLM with LMCache: SHA-256 of canonical CBOR over chunks of
256 tokens, entries as (2, layers, tokens, width). Such a peer stores no identity, so only the key and the length can be
checked. With `blake3`, for vkit's engines among themselves, the bytes carry identity and checksum as files do.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from vkit import env, kernels
from vkit.cache.connector import ConnectorContext, ConnectorStats, KVConnector
from vkit.cache.prefix import hash_sha256_cbor, none_hash
from vkit.connectors.blake3 import blake3
from vkit.connectors.envelope import Payload, seal, unseal
from vkit.connectors.identity import identity_digest
from vkit.connectors.moving import Chunk, Mover, StoreUnavailable
from vkit.connectors.planning import chunked_connector
from vkit.errors import UsageError
from vkit.kv_transfer import ExtraConfig
from vkit.sequence import Sequence as EngineSequence

PUT, GET, EXIST = 1, 2, 3
SUCCESS = 200
KEY_BYTES = 150
REQUEST = struct.Struct(f"=9i{KEY_BYTES}s")
REPLY = struct.Struct("=9i")
FORMAT_2LTD, FORMAT_BINARY = 1, 4
DTYPES = {
    "float16": (2, "half"),
    "bfloat16": (3, "bfloat16"),
    "float32": (4, "float"),
    "uint8": (6, "fp8"),
    "float8_e4m3fn": (7, "fp8_e4m3"),
    "float8_e5m2": (8, "fp8_e5m2"),
}
"""torch's name -> (number on the wire, name in keys)."""
PEER_CHUNK_TOKENS = 256
TIMEOUT_S = 5.0
_BATCH = 64
_MAX_CHAINS = 1024

_Result = TypeVar("_Result")

HASH_ALGORITHMS = ("blake3", "vllm", "sha256_cbor")


class Naming:
    """How chunks are called. A salted sequence begins from a seed of its own, so it meets nobody else's."""

    def __init__(self, chunk_tokens: int, seed: int, *, is_peer: bool, block_size: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._block_size = block_size
        self._is_peer = is_peer
        self._seed = none_hash(str(seed)) if is_peer else blake3(str(seed).encode())
        self._chains: OrderedDict[str, list[bytes]] = OrderedDict()

    def __call__(self, sequence: EngineSequence, first: int, end: int) -> list[bytes]:
        """Names of chunks first .. end - 1; each chunk of a sequence is hashed once."""
        size = self._chunk_tokens
        if sequence.adapter is not None or sequence.media:
            # Tokens alone do not say what these keys and values are; the engine's own hashes do.
            ends = [(chunk + 1) * (size // self._block_size) - 1 for chunk in range(first, end)]
            return [hashlib.sha256(self._seed + sequence.block_hashes[last]).digest() for last in ends]
        chain = self._chains.setdefault(sequence.id, [])
        self._chains.move_to_end(sequence.id)
        while len(self._chains) > _MAX_CHAINS:
            self._chains.popitem(last=False)
        for chunk in range(len(chain), end):
            token_ids = sequence.token_ids[chunk * size : (chunk + 1) * size]
            chain.append(self._hash(chain[-1] if chain else self._first(sequence.cache_salt), token_ids))
        return chain[first:end]

    def _first(self, salt: str | None) -> bytes:
        return self._seed if salt is None else hashlib.sha256(self._seed + salt.encode()).digest()

    def _hash(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        if self._is_peer:
            return hash_sha256_cbor(parent, token_ids, ())
        return blake3(parent + array("i", token_ids).tobytes())


class LMCacheStore:
    """Chunks at a server. One connection per thread, opened again after a failure."""

    def __init__(
        self, address: tuple[str, int], key_of: Callable[[bytes], str], dtype: int, identity: dict[str, str] | None
    ) -> None:
        """`identity` None: bytes go as they are."""
        self.payload_bytes = 0
        self.shape = (0, 0, 0, 0)
        """Sizes on the wire, when bytes go as they are."""
        self._address = address
        self._key_of = key_of
        self._dtype = dtype
        self._identity = identity
        self._local = threading.local()
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()

    def peek(self, keys: Sequence[bytes]) -> list[Chunk] | None:
        """Everything is a network away."""
        return None

    def read_leading(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Up to the first that is missing or damaged."""
        chunks = []
        for key in keys:
            chunk = self.read(key)
            if chunk is None:
                break
            chunks.append(chunk)
        return chunks

    def count_leading(self, keys: Sequence[bytes]) -> int:
        """How many the server says it has, several questions at a time."""
        for start in range(0, len(keys), _BATCH):
            codes = self._exchange(partial(self._ask, keys=keys[start : start + _BATCH]))
            for index, code in enumerate(codes):
                if code != SUCCESS:
                    return start + index
        return len(keys)

    def read(self, key: bytes) -> Chunk | None:
        """One chunk."""
        data = self._exchange(lambda link: self._get(link, key))
        if data is None:
            return None
        if self._identity is not None:
            payload = unseal(self._identity, key, data, self.payload_bytes)
        else:
            payload = data if len(data) == self.payload_bytes else None
        return None if payload is None else Chunk(payload, "external_unspecified")

    def may_contain(self, key: bytes) -> bool:
        """Only the server knows, and is asked when writing."""
        return False

    def write(self, key: bytes, payload: Payload) -> None:
        """Put a chunk unless it is there. The protocol has no answer to that."""
        if self.count_leading([key]):
            return
        parts = [payload] if self._identity is None else seal(self._identity, key, payload)
        self._exchange(lambda link: self._put(link, key, parts))

    def clear(self) -> bool:
        """The protocol knows no way to delete."""
        return False

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for link in self._open:
                link.close()
            self._open.clear()

    # On the wire

    def _ask(self, link: socket.socket, keys: Sequence[bytes]) -> list[int]:
        link.sendall(b"".join(self._request(EXIST, key, 0, FORMAT_2LTD, (0, 0, 0, 0)) for key in keys))
        return [REPLY.unpack(_received(link, REPLY.size))[0] for _ in keys]

    def _get(self, link: socket.socket, key: bytes) -> bytes | None:
        link.sendall(self._request(GET, key, 0, FORMAT_2LTD, (0, 0, 0, 0)))
        code, length, *_ = REPLY.unpack(_received(link, REPLY.size))
        if code != SUCCESS:
            return None
        if length < 0:
            raise ConnectionError(f"a reply of {length} bytes")
        return _received(link, length)

    def _put(self, link: socket.socket, key: bytes, parts: Sequence[Payload]) -> None:
        length = sum(map(len, parts))
        if self._identity is None:
            head = self._request(PUT, key, length, FORMAT_2LTD, self.shape)
        else:
            head = self._request(PUT, key, length, FORMAT_BINARY, (length, 0, 0, 0))
        link.sendall(head)
        for part in parts:
            link.sendall(part)

    def _request(self, command: int, key: bytes, length: int, form: int, shape: tuple[int, int, int, int]) -> bytes:
        name = self._key_of(key).encode().ljust(KEY_BYTES)
        return REQUEST.pack(command, length, form, self._dtype, 0, *shape, name)

    def _exchange(self, action: Callable[[socket.socket], _Result]) -> _Result:
        """The action over this thread's connection; once more over a new one if an old one turns out to be dead."""
        is_old = getattr(self._local, "link", None) is not None
        try:
            return action(self._link())
        except (OSError, struct.error) as error:
            self._drop()
            if is_old:
                return self._exchange(action)
            raise StoreUnavailable(f"the LMCache server at {self._address[0]}:{self._address[1]}: {error}") from None

    def _link(self) -> socket.socket:
        link: socket.socket | None = getattr(self._local, "link", None)
        if link is None:
            link = socket.create_connection(self._address, TIMEOUT_S)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.link = link
            with self._lock:
                self._open.append(link)
        return link

    def _drop(self) -> None:
        link: socket.socket | None = getattr(self._local, "link", None)
        self._local.link = None
        if link is not None:
            link.close()
            with self._lock:
                if link in self._open:
                    self._open.remove(link)


def _received(link: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view = memoryview(data)
    while view:
        count = link.recv_into(view)
        if count == 0:
            raise ConnectionError("the connection was closed in mid-reply")
        view = view[count:]
    return bytes(data)


class PeerForm:
    """Chunks between pages and the form of a Python peer: (2, layers, tokens, heads · width) in the cache's dtype."""

    def __init__(self, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._layout = (block_size, num_kv_heads, (head_dim, head_dim), dtype)
        self._width = num_kv_heads * head_dim
        self.page_bytes = 0
        self.num_layers = 0
        self.chunk_blocks = 0

    def pack(self, chunk: Tensor) -> Payload:
        """chunk (layers, blocks, page_bytes) uint8 -> bytes."""
        both = [[part.reshape(-1, self._width) for part in self._views(pages)] for pages in chunk.unbind(0)]
        joined = torch.stack([torch.stack(parts) for parts in zip(*both, strict=True)])
        return joined.contiguous().view(torch.uint8).numpy().data.cast("B")

    def unpack(self, payload: Payload) -> Tensor:
        """The other way round."""
        block_size, num_heads, (head_dim, _), dtype = self._layout
        values = torch.frombuffer(bytearray(payload), dtype=dtype)
        values = values.view(2, self.num_layers, self.chunk_blocks, block_size, num_heads, head_dim)
        chunk = torch.zeros((self.num_layers, self.chunk_blocks, self.page_bytes), dtype=torch.uint8)
        for layer, pages in enumerate(chunk.unbind(0)):
            for part, view in enumerate(self._views(pages)):
                view.copy_(values[part, layer].reshape(view.shape))
        return chunk

    def _views(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.kv_by_token(*kernels.kv_layout(pages, *self._layout))


class _PeerMover(Mover):
    """Tells form and store the sizes once they are known."""

    form: PeerForm

    def register_kv_caches(self, caches: dict[str, Tensor]) -> None:  # type: ignore[override]
        """Take the pages of every layer."""
        super().register_kv_caches(caches)
        form, store = self.form, self.store
        assert isinstance(store, LMCacheStore)
        form.num_layers, form.chunk_blocks, form.page_bytes = self.shape
        block_size, num_heads, (head_dim, _), dtype = form._layout
        tokens = form.chunk_blocks * block_size
        store.shape = (2, form.num_layers, tokens, num_heads * head_dim)
        store.payload_bytes = 2 * form.num_layers * tokens * num_heads * head_dim * dtype.itemsize


def make(context: ConnectorContext) -> KVConnector:
    """The connector.

    Raises:
        UsageError: settings that cannot be, a cache that has no form a peer knows, or no server answers.
    """
    extra = ExtraConfig(context.config)
    host = extra.text("host", env.LMCACHE_HOST.read())
    port = extra.whole("port", env.LMCACHE_PORT.read(), high=65535)
    algorithm = extra.text("hash_algo", env.LMCACHE_HASH_ALGO.read(), choices=HASH_ALGORITHMS)
    is_peer = algorithm != "blake3"
    chunk_tokens = extra.whole("chunk_tokens", PEER_CHUNK_TOKENS if is_peer else context.block_size)
    model_name = extra.text("model_name", context.model_name)
    world_size, worker_id = extra.whole("world_size", 1), extra.whole("worker_id", 0, low=0)
    prompt_only = extra.flag("offload_prompt_only", True)
    saves_unfull = extra.flag("save_unfull_chunk", False)
    seed = extra.whole("none_hash_seed", 0, low=0)
    extra.done()
    assert host is not None
    assert port is not None
    assert chunk_tokens is not None
    assert model_name is not None
    if saves_unfull:
        raise extra.refuse("save_unfull_chunk", "chunks that are not full are not stored here; leave it false")
    if chunk_tokens % context.block_size:
        raise extra.refuse("chunk_tokens", f"{chunk_tokens} is no multiple of the block size, {context.block_size}")
    if context.dtype not in DTYPES:
        raise extra.refuse("hash_algo", f"a cache of {context.dtype} has no name at an LMCache server")
    number, dtype_name = DTYPES[context.dtype]
    identity = {**context.identity, "chunk_tokens": str(chunk_tokens)}
    # Engines that differ in anything must not even find each other's chunks, so their own names say who they are.
    model = model_name if is_peer else f"{model_name}-{identity_digest(identity)[:12]}"
    prefix = f"{model}@{world_size}@{worker_id}@"
    if len(f"{prefix}{'0' * 64}@{dtype_name}".encode()) > KEY_BYTES:
        raise extra.refuse("model_name", f"keys may have {KEY_BYTES} bytes: {model_name!r} is too long")
    store = LMCacheStore(
        (host, port), lambda key: f"{prefix}{key.hex()}@{dtype_name}", number, None if is_peer else identity
    )
    try:
        store.count_leading([bytes(32)])
    except StoreUnavailable as error:
        raise UsageError(f"--kv-transfer-config: {context.config.kv_connector}: {error}") from None
    assert seed is not None
    naming = Naming(chunk_tokens, seed, is_peer=is_peer, block_size=context.block_size)
    stats = ConnectorStats()
    chunk_blocks = chunk_tokens // context.block_size
    if not is_peer:
        mover = Mover(store, context.groups, chunk_blocks, context.notify, stats)
    else:
        mover = _peer_mover(context, store, chunk_blocks, stats, extra)
    return chunked_connector(
        context,
        store,
        chunk_blocks=chunk_blocks,
        prompt_only=prompt_only,
        is_remote=True,
        name_chunks=naming,
        mover=mover,
        stats=stats,
    )


def _peer_mover(
    context: ConnectorContext, store: LMCacheStore, chunk_blocks: int, stats: ConnectorStats, extra: ExtraConfig
) -> Mover:
    """A mover that speaks a Python peer's form.

    Raises:
        UsageError: the model's cache has no such form.
    """
    shapes = {tuple((x.name, x.shape, x.dtype) for x in spec.tensors) for spec in context.specs if spec is not None}
    if len(shapes) != 1 or len(context.groups) != 1:
        raise extra.refuse("hash_algo", "vllm: the model's layers do not all keep the same; blake3 serves it")
    tensors = next(iter(shapes))
    names = [name for name, _, _ in tensors]
    if names != ["k", "v"] or tensors[0][1] != tensors[1][1]:
        raise extra.refuse("hash_algo", "vllm: the model keeps no keys and values of one width; blake3 serves it")
    num_heads, head_dim = tensors[0][1]
    form = PeerForm(context.block_size, num_heads, head_dim, getattr(torch, context.dtype))
    mover = _PeerMover(store, context.groups, chunk_blocks, context.notify, stats, pack=form.pack, unpack=form.unpack)
    mover.form = form
    return mover

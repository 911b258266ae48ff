"""`RedisConnector`: chunks in a Redis or Valkey server that several engines share. Needs the extra `redis`.

A chunk is one value under `vkit:kv:<identity>:<block hash>`, in the same envelope as a file. The server forgets by its
own rules (`ttl_s`, its memory policy) and, with `max_bytes`, by ours: a sorted set of last uses says which goes first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from vkit.cache.connector import ConnectorContext, KVConnector
from vkit.connectors.envelope import Payload, seal, sealed_bytes, unseal
from vkit.connectors.identity import identity_digest
from vkit.connectors.moving import Chunk, StoreUnavailable
from vkit.connectors.planning import chunked_connector
from vkit.errors import MissingExtra, UsageError
from vkit.kv_transfer import ExtraConfig

TIMEOUT_S = 5.0
_BATCH = 256

_MAKE_ROOM = """
local used = tonumber(redis.call('GET', KEYS[2]) or '0')
while used + tonumber(ARGV[1]) > tonumber(ARGV[2]) do
  local oldest = redis.call('ZRANGE', KEYS[1], 0, 0)
  if #oldest == 0 then used = 0 break end
  local size = redis.call('STRLEN', oldest[1])
  if size == 0 then size = tonumber(ARGV[1]) end
  redis.call('DEL', oldest[1])
  redis.call('ZREM', KEYS[1], oldest[1])
  used = math.max(0, used - size)
end
redis.call('SET', KEYS[2], used + tonumber(ARGV[1]))
return used
"""
"""Removes least recently used values until one more of ARGV[1] bytes fits below ARGV[2]; books it."""


class RedisStore:
    """Chunks as values of a server."""

    def __init__(
        self,
        client: Any,
        failures: tuple[type[Exception], ...],
        context: ConnectorContext,
        ttl_s: int | None,
        limit: int | None,
    ) -> None:
        """`failures`: what the client raises when the server cannot be used."""
        self.payload_bytes = 0
        self._client = client
        self._failures = failures
        self._identity = dict(context.identity)
        self._prefix = f"vkit:kv:{identity_digest(context.identity)}"
        self._ttl_s = ttl_s
        self._max_bytes = limit
        self._make_room = client.register_script(_MAKE_ROOM)

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
        """How many the server says it has, asked in batches."""
        for start in range(0, len(keys), _BATCH):
            batch = keys[start : start + _BATCH]
            pipe = self._client.pipeline(transaction=False)
            for key in batch:
                pipe.exists(self._name(key))
            for index, exists in enumerate(self._run(pipe.execute)):
                if not exists:
                    return start + index
        return len(keys)

    def read(self, key: bytes) -> Chunk | None:
        """One value; what is damaged or not ours is removed."""
        name = self._name(key)
        data = self._run(lambda: self._client.get(name))
        if data is None:
            return None
        payload = unseal(self._identity, key, data, self.payload_bytes)
        if payload is None:
            self._run(lambda: self._client.delete(name))
            return None
        if self._max_bytes is not None:
            self._run(lambda: self._client.zadd(self._uses, {name: time.time()}, xx=True))
        return Chunk(payload, "external_unspecified")

    def may_contain(self, key: bytes) -> bool:
        """Only the server knows, and is asked when writing."""
        return False

    def write(self, key: bytes, payload: Payload) -> None:
        """Set the value unless it is there."""
        name = self._name(key)
        if self._run(lambda: self._client.exists(name)):
            return
        size = sealed_bytes(self._identity, key, len(payload))
        if self._max_bytes is not None:
            if size > self._max_bytes:
                raise StoreUnavailable(f"a chunk of {size} bytes is larger than max_bytes, {self._max_bytes}")
            self._run(lambda: self._make_room(keys=[self._uses, self._used], args=[size, self._max_bytes]))
        data = b"".join(seal(self._identity, key, payload))
        self._run(lambda: self._client.set(name, data, ex=self._ttl_s))
        if self._max_bytes is not None:
            self._run(lambda: self._client.zadd(self._uses, {name: time.time()}))

    def clear(self) -> bool:
        """Delete every value of this identity."""
        try:
            names = list(self._run(lambda: list(self._client.scan_iter(match=f"{self._prefix}:*", count=1000))))
            if names:
                self._run(lambda: self._client.delete(*names))
        except StoreUnavailable:
            return False
        return True

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    @property
    def _uses(self) -> str:
        return f"{self._prefix}:uses"

    @property
    def _used(self) -> str:
        return f"{self._prefix}:bytes"

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}:{key.hex()}"

    def _run(self, action: Any) -> Any:
        try:
            return action()
        except self._failures as error:
            reason = " ".join(str(error).split())
            raise StoreUnavailable(f"the Redis server: {type(error).__name__}: {reason}") from None


def make(context: ConnectorContext) -> KVConnector:
    """The connector.

    Raises:
        UsageError: settings that cannot be, or no server answers.
        MissingExtra: the client is not installed.
    """
    extra = ExtraConfig(context.config)
    url = extra.required_text("url")
    ttl_s, max_bytes = extra.whole("ttl_s"), extra.whole("max_bytes")
    extra.done()
    try:
        import redis
    except ImportError:
        raise MissingExtra("RedisConnector", "redis") from None
    failures = (redis.RedisError, OSError)
    try:
        client = redis.Redis.from_url(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
        client.ping()
    except ValueError as error:
        raise extra.refuse("url", f"{error}") from None
    except failures as error:
        raise UsageError(f"--kv-transfer-config: RedisConnector: url: no server answers: {error}") from None
    store = RedisStore(client, failures, context, ttl_s, max_bytes)
    return chunked_connector(context, store, is_remote=True, budgets={"max_bytes": max_bytes})

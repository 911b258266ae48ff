"""Stand-ins for a model and a tokenizer: fast, deterministic, and unforgiving about cache blocks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from vkit.cache.groups import CacheGroup, CacheKind
from vkit.sequence import Plan

EOS = 1
FULL = [CacheGroup(0, CacheKind.FULL, (0,))]


class ByteTokenizer:
    """One token per byte, ids 0..255; BOS, EOS and the given merged texts follow."""

    def __init__(self, merges: Sequence[str] = (), *, adds_bos: bool = False) -> None:
        self.bos_token_id: int | None = 256
        self.eos_token_id: int | None = 257
        self.adds_bos = adds_bos
        self._bytes = [bytes([value]) for value in range(256)] + [b"<bos>", b"<eos>"]
        self._bytes.extend(text.encode() for text in merges)
        self.vocab_size = len(self._bytes)
        self.special_ids = frozenset({256, 257})
        self.eos_token_ids = (257,)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
        ids = [256] if add_special_tokens and self.adds_bos else []
        data = text.encode()
        position = 0
        while position < len(data):
            best = data[position]
            for token_id in range(self.vocab_size - 1, 257, -1):
                merged = self._bytes[token_id]
                if data.startswith(merged, position) and len(merged) > len(self._bytes[best]):
                    best = token_id
            ids.append(best)
            position += len(self._bytes[best])
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        kept = [self._bytes[i] for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(kept).decode("utf-8", "replace")

    def token_text(self, token_id: int) -> str:
        return self._bytes[token_id].decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]


def context_key(groups: Sequence[CacheGroup], token_ids: Sequence[int]) -> int:
    """What a model with these groups can know about a context: everything, a window, a running state."""
    key = 0
    for group in groups:
        if group.kind is CacheKind.STATE:
            state = 0
            for token_id in token_ids:
                state = next_state(state, token_id)
            key = zlib.crc32(state.to_bytes(8, "little"), key)
        else:
            first = max(0, len(token_ids) - group.window) if group.window else 0
            key = zlib.crc32(np.array(token_ids[first:], dtype=np.int64).tobytes(), zlib.crc32(b"%d" % first, key))
    return key


def next_state(state: int, token_id: int) -> int:
    return (state * 6364136223846793005 + token_id + 1) % 2**63


def hashed_logits(key: int, vocab_size: int) -> np.ndarray:
    """Logits in [0, 3), one per token, that look random and depend on the key alone."""
    x = (np.arange(1, vocab_size + 1, dtype=np.uint64) + np.uint64(key * 65537 + 1)) * np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(32)
    return (x.astype(np.float64) * (3.0 / 2**64)).astype(np.float32)


@dataclass
class FakeBatch:
    """What a forward pass needs, copied: later changes to tables must not reach a step already prepared."""

    rows: list[tuple[list[int], int, list[list[int]], int]]
    state_copies: list[tuple[int, int, int]]


class FakeRunner:
    """Keeps token ids where keys and values would be, addressed by block table and slot, and reads them back.

    Logits are a hash of the whole context as found through the table, so a wrong block, a stale slot or a missing write
    changes the output.
    """

    copies_states = True

    def __init__(self, groups: Sequence[CacheGroup], num_blocks: int, block_size: int, *, vocab_size: int = 24) -> None:
        self.groups = list(groups)
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.slots = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.states = np.full(num_blocks, -1, dtype=np.int64)
        self.num_steps = 0
        self.num_tokens = 0
        self.step_log: list[list[tuple[str, int, int]]] = []
        self.hook: Callable[[int, torch.Tensor], None] | None = None

    def prepare(self, plan: Plan) -> FakeBatch:
        rows = []
        for item in plan.scheduled:
            sequence = item.sequence
            end = item.start + item.num_tokens - item.num_drafts
            tokens = sequence.token_ids[item.start : end] + sequence.draft_token_ids[: item.num_drafts]
            assert len(tokens) == item.num_tokens, "a step runs known tokens only"
            rows.append((tokens, item.start, [list(table) for table in sequence.block_ids], item.num_logits))
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.step_log.append([(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled])
        return FakeBatch(rows, [(copy.group, copy.source, copy.target) for copy in plan.state_copies])

    def execute(self, batch: FakeBatch) -> torch.Tensor:
        for _, source, target in batch.state_copies:
            self.states[target] = self.states[source]
        for tokens, start, tables, _ in batch.rows:
            self._write(tokens, start, tables)
        keys = []
        for tokens, start, tables, num_logits in batch.rows:
            end = start + len(tokens)
            keys.extend(self._key(tokens, start, tables, position) for position in range(end - num_logits, end))
        logits = np.stack([hashed_logits(key, self.vocab_size) for key in keys]) if keys else np.zeros((0, 1))
        self._store_states(batch)
        result = torch.from_numpy(logits.astype(np.float32))
        if self.hook is not None:
            self.hook(self.num_steps, result)
        return result

    def forward(self, plan: Plan) -> torch.Tensor:
        return self.execute(self.prepare(plan))

    def _write(self, tokens: list[int], start: int, tables: list[list[int]]) -> None:
        for group, table in zip(self.groups, tables, strict=True):
            if group.kind is CacheKind.STATE:
                continue
            for position, token_id in enumerate(tokens, start):
                block = table[position // self.block_size]
                assert block != 0, "a step writes into blocks it owns"
                self.slots[block, position % self.block_size] = token_id

    def _key(self, tokens: list[int], start: int, tables: list[list[int]], position: int) -> int:
        key = 0
        for group, table in zip(self.groups, tables, strict=True):
            if group.kind is CacheKind.STATE:
                state = self._state(tokens, start, table, position)
                key = zlib.crc32(state.to_bytes(8, "little"), key)
                continue
            first = max(0, position + 1 - group.window) if group.window else 0
            found = []
            for index in range(first, position + 1):
                block = table[index // self.block_size]
                assert block != 0, "a query sees blocks that were given back"
                found.append(self.slots[block, index % self.block_size])
            key = zlib.crc32(np.array(found, dtype=np.int64).tobytes(), zlib.crc32(b"%d" % first, key))
        return key

    def _state(self, tokens: list[int], start: int, table: list[int], position: int) -> int:
        """The state after `position`, from what the block held before the chunk."""
        (block,) = table
        state = 0 if start == 0 else int(self.states[block])
        for token_id in tokens[: position - start + 1]:
            state = next_state(state, token_id)
        return state

    def _store_states(self, batch: FakeBatch) -> None:
        """Every chunk's final state replaces the one it began from."""
        for tokens, start, tables, _ in batch.rows:
            for group, table in zip(self.groups, tables, strict=True):
                if group.kind is CacheKind.STATE:
                    self.states[table[0]] = self._state(tokens, start, table, start + len(tokens) - 1)


class ScriptedRunner:
    """A model that says given tokens in turn: logits favour `script[position - prompt length]`."""

    def __init__(self, scripts: dict[int, list[int]] | list[int], vocab_size: int) -> None:
        self.scripts = scripts
        self.vocab_size = vocab_size
        self.step_log: list[list[tuple[str, int, int]]] = []
        self.on_step: Callable[[int], None] | None = None

    def prepare(self, plan: Plan) -> list[tuple[int, int, int, int]]:
        self.step_log.append([(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled])
        return [
            (item.sequence.token_ids[0], item.sequence.num_prompt_tokens, item.start + item.num_tokens, item.num_logits)
            for item in plan.scheduled
        ]

    def execute(self, batch: list[tuple[int, int, int, int]]) -> torch.Tensor:
        if self.on_step is not None:
            self.on_step(len(self.step_log))
        rows = []
        for first_token, num_prompt, end, num_logits in batch:
            script = self.scripts if isinstance(self.scripts, list) else self.scripts[first_token]
            for position in range(end - num_logits, end):
                row = torch.zeros(self.vocab_size)
                index = position + 1 - num_prompt
                if 0 <= index < len(script):
                    row[script[index]] = 10.0
                rows.append(row)
        return torch.stack(rows) if rows else torch.zeros((0, self.vocab_size))

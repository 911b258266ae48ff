"""Stand-ins for a model and a tokenizer: fast, deterministic, and unforgiving about cache blocks."""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from vkit.cache.groups import CacheGroup, CacheKind
from vkit.engine import Engine, EngineSettings
from vkit.inputs import EngineRequest, InputProcessor
from vkit.kernels.reference.noise import exponential_noise
from vkit.randomness import draw_key
from vkit.sampled import SampledTokens
from vkit.scheduler import SchedulerLimits
from vkit.sequence import Plan, StepSamples
from vkit.sequence import Sequence as Sequence_
from vkit.speculation.proposer import Drafts
from vkit.text.tokenizer import Tokenizer
from vkit.text.vocabulary import Vocabulary
from vkit.types import OutputKind, RequestOutput, SamplingParams

FULL = [CacheGroup(0, CacheKind.FULL, (0,))]


class _ByteEncoder:
    """Longest merged text first, else bytes."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._merged = sorted(((piece, 258 + i) for i, piece in enumerate(pieces)), key=lambda entry: -len(entry[0]))

    def encode(self, text: str, parse_special: bool) -> list[int]:
        ids = []
        rest = text.encode()
        while rest:
            piece, token_id = next((entry for entry in self._merged if rest.startswith(entry[0])), (rest[:1], rest[0]))
            ids.append(token_id)
            rest = rest[len(piece) :]
        return ids


BOS_ID, EOS_ID = 256, 257


def byte_tokenizer(
    merges: Sequence[str] = (), *, adds_bos: bool = False, chat_template: str | None = None
) -> Tokenizer:
    """One token per byte, ids 0..255; BOS and EOS and the given merged texts follow."""
    pieces = [*(f"<{value}>" for value in range(256)), "<bos>", "<eos>", *merges]
    special = frozenset({BOS_ID, EOS_ID})
    vocabulary = Vocabulary(
        size=len(pieces),
        piece=lambda token_id: pieces[token_id] if token_id < len(pieces) else None,
        added_ids=special,
        special_ids=special,
        spell=str.encode,
        byte_values={value: value for value in range(256)},
    )
    return Tokenizer(
        _ByteEncoder([text.encode() for text in merges]),
        vocabulary,
        prefix=[BOS_ID] if adds_bos else [],
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        chat_templates={"default": chat_template} if chat_template else None,
    )


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

    rows: list[tuple[list[int], int, list[list[int]], int, tuple[int, int]]]
    """Tokens, start, tables, logits rows wanted; row of the current state and number of drafts."""
    state_copies: list[tuple[int, int, int]]
    unknown: list[tuple[int, int]] = field(default_factory=list)
    """Rows whose token only the device knows, and its row among what was sampled."""
    sampled: torch.Tensor | None = None


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
        self.num_unknown = 0
        """Tokens that were given as places among what the step before sampled."""
        self.step_log: list[list[tuple[str, int, int]]] = []
        self.hook: Callable[[int, torch.Tensor], None] | None = None

    def prepare(self, plan: Plan, sampled: SampledTokens | None = None) -> FakeBatch:
        rows = []
        unknown = []
        for item in plan.scheduled:
            sequence = item.sequence
            end = item.start + item.num_tokens - item.num_drafts
            tokens = sequence.token_ids[item.start : end] + sequence.draft_token_ids[: item.num_drafts]
            if sampled is not None and item.start == len(sequence.token_ids):
                tokens = [-1]  # known to the device alone, which is not asked before the step runs
                unknown.append((len(rows), sampled.rows[sequence.id]))
                self.num_unknown += 1
            assert len(tokens) == item.num_tokens, "a step runs known tokens only"
            tables = [list(table) for table in sequence.block_ids]
            rows.append((tokens, item.start, tables, item.num_logits, (sequence.state_row, item.num_drafts)))
        self.num_steps += 1
        self.num_tokens += plan.num_tokens
        self.step_log.append([(item.sequence.id, item.start, item.num_tokens) for item in plan.scheduled])
        copies = [(copy.group, copy.source, copy.target) for copy in plan.state_copies]
        return FakeBatch(rows, copies, unknown, None if sampled is None else sampled.ids)

    def execute(self, batch: FakeBatch) -> torch.Tensor:
        for _, source, target in batch.state_copies:
            self.states[target] = self.states[source]
        for index, row in batch.unknown:
            assert batch.sampled is not None
            batch.rows[index][0][0] = int(batch.sampled[row])
        for tokens, start, tables, _, _ in batch.rows:
            self._write(tokens, start, tables)
        keys = []
        for tokens, start, tables, num_logits, (row, _) in batch.rows:
            end = start + len(tokens)
            keys.extend(self._key(tokens, start, tables, row, position) for position in range(end - num_logits, end))
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

    def _key(self, tokens: list[int], start: int, tables: list[list[int]], row: int, position: int) -> int:
        key = 0
        for group, table in zip(self.groups, tables, strict=True):
            if group.kind is CacheKind.STATE:
                state = self._state(tokens, start, table[row], position)
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

    def _state(self, tokens: list[int], start: int, block: int, position: int) -> int:
        """The state after `position`, from what the block held before the chunk."""
        state = 0 if start == 0 else int(self.states[block])
        for token_id in tokens[: position - start + 1]:
            state = next_state(state, token_id)
        return state

    def _store_states(self, batch: FakeBatch) -> None:
        """Every chunk's final state replaces the one it began from; a verification leaves one per token."""
        for tokens, start, tables, _, (row, num_drafts) in batch.rows:
            for group, table in zip(self.groups, tables, strict=True):
                if group.kind is not CacheKind.STATE:
                    continue
                if not num_drafts:
                    self.states[table[row]] = self._state(tokens, start, table[row], start + len(tokens) - 1)
                    continue
                after = [self._state(tokens, start, table[row], start + place) for place in range(len(tokens))]
                for place, state in enumerate(after, 1):
                    self.states[table[(row + place) % len(table)]] = state


@dataclass
class GuessingProposer:
    """Drafts what `guess` says follows a sequence."""

    guess: Callable[[Sequence_], list[int] | Drafts]
    max_drafts: int = 8
    num_lookahead: int = 0
    needs_hidden_states: bool = False
    booked: list[tuple[int, int]] = field(default_factory=list)
    """(drafts, accepted) of every verification."""

    def observe(self, plan: Plan, samples: StepSamples) -> None:
        pass

    def propose(self, sequence: Sequence_) -> Drafts:
        found = self.guess(sequence)
        return found if isinstance(found, Drafts) else Drafts(found)

    def book(self, sequence: Sequence_, num_drafts: int, num_accepted: int) -> None:
        self.booked.append((num_drafts, num_accepted))

    def forget(self, sequence_ids: Iterable[str]) -> None:
        pass


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


def make_engine(
    runner: Any = None,
    *,
    groups: Sequence[CacheGroup] = FULL,
    tokenizer: Tokenizer | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    vocab_size: int = 24,
    limits: Mapping[str, Any] | None = None,
    plugins: Sequence[Any] = (),
    proposer: Any = None,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Engine:
    """An engine over a fake runner, small unless told otherwise."""
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
    if runner is None:
        runner = FakeRunner(groups, num_blocks, block_size, vocab_size=vocab_size)
    chosen = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **(limits or {})}
    return Engine(
        EngineSettings(
            limits=SchedulerLimits(**chosen),
            num_blocks=num_blocks,
            block_size=block_size,
            vocab_size=vocab_size,
            **{"seed": 7, **settings},
        ),
        runner,
        list(groups),
        tokenizer,
        plugins=plugins,
        proposer=proposer,
        clock=clock,
    )


def make_request(
    engine: Engine,
    prompt: Any,
    params: SamplingParams | None = None,
    *,
    name: str = "r",
    eos_token_id: int | None = None,
    tokenizer: Tokenizer | None = None,
    **keywords: Any,
) -> EngineRequest:
    """A checked request for that engine; FINAL_ONLY unless `params` say otherwise."""
    inputs = InputProcessor(
        engine.settings.limits.max_model_len,
        engine.settings.vocab_size,
        tokenizer,
        **{key: keywords.pop(key) for key in ("compile_grammar", "generation_config") if key in keywords},
    )
    params = params or SamplingParams(temperature=0.0, max_tokens=8, output_kind=OutputKind.FINAL_ONLY)
    request = inputs.process(prompt, params, request_id=name, **keywords)
    if eos_token_id is not None:
        request.eos_token_id = eos_token_id
    return request


def run(
    engine: Engine, *, after_step: Callable[[], None] | None = None, max_steps: int = 10_000
) -> list[RequestOutput]:
    """Every output until nothing is left to do."""
    outputs = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs.extend(engine.step())
        if after_step is not None:
            after_step()
    raise AssertionError(f"work is left after {max_steps} steps")


def generate(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, RequestOutput]:
    """The last output of each request, all of them run together."""
    for request in requests:
        engine.add_request(request)
    return {output.request_id: output for output in run(engine)}


def check_pool(engine: Engine) -> None:
    """Every block is held as often as tables say; the free list holds exactly the rest; no table holds one twice."""
    pool = engine.pool
    sequences = {id(sequence): sequence for sequence in engine.scheduler._sequences.values()}
    flight = engine._flight.plan if engine._flight is not None else None
    for plan in (engine._next_plan, flight):
        if plan is not None:
            sequences.update((id(item.sequence), item.sequence) for item in plan.scheduled)
    held: Counter[int] = Counter()
    for sequence in sequences.values():
        for table in sequence.block_ids:
            owned = [block for block in table if block]
            assert len(owned) == len(set(owned)), "a table holds a block twice"
            held.update(owned)
    free = pool.free_order()
    assert len(free) == len(set(free)) == pool.num_free
    assert 0 not in free
    assert pool.ref_count(0) == 0
    for block in range(1, pool.num_blocks):
        assert pool.ref_count(block) == held[block], f"block {block}"
        assert (block in set(free)) == (held[block] == 0)


def reference_choice(
    logits: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int, ends: set[int]
) -> int:
    """The next token by the rules as written, one row, whole vocabulary, float64."""
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in params.allowed_token_ids]] = -np.inf
    if len(output) < params.min_tokens:
        x[list(ends)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    for token_id in set(prompt) | set(output):
        x[token_id] *= 1 / params.repetition_penalty if x[token_id] > 0 else params.repetition_penalty
    for token_id, count in Counter(output).items():
        x[token_id] -= params.frequency_penalty * count + params.presence_penalty
    if params.is_greedy:
        return int(x.argmax())
    x = x / params.temperature
    p = np.exp(x - x.max())
    p /= p.sum()
    x[p < params.min_p * p.max()] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1.0:
        p = np.exp(x - x.max())
        p /= p.sum()
        order = np.argsort(p, kind="stable")
        dropped = order[np.cumsum(p[order]) <= 1.0 - params.top_p]
        x[[i for i in dropped if i != order[-1]]] = -np.inf
    ids = torch.arange(len(x), dtype=torch.int32)
    key = np.array([draw_key(seed, len(output))], dtype=np.uint64).view(np.int64)
    noise = exponential_noise(torch.from_numpy(key), ids).numpy()[0]
    return int((x - np.log(noise)).argmax())


def naive_loop(
    groups: Sequence[CacheGroup], vocab_size: int, request: EngineRequest, *, seed: int, max_model_len: int
) -> tuple[list[int], str]:
    """One request, one token at a time, everything computed anew: output ids and finish reason."""
    params = request.params
    prompt = list(request.prompt_token_ids)
    output: list[int] = []
    ends = set(request.stop_token_ids)
    if request.eos_token_id is not None and not params.ignore_eos:
        ends.add(request.eos_token_id)
    while True:
        logits = hashed_logits(context_key(groups, prompt + output), vocab_size)
        output.append(reference_choice(logits, params, prompt, output, seed, ends))
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output, "stop"
        if len(output) >= (params.max_tokens or max_model_len) or len(prompt) + len(output) >= max_model_len:
            return output, "length"


def make_loaded(
    runner: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    generation_config: Mapping[str, Any] | None = None,
    **keywords: Any,
) -> Any:
    """A LoadedModel over a fake runner: what LLM and AsyncLLM stand on."""
    from vkit.loading import LoadedModel
    from vkit.text.template import ChatTemplate

    tokenizer = tokenizer or byte_tokenizer()
    engine = make_engine(runner, tokenizer=tokenizer, **keywords)
    inputs = InputProcessor(
        engine.settings.limits.max_model_len,
        engine.settings.vocab_size,
        tokenizer,
        generation_config=generation_config or {},
    )
    template = ChatTemplate.for_tokenizer(tokenizer) if tokenizer.chat_templates else None
    return LoadedModel(engine, inputs, tokenizer, template, {})

"""Scheduling around a cache connector: what it brings changes no token, whatever it promises, delays or loses."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.connected import (
    Store,
    check_held,
    config_of,
    connected_engine,
    flushed,
    store_connector,
)
from tests.fakes import generate, make_engine, make_request, run
from vkit.cache.connector import KVConnector, SchedulerSide, WorkerSide
from vkit.engine import Engine
from vkit.errors import UsageError
from vkit.sequence import Plan, Sequence, SequenceStatus
from vkit.types import FinishReason, OutputKind, RequestOutput, SamplingParams

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, output_kind=OutputKind.FINAL_ONLY, ignore_eos=True)
PROMPT = [2 + i % 20 for i in range(18)]


def run_patiently(engine: Engine, seconds: float = 10.0) -> dict[str, RequestOutput]:
    """Every output until nothing is left to do; waits for threads where nothing can run."""
    outputs: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + seconds
    while engine.has_work:
        outputs.update((output.request_id, output) for output in engine.step())
        check_held(engine)
        if engine.is_stalled:
            time.sleep(0.001)
        assert time.monotonic() < deadline, "the engine spins"
    return outputs


def tokens_of(output: RequestOutput) -> list[int]:
    return output.outputs[0].token_ids


def plain_tokens(prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    engine = make_engine()
    return tokens_of(generate(engine, [make_request(engine, prompt, params)])["r"])


def warmed(store: Store, prompt: list[int] = PROMPT, **keywords: Any) -> None:
    """Let another engine put a prompt's chunks into the store."""
    connector = store_connector(store, config=config_of("kv_producer"), **keywords)
    engine = connected_engine(connector, config=config_of("kv_producer"))
    engine.add_request(make_request(engine, prompt, GREEDY.with_(max_tokens=1)))
    run_patiently(engine)
    flushed(connector)
    engine.close()


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("is_remote", [True, False])
@pytest.mark.parametrize("chunk_blocks", [1, 2, 3])
def test_what_a_store_brings_changes_no_token(caches: bool, is_async: bool, is_remote: bool, chunk_blocks: int) -> None:
    store = Store()
    warmed(store, chunk_blocks=chunk_blocks)
    assert len(store.chunks) == 18 // (4 * chunk_blocks)
    connector = store_connector(store, is_remote=is_remote, chunk_blocks=chunk_blocks)
    engine = connected_engine(connector, async_scheduling=is_async, enable_prefix_caching=caches)
    engine.add_request(make_request(engine, PROMPT, GREEDY))
    output = run_patiently(engine)["r"]
    expected = 18 // (4 * chunk_blocks) * 4 * chunk_blocks
    assert tokens_of(output) == plain_tokens(PROMPT)
    assert output.num_cached_tokens == expected
    assert engine.runner.num_tokens == 18 - expected + 5  # type: ignore[attr-defined]
    assert engine.metrics.external_queries.value == 18
    assert engine.metrics.external_hits.value == expected
    assert engine.metrics.prompt_tokens_by_source.by_label["external_kv_transfer"] == expected
    assert engine.pool.usage == 0
    engine.close()


def test_only_what_the_local_cache_lacks_is_loaded() -> None:
    store = Store(is_instant=True)
    warmed(store)
    engine = connected_engine(store_connector(store))
    engine.add_request(make_request(engine, PROMPT[:9], GREEDY.with_(max_tokens=1), name="first"))
    run_patiently(engine)
    engine.add_request(make_request(engine, PROMPT, GREEDY, name="second"))
    assert tokens_of(run_patiently(engine)["second"]) == plain_tokens(PROMPT)
    assert engine.metrics.prefix_cache_hits.value == 8
    assert engine.metrics.external_hits.value == 8 + 8  # 8 of the first request, then what comes after its 8
    engine.close()


def test_an_unanswered_sequence_keeps_its_place_and_lets_others_go() -> None:
    gate = threading.Event()
    store = Store()
    warmed(store)
    store.gate = gate
    engine = connected_engine(store_connector(store), limits={"max_num_seqs": 1})
    for name in ("a", "b"):
        engine.add_request(make_request(engine, PROMPT, GREEDY, name=name))
    engine.step()
    assert engine.is_stalled
    assert [s.id[0] for s in engine.scheduler._policy.order(lambda s: 0)] == ["a", "b"]
    gate.set()
    outputs = run_patiently(engine)
    assert list(outputs) == ["a", "b"]
    log = engine.runner.step_log  # type: ignore[attr-defined]
    assert log[0][0][:2] == ("a#1.0", 16)  # begins behind the sixteen tokens that were loaded
    engine.close()


def test_a_sequence_that_loads_holds_its_blocks_and_others_run() -> None:
    gate = threading.Event()
    store = Store()
    warmed(store)
    engine = connected_engine(store_connector(store, is_remote=True))
    engine.add_request(make_request(engine, PROMPT, GREEDY, name="loads"))
    while engine.scheduler.num_deferred == 0:
        store.gate = gate if engine._transfer.has_pending else None  # type: ignore[union-attr]
        engine.step()
    store.gate = gate
    engine.add_request(make_request(engine, [3, 4, 5], GREEDY, name="other"))
    seen: list[str] = []
    for _ in range(8):
        seen += [output.request_id for output in engine.step()]
    (waiting,) = [s for s in engine.scheduler._sequences.values() if s.id.startswith("loads")]
    if waiting.status is SequenceStatus.WAITING_FOR_REMOTE_KV:  # unless its four reads were done before the gate shut
        assert len(waiting.block_ids[0]) == 4
    assert "other" in seen
    gate.set()
    assert tokens_of(run_patiently(engine)["loads"]) == plain_tokens(PROMPT)
    engine.close()


def test_a_load_is_carried_out_although_its_sequence_ends_before_the_worker_heard_of_it() -> None:
    """Its blocks are held until the worker has reported, so the order must reach it."""
    store = Store()
    warmed(store)
    engine = connected_engine(store_connector(store, is_remote=True), async_scheduling=True)
    schedule, was_aborted = engine.scheduler.schedule, []

    def schedule_and_abort(*args: Any) -> Plan | None:
        plan = schedule(*args)
        if engine.scheduler.num_deferred and not was_aborted:
            was_aborted.append(True)
            engine.abort("loads")
        return plan

    engine.scheduler.schedule = schedule_and_abort  # type: ignore[method-assign]
    engine.add_request(make_request(engine, PROMPT, GREEDY, name="loads"))
    engine.add_request(make_request(engine, [3, 4, 5], GREEDY, name="other"))
    outputs = run_patiently(engine)
    assert was_aborted
    assert outputs["loads"].outputs[0].finish_reason is FinishReason.ABORT
    assert tokens_of(outputs["other"]) == plain_tokens([3, 4, 5])
    assert engine.pool.usage == 0
    engine.close()


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("lost", range(4))
def test_recompute_goes_back_to_the_first_lost_block(is_async: bool, lost: int) -> None:
    store = Store()
    warmed(store)
    keys = list(store.chunks)
    store.loses = lambda key: key == keys[lost]
    config = config_of(policy="recompute")
    engine = connected_engine(
        store_connector(store, config=config, is_remote=True), config=config, async_scheduling=is_async
    )
    engine.add_request(make_request(engine, PROMPT, GREEDY))
    output = run_patiently(engine)["r"]
    assert tokens_of(output) == plain_tokens(PROMPT)
    assert output.num_cached_tokens == 4 * lost
    assert engine._transfer.num_failed_loads == 1  # type: ignore[union-attr]
    engine.close()


@pytest.mark.parametrize("is_async", [True, False])
def test_fail_ends_the_one_request(is_async: bool) -> None:
    store = Store()
    warmed(store)
    last = list(store.chunks)[-1]
    store.loses = lambda key: key == last
    engine = connected_engine(store_connector(store, is_remote=True), async_scheduling=is_async)
    engine.add_request(make_request(engine, PROMPT, GREEDY, name="lost"))
    engine.add_request(make_request(engine, [3, 4, 5, 6, 7, 8], GREEDY, name="other"))
    outputs = run_patiently(engine)
    lost = outputs["lost"].outputs[0]
    assert lost.finish_reason is FinishReason.ERROR
    assert lost.error is not None
    assert "could not be loaded: tokens from 12 on" in lost.error
    assert tokens_of(outputs["other"]) == plain_tokens([3, 4, 5, 6, 7, 8])
    assert engine.pool.usage == 0
    engine.close()


@dataclass
class Scripted(SchedulerSide):
    """Offers tokens into blocks that its worker fills, or says that it could not."""

    num_tokens: int
    content: list[int]
    fails_at: int | None = None
    num_none: int = 0
    delays: bool = False
    orders: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)

    def get_num_new_matched_tokens(self, sequence: Sequence, num_computed: int) -> tuple[int | None, bool]:
        if self.num_none:
            self.num_none -= 1
            return None, False
        return max(0, min(self.num_tokens, (sequence.num_tokens - 1) // 4 * 4) - num_computed), False

    def update_state_after_alloc(self, sequence: Sequence, block_ids: list[list[int]], num_external: int) -> None:
        if num_external:
            self.orders.append((sequence, list(block_ids[0][: self.num_tokens // 4])))

    def build_connector_meta(self, plan: Plan) -> Any:
        orders, self.orders = self.orders, []
        return [(blocks, self.content, self.fails_at) for _, blocks in orders]

    def request_finished(self, sequence: Sequence, block_ids: list[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        self.finished.append(sequence.id)
        return self.delays, {"blocks": len(block_ids[0]) if block_ids else 0}


class ScriptedWorker(WorkerSide):
    def __init__(self) -> None:
        self.pages: Any = None
        self.bad: set[int] = set()
        self.sent: set[str] = set()
        self.calls: list[str] = []

    def register_kv_caches(self, caches: Any) -> None:
        self.pages = caches["layers.0"]

    def start_load_kv(self, meta: Any) -> None:
        for blocks, content, fails_at in meta:
            for index, block in enumerate(blocks):
                if fails_at is not None and index >= fails_at:
                    self.bad.add(block)
                    continue
                row = self.pages[block].numpy().view("int64")
                row[:] = content[4 * index : 4 * index + 4]

    def save_kv_layer(self, name: str, kv: Any) -> None:
        self.calls.append(name)

    def get_finished(self) -> tuple[set[str], set[str]]:
        sent, self.sent = self.sent, set()
        return sent, set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad = self.bad, set()
        return bad


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("fails_at", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("max_tokens", [1, 6])
def test_a_load_that_fails_within_a_step_voids_what_was_computed_on_it(
    is_async: bool, fails_at: int | None, max_tokens: int
) -> None:
    side = Scripted(16, PROMPT, fails_at=fails_at, num_none=2)
    connector = KVConnector(side, ScriptedWorker())
    config = config_of(policy="recompute")
    engine = connected_engine(connector, config=config, async_scheduling=is_async)
    params = GREEDY.with_(max_tokens=max_tokens)
    engine.add_request(make_request(engine, PROMPT, params))
    output = run_patiently(engine)["r"]
    assert tokens_of(output) == plain_tokens(PROMPT, params)
    assert output.num_cached_tokens == (16 if fails_at is None else 4 * fails_at)
    engine.add_request(make_request(engine, PROMPT, params, name="again"))  # nothing bad was left in the prefix cache
    assert tokens_of(run_patiently(engine)["again"]) == plain_tokens(PROMPT, params)
    assert engine.pool.usage == 0
    engine.close()


@pytest.mark.parametrize("is_async", [True, False])
def test_a_load_that_fails_within_a_step_ends_the_request_under_fail(is_async: bool) -> None:
    engine = connected_engine(
        KVConnector(Scripted(16, PROMPT, fails_at=1), ScriptedWorker()), async_scheduling=is_async
    )
    engine.add_request(make_request(engine, PROMPT, GREEDY))
    (output,) = run_patiently(engine)["r"].outputs
    assert (output.finish_reason, output.token_ids) == (FinishReason.ERROR, [])
    assert engine.pool.usage == 0
    engine.close()


@pytest.mark.parametrize("is_async", [True, False])
def test_blocks_stay_until_they_were_sent(is_async: bool) -> None:
    side, worker = Scripted(0, PROMPT, delays=True), ScriptedWorker()
    engine = connected_engine(KVConnector(side, worker), async_scheduling=is_async)
    engine.add_request(make_request(engine, PROMPT, GREEDY.with_(max_tokens=1)))
    outputs: list[RequestOutput] = []
    for _ in range(6):
        outputs += engine.step()
    (output,) = outputs
    assert output.kv_transfer_params == {"blocks": 5}
    assert engine.has_work
    assert round(engine.pool.usage * 63) == 5
    worker.sent = {side.finished[0]}
    engine.step()
    assert engine.pool.usage == 0
    assert not engine.has_work
    engine.close()


def test_a_connector_with_half_of_it_missing_is_refused() -> None:
    from vkit.cache.groups import CacheGroup, CacheKind

    whole, half = KVConnector(SchedulerSide(), WorkerSide()), KVConnector(SchedulerSide(), None)
    full, state = CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.STATE, (1,))
    sliding = CacheGroup(1, CacheKind.SLIDING, (1,), 8)
    with pytest.raises(UsageError, match="Mine has only a scheduler half"):
        half.checked("Mine", (full,))
    with pytest.raises(UsageError, match="recurrent states are not moved"):
        whole.checked("Mine", (full, state))
    with pytest.raises(UsageError, match="full attention only"):
        whole.checked("Mine", (full, sliding))
    assert whole.checked("Mine", (full,)) is whole


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10**6),
    is_remote=st.booleans(),
    is_async=st.booleans(),
    caches=st.booleans(),
    policy=st.sampled_from(["fail", "recompute"]),
    chunk_blocks=st.integers(1, 2),
    num_blocks=st.integers(12, 40),
)
def test_random_loads_losses_aborts_and_small_pools(
    seed: int, is_remote: bool, is_async: bool, caches: bool, policy: str, chunk_blocks: int, num_blocks: int
) -> None:
    """Whatever arrives when: tokens are those of an engine without a connector, and no block is lost."""
    rng = random.Random(seed)
    chance = rng.choice([0.0, 0.1, 0.5])
    store = Store(
        loses=lambda key: rng.random() < chance, delay_s=rng.choice([0.0, 0.002]), is_instant=rng.random() < 0.5
    )
    config = config_of(policy=policy)
    connector = store_connector(store, config=config, is_remote=is_remote, chunk_blocks=chunk_blocks)
    engine = connected_engine(
        connector,
        config=config,
        num_blocks=num_blocks,
        limits={"max_model_len": 40, "max_num_batched_tokens": rng.choice([5, 16])},
        async_scheduling=is_async,
        enable_prefix_caching=caches,
    )
    heads = [[rng.randrange(2, 22) for _ in range(rng.randrange(8, 24))] for _ in range(2)]
    prompts = [[*rng.choice(heads)[: rng.randrange(4, 24)], rng.randrange(2, 22)] for _ in range(7)]
    outputs: dict[str, RequestOutput] = {}
    deadline = time.monotonic() + 200
    todo = list(enumerate(prompts))
    while todo or engine.has_work:
        assert time.monotonic() < deadline, "the engine spins"
        if todo and rng.random() < 0.4:
            index, prompt = todo.pop(0)
            engine.add_request(
                make_request(engine, prompt, GREEDY.with_(max_tokens=rng.randrange(1, 7)), name=f"{index}")
            )
        if rng.random() < 0.03:
            engine.abort(str(rng.randrange(7)))
        if rng.random() < 0.03:
            engine.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        outputs.update((output.request_id, output) for output in engine.step())
        check_held(engine)
        if engine.is_stalled:
            time.sleep(0.0005)
    for name, output in outputs.items():
        (completion,) = output.outputs
        expected = plain_tokens(prompts[int(name)])
        if completion.finish_reason is FinishReason.LENGTH:
            assert completion.token_ids == expected[: len(completion.token_ids)]
        else:
            reasons = {FinishReason.ABORT, FinishReason.ERROR} if policy == "fail" else {FinishReason.ABORT}
            assert completion.finish_reason in reasons
            assert completion.token_ids == expected[: len(completion.token_ids)]
    assert engine.pool.usage == 0
    assert not engine.scheduler._deferred
    engine.close()


def test_plain_engines_are_untouched() -> None:
    engine = make_engine()
    engine.add_request(make_request(engine, PROMPT, GREEDY))
    (output,) = run(engine)
    assert output.kv_transfer_params is None
    assert engine.poll_interval_s is None

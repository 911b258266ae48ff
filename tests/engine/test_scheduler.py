"""Who runs when: fairness, admission, limits, policies, victims, impossible requests, random aborts."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

import pytest

from tests.fakes import (
    FULL,
    FakeRunner,
    ScriptedRunner,
    check_pool,
    generate,
    make_engine,
    make_request,
    naive_loop,
    run,
)
from vkit.engine import Engine
from vkit.inputs import EngineRequest
from vkit.sequence import SequenceStatus
from vkit.types import FinishReason, OutputKind, RepetitionDetection, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, output_kind=OutputKind.FINAL_ONLY, ignore_eos=True)


def first_steps(engine: Engine) -> dict[str, int]:
    """Step number at which each request was first scheduled."""
    seen: dict[str, int] = {}
    for step, items in enumerate(engine.runner.step_log):  # type: ignore[attr-defined]
        for name, _, _ in items:
            seen.setdefault(name.partition("#")[0], step)
    return seen


def order_of_admission(engine: Engine) -> list[str]:
    names: list[str] = []
    for items in engine.runner.step_log:  # type: ignore[attr-defined]
        names.extend(name.partition("#")[0] for name, _, _ in items)
    return list(dict.fromkeys(names))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_decode_never_stalls_behind_a_long_prefill(async_scheduling: bool) -> None:
    engine = make_engine(
        num_blocks=200, async_scheduling=async_scheduling, limits={"max_num_batched_tokens": 8, "max_model_len": 300}
    )
    engine.add_request(make_request(engine, [2, 3], GREEDY.with_(max_tokens=60), name="decoding"))
    for _ in range(3):
        engine.step()
    engine.add_request(make_request(engine, [2 + i % 20 for i in range(200)], GREEDY, name="long"))
    run(engine)
    log = engine.runner.step_log  # type: ignore[attr-defined]
    begin = first_steps(engine)["long"]
    for items in log[begin : begin + 28]:
        shares = {name.partition("#")[0]: count for name, _, count in items}
        assert shares == {"decoding": 1, "long": 7}
    assert sum(count for items in log for name, _, count in items if name.startswith("long")) == 200 + 5
    engine.close()


def test_chunks_continue_where_they_were_cut_and_only_the_last_yields_a_token() -> None:
    engine = make_engine(limits={"max_num_batched_tokens": 5, "max_num_seqs": 2})
    engine.add_request(make_request(engine, list(range(2, 14)), GREEDY.with_(max_tokens=2)))
    results = [bool(engine.step()) for _ in range(4)]
    assert results == [False, False, False, True]
    assert [(start, count) for ((_, start, count),) in engine.runner.step_log] == [(0, 5), (5, 5), (10, 2), (12, 1)]


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    engine = make_engine(num_blocks=9, limits={"max_num_batched_tokens": 8})
    engine.add_request(make_request(engine, list(range(2, 18)), GREEDY.with_(max_tokens=8), name="a"))  # four blocks
    engine.add_request(make_request(engine, [1, *range(2, 22)], GREEDY, name="b"))  # six blocks
    engine.add_request(make_request(engine, [3, 4], GREEDY, name="c"))
    run(engine, after_step=lambda: check_pool(engine))
    begin = first_steps(engine)
    last_of_a = max(step for step, items in enumerate(engine.runner.step_log) if items[0][0].startswith("a"))
    assert begin["b"] > last_of_a
    assert begin["c"] >= begin["b"], "no bypass: the first that does not fit stops admission"


def test_the_watermark_keeps_blocks_free_while_others_run() -> None:
    def begin_of_b(watermark: float) -> int:
        engine = make_engine(num_blocks=11, limits={"watermark": watermark})
        engine.add_request(make_request(engine, list(range(2, 14)), GREEDY, name="a"))
        engine.add_request(make_request(engine, [1, *range(2, 22)], GREEDY, name="b"))
        run(engine)
        return first_steps(engine)["b"]

    assert begin_of_b(0.0) < begin_of_b(0.3)


def test_without_chunked_prefill_a_prompt_waits_for_a_whole_step() -> None:
    engine = make_engine(limits={"max_num_batched_tokens": 16, "enable_chunked_prefill": False, "max_model_len": 16})
    engine.add_request(make_request(engine, list(range(2, 12)), GREEDY.with_(max_tokens=2), name="a"))
    engine.add_request(make_request(engine, [1, *range(2, 11)], GREEDY.with_(max_tokens=2), name="b"))
    run(engine)
    for items in engine.runner.step_log:
        assert all(count in (1, 10) for _, _, count in items)
    assert first_steps(engine) == {"a": 0, "b": 1}


def test_partial_prefill_limits() -> None:
    def most_partial(**limits: Any) -> int:
        engine = make_engine(
            num_blocks=300,
            limits={
                "max_num_batched_tokens": 12,
                "max_model_len": 200,
                "long_prefill_token_threshold": 4,
                **limits,
            },
        )
        for index in range(4):
            engine.add_request(make_request(engine, [1 + index, *range(2, 22)], GREEDY, name=f"{index}"))
        most = 0
        while engine.has_work:
            engine.step()
            most = max(most, sum(sequence.is_prefilling for sequence in engine.scheduler.running))
        return most

    assert most_partial() == 3
    assert most_partial(max_num_partial_prefills=2) == 2
    assert most_partial(max_num_partial_prefills=3, max_long_partial_prefills=1) == 1


def test_the_long_prefill_threshold_caps_each_step() -> None:
    engine = make_engine(limits={"long_prefill_token_threshold": 3})
    generate(engine, [make_request(engine, list(range(2, 12)), GREEDY)])
    assert max(count for items in engine.runner.step_log for _, _, count in items) == 3  # type: ignore[attr-defined]


def test_fcfs_keeps_arrival_order_and_preempted_requests_return_to_the_front() -> None:
    engine = make_engine(num_blocks=8, limits={"max_num_seqs": 2})
    for index in range(4):
        engine.add_request(make_request(engine, [2 + index] * 9, GREEDY.with_(max_tokens=12), name=f"{index}"))
    finished = [output.request_id for output in run(engine, after_step=lambda: check_pool(engine))]
    assert finished == ["0", "1", "2", "3"]
    assert engine.scheduler.num_preemptions > 0
    assert order_of_admission(engine) == ["0", "1", "2", "3"]


def test_priority_orders_admission_and_the_worst_is_the_victim() -> None:
    engine = make_engine(num_blocks=100, scheduling_policy="priority", limits={"max_num_seqs": 1})
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        engine.add_request(make_request(engine, [2, 3], GREEDY, name=name, priority=priority))
    assert [output.request_id for output in run(engine)] == ["c", "a", "d", "b"]

    engine = make_engine(num_blocks=9, scheduling_policy="priority", limits={"max_num_seqs": 3})
    preempted: list[str] = []
    for name, priority in (("good", 0), ("bad", 5), ("fair", 3)):
        engine.add_request(
            make_request(engine, [2, 3, 4, 5, 6], GREEDY.with_(max_tokens=14), name=name, priority=priority)
        )

    def watch() -> None:
        check_pool(engine)
        for sequence in engine.scheduler._sequences.values():
            if sequence.status is SequenceStatus.PREEMPTED:
                preempted.append(sequence.id.partition("#")[0])

    finished = [output.request_id for output in run(engine, after_step=watch)]
    assert preempted[0] == "bad"
    assert "good" not in preempted
    assert finished[0] == "good"
    assert finished[-1] == "bad"


def test_a_better_priority_does_not_evict_by_itself() -> None:
    engine = make_engine(num_blocks=100, scheduling_policy="priority", limits={"max_num_seqs": 1})
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="runs", priority=9))
    engine.step()
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="waits", priority=0))
    assert [output.request_id for output in run(engine)] == ["runs", "waits"]
    assert engine.scheduler.num_preemptions == 0


def lpm_engine(**limits: Any) -> Engine:
    return make_engine(
        num_blocks=800,
        scheduling_policy="lpm",
        limits={"max_num_seqs": 1, "max_num_batched_tokens": 64, "max_model_len": 200, **limits},
    )


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    engine = lpm_engine()
    warm = [5] * 40
    generate(engine, [make_request(engine, warm, GREEDY, name="warm")])
    prompts = {"none": [7] * 30, "some": [*warm[:12], 9], "most": [*warm, 9], "none2": [8] * 30}
    for name, prompt in prompts.items():
        engine.add_request(make_request(engine, prompt, GREEDY, name=name))
    assert [output.request_id for output in run(engine)] == ["most", "some", "none", "none2"]


def test_lpm_holds_back_the_second_of_two_with_one_new_prefix() -> None:
    engine = lpm_engine()
    engine.add_request(make_request(engine, [4, 4], GREEDY, name="first"))
    engine.step()
    shared = [6] * 32
    for name, prompt in (("a", [*shared, 1]), ("b", [*shared, 2]), ("c", [9] * 40), ("short", [6] * 31)):
        engine.add_request(make_request(engine, prompt, GREEDY, name=name))
    # Once a has filled the cache, b and then short find their beginning there and go before c.
    assert [output.request_id for output in run(engine)] == ["first", "a", "b", "short", "c"]


def test_in_batch_sharing_is_judged_within_one_pass() -> None:
    engine = lpm_engine(max_num_seqs=4)
    shared = [6] * 32
    for name, prompt in (("a", [*shared, 1]), ("b", [*shared, 2]), ("c", [9] * 31), ("d", [*shared, 3])):
        engine.add_request(make_request(engine, prompt, GREEDY, name=name))
    waiting = [sequence.id.partition("#")[0] for sequence in engine.scheduler._policy.order(lambda sequence: 0)]
    assert waiting == ["a", "c", "b", "d"]
    cached = {"b": 33}
    waiting = [
        sequence.id.partition("#")[0]
        for sequence in engine.scheduler._policy.order(lambda s: cached.get(s.id.partition("#")[0], 0))
    ]
    assert waiting == ["b", "a", "c", "d"]


def test_lpm_acts_as_fcfs_above_128_waiting_and_without_prefix_caching(caplog: pytest.LogCaptureFixture) -> None:
    engine = lpm_engine()
    generate(engine, [make_request(engine, [5] * 40, GREEDY, name="warm")])
    for index in range(129):
        engine.add_request(make_request(engine, [7] * 9, GREEDY, name=f"{index}"))
    engine.add_request(make_request(engine, [5] * 40, GREEDY, name="hit"))
    order = [sequence.id.partition("#")[0] for sequence in engine.scheduler._policy.order(engine.scheduler._hit_length)]
    assert order[0] == "0"
    assert order[-1] == "hit"
    make_engine(scheduling_policy="lpm", enable_prefix_caching=False)
    assert "lpm needs prefix caching" in caplog.text


def test_an_impossible_request_fails_by_itself() -> None:
    engine = make_engine(num_blocks=5)
    requests = [
        make_request(engine, list(range(2, 22)), GREEDY, name="large"),
        make_request(engine, [2, 3, 4], GREEDY, name="small"),
    ]
    outputs = generate(engine, requests)
    large, small = outputs["large"].outputs[0], outputs["small"].outputs[0]
    assert large.finish_reason is FinishReason.ERROR
    assert large.error == "20 tokens need 5 cache blocks, the pool has 4"
    assert small.finish_reason is FinishReason.LENGTH
    assert not engine.has_work


def test_a_request_that_outgrows_the_pool_fails_instead_of_spinning() -> None:
    engine = make_engine(num_blocks=4)
    request = make_request(engine, [2, 3, 4, 5, 6], GREEDY.with_(max_tokens=30))
    completion = generate(engine, [request])["r"].outputs[0]
    assert completion.finish_reason is FinishReason.ERROR
    expected, _ = naive_loop(FULL, 24, request, seed=0, max_model_len=64)
    assert completion.token_ids == expected[:8]  # twelve slots, and one token more than they hold
    check_pool(engine)


def scripted(script: list[int], params: SamplingParams, **keywords: Any) -> Any:
    engine = make_engine(ScriptedRunner(script, 24))
    return generate(engine, [make_request(engine, [2, 3], params, **keywords)])["r"].outputs[0]


def test_stops_on_eos_stop_ids_length_and_repetition() -> None:
    script = [5, 6, 7, 1, 8, 9, 10]
    base = SamplingParams(temperature=0.0, max_tokens=7, output_kind=OutputKind.FINAL_ONLY)
    ended = scripted(script, base, eos_token_id=1)
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([5, 6, 7, 1], FinishReason.STOP, None)
    ended = scripted(script, base.with_(stop_token_ids=(6,)), eos_token_id=1)
    assert (ended.token_ids, ended.stop_reason) == ([5, 6], 6)
    ended = scripted(script, base.with_(ignore_eos=True), eos_token_id=1)
    assert (ended.token_ids, ended.finish_reason) == (script, FinishReason.LENGTH)
    ended = scripted(script, base.with_(max_tokens=2), eos_token_id=1)
    assert (ended.token_ids, ended.finish_reason) == ([5, 6], FinishReason.LENGTH)
    rule = RepetitionDetection(max_pattern_size=3, min_pattern_size=2, min_count=3)
    looping = [9, 4, 5, 4, 5, 4, 5, 4, 5]
    ended = scripted(looping, base.with_(max_tokens=9, repetition_detection=rule))
    assert (ended.token_ids, ended.finish_reason) == (looping[:7], FinishReason.REPETITION)
    assert ended.stop_reason == "repetition_detected"
    ended = scripted([4, 4, 4, 4], base.with_(max_tokens=4, repetition_detection=rule))
    assert ended.finish_reason is FinishReason.LENGTH  # a single token three times is a pattern of one


def test_patterns_longer_than_the_output_cost_nothing() -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=5, repetition_detection=RepetitionDetection(max_pattern_size=10**12)
    )
    assert scripted([4, 5, 4, 5, 4], params).finish_reason is FinishReason.REPETITION


class _Exploding(frozenset[int]):
    """Stop ids that cannot be asked."""

    def __contains__(self, token_id: object) -> bool:
        raise AttributeError("no such stop")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_stop_check_that_raises_ends_its_own_sequence_only(async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    alone = generate(engine, [make_request(engine, [2, 3], GREEDY, name="good")])["good"].outputs[0]
    good, bad = (make_request(engine, [2, 3], GREEDY, name=name) for name in ("good", "bad"))
    bad.stop_token_ids = _Exploding()
    results = generate(engine, [good, bad])
    assert results["good"].outputs[0].token_ids == alone.token_ids
    ended = results["bad"].outputs[0]
    assert (ended.finish_reason, ended.error) == (FinishReason.ERROR, "AttributeError: no such stop")
    assert engine.num_unfinished == 0
    check_pool(engine)
    engine.close()


def test_min_tokens_holds_eos_and_stop_ids_back() -> None:
    """The script asks for EOS at once; masked, the next best follows until the floor is reached."""
    base = SamplingParams(temperature=0.0, max_tokens=9, min_tokens=3, output_kind=OutputKind.FINAL_ONLY)
    ended = scripted([1, 1, 1, 1, 1], base, eos_token_id=1)
    assert len(ended.token_ids) == 4
    assert ended.token_ids[3] == 1
    assert 1 not in ended.token_ids[:3]
    ended = scripted([6, 6, 6, 6, 6], base.with_(stop_token_ids=(6,)))
    assert ended.token_ids[3:] == [6]
    ended = scripted([5] * 70, base.with_(max_tokens=70, min_tokens=70))
    assert len(ended.token_ids) == 62  # the context ends before the floor: 64 tokens, two of them the prompt
    assert ended.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_aborts_in_every_state_free_blocks_before_the_next_step(async_scheduling: bool) -> None:
    engine = make_engine(num_blocks=12, async_scheduling=async_scheduling, limits={"max_num_seqs": 2})
    for name in ("runs", "prefills", "waits"):
        prompt = [2] * 12 if name == "runs" else [3] * 20
        engine.add_request(make_request(engine, prompt, GREEDY.with_(max_tokens=40), name=name))
    engine.step()
    for name in ("waits", "prefills", "runs", "runs", "never existed"):
        engine.abort(name)
        check_pool(engine)
    outputs = {output.request_id: output for output in run(engine)}
    assert {output.outputs[0].finish_reason for output in outputs.values()} == {FinishReason.ABORT}
    assert len(outputs) == 3
    assert engine.pool.num_free == engine.pool.num_usable
    assert engine.num_unfinished == 0
    engine.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_two_thousand_requests_through_64_blocks_with_random_aborts(async_scheduling: bool) -> None:
    chooser = random.Random(3)
    engine = make_engine(
        num_blocks=65, block_size=4, async_scheduling=async_scheduling, limits={"max_num_seqs": 16, "max_model_len": 60}
    )
    runner = engine.runner
    assert isinstance(runner, FakeRunner)

    def request(index: int) -> EngineRequest:
        prompt = [chooser.randrange(2, 24) for _ in range(chooser.randrange(1, 20))]
        return make_request(engine, prompt, GREEDY.with_(max_tokens=chooser.randrange(1, 12)), name=f"{index}")

    ended = aborted = sent = 0
    open_ids: set[str] = set()
    sizes: list[int] = []
    tracemalloc.start()
    while ended < 2000:
        while sent < 2000 and len(open_ids) < 40:
            engine.add_request(request(sent))
            open_ids.add(f"{sent}")
            sent += 1
        if chooser.random() < 0.3 and open_ids:
            engine.abort(chooser.choice(sorted(open_ids)))
        for output in engine.step():
            assert output.finished
            ended += 1
            aborted += output.outputs[0].finish_reason is FinishReason.ABORT
            open_ids.remove(output.request_id)
        runner.step_log.clear()
        if ended and ended % 500 == 0 and len(sizes) < ended // 500:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert aborted > 100
    assert not run(engine)
    assert engine.pool.num_free == engine.pool.num_usable == 64
    assert len(engine.scheduler._finished_ids) < 50
    assert (engine.num_unfinished, engine.outputs.num_requests, len(engine._owners)) == (0, 0, 0)
    assert sizes[-1] < sizes[0] * 1.5 + 200_000, sizes
    engine.close()


def test_planning_does_not_depend_on_the_context_length() -> None:
    """Block tables and token lists are never walked: what planning touches is counted, not timed."""
    counts = []
    for length in (8, 4000):
        engine = make_engine(
            ScriptedRunner([5] * 100, 24),
            num_blocks=3000,
            limits={"max_model_len": 5000, "max_num_batched_tokens": 5000},
        )
        engine.add_request(make_request(engine, [2] * length, GREEDY.with_(max_tokens=20)))
        engine.step()
        sequence = engine.scheduler.running[0]
        counting = _CountingList(sequence.token_ids)
        sequence.token_ids = counting
        engine.step()
        engine.step()
        counts.append(counting.reads)
    assert abs(counts[0] - counts[1]) <= 8  # one block's tokens may be hashed in between


class _CountingList(list[int]):
    """Counts elements read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        result = super().__getitem__(index)
        self.reads += len(result) if isinstance(index, slice) else 1
        return result

    def __iter__(self) -> Any:
        self.reads += len(self)
        return super().__iter__()

"""Control of a running engine, and what it measures."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes import FULL, FakeRunner, check_pool, generate, make_engine, make_request, naive_loop, run
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.engine import PauseMode
from vkit.errors import InvalidRequest, UsageError
from vkit.types import FinishReason, OutputKind, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, output_kind=OutputKind.FINAL_ONLY)


class SleepyRunner(FakeRunner):
    """Forgets everything while asleep."""

    def __init__(self) -> None:
        super().__init__(FULL, 64, 4)
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(level)
        self.slots[:] = -7

    def wake_up(self, tags: frozenset[str]) -> None:
        self.calls.append(sorted(tags))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_reset_prefix_cache_waits_for_idle_or_makes_running_ones_start_again(async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    requests = [make_request(engine, [2, 3, 4, 5, 6, 7 + i], GREEDY, name=f"{i}") for i in range(2)]
    for request in requests:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    assert not engine.reset_prefix_cache()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    check_pool(engine)
    outputs = {output.request_id: output for output in run(engine, after_step=lambda: check_pool(engine))}
    for request in requests:
        assert outputs[request.id].outputs[0].token_ids == naive_loop(FULL, 24, request, seed=0, max_model_len=64)[0]
    assert engine.reset_prefix_cache()
    again = generate(engine, [make_request(engine, [2, 3, 4, 5, 6, 7], GREEDY, name="again")])["again"]
    assert again.num_cached_tokens == 0
    engine.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_pause_keep_freezes_and_resume_goes_on(async_scheduling: bool) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    first = make_request(engine, [2, 3], GREEDY, name="first")
    engine.add_request(first)
    engine.step()
    engine.pause(PauseMode.KEEP)
    engine.add_request(make_request(engine, [4, 5], GREEDY, name="held"))
    steps = engine.runner.num_steps  # type: ignore[attr-defined]
    for _ in range(5):
        engine.step()
    assert engine.runner.num_steps == steps  # type: ignore[attr-defined]
    assert not engine.has_work
    assert engine.num_unfinished == 2
    engine.resume()
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs["first"].outputs[0].token_ids == naive_loop(FULL, 24, first, seed=0, max_model_len=64)[0]
    assert set(outputs) == {"first", "held"}
    engine.close()


def test_pause_wait_finishes_what_runs_and_abort_ends_it() -> None:
    engine = make_engine()
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="runs"))
    engine.step()
    engine.pause(PauseMode.WAIT)
    engine.add_request(make_request(engine, [4, 5], GREEDY, name="held"))
    assert [output.request_id for output in run(engine)] == ["runs"]
    engine.abort("held")
    (held,) = engine.step()
    assert held.outputs[0].finish_reason is FinishReason.ABORT
    engine.resume()
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="later"))
    engine.step()
    engine.pause(PauseMode.ABORT)
    (later,) = run(engine)
    assert later.outputs[0].finish_reason is FinishReason.ABORT
    assert engine.pool.num_free == engine.pool.num_usable


def test_sleep_forgets_the_cache_and_requests_wait_for_waking() -> None:
    runner = SleepyRunner()
    engine = make_engine(runner)
    prompt = list(range(2, 14))
    before = generate(engine, [make_request(engine, prompt, GREEDY)])["r"]
    engine.add_request(make_request(engine, prompt, GREEDY, name="cut"))
    engine.step()
    engine.sleep(2)
    assert [output.outputs[0].finish_reason for output in run(engine)] == [FinishReason.ABORT]
    states = {family.name: family for family in engine.metric_families()}["vllm:engine_sleep_state"]
    assert [sample.value for sample in states.samples] == [0, 0, 1]
    engine.add_request(make_request(engine, prompt, GREEDY, name="waits"))
    assert not engine.has_work
    engine.wake_up(["weights"])
    assert engine.sleep_level == 2
    engine.wake_up(["kv_cache"])
    (after,) = run(engine)
    assert after.num_cached_tokens == 0
    assert after.outputs == before.outputs
    assert runner.calls == [2, ["weights"], ["kv_cache"]]
    engine.wake_up()
    with pytest.raises(InvalidRequest, match="level: expected 1 or 2, got 3"):
        engine.sleep(3)
    engine.sleep(1)
    with pytest.raises(InvalidRequest, match="tags"):
        engine.wake_up(["brain"])
    with pytest.raises(InvalidRequest, match="cannot give its memory back"):
        make_engine().sleep(1)


def test_recurrent_layers_need_a_runner_that_copies_states() -> None:
    class Plain(FakeRunner):
        copies_states = False

    groups = [CacheGroup(0, CacheKind.STATE, (0,))]
    with pytest.raises(UsageError, match="--enable-prefix-caching"):
        make_engine(Plain(groups, 64, 4), groups=groups)
    assert make_engine(Plain(groups, 64, 4), groups=groups, enable_prefix_caching=False)


def test_request_ids_need_not_be_unique() -> None:
    engine = make_engine()
    for prompt in ([2, 3], [4, 5]):
        engine.add_request(make_request(engine, prompt, GREEDY, name="same"))
    assert len(run(engine)) == 2
    for prompt in ([2, 3], [4, 5]):
        engine.add_request(make_request(engine, prompt, GREEDY, name="same"))
    engine.step()
    engine.abort("same")
    assert [output.outputs[0].finish_reason for output in run(engine)] == [FinishReason.ABORT] * 2


def test_engines_share_nothing() -> None:
    one, other = make_engine(), make_engine()
    prompt = list(range(2, 14))
    first = generate(one, [make_request(one, prompt, GREEDY)])["r"]
    second = generate(other, [make_request(other, prompt, GREEDY)])["r"]
    assert first.outputs == second.outputs
    assert second.num_cached_tokens == 0
    assert one.metrics.success.by_label["length"] == other.metrics.success.by_label["length"] == 1


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def histogram(engine: Any, name: str) -> tuple[int, float]:
    """(count, sum)"""
    family = {family.name: family for family in engine.metric_families()}[name]
    values = {sample.suffix: sample.value for sample in family.samples}
    return int(values["_count"]), values["_sum"]


def test_times_are_measured_between_the_right_events() -> None:
    clock = Clock()
    engine = make_engine(clock=clock, limits={"max_num_batched_tokens": 4, "max_num_seqs": 1})
    runner = engine.runner
    assert isinstance(runner, FakeRunner)

    def forward_takes_a_second(step: int, logits: torch.Tensor) -> None:
        clock.now += 1.0

    runner.hook = forward_takes_a_second
    request = make_request(engine, list(range(2, 10)), GREEDY.with_(max_tokens=4, output_kind=OutputKind.DELTA))
    request.arrival_time = 98.0
    engine.add_request(request)
    outputs = run(engine)
    times = outputs[-1].metrics
    assert times is not None
    assert times.first_scheduled_time == 100.0
    assert times.first_token_time == 102.0  # two chunks
    assert times.last_token_time == times.finished_time == 105.0
    assert histogram(engine, "vllm:request_queue_time_seconds") == (1, 2.0)
    assert histogram(engine, "vllm:request_prefill_time_seconds") == (1, 2.0)
    assert histogram(engine, "vllm:request_decode_time_seconds") == (1, 3.0)
    assert histogram(engine, "vllm:request_inference_time_seconds") == (1, 5.0)
    assert histogram(engine, "vllm:time_to_first_token_seconds") == (1, 4.0)
    assert histogram(engine, "vllm:e2e_request_latency_seconds") == (1, 7.0)
    assert histogram(engine, "vllm:inter_token_latency_seconds") == (3, 3.0)
    assert histogram(engine, "vllm:request_time_per_output_token_seconds") == (1, 1.0)
    assert histogram(engine, "vllm:iteration_tokens_total") == (5, 4 + 4 + 3)
    assert engine.stats().iteration_tokens == [4, 4, 1, 1, 1]
    assert engine.stats().iteration_tokens == []


def test_counters_tell_what_happened() -> None:
    engine = make_engine(num_blocks=9, block_size=2, limits={"full_sequence_must_fit": False})
    requests = [
        make_request(engine, [2, 3, 4, 5 + i], GREEDY.with_(max_tokens=9, n=1 + (i == 2)), name=f"{i}")
        for i in range(3)
    ]
    generate(engine, requests)
    families = {family.name: family for family in engine.metric_families()}

    def value(name: str, **labels: str) -> float:
        samples = [sample for sample in families[name].samples if dict(sample.labels) == labels]
        return samples[0].value

    assert value("vllm:prompt_tokens") == 12
    assert value("vllm:generation_tokens") == 36
    assert value("vllm:request_success", finished_reason="length") == 4
    assert value("vllm:request_success", finished_reason="stop") == 0  # children of fixed sets exist at zero
    assert value("vllm:num_preemptions") == engine.scheduler.num_preemptions > 0
    assert histogram(engine, "vllm:request_num_preemptions")[1] == engine.scheduler.num_preemptions
    assert histogram(engine, "vllm:request_generation_tokens") == (4, 36)
    assert histogram(engine, "vllm:request_max_num_generation_tokens") == (3, 27)
    assert histogram(engine, "vllm:request_params_n") == (3, 4)
    assert histogram(engine, "vllm:request_params_max_tokens") == (3, 27)
    assert histogram(engine, "vllm:request_prompt_tokens") == (3, 12)
    assert value("vllm:num_requests_running") == value("vllm:num_requests_waiting") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    sources = families["vllm:prompt_tokens_by_source"].samples
    assert sum(sample.value for sample in sources) == 12
    assert [sample.labels["reason"] for sample in families["vllm:num_requests_waiting_by_reason"].samples] == [
        "capacity",
        "deferred",
    ]


def test_every_engine_row_of_the_metrics_table_exists() -> None:
    engine = make_engine(measures_blocks=True)
    names = {family.name + ("_total" if family.kind == "counter" else "") for family in engine.metric_families()}
    expected = [
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "engine_sleep_state",
        "cache_config_info",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "external_prefix_cache_queries_total",
        "external_prefix_cache_hits_total",
        "mm_cache_queries_total",
        "mm_cache_hits_total",
        "num_preemptions_total",
        "corrupted_requests_total",
        "prompt_tokens_total",
        "prompt_tokens_by_source_total",
        "prompt_tokens_cached_total",
        "prompt_tokens_cached_by_source_total",
        "generation_tokens_total",
        "request_success_total",
        "admission_rejections_total",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_max_tokens",
        "request_prefill_kv_computed_tokens",
        "iteration_tokens_total",
        "request_params_n",
        "request_num_preemptions",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "kv_block_lifetime_seconds",
        "kv_block_idle_before_evict_seconds",
        "kv_block_reuse_gap_seconds",
    ]
    assert names == {f"vllm:{name}" for name in expected} | {"vkit:jump_forward_tokens_total"}


def test_block_lifetimes_reach_the_histograms() -> None:
    clock = Clock()
    engine = make_engine(num_blocks=5, measures_blocks=True, clock=clock)
    generate(engine, [make_request(engine, list(range(2, 11)), GREEDY.with_(max_tokens=3))])
    clock.now += 50
    generate(engine, [make_request(engine, list(range(12, 23)), GREEDY.with_(max_tokens=3), name="s")])
    count, total = histogram(engine, "vllm:kv_block_lifetime_seconds")
    assert count >= 1
    assert total == 50 * count


class Cramped(FakeRunner):
    """Runs out of memory for steps of more than `most` sequences."""

    most = 2

    def execute(self, batch: Any) -> torch.Tensor:
        if len(batch.rows) > self.most:
            # What was to be written is not there.
            raise RuntimeError(
                "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return super().execute(batch)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_out_of_memory_is_tried_again_with_half_the_batch(async_scheduling: bool) -> None:
    engine = make_engine(Cramped(FULL, 64, 4), async_scheduling=async_scheduling)
    requests = [make_request(engine, [2, 3, 4, 5, 6 + i], GREEDY, name=f"{i}") for i in range(3)]
    for request in requests:
        engine.add_request(request)
    outputs = {output.request_id: output for output in run(engine, after_step=lambda: check_pool(engine))}
    for request in requests:
        expected = naive_loop(FULL, 24, request, seed=0, max_model_len=64)[0]
        assert outputs[request.id].outputs[0].token_ids == expected
    assert engine.scheduler.num_preemptions > 0
    engine.close()


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_what_does_not_fit_even_alone_fails_and_the_rest_goes_on(async_scheduling: bool) -> None:
    runner = Cramped(FULL, 64, 4)
    runner.most = 0
    engine = make_engine(runner, async_scheduling=async_scheduling)
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="large"))
    (failed,) = run(engine, after_step=lambda: check_pool(engine))
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert failed.outputs[0].error is not None
    assert failed.outputs[0].error.startswith("out of memory: ")
    runner.most = 9
    engine.add_request(make_request(engine, [2, 3], GREEDY, name="small"))
    assert run(engine)[0].outputs[0].finish_reason is FinishReason.LENGTH
    engine.close()


def test_activity_is_logged_every_ten_seconds_and_idleness_is_not(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    runner = engine.runner
    assert isinstance(runner, FakeRunner)

    def forward_takes_four_seconds(step: int, logits: torch.Tensor) -> None:
        clock.now += 4.0

    runner.hook = forward_takes_four_seconds
    prompt = list(range(2, 14))
    with caplog.at_level("INFO", logger="vkit.engine"):
        generate(engine, [make_request(engine, prompt, GREEDY.with_(max_tokens=6), name="a")])
        clock.now += 100.0
        engine.step()
        generate(engine, [make_request(engine, prompt, GREEDY.with_(max_tokens=1), name="b")])
    first, second, third = (record.getMessage() for record in caplog.records)
    # Three steps in twelve seconds: a prompt of twelve tokens and the first two tokens are out.
    assert first == (
        "prompt 1.0 tokens/s, generation 0.2 tokens/s, running 1, waiting 0, KV cache 6.3 %, prefix hits 0.0 %"
    )
    assert "prompt 0.0 tokens/s, generation 0.2 tokens/s" in second
    assert third.endswith("prefix hits 33.3 %")  # eight of twice twelve

"""Steps launched before the host knows the tokens of the step before: what waits, what is dropped, what is let go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes import (
    FULL,
    FakeRunner,
    GuessingProposer,
    check_pool,
    generate,
    make_engine,
    make_request,
    naive_loop,
    run,
)
from vkit.engine import Engine, PauseMode
from vkit.sampled import Readback
from vkit.sequence import Plan
from vkit.types import OutputKind, SamplingParams

VOCAB = 24


def make(**settings: Any) -> tuple[Engine, FakeRunner]:
    blocks = {"num_blocks": 64, "block_size": 4}
    runner = FakeRunner(FULL, **blocks, vocab_size=VOCAB)
    engine = make_engine(
        runner, vocab_size=VOCAB, async_scheduling=True, keeps_tokens_on_device=True, **blocks, **settings
    )
    return engine, runner


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "output_kind": OutputKind.FINAL_ONLY, **changes})


def test_every_decoding_step_reads_its_tokens_on_the_device() -> None:
    engine, runner = make()
    requests = [make_request(engine, [3, 4, 5 + i], params(), name=f"{i}") for i in range(3)]
    outputs = generate(engine, requests)
    for request in requests:
        assert outputs[request.id].outputs[0].token_ids == naive_loop(FULL, VOCAB, request, seed=0, max_model_len=64)[0]
    assert runner.num_unknown == 3 * 7  # all but what follows the prompts
    assert runner.num_steps == 8
    assert engine.scheduler.num_dropped_tokens == 0
    engine.close()


def test_a_step_is_launched_before_the_tokens_of_the_one_before_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, runner = make()
    order: list[str] = []
    start, execute = Readback.start, runner.execute

    def watched(self: Readback, ids: torch.Tensor, values: torch.Tensor) -> Callable[[], Any]:
        wait = start(self, ids, values)
        step = runner.num_steps
        return lambda: (order.append(f"tokens of {step}"), wait())[1]

    monkeypatch.setattr(Readback, "start", watched)
    monkeypatch.setattr(runner, "execute", lambda batch: (order.append(f"run {runner.num_steps}"), execute(batch))[1])
    generate(engine, [make_request(engine, [3, 4], params(max_tokens=3))])
    assert order == ["run 1", "run 2", "tokens of 1", "run 3", "tokens of 2", "tokens of 3"]
    engine.close()


def test_a_sequence_that_ends_a_step_late_wastes_one_token() -> None:
    engine, runner = make()
    whole, _ = naive_loop(FULL, VOCAB, make_request(engine, [3, 4, 5], params()), seed=0, max_model_len=64)
    request = make_request(engine, [3, 4, 5], params(max_tokens=30), eos_token_id=whole[5])
    expected, reason = naive_loop(FULL, VOCAB, request, seed=0, max_model_len=64)
    assert (len(expected), reason) == (whole.index(whole[5]) + 1, "stop")
    output = generate(engine, [request])[request.id].outputs[0]
    assert output.token_ids == expected
    assert engine.scheduler.num_dropped_tokens == 1
    assert runner.num_steps == len(expected) + 1
    assert engine.pool.num_free == engine.pool.num_usable
    assert engine.cache.stats.num_hits == 0
    engine.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.2},
        {"min_tokens": 3},
        {"logprobs": 2},
        {"prompt_logprobs": 1},
        {"logit_bias": {5: 1.0}},
        {"allowed_token_ids": [3, 4, 5, 6]},
    ],
)
def test_what_depends_on_known_tokens_waits_for_them(changes: dict[str, Any]) -> None:
    """Beside one that does not: while both run the engine waits, and launches ahead again once it is alone."""
    engine, runner = make()
    waiting = make_request(engine, [3, 4, 5], params(max_tokens=4, **changes), name="waiting")
    plain = make_request(engine, [3, 4, 6], params(max_tokens=12), name="plain")
    synchronous = make_engine(vocab_size=VOCAB)
    expected = generate(synchronous, [waiting, plain])
    found = generate(engine, [waiting, plain])
    assert found["waiting"].outputs[0].token_ids == expected["waiting"].outputs[0].token_ids
    assert found["waiting"].outputs[0].logprobs == expected["waiting"].outputs[0].logprobs
    assert found["waiting"].prompt_logprobs == expected["waiting"].prompt_logprobs
    assert found["plain"].outputs[0].token_ids == expected["plain"].outputs[0].token_ids
    assert 0 < runner.num_unknown < 14
    engine.close()


def test_a_sequence_that_ends_right_after_a_step_that_waited_keeps_its_last_token() -> None:
    """Its token of the launched step and that of the step that waited for it come in one call of the engine."""
    engine, _ = make()
    plain = make_request(engine, [3, 4, 6], params(max_tokens=5), name="plain")
    waiting = make_request(engine, [3, 4, 5], params(max_tokens=4, logit_bias={5: 1.0}), name="waiting")
    for delay in range(6):
        engine.add_request(plain)
        outputs = [output for _ in range(delay) for output in engine.step()]
        engine.add_request(waiting)
        outputs += run(engine, after_step=lambda: check_pool(engine))
        found = {output.request_id: output.outputs[0].token_ids for output in outputs}
        assert found["plain"] == naive_loop(FULL, VOCAB, plain, seed=0, max_model_len=64)[0]
        assert found["waiting"] == naive_loop(FULL, VOCAB, waiting, seed=0, max_model_len=64)[0]
    engine.close()


def test_seeded_draws_are_those_of_the_synchronous_engine() -> None:
    rules = [{"temperature": 0.9}, {"temperature": 1.3, "top_k": 5}, {"temperature": 0.7, "top_p": 0.8, "min_p": 0.05}]
    found = []
    for settings in ({}, {"async_scheduling": True, "keeps_tokens_on_device": True}):
        engine = make_engine(vocab_size=VOCAB, limits={"max_num_batched_tokens": 5}, **settings)
        requests = [
            make_request(engine, [3] * (4 + i), params(max_tokens=10, seed=i, **rule), name=f"{i}")
            for i, rule in enumerate([*rules, {}])
        ]
        outputs = generate(engine, requests)
        found.append([outputs[f"{i}"].outputs[0].token_ids for i in range(4)])
        engine.close()
    assert found[0] == found[1]


def test_logits_that_are_no_numbers_end_their_sequence_alone() -> None:
    engine, runner = make()

    def spoil(step: int, logits: torch.Tensor) -> None:
        if step == 3:
            logits[0, 7] = torch.nan

    runner.hook = spoil
    requests = [make_request(engine, [3, 4, 5 + i], params(), name=f"{i}") for i in range(2)]
    outputs = generate(engine, requests)
    assert outputs["0"].outputs[0].finish_reason == "error"
    assert "not finite" in (outputs["0"].outputs[0].error or "")
    assert outputs["1"].outputs[0].token_ids == naive_loop(FULL, VOCAB, requests[1], seed=0, max_model_len=64)[0]
    assert engine.stats().num_corrupted == 1
    engine.close()


@pytest.mark.parametrize("how", ["abort", "pause", "sleep", "reset", "close"])
def test_nothing_names_a_block_once_the_engine_has_let_go(how: str) -> None:
    engine, runner = make()
    runner.sleep = lambda level: None  # type: ignore[attr-defined]
    runner.wake_up = lambda tags: None  # type: ignore[attr-defined]
    request = make_request(engine, [3, 4, 5], params(max_tokens=20))
    engine.add_request(request)
    for _ in range(4):
        engine.step()
    assert engine._flight is not None
    if how == "abort":
        engine.abort(request.id)
        run(engine)
    elif how == "pause":
        engine.pause(PauseMode.KEEP)
        while engine.has_work:
            engine.step()
        assert engine._flight is None
        assert engine.pool.num_free < engine.pool.num_usable
        check_pool(engine)
        engine.resume()
        (output,) = run(engine)
        assert output.outputs[0].token_ids == naive_loop(FULL, VOCAB, request, seed=0, max_model_len=64)[0]
    elif how == "sleep":
        engine.sleep()
    elif how == "reset":
        assert engine.reset_prefix_cache(reset_running_requests=True)
        assert engine._flight is None
        (output,) = run(engine)
        assert output.outputs[0].token_ids == naive_loop(FULL, VOCAB, request, seed=0, max_model_len=64)[0]
    else:
        engine.close()
    assert engine._flight is None
    assert engine.pool.num_free == engine.pool.num_usable


def test_running_out_of_memory_loses_no_token() -> None:
    engine, runner = make()
    execute, failures = runner.execute, [4]

    def failing(batch: Any) -> torch.Tensor:
        if runner.num_steps in failures:
            failures.clear()
            raise torch.OutOfMemoryError("no memory")
        return execute(batch)

    runner.execute = failing  # type: ignore[method-assign]
    requests = [make_request(engine, [3, 4, 5 + i], params(), name=f"{i}") for i in range(4)]
    outputs = generate(engine, requests)
    for request in requests:
        assert outputs[request.id].outputs[0].token_ids == naive_loop(FULL, VOCAB, request, seed=0, max_model_len=64)[0]
    assert engine.scheduler.num_preemptions == 4
    engine.close()


def test_drafts_and_tokens_on_the_device_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="keeps_tokens_on_device, expected no proposer"):
        make(proposer=GuessingProposer(lambda sequence: [], 2))


def test_an_empty_plan_can_be_deferred() -> None:
    engine, _ = make()
    assert engine.sampler.can_defer(Plan(1, []))  # type: ignore[union-attr]
    engine.close()

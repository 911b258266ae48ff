"""Drafts beside everything else a request may ask for: outputs are those of an engine without drafts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.fakes import (
    EOS_ID,
    FULL,
    FakeRunner,
    GuessingProposer,
    ScriptedRunner,
    byte_tokenizer,
    check_pool,
    generate,
    make_engine,
    make_request,
    run,
)
from vkit.engine import Engine
from vkit.errors import InvalidRequest, UsageError
from vkit.logits import BatchUpdate
from vkit.sequence import Sequence
from vkit.speculation.ngram import NgramProposer
from vkit.speculation.support import check_plugins, check_processors
from vkit.types import FinishReason, OutputKind, RepetitionDetection, SamplingParams

pytestmark = pytest.mark.slow

TOKENIZER = byte_tokenizer(["ab", "cd", "the "])
VOCAB = TOKENIZER.vocab_size


def params_of(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, "output_kind": OutputKind.FINAL_ONLY, **values})


def away_from_end(output: Any, row: torch.Tensor) -> None:
    """Depends on all of the output: what was said last becomes likelier, and the count decides by how much."""
    row[EOS_ID] = -100.0
    if len(output):
        row[output[-1]] += 0.2 * (len(output) % 3)


away_from_end.supports_speculation = True  # type: ignore[attr-defined]

PARAMS: dict[str, SamplingParams] = {
    "plain": params_of(),
    "logprobs": params_of(logprobs=3),
    "many logprobs": params_of(logprobs=20, temperature=0.9, seed=3, max_tokens=6),
    "scored": params_of(logprob_token_ids=(1, 5), temperature=1.0, seed=4),
    "penalties": params_of(repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3),
    "drawn with penalties": params_of(temperature=1.2, seed=8, frequency_penalty=1.0, top_p=0.7, logprobs=1),
    "bad words": params_of(bad_words=["ab", "cd", "xy"], logit_bias={97: 4.0, 98: 4.0, 258: 4.0, 120: 3.9, 121: 3.8}),
    "min tokens": params_of(min_tokens=12, logit_bias={EOS_ID: 5.0}),
    "stop ids": params_of(stop_token_ids=tuple(range(40, 60))),
    "stop strings": params_of(stop=["e", "th"], logit_bias={260: 2.5, 101: 2.0}),
    "allowed": params_of(allowed_token_ids=(65, 66, 67, 258), repetition_penalty=1.2),
    "prompt logprobs": params_of(prompt_logprobs=2, logprobs=0),
    "several": params_of(n=3, temperature=0.8, seed=11),
    "best of": params_of(n=1, best_of=3, temperature=0.8, seed=12),
    "repetition": params_of(
        repetition_detection=RepetitionDetection(max_pattern_size=3, min_count=3), logit_bias={65: 9.0, 66: 9.0}
    ),
    "processor": params_of(logits_processors=(away_from_end,)),
}


def requests_of(engine: Engine, names: list[str]) -> list[Any]:
    return [
        make_request(engine, [7, 8, 9, *range(10, 10 + index)], PARAMS[name], name=name, tokenizer=TOKENIZER)
        for index, name in enumerate(names)
    ]


def everything(output: Any) -> Any:
    """All that a caller sees of an output."""
    return [
        (item.text, item.token_ids, item.logprobs, item.cumulative_logprob, item.finish_reason, item.stop_reason)
        for item in output.outputs
    ], output.prompt_logprobs


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    engine = make_engine(tokenizer=TOKENIZER, num_blocks=200, limits={"max_num_seqs": 30, "max_num_batched_tokens": 64})
    return generate(engine, requests_of(engine, list(PARAMS)))


def oracle(plain: dict[str, Any], spoil: Callable[[int, list[int]], list[int]]) -> Callable[[Sequence], list[int]]:
    def guess(sequence: Sequence) -> list[int]:
        name, _, child = sequence.id.partition("#")
        outputs = plain[name].outputs
        right = outputs[int(child.rpartition(".")[2]) % len(outputs)].token_ids
        return spoil(len(sequence.token_ids), (right[sequence.num_output_tokens :] + [1] * 6)[:6])

    return guess


SPOILS: dict[str, Callable[[int, list[int]], list[int]]] = {
    "right": lambda _, right: right,
    "half right": lambda position, right: [*right[: position % 5], 66, *right[position % 5 :]],
    "ends": lambda position, right: [*right[: position % 3], EOS_ID, *right[position % 3 :]],
    "wrong": lambda _, right: [(token_id + 1) % VOCAB for token_id in right],
}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", SPOILS)
def test_same_outputs(plain: dict[str, Any], kind: str, is_async: bool, mode: str) -> None:
    names = list(PARAMS)
    if mode == "processed_logprobs":
        engine = make_engine(tokenizer=TOKENIZER, num_blocks=300, limits={"max_num_seqs": 30}, logprobs_mode=mode)
        plain = generate(engine, requests_of(engine, names))
    engine = make_engine(
        tokenizer=TOKENIZER,
        num_blocks=90,
        limits={"max_num_seqs": 12, "max_num_batched_tokens": 40},
        proposer=GuessingProposer(oracle(plain, SPOILS[kind]), max_drafts=6),
        async_scheduling=is_async,
        logprobs_mode=mode,
    )
    for request in requests_of(engine, names):
        engine.add_request(request)
    found = {output.request_id: output for output in run(engine, after_step=lambda: check_pool(engine))}
    for name in names:
        assert everything(found[name]) == everything(plain[name]), name
    stats = engine.scheduler.draft_stats
    assert (stats.num_accepted_tokens > 0) == (kind != "wrong")
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    engine.close()


def test_right_drafts_save_steps() -> None:
    script = [65 + value % 20 for value in range(24)]
    guess = lambda sequence: script[sequence.num_output_tokens :]  # noqa: E731
    proposer = GuessingProposer(guess, max_drafts=5)
    runner = ScriptedRunner(script, VOCAB)
    engine = make_engine(runner, tokenizer=TOKENIZER, proposer=proposer)
    output = generate(engine, [make_request(engine, [1, 2, 3], params_of(max_tokens=24), tokenizer=TOKENIZER)])["r"]
    assert output.outputs[0].token_ids == script
    # One token from the prompt, then six at a time; the last of 24 needs no draft.
    assert [count for ((_, _, count),) in runner.step_log] == [3, 6, 6, 6, 5]
    assert proposer.booked == [(5, 5)] * 3
    assert output.metrics is not None
    drafts = output.metrics.drafts
    assert (drafts.num_verifications, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (4, 19, 19)
    assert (drafts.acceptance_rate, drafts.mean_acceptance_length) == (1.0, 5.75)
    families = {family.name: family for family in engine.metric_families()}
    values = {name: families[f"vllm:spec_decode_num_{name}"].samples for name in ("drafts", "accepted_tokens")}
    assert [samples[0].value for samples in values.values()] == [4, 19]
    by_position = families["vllm:spec_decode_num_accepted_tokens_per_pos"].samples
    assert [(sample.labels["position"], sample.value) for sample in by_position] == [
        *((str(position), 4) for position in range(4)),
        ("4", 3),
    ]


def test_no_metrics_without_speculation() -> None:
    assert not [family for family in make_engine().metric_families() if "spec_decode" in family.name]


def test_activity_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    script = [65 + value % 20 for value in range(24)]
    now = [0.0]
    proposer = GuessingProposer(lambda sequence: [*script[sequence.num_output_tokens :][:3], 1], max_drafts=4)
    engine = make_engine(
        ScriptedRunner(script, VOCAB), tokenizer=TOKENIZER, proposer=proposer, clock=lambda: now[0], num_blocks=80
    )
    engine.add_request(make_request(engine, [1, 2, 3], params_of(max_tokens=24), tokenizer=TOKENIZER))
    with caplog.at_level(logging.INFO, "vkit.engine"):
        for _ in range(3):
            engine.step()
        now[0] = 11.0
        engine.step()
    assert "speculation: 6 drafts accepted of 8 (75.0 %), mean acceptance length 4.00" in caplog.text


def test_a_failure_after_drafts_ends_the_request_where_it_would_have() -> None:
    """A row that is reached and is not finite: the tokens before it stand, and the next step fails."""
    script = [65, 66, 67, 68, 69, 70]

    class Broken(ScriptedRunner):
        def execute(self, batch: Any) -> torch.Tensor:
            logits = super().execute(batch)
            row = 0
            for _, num_prompt, end, num_logits in batch:
                for position in range(end - num_logits, end):
                    if position + 1 - num_prompt == 3:
                        logits[row] = float("nan")
                    row += 1
            return logits

    results = []
    for proposer in (None, GuessingProposer(lambda sequence: script[sequence.num_output_tokens :], max_drafts=5)):
        engine = make_engine(Broken(script, VOCAB), tokenizer=TOKENIZER, proposer=proposer)
        output = generate(engine, [make_request(engine, [1, 2, 3], params_of(max_tokens=6), tokenizer=TOKENIZER)])["r"]
        (completion,) = output.outputs
        results.append((completion.token_ids, completion.finish_reason, completion.error))
        assert engine.metrics.corrupted.value == 1
    assert results[0] == results[1]
    assert results[0][:2] == ([65, 66, 67], FinishReason.ERROR)


def test_running_sequences_keep_their_share_of_the_budget() -> None:
    """Drafts of the first may not leave those behind it without a token."""
    runner = FakeRunner(FULL, 200, 4, vocab_size=VOCAB)
    proposer = GuessingProposer(lambda _: [1] * 8, max_drafts=8)
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 10}
    engine = make_engine(runner, tokenizer=TOKENIZER, num_blocks=200, limits=limits, proposer=proposer)
    for index in range(4):
        engine.add_request(make_request(engine, [5 + index], params_of(ignore_eos=True), name=f"{index}"))
    engine.step()
    while engine.has_work:
        running = len(engine.scheduler.running)
        engine.step()
        if running == 4 and len(engine.scheduler.running) == 4:
            assert len(runner.step_log[-1]) == 4
            assert sum(count for _, _, count in runner.step_log[-1]) <= 10


def test_own_processors_have_to_say_that_they_can() -> None:
    check_processors(params_of(logits_processors=(away_from_end,)))
    with pytest.raises(InvalidRequest, match="<lambda> cannot be used while tokens are drafted"):
        check_processors(params_of(logits_processors=(lambda output, row: None,)))


class Plugin:
    """Makes what a sequence said last impossible."""

    supports_speculation = True

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, update: BatchUpdate | None) -> None:
        if update is None:
            return
        for row in update.removed:
            self.rows.pop(row, None)
        moving = [(new, self.rows.pop(old)) for old, new in update.moved]
        self.rows.update(moving)
        self.rows.update({added.index: added.output_token_ids for added in update.added})
        assert sorted(self.rows) == list(range(update.batch_size))

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for row, output in self.rows.items():
            if len(output):
                logits[row, output[-1]] = -torch.inf
        return logits


def test_plugins_see_the_drafts_before_each_row() -> None:
    names = ["plain", "penalties", "scored", "several"]

    def outputs(proposer: Any) -> dict[str, Any]:
        engine = make_engine(
            tokenizer=TOKENIZER, num_blocks=200, proposer=proposer, plugins=[Plugin()], limits={"max_num_seqs": 8}
        )
        return generate(engine, requests_of(engine, names))

    expected = outputs(None)
    for spoil in SPOILS.values():
        found = outputs(GuessingProposer(oracle(expected, spoil), max_drafts=5))
        assert {name: everything(found[name]) for name in names} == {name: everything(expected[name]) for name in names}


def test_plugins_have_to_say_that_they_can() -> None:
    check_plugins([Plugin()])
    silent = type("Silent", (Plugin,), {"supports_speculation": False})()
    with pytest.raises(UsageError, match="Silent cannot be used with drafts"):
        check_plugins([silent])


def test_prompt_lookup_through_the_engine() -> None:
    """A model that repeats its prompt is followed; the output is the same and takes fewer steps."""
    prompt = [65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75, 76, 65, 66, 67]
    script = [68, 69, 70, 71, 72, 73, 74, 75, 76, 65, 66, 67] * 2
    steps = []
    for proposer in (None, NgramProposer(8, 2, 3)):
        runner = ScriptedRunner(script, VOCAB)
        engine = make_engine(runner, tokenizer=TOKENIZER, proposer=proposer, num_blocks=80)
        params = params_of(max_tokens=len(script))
        output = generate(engine, [make_request(engine, prompt, params, tokenizer=TOKENIZER)])["r"]
        assert output.outputs[0].token_ids == script
        steps.append(len(runner.step_log))
    assert steps[0] == 24
    assert steps[1] <= 6


@pytest.mark.parametrize(("needs_hidden_states", "num_cached"), [(False, 12), (True, 8)])
def test_a_drafter_on_hidden_states_has_the_last_cached_block_computed_again(
    needs_hidden_states: bool, num_cached: int
) -> None:
    proposer = GuessingProposer(lambda _: [1, 2], max_drafts=2, needs_hidden_states=needs_hidden_states)
    engine = make_engine(tokenizer=TOKENIZER, proposer=proposer)
    prompt = list(range(5, 18))  # three blocks of four, and one token
    outputs = []
    for _ in range(2):
        request = make_request(engine, prompt, params_of(max_tokens=3), tokenizer=TOKENIZER)
        outputs.append(generate(engine, [request])["r"])
    assert [output.num_cached_tokens for output in outputs] == [0, num_cached]
    assert outputs[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


def test_drafts_end_at_the_limits() -> None:
    """Neither the context nor max_tokens is passed, and the last steps draft only what there is room for."""
    for limits, max_tokens in (({"max_model_len": 16}, 60), ({"max_model_len": 64}, 13)):
        script = [65 + value % 20 for value in range(60)]
        runner = ScriptedRunner(script, VOCAB)
        proposer = GuessingProposer(lambda sequence: script[sequence.num_output_tokens :], max_drafts=8)  # noqa: B023
        engine = make_engine(runner, tokenizer=TOKENIZER, proposer=proposer, limits=limits)
        request = make_request(engine, [1, 2, 3], params_of(max_tokens=max_tokens), tokenizer=TOKENIZER)
        (completion,) = generate(engine, [request])["r"].outputs
        assert completion.token_ids == script[:13]
        assert completion.finish_reason is FinishReason.LENGTH
        assert max(start + count for ((_, start, count),) in runner.step_log) == 15, "the last token is never run"


def test_a_draft_is_not_worth_anybodys_blocks() -> None:
    """With blocks for known tokens only, drafts are cut and nobody is preempted."""
    runner = FakeRunner(FULL, 9, 4, vocab_size=VOCAB)
    proposer = GuessingProposer(lambda _: [1] * 8, max_drafts=8)
    engine = make_engine(runner, tokenizer=TOKENIZER, num_blocks=9, proposer=proposer)
    for index in range(2):
        params = params_of(max_tokens=12, ignore_eos=True)
        engine.add_request(make_request(engine, [5 + index, 6, 7, 8], params, name=f"{index}"))
    run(engine, after_step=lambda: check_pool(engine))
    assert engine.scheduler.num_preemptions == 0
    assert engine.scheduler.draft_stats.num_draft_tokens > 0

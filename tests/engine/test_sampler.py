"""Stages of the sampler one by one, log-probabilities in every mode, plug-ins, grammars, and rows that fail alone."""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch

from tests.fakes import (
    FULL,
    FakeRunner,
    ScriptedRunner,
    byte_tokenizer,
    generate,
    hashed_logits,
    make_engine,
    make_request,
    run,
)
from vkit.errors import InvalidRequest
from vkit.logits import BatchUpdate
from vkit.sequence import SequenceStatus
from vkit.types import FinishReason, OutputKind, RequestOutput, SamplingParams, StructuredOutputs

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, output_kind=OutputKind.FINAL_ONLY)
VOCAB = 24


def one(params: SamplingParams, prompt: Any = (2, 3, 4), runner: Any = None, **keywords: Any) -> RequestOutput:
    engine = make_engine(runner, **keywords)
    return generate(engine, [make_request(engine, list(prompt), params)])["r"]


def rows_of(runner: FakeRunner) -> list[torch.Tensor]:
    """Copies of every step's logits as the model gave them."""
    seen: list[torch.Tensor] = []
    runner.hook = lambda step, logits: seen.append(logits.clone())
    return seen


class Rows:
    """A model that gives the same row always."""

    def __init__(self, row: list[float]) -> None:
        self.row = torch.tensor(row)

    def prepare(self, plan: Any) -> int:
        return sum(item.num_logits for item in plan.scheduled)

    def execute(self, count: int) -> torch.Tensor:
        return self.row.repeat(count, 1)


def flat_engine(row: list[float], **keywords: Any) -> Any:
    return make_engine(Rows(row), vocab_size=len(row), **keywords)


def tokens(row: list[float], params: SamplingParams, prompt: Any = (0,), **keywords: Any) -> list[int]:
    engine = flat_engine(row)
    return generate(engine, [make_request(engine, list(prompt), params, **keywords)])["r"].outputs[0].token_ids


def test_ties_go_to_the_lowest_id() -> None:
    assert tokens([0.0, 3.0, 1.0, 3.0], GREEDY) == [1, 1, 1, 1]


def test_allowed_ids_bias_and_bad_words() -> None:
    row = [0.0, 3.0, 2.0, 1.0]
    assert tokens(row, GREEDY.with_(allowed_token_ids=(3, 0))) == [3] * 4
    assert tokens(row, GREEDY.with_(logit_bias={3: 2.5})) == [3] * 4
    assert tokens(row, GREEDY.with_(logit_bias={1: -100})) == [2] * 4


def test_bad_words_block_only_where_they_would_complete() -> None:
    engine = flat_engine([0.0, 3.0, 2.0, 1.0])
    request = make_request(engine, [0], GREEDY.with_(max_tokens=6))
    request.bad_word_ids = ((1, 1), (2, 1, 2))
    # 1, then not 1 again: 2; then 1; after 1 neither 1 nor (2 1) 2: 3; and so on.
    assert generate(engine, [request])["r"].outputs[0].token_ids == [1, 2, 1, 3, 1, 2]


def test_bad_words_are_encoded_with_and_without_a_space() -> None:
    tokenizer = byte_tokenizer(["ab", " ab"])
    engine = make_engine(tokenizer=tokenizer)
    request = make_request(engine, "x", GREEDY.with_(bad_words=("ab",)), tokenizer=tokenizer)
    assert request.bad_word_ids == ((258,), (259,))
    request = make_request(engine, "x", GREEDY.with_(bad_words=("xy",)), tokenizer=tokenizer)
    assert request.bad_word_ids == ((120, 121),)  # the spaced form is longer


def test_penalties_follow_the_formulas_and_count_incrementally() -> None:
    row = [2.0, 1.9, -1.0, 1.0]
    # Repetition counts the prompt: 2 / 2 = 1 is below 1.9; then 1.9 / 2, then 1.0 / 2; negative values are multiplied.
    params = GREEDY.with_(repetition_penalty=2.0, max_tokens=4)
    assert tokens(row, params, prompt=[0]) == [1, 0, 0, 0]
    # Presence: each used id falls by 0.5 once. 2, 1.9 -> 1.5, 1.4; then the first again.
    assert tokens(row, GREEDY.with_(presence_penalty=0.5)) == [0, 1, 0, 0]
    # Frequency: falls by 0.5 each time.
    assert tokens(row, GREEDY.with_(frequency_penalty=0.5)) == [0, 1, 0, 1]
    # The prompt does not count for presence and frequency.
    assert tokens(row, GREEDY.with_(frequency_penalty=2.0, max_tokens=1), prompt=[0, 0, 0]) == [0]


def test_custom_processors_see_the_output_and_fail_alone() -> None:
    seen: list[list[int]] = []

    def rotate(output: Any, row: torch.Tensor) -> None:
        seen.append(list(output))
        row[:] = -math.inf
        row[len(output) % 4] = 0.0

    def broken(output: Any, row: torch.Tensor) -> None:
        if len(output) == 2:
            raise KeyError("mine")

    engine = flat_engine([0.0, 3.0, 2.0, 1.0])
    requests = [
        make_request(engine, [0], GREEDY.with_(logits_processors=(rotate,)), name="rotate"),
        make_request(engine, [0], GREEDY.with_(logits_processors=(broken,)), name="broken"),
        make_request(engine, [0], GREEDY, name="plain"),
    ]
    outputs = generate(engine, requests)
    assert outputs["rotate"].outputs[0].token_ids == [0, 1, 2, 3]
    assert seen == [[], [0], [0, 1], [0, 1, 2]]
    assert outputs["plain"].outputs[0].token_ids == [1] * 4
    failed = outputs["broken"].outputs[0]
    assert failed.token_ids == [1, 1]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error == "logits processor failed: KeyError('mine')"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_numbers_ends_its_request_alone(bad: float, temperature: float) -> None:
    runner = FakeRunner(FULL, 64, 4, vocab_size=VOCAB)

    def spoil(step: int, logits: torch.Tensor) -> None:
        if step == 3:
            logits[0, 5] = bad

    runner.hook = spoil
    engine = make_engine(runner)
    params = GREEDY.with_(temperature=temperature, seed=4)
    outputs = generate(engine, [make_request(engine, [2, 3], params, name=name) for name in ("a", "b")])
    assert outputs["a"].outputs[0].finish_reason is FinishReason.ERROR
    assert outputs["a"].outputs[0].error == "the model's logits are not finite"
    assert len(outputs["a"].outputs[0].token_ids) == 2
    assert outputs["b"].outputs[0].finish_reason is FinishReason.LENGTH
    assert engine.metrics.corrupted.value == 1


def test_constraints_that_leave_nothing_say_so() -> None:
    engine = flat_engine([0.0, 3.0, 2.0, 1.0])
    request = make_request(engine, [0], GREEDY.with_(allowed_token_ids=(1,)))
    request.bad_word_ids = ((1,),)
    completion = generate(engine, [request])["r"].outputs[0]
    assert completion.error == "no token is allowed by the constraints on this output"
    assert engine.metrics.corrupted.value == 0


# Log-probabilities


def test_logprobs_give_the_chosen_token_first_with_its_rank() -> None:
    row = [0.0, 3.0, 2.0, 1.0]
    expected = torch.log_softmax(torch.tensor(row), 0).tolist()
    engine = flat_engine(row)
    params = GREEDY.with_(logprobs=2, logit_bias={3: 50.0}, max_tokens=2)  # the bias forces 3; raw values ignore it
    completion = generate(engine, [make_request(engine, [0], params)])["r"].outputs[0]
    assert completion.logprobs is not None
    for position in completion.logprobs:
        assert [(entry.token_id, entry.rank) for entry in position] == [(3, 3), (1, 1), (2, 2)]
        assert [entry.logprob for entry in position] == pytest.approx([expected[3], expected[1], expected[2]])
    assert completion.cumulative_logprob == pytest.approx(2 * expected[3])
    assert tokens_of(row, logprobs=0) == [[1]]
    assert tokens_of(row, logprobs=-1) == [[1, 1, 2, 3, 0]]
    assert tokens_of(row, logprob_token_ids=(0, 3)) == [[1, 0, 3]]
    assert one(GREEDY).outputs[0].logprobs is None


def tokens_of(row: list[float], **params: Any) -> list[list[int]]:
    engine = flat_engine(row)
    inputs_limit = {"options": _no_limit()}
    request = make_request(engine, [0], GREEDY.with_(max_tokens=1, **params), **inputs_limit)
    completion = generate(engine, [request])["r"].outputs[0]
    return [[entry.token_id for entry in position] for position in completion.logprobs or []]


def _no_limit() -> Any:
    from vkit.inputs import PromptOptions

    return PromptOptions(max_logprobs=-1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_modes(mode: str, temperature: float) -> None:
    row = torch.tensor([0.5, 3.0, 2.0, 1.0])
    params = GREEDY.with_(temperature=temperature, top_k=2, logit_bias={1: -100.0}, max_tokens=1, logprobs=-1, seed=1)
    engine = flat_engine(row.tolist(), logprobs_mode=mode)
    completion = generate(engine, [make_request(engine, [0], params, options=_no_limit())])["r"].outputs[0]
    assert completion.logprobs is not None
    found = {entry.token_id: entry.logprob for entry in completion.logprobs[0][1:]}
    if mode.startswith("processed"):
        row = row.clone()
        row[1] -= 100.0
        if temperature:
            row = row / temperature
            row[[0, 1]] = -math.inf  # top_k 2 keeps 2 and 3
    expected = torch.log_softmax(row, 0) if mode.endswith("logprobs") else row
    assert [found[token_id] for token_id in range(4)] == pytest.approx(expected.tolist())


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.4}])
def test_processed_modes_do_not_change_the_choice(temperature: float, truncation: dict[str, Any]) -> None:
    params = GREEDY.with_(temperature=temperature, seed=3, max_tokens=8, **truncation)
    plain = one(params).outputs[0]
    for mode in ("raw_logprobs", "processed_logprobs"):
        logged = one(params.with_(logprobs=1), logprobs_mode=mode).outputs[0]
        assert logged.token_ids == plain.token_ids
        assert logged.logprobs is not None
        assert all(position[0].logprob > -math.inf for position in logged.logprobs)


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_prompt_logprobs_are_the_same_in_any_chunks_and_with_any_cache(
    budget: int, caching: bool, async_scheduling: bool
) -> None:
    engine = make_engine(
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        limits={"max_num_batched_tokens": budget, "max_num_seqs": 1},
    )
    prompt = [2 + i % 9 for i in range(19)]
    params = GREEDY.with_(prompt_logprobs=2, max_tokens=2)
    for turn in ("first", "again"):
        output = generate(engine, [make_request(engine, prompt, params, name=turn)])[turn]
        assert output.num_cached_tokens == 0, "no logits exist at cached positions"
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position in range(1, len(prompt)):
            entries = output.prompt_logprobs[position]
            assert entries is not None
            expected = torch.log_softmax(torch.from_numpy(hashed_logits(_key(prompt[:position]), VOCAB)), 0)
            assert entries[0].token_id == prompt[position]
            assert entries[0].logprob == pytest.approx(float(expected[prompt[position]]), abs=1e-5)
            assert entries[0].rank == int((expected >= expected[prompt[position]]).sum())
            assert [entry.token_id for entry in entries[1:]] == expected.topk(2).indices.tolist()
    engine.close()


def _key(context: list[int]) -> int:
    from tests.fakes import context_key

    return context_key(FULL, context)


def test_prompt_logprobs_survive_preemption_and_come_once_with_deltas() -> None:
    engine = make_engine(num_blocks=9, block_size=2, limits={"full_sequence_must_fit": False})
    params = GREEDY.with_(prompt_logprobs=0, max_tokens=9, output_kind=OutputKind.DELTA)
    for name in ("a", "b", "c"):
        engine.add_request(make_request(engine, [2, 3, 4, 5], params, name=name))
    found: dict[str, list[Any]] = {}
    for output in run(engine):
        if output.prompt_logprobs is not None:
            found.setdefault(output.request_id, []).append(output.prompt_logprobs)
    assert engine.scheduler.num_preemptions > 0
    assert {name: len(values) for name, values in found.items()} == {"a": 1, "b": 1, "c": 1}
    assert all(len(values[0]) == 4 for values in found.values())


def test_known_pitfall_4_prompt_logprobs_with_prefix_caching() -> None:
    a = [2 + i % 20 for i in range(33)]
    b = [*a[:16], *(3 + i % 7 for i in range(17))]
    params = GREEDY.with_(prompt_logprobs=0, max_tokens=1)

    def answers(order: str, caching: bool) -> dict[str, list[float]]:
        engine = make_engine(block_size=16, enable_prefix_caching=caching)
        found = {}
        for number, name in enumerate(order):
            request = make_request(engine, a if name == "a" else b, params, name=f"{number}")
            output = generate(engine, [request])[f"{number}"]
            positions = output.prompt_logprobs
            assert positions is not None
            assert len(positions) == 33
            assert positions[0] is None
            values = [position[0].logprob for position in positions if position is not None]
            if name in found:
                assert values == pytest.approx(found[name], abs=1e-4)
            found[name] = values
        return found

    reference = answers("ab", caching=False)
    for order in ("aba", "baab"):
        for name, values in answers(order, caching=True).items():
            assert values == pytest.approx(reference[name], abs=1e-4)


# Randomness


def test_known_pitfall_5_seeds() -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, output_kind=OutputKind.FINAL_ONLY)
    engine = make_engine(num_blocks=200, limits={"max_num_seqs": 16})
    unseeded = generate(engine, [make_request(engine, [2, 3], params, name=name) for name in ("a", "b")])
    assert unseeded["a"].outputs[0].token_ids != unseeded["b"].outputs[0].token_ids

    def choices(**values: Any) -> list[list[int]]:
        request = make_request(engine, [2, 3], params.with_(n=4, **values), name="n")
        return [completion.token_ids for completion in generate(engine, [request])["n"].outputs]

    first, second = choices(seed=7), choices(seed=7)
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4
    assert first[1] == choices(seed=8)[0]  # child i uses seed + i
    assert len({tuple(ids) for ids in choices(temperature=0.0)}) == 1
    assert choices(seed=-3) == choices(seed=-3)

    alone = one(params.with_(seed=11), prompt=[2, 3]).outputs[0].token_ids
    busy = generate(
        engine,
        [make_request(engine, [4, 5, i], params, name=f"{i}") for i in range(9)]
        + [make_request(engine, [2, 3], params.with_(seed=11), name="seeded")],
    )
    assert busy["seeded"].outputs[0].token_ids == alone


# Plug-ins


class Recorder:
    """Adds a constant to one id and writes down what it is told."""

    def __init__(self, vocab_size: int, invariant: bool = False, token_id: int = 3, amount: float = 50.0) -> None:
        self.invariant = invariant
        self.token_id = token_id
        self.amount = amount
        self.updates: list[BatchUpdate | None] = []
        self.shapes: list[tuple[int, ...]] = []

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, update: BatchUpdate | None) -> None:
        self.updates.append(update)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(logits.shape))
        edited = logits.clone()
        edited[:, self.token_id] += self.amount
        return edited


def test_batch_plugins_edit_all_rows_and_follow_the_batch() -> None:
    plugin = Recorder(4)
    engine = flat_engine([0.0, 3.0, 2.0, 1.0], plugins=[plugin])
    for name, count in (("a", 2), ("b", 4)):
        engine.add_request(make_request(engine, [0, 1], GREEDY.with_(max_tokens=count), name=name))
    outputs = {output.request_id: output for output in run(engine)}
    assert outputs["b"].outputs[0].token_ids == [3] * 4
    assert plugin.shapes == [(2, 4), (2, 4), (1, 4), (1, 4)]
    first, second, third, fourth = plugin.updates
    assert first is not None
    assert [(row.index, row.prompt_token_ids) for row in first.added] == [(0, [0, 1]), (1, [0, 1])]
    assert second is None
    assert third is not None
    assert (third.removed, third.moved, third.added, third.batch_size) == ([0], [(1, 0)], [], 1)
    assert fourth is None
    assert list(first.added[1].output_token_ids) == [3] * 4  # a live view


def test_invariant_plugins_come_after_the_greedy_choice() -> None:
    engine = flat_engine([0.0, 3.0, 2.0, 1.0], plugins=[Recorder(4, invariant=True)])
    greedy = generate(engine, [make_request(engine, [0], GREEDY)])["r"]
    assert greedy.outputs[0].token_ids == [1] * 4
    drawn = generate(engine, [make_request(engine, [0], GREEDY.with_(temperature=1.0))])["r"]
    assert drawn.outputs[0].token_ids == [3] * 4


def test_a_plugin_that_fails_ends_its_step_and_not_the_engine() -> None:
    plugin = Recorder(4)
    engine = flat_engine([0.0, 3.0, 2.0, 1.0], plugins=[plugin])
    plugin.token_id = 99
    failed = generate(engine, [make_request(engine, [0], GREEDY)])["r"].outputs[0]
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.error is not None
    assert "Recorder failed: IndexError" in failed.error
    plugin.token_id = 2
    assert generate(engine, [make_request(engine, [0], GREEDY)])["r"].outputs[0].token_ids == [2] * 4


# Grammars


class Alternating:
    """Allows 5 after 7 and 7 after 5, beginning with 7, and ends after four tokens."""

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def allowed(self) -> int:
        return 5 if len(self.accepted) % 2 else 7

    def accept_tokens(self, token_ids: Any) -> bool:
        for token_id in token_ids:
            if token_id != self.allowed():
                return False
            self.accepted.append(token_id)
        return True

    def validate_tokens(self, token_ids: Any) -> list[int]:
        return [token_id for token_id in token_ids if token_id == self.allowed()]

    def rollback(self, num_tokens: int) -> None:
        del self.accepted[len(self.accepted) - num_tokens :]

    def fill_bitmask(self, row: np.ndarray) -> None:
        row[self.allowed() // 32] |= 1 << (self.allowed() % 32)

    def is_terminated(self) -> bool:
        return len(self.accepted) >= 4

    def reset(self) -> None:
        self.accepted.clear()


def compiler(futures: list[Future[Any]]) -> Any:
    def compile_grammar(constraint: Any) -> Future[Any]:
        future: Future[Any] = Future()
        futures.append(future)
        return future

    return compile_grammar


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_grammar_masks_and_advances_and_nobody_waits_for_its_compilation(
    temperature: float, async_scheduling: bool
) -> None:
    engine = make_engine(async_scheduling=async_scheduling)
    futures: list[Future[Any]] = []
    woken: list[int] = []
    engine.wake = lambda: woken.append(1)
    params = GREEDY.with_(
        temperature=temperature, seed=2, max_tokens=12, structured_outputs=StructuredOutputs(regex="x")
    )
    constrained = make_request(engine, [2, 3], params, name="c", eos_token_id=1, compile_grammar=compiler(futures))
    engine.add_request(constrained)
    engine.add_request(make_request(engine, [4, 5], GREEDY, name="free"))
    finished = [output.request_id for _ in range(12) for output in engine.step()]
    assert finished == ["free"]
    (waiting,) = engine.scheduler._sequences.values()
    assert waiting.status is SequenceStatus.WAITING_FOR_GRAMMAR
    assert engine.is_stalled
    assert engine.stats().num_waiting_deferred == 1
    grammar = Alternating()
    futures[0].set_result(grammar)
    assert woken
    (output,) = run(engine)
    assert output.outputs[0].token_ids == [7, 5, 7, 5], "a complete output needs no end token"
    assert output.outputs[0].finish_reason is FinishReason.STOP
    assert grammar.accepted == [7, 5, 7, 5]
    engine.close()


def test_a_grammar_that_fails_to_compile_or_is_aborted_ends_its_request_alone() -> None:
    engine = make_engine()
    futures: list[Future[Any]] = []
    params = GREEDY.with_(structured_outputs=StructuredOutputs(regex="x"))
    for name in ("fails", "aborted"):
        engine.add_request(make_request(engine, [2], params, name=name, compile_grammar=compiler(futures)))
    assert engine.step() == []
    engine.abort("aborted")
    futures[0].set_exception(ValueError("no such thing"))
    outputs = {output.request_id: output.outputs[0] for output in run(engine)}
    assert outputs["fails"].finish_reason is FinishReason.ERROR
    assert outputs["fails"].error == "structured output: no such thing"
    assert outputs["aborted"].finish_reason is FinishReason.ABORT
    assert engine.scheduler.num_deferred == 0


def test_a_token_the_grammar_refuses_ends_the_request() -> None:
    class Lying(Alternating):
        def fill_bitmask(self, row: np.ndarray) -> None:
            row[:] = -1

    engine = make_engine(ScriptedRunner([7, 5, 5, 5], VOCAB))
    futures: list[Future[Any]] = []
    params = GREEDY.with_(structured_outputs=StructuredOutputs(regex="x"), max_tokens=9)
    engine.add_request(make_request(engine, [2], params, compile_grammar=compiler(futures)))
    futures[0].set_result(Lying())
    completion = run(engine)[-1].outputs[0]
    assert completion.token_ids == [7, 5, 5]
    assert completion.error == "the grammar refused token 5"


def test_without_a_backend_structured_outputs_are_refused() -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match="structured_outputs") as caught:
        make_request(engine, [2], GREEDY.with_(structured_outputs=StructuredOutputs(regex="x")))
    assert caught.value.param == "structured_outputs"

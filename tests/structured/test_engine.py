"""Constraints inside the engine: mixed batches, preemption, ends, jump-forward, failures of one request alone."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
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
    make_engine,
    make_request,
    run,
)
from vkit import kernels
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.engine import Engine
from vkit.inputs import EngineRequest
from vkit.logits import apply_bitmask
from vkit.sequence import Sequence
from vkit.structured.compiler import GrammarCompiler
from vkit.structured.grammar import GrammarError
from vkit.structured.masks import GrammarMasks
from vkit.types import CompletionOutput, FinishReason, OutputKind, SamplingParams, StructuredOutputs

TOKENIZER = byte_tokenizer(["title", '":', ' "', "ab"])
SCHEMA = {
    "type": "object",
    "properties": {"identifier": {"type": "integer", "maximum": 999}, "title": {"type": "string", "maxLength": 5}},
    "required": ["identifier", "title"],
    "additionalProperties": False,
}
STATE_AND_FULL = [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.STATE, (1,))]


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, TOKENIZER.eos_token_ids)


def params_of(constraint: StructuredOutputs | None, **values: Any) -> SamplingParams:
    values = {"temperature": 1.0, "seed": 1, "max_tokens": 40, "output_kind": OutputKind.FINAL_ONLY, **values}
    return SamplingParams(structured_outputs=constraint, **values)


def request(
    engine: Engine, compiler: GrammarCompiler, constraint: StructuredOutputs | None, name: str, **values: Any
) -> EngineRequest:
    made = make_request(
        engine,
        values.pop("prompt", [1, 2, 3]),
        params_of(constraint, **values),
        name=name,
        tokenizer=TOKENIZER,
        compile_grammar=compiler.compile,
    )
    if made.is_enforceable is not None:
        made.is_enforceable.result()
    return made


def outputs(engine: Engine, requests: list[EngineRequest]) -> dict[str, CompletionOutput]:
    for item in requests:
        engine.add_request(item)
    found = {output.request_id: output.outputs[0] for output in run(engine, after_step=lambda: check_pool(engine))}
    engine.close()
    return found


def one(
    compiler: GrammarCompiler, constraint: StructuredOutputs, script: list[int] | None = None, **values: Any
) -> CompletionOutput:
    runner = None if script is None else ScriptedRunner(script, TOKENIZER.vocab_size)
    engine = make_engine(runner, tokenizer=TOKENIZER)
    return outputs(engine, [request(engine, compiler, constraint, "r", **values)])["r"]


def shape(found: dict[str, CompletionOutput]) -> dict[str, Any]:
    return {
        name: (item.text, item.token_ids, item.finish_reason, item.stop_reason, item.error)
        for name, item in found.items()
    }


KINDS: list[StructuredOutputs | None] = [
    StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(choice=["identifier", "identity", "title"]),
    StructuredOutputs(regex="(ab|title){2}[0-9]{3}"),
    StructuredOutputs(grammar='root ::= "(" root ")" | "title"'),
    None,
]


def run_mixture(compiler: GrammarCompiler, *, groups: Any = FULL, num_blocks: int = 64, **settings: Any) -> Any:
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": settings.pop("budget", 24)}
    engine = make_engine(tokenizer=TOKENIZER, groups=groups, num_blocks=num_blocks, limits=limits, **settings)
    requests = [
        request(engine, compiler, kind, f"{index}.{seed}", seed=seed, prompt=list(range(1, 4 + index)), max_tokens=36)
        for index, kind in enumerate(KINDS)
        for seed in (5, 6)
    ]
    return shape(outputs(engine, requests)), engine


@pytest.fixture(scope="module")
def plain_run(compiler: GrammarCompiler) -> Any:
    """Every mixture's outputs without jumping, preemption or overlap."""
    return run_mixture(compiler)[0]


def test_constrained_outputs_are_valid_beside_free_ones(plain_run: Any) -> None:
    for name, (text, _, reason, _, error) in plain_run.items():
        assert error is None
        if name[0] in "01" and reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text), SCHEMA)
        if name[0] == "2":
            assert text in ("identifier", "identity", "title")
    reasons = {reason for _, _, reason, _, _ in plain_run.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    assert sum(reason is FinishReason.STOP for name, (_, _, reason, _, _) in plain_run.items() if name[0] < "5") >= 6


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("num_blocks", "budget", "groups"), [(64, 24, "full"), (17, 24, "full"), (64, 5, "full"), (17, 7, "state")]
)
def test_the_same_outputs_whatever_the_engine_does(
    compiler: GrammarCompiler, plain_run: Any, jumps: bool, is_async: bool, num_blocks: int, budget: int, groups: str
) -> None:
    settings = {"enable_jump_forward": jumps, "async_scheduling": is_async, "budget": budget, "num_blocks": num_blocks}
    if groups == "state":
        expected, _ = run_mixture(compiler, groups=STATE_AND_FULL)
        found, engine = run_mixture(compiler, groups=STATE_AND_FULL, **settings)
    else:
        expected = plain_run
        found, engine = run_mixture(compiler, **settings)
    assert found == expected
    if num_blocks == 17:
        assert engine.scheduler.num_preemptions > 0
    forced = next(f for f in engine.metric_families() if f.name == "vkit:jump_forward_tokens").samples[0].value
    assert (forced > 30) == jumps
    assert forced == engine.scheduler.num_forced_tokens


@pytest.mark.parametrize("is_async", [False, True])
def test_jumping_saves_the_steps_it_counts(compiler: GrammarCompiler, is_async: bool) -> None:
    steps = []
    for jumps in (False, True):
        engine = make_engine(tokenizer=TOKENIZER, enable_jump_forward=jumps, async_scheduling=is_async)
        found = outputs(engine, [request(engine, compiler, KINDS[0], "r")])
        assert isinstance(engine.runner, FakeRunner)
        steps.append((engine.runner.num_steps, engine.scheduler.num_forced_tokens, shape(found)))
    (slow, none, expected), (fast, forced, same) = steps
    assert none == 0
    assert same == expected
    assert forced >= 10
    assert slow - fast == forced


@pytest.mark.parametrize(
    "values",
    [
        {"logprobs": 1},
        {"logprobs": 0, "logprob_token_ids": (1,)},
        {"allowed_token_ids": tuple(range(258))},
        {"bad_words": ("zz",)},
        {"logits_processors": (lambda output, row: None,)},
    ],
    ids=lambda values: next(iter(values)),
)
def test_no_jump_where_more_than_the_id_matters(compiler: GrammarCompiler, values: dict[str, Any]) -> None:
    engine = make_engine(tokenizer=TOKENIZER, enable_jump_forward=True)
    found = outputs(engine, [request(engine, compiler, KINDS[0], "r", **values)])["r"]
    assert engine.scheduler.num_forced_tokens == 0
    if "logprobs" in values:
        assert found.logprobs is not None
        assert len(found.logprobs) == len(found.token_ids)


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("values", [{"stop": "fier"}, {"stop_token_ids": (ord("f"),)}, {"max_tokens": 5}, {"n": 3}])
def test_stops_and_limits_hold_while_jumping(compiler: GrammarCompiler, jumps: bool, values: dict[str, Any]) -> None:
    constraint = StructuredOutputs(regex="identifier[0-9]{2}")
    engine = make_engine(tokenizer=TOKENIZER, enable_jump_forward=jumps)
    (output,) = _all(engine, request(engine, compiler, constraint, "r", **values))
    for completion in output:
        match next(iter(values)):
            case "stop":
                assert (completion.text, completion.stop_reason) == ("identi", "fier")
                assert bytes(completion.token_ids) == b"identifier"
            case "stop_token_ids":
                assert (completion.text, completion.stop_reason) == ("identi", ord("f"))
            case "max_tokens":
                assert (completion.text, completion.finish_reason) == ("ident", FinishReason.LENGTH)
            case _:
                assert completion.text.startswith("identifier")
    assert len({completion.text for completion in output}) == len(output)


def _all(engine: Engine, item: EngineRequest) -> list[list[CompletionOutput]]:
    engine.add_request(item)
    found = [output.outputs for output in run(engine)]
    engine.close()
    return found


# Ends


def test_a_complete_output_ends_by_itself(compiler: GrammarCompiler) -> None:
    found = one(compiler, StructuredOutputs(choice=["yes"]), max_tokens=3)
    assert (found.text, bytes(found.token_ids)) == ("yes", b"yes")
    assert (found.finish_reason, found.stop_reason) == (FinishReason.STOP, None)


def test_an_output_that_may_end_ends_by_the_end_token(compiler: GrammarCompiler) -> None:
    found = one(compiler, StructuredOutputs(regex="a*"), [97, 97, EOS_ID])
    assert (found.text, found.token_ids, found.finish_reason) == ("aa", [97, 97, EOS_ID], FinishReason.STOP)


def test_the_end_token_is_not_taken_before_the_output_may_end(compiler: GrammarCompiler) -> None:
    found = one(compiler, StructuredOutputs(regex="ab|ac"), [EOS_ID, EOS_ID, EOS_ID], temperature=0.0)
    assert found.text in ("ab", "ac")


def test_min_tokens_keeps_it_going_as_far_as_the_grammar_can(compiler: GrammarCompiler) -> None:
    script = [EOS_ID] * 9
    assert one(compiler, StructuredOutputs(regex="a*"), script, min_tokens=4).token_ids == [97] * 4 + [EOS_ID]
    found = one(compiler, StructuredOutputs(regex="a{2}"), script, min_tokens=4)
    assert (found.text, found.finish_reason) == ("aa", FinishReason.STOP), "complete is complete"


def test_ignore_eos_goes_on_while_the_grammar_can(compiler: GrammarCompiler) -> None:
    script = [EOS_ID] * 9
    found = one(compiler, StructuredOutputs(regex="a*"), script, ignore_eos=True, max_tokens=6)
    assert (found.text, found.finish_reason) == ("a" * 6, FinishReason.LENGTH)
    found = one(compiler, StructuredOutputs(regex="a{0,2}"), script, ignore_eos=True, max_tokens=6)
    assert (found.text, found.finish_reason) == ("aa", FinishReason.STOP)
    found = one(compiler, StructuredOutputs(choice=[""]), script, ignore_eos=True, max_tokens=6)
    assert (found.text, found.finish_reason) == ("", FinishReason.STOP), "nothing but the end was ever allowed"


def test_masks_come_before_other_constraints_and_an_empty_choice_is_an_error(compiler: GrammarCompiler) -> None:
    found = one(compiler, StructuredOutputs(regex="[ab]"), allowed_token_ids=(98, 99))
    assert found.text == "b"
    found = one(compiler, StructuredOutputs(regex="[ab]"), allowed_token_ids=(99,))
    assert found.finish_reason is FinishReason.ERROR
    assert found.error == "no token is allowed by the constraints on this output"


def test_logprobs_are_of_the_raw_logits(compiler: GrammarCompiler) -> None:
    values: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
    scored = one(compiler, StructuredOutputs(regex="(?s).*"), logprobs=0, logprob_token_ids=(97, 98), **values)
    free = one(compiler, StructuredOutputs(regex="(?s).*"), logprobs=2, **values)
    bound = one(compiler, StructuredOutputs(regex="[ab]"), logprobs=2, **values)
    assert scored.logprobs is not None
    assert free.logprobs is not None
    assert bound.logprobs is not None
    raw = {entry.token_id: entry.logprob for entry in scored.logprobs[0]}
    assert bound.logprobs[0][0].logprob == pytest.approx(raw[bound.token_ids[0]])
    assert bound.logprobs[0][1:] == free.logprobs[0][1:], "rivals are the model's, allowed or not"


# Failures


def test_a_grammar_that_fails_ends_its_request_alone(compiler: GrammarCompiler) -> None:
    engine = make_engine(tokenizer=TOKENIZER)
    good, bad = (request(engine, compiler, StructuredOutputs(regex="[a-c]{6}"), name) for name in ("good", "bad"))
    for item in (good, bad):
        engine.add_request(item)
    engine.step()
    broken = next(s for s in engine.scheduler.running if s.id.startswith("bad"))

    class Failing:
        def fill_bitmask(self, row: Any) -> None:
            raise GrammarError("too many items")

        def rollback(self, num_tokens: int) -> None:
            assert num_tokens == 0

    broken.grammar = Failing()  # type: ignore[assignment]
    found = {output.request_id: output.outputs[0] for output in run(engine)}
    engine.close()
    assert found["bad"].finish_reason is FinishReason.ERROR
    assert found["bad"].error == "the grammar cannot be followed further: too many items"
    assert found["good"].finish_reason is FinishReason.STOP
    assert len(found["good"].text) == 6


def test_nothing_is_done_where_nothing_is_constrained(compiler: GrammarCompiler, monkeypatch: Any) -> None:
    monkeypatch.setattr(GrammarMasks, "_fill", lambda self, wanted: pytest.fail("no mask was asked for"))
    engine = make_engine(tokenizer=TOKENIZER)
    assert outputs(engine, [request(engine, compiler, None, "r", max_tokens=3)])["r"].error is None
    assert engine.sampler._masks._worker is None


def test_masks_on_a_device_and_on_the_host() -> None:
    words = np.random.default_rng(3).integers(-(2**31), 2**31, (2, 4), dtype=np.int64).astype(np.int32)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :101].astype(bool)
    logits = torch.randn(3, 101)
    expected = logits.clone()
    expected[[2, 0]] = torch.where(torch.from_numpy(bits), logits[[2, 0]], -torch.inf)
    on_device = logits.clone()
    kernels.mask_tokens(on_device, torch.tensor([2, 0]), torch.from_numpy(words))
    assert torch.equal(on_device, expected)
    apply_bitmask(logits, [2, 0], words)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("jumps", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["right", "broken", "ends"])
def test_drafts_change_nothing(
    compiler: GrammarCompiler, plain_run: Any, jumps: bool, is_async: bool, kind: str
) -> None:
    def guess(sequence: Sequence) -> list[int]:
        right = plain_run[sequence.id.partition("#")[0]][1][sequence.num_output_tokens :]
        place = len(sequence.token_ids) % 4
        spoilt = {"right": right, "broken": [*right[:place], 33, *right[place:]], "ends": [*right[:place], EOS_ID, 1]}
        return spoilt[kind][:6]

    found, engine = run_mixture(
        compiler,
        proposer=GuessingProposer(guess, max_drafts=6),
        enable_jump_forward=jumps,
        async_scheduling=is_async,
        num_blocks=24,
        budget=30,
    )
    assert found == plain_run
    stats = engine.scheduler.draft_stats
    assert stats.num_accepted_tokens > 20
    assert (stats.num_accepted_tokens == stats.num_draft_tokens) == (kind == "right")

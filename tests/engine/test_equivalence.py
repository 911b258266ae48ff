"""Whatever happens to a request on the way, its tokens are those of a loop that runs it alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes import GuessingProposer, check_pool, make_engine, make_request, naive_loop, run
from vkit.cache.groups import CacheGroup, CacheKind
from vkit.sequence import Sequence
from vkit.speculation.ngram import NgramProposer
from vkit.speculation.proposer import Proposer
from vkit.speculation.suffix import SuffixProposer
from vkit.speculative_config import SuffixSettings
from vkit.types import OutputKind, SamplingParams

VOCAB = 24
EOS = 1
MAX_LEN = 48

GROUPS = {
    "full": [CacheGroup(0, CacheKind.FULL, (0,))],
    "sliding": [CacheGroup(0, CacheKind.SLIDING, (0,), 5)],
    "full+sliding": [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.SLIDING, (1,), 7)],
    "sliding+sliding": [CacheGroup(0, CacheKind.SLIDING, (0,), 1), CacheGroup(1, CacheKind.SLIDING, (1,), 9)],
    "full+state": [CacheGroup(0, CacheKind.FULL, (0,)), CacheGroup(1, CacheKind.STATE, (1,))],
    "state": [CacheGroup(0, CacheKind.STATE, (0,))],
}


OVERLAPS = (
    {"async_scheduling": False},
    {"async_scheduling": True},
    {"async_scheduling": True, "keeps_tokens_on_device": True},
)
"""Nothing beside a step; the next one is planned beside it; the next one is launched before its tokens are known."""


@dataclass(frozen=True)
class Job:
    """One request of a scenario."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    arrives: int
    aborted: int | None
    salt: str | None


@st.composite
def jobs(draw: Any) -> Job:
    # Prompts share beginnings often, so that the prefix cache has something to find.
    stem = draw(st.sampled_from([(), (2, 3, 4, 5, 6, 7, 8, 9), (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14)]))
    tail = draw(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=12))
    values: dict[str, Any] = {"max_tokens": draw(st.integers(1, 12)), "seed": draw(st.integers(0, 50))}
    values["temperature"] = draw(st.sampled_from([0.0, 0.7, 1.5]))
    if draw(st.booleans()):
        values["top_k"] = draw(st.sampled_from([0, 1, 3, 8]))
        values["top_p"] = draw(st.sampled_from([0.3, 0.8, 1.0]))
        values["min_p"] = draw(st.sampled_from([0.0, 0.2]))
    if draw(st.booleans()):
        values["repetition_penalty"] = draw(st.sampled_from([1.0, 1.3]))
        values["frequency_penalty"] = draw(st.sampled_from([0.0, 0.5, -0.5]))
        values["presence_penalty"] = draw(st.sampled_from([0.0, 0.7]))
        values["min_tokens"] = draw(st.integers(0, values["max_tokens"]))
        values["logit_bias"] = {draw(st.integers(2, VOCAB - 1)): 0.5}
        values["stop_token_ids"] = (2,)
    values["output_kind"] = draw(st.sampled_from([OutputKind.FINAL_ONLY, OutputKind.DELTA]))
    return Job(
        prompt=stem + tuple(tail),
        params=SamplingParams(**values),
        priority=draw(st.integers(0, 2)),
        arrives=draw(st.integers(0, 6)),
        aborted=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
        salt=draw(st.sampled_from([None, None, "tenant"])),
    )


@st.composite
def machines(draw: Any) -> dict[str, Any]:
    groups = draw(st.sampled_from(sorted(GROUPS)))
    max_num_seqs = draw(st.integers(1, 5))
    return {
        "groups": groups,
        "block_size": draw(st.sampled_from([1, 2, 3, 4, 8])),
        "spare_blocks": draw(st.sampled_from([0, 0, 1, 3, 10, 60])),
        "enable_prefix_caching": draw(st.booleans()),
        **draw(st.sampled_from(OVERLAPS)),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "lpm"])),
        "limits": {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_seqs, draw(st.sampled_from([1, 2, 3, 7, 16, 64]))),
            "max_model_len": MAX_LEN,
            "full_sequence_must_fit": draw(st.booleans()),
            "watermark": draw(st.sampled_from([0.0, 0.1])),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 4])),
            "max_num_partial_prefills": draw(st.sampled_from([0, 0, 1, 2])),
        },
    }


@dataclass(frozen=True)
class Drafting:
    """How tokens are guessed: `max_drafts` at a time, of `kinds` that take turns."""

    max_drafts: int
    kinds: tuple[str, ...]


@st.composite
def draftings(draw: Any) -> Drafting:
    kinds = st.sampled_from(["good", "bad", "spoilt", "end", "none", "short", "repeated"])
    return Drafting(draw(st.integers(1, 8)), tuple(draw(st.lists(kinds, min_size=1, max_size=4))))


@st.composite
def lookups(draw: Any) -> Drafting:
    return Drafting(draw(st.integers(1, 8)), (draw(st.sampled_from(["ngram", "suffix"])),))


def guesser(drafting: Drafting, expected: dict[str, list[int]]) -> Proposer:
    """Drafts made of the right continuation, which they follow, spoil, cut or ignore; or looked up."""
    if drafting.kinds == ("ngram",):
        return NgramProposer(drafting.max_drafts, 1, 3)
    if drafting.kinds == ("suffix",):
        return SuffixProposer(drafting.max_drafts, SuffixSettings(max_tree_depth=9, max_cached_requests=3))

    def guess(sequence: Sequence) -> list[int]:
        known = len(sequence.token_ids)
        right = expected[sequence.id.partition("#")[0]][sequence.num_output_tokens :]
        right = (right + [3] * drafting.max_drafts)[: drafting.max_drafts]
        place = known % len(right)
        return {
            "good": right,
            "bad": [2 + (token_id - 1) % (VOCAB - 2) for token_id in right],
            "spoilt": [*right[:place], 2 + (right[place] - 1) % (VOCAB - 2), *right[place + 1 :]],
            "end": [*right[:place], EOS, *right[place:]][: drafting.max_drafts],
            "none": [],
            "short": right[:place],
            "repeated": [sequence.token_ids[-1]] * drafting.max_drafts,
        }[drafting.kinds[known % len(drafting.kinds)]]

    return GuessingProposer(guess, drafting.max_drafts)


def check_scenario(work: list[Job], machine: dict[str, Any], drafting: Drafting | None = None) -> int:
    """Run the jobs and compare each with the naive loop; the pool is checked after every step. Drafts that stood."""
    machine = dict(machine)
    if drafting:
        machine.pop("keeps_tokens_on_device", None)  # drafts follow from tokens that the host must know
    groups = GROUPS[machine.pop("groups")]
    spare = machine.pop("spare_blocks")
    block_size = machine["block_size"]
    longest = max(min(MAX_LEN, len(job.prompt) + job.params.max_tokens) for job in work)
    blocks_each = -(-longest // block_size) + 2 + (drafting.max_drafts if drafting else 0)
    expected: dict[str, tuple[list[int], str]] = {}
    proposer = guesser(drafting, known := {}) if drafting else None
    engine = make_engine(
        groups=groups,
        num_blocks=1 + blocks_each * len(groups) + spare,
        vocab_size=VOCAB,
        proposer=proposer,
        **machine,
    )
    requests = {}
    for index, job in enumerate(work):
        requests[f"{index}"] = make_request(
            engine,
            list(job.prompt),
            job.params,
            name=f"{index}",
            eos_token_id=EOS,
            priority=job.priority,
            cache_salt=job.salt,
        )
        expected[f"{index}"] = naive_loop(
            groups, VOCAB, requests[f"{index}"], seed=job.params.seed or 0, max_model_len=MAX_LEN
        )
    if drafting:
        known.update({name: output for name, (output, _) in expected.items()})
    tokens: dict[str, list[int]] = {name: [] for name in requests}
    reasons: dict[str, str] = {}
    for step in range(3000):
        for index, job in enumerate(work):
            if job.arrives == step:
                engine.add_request(requests[f"{index}"])
            if job.aborted is not None and job.arrives + job.aborted == step:
                engine.abort(f"{index}")
        if step > 20 and not engine.has_work:
            break
        for output in engine.step():
            (completion,) = output.outputs
            tokens[output.request_id] += completion.token_ids
            assert completion.error is None
            if output.finished:
                assert output.request_id not in reasons, "a request ends once"
                assert completion.finish_reason is not None
                reasons[output.request_id] = completion.finish_reason.value
        check_pool(engine)
    assert len(reasons) == len(work), "every request ends"
    for index, job in enumerate(work):
        name = f"{index}"
        if reasons[name] == "abort":
            assert job.aborted is not None
            assert tokens[name] == expected[name][0][: len(tokens[name])]
        else:
            assert (tokens[name], reasons[name]) == expected[name]
    assert engine.pool.num_free == engine.pool.num_usable, "a block leaked"
    assert engine.reset_prefix_cache()
    engine.close()
    return engine.scheduler.draft_stats.num_accepted_tokens


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(jobs(), min_size=1, max_size=6), machine=machines())
def test_tokens_equal_a_naive_loop(work: list[Job], machine: dict[str, Any]) -> None:
    check_scenario(work, machine)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(jobs(), min_size=1, max_size=6), machine=machines(), drafting=draftings())
def test_drafts_change_no_token(work: list[Job], machine: dict[str, Any], drafting: Drafting) -> None:
    check_scenario(work, machine, drafting)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(work=st.lists(jobs(), min_size=1, max_size=6), machine=machines(), drafting=lookups())
def test_drafts_looked_up_change_no_token(work: list[Job], machine: dict[str, Any], drafting: Drafting) -> None:
    check_scenario(work, machine, drafting)


@pytest.mark.parametrize("kind", ["ngram", "suffix"])
def test_drafts_looked_up_stand(kind: str) -> None:
    """The tests above verify drafts that stand: a fake model that says what it was told repeats itself."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias={5: 90.0}, output_kind=OutputKind.DELTA)
    work = [Job((5, 6, 5, 7), params, 0, arrives, None, None) for arrives in (0, 20)]
    machine = {"groups": "full+state", "spare_blocks": 60, "block_size": 4, "limits": {"max_model_len": MAX_LEN}}
    assert check_scenario(work, machine, Drafting(4, (kind,))) >= 8


@pytest.mark.soak
@pytest.mark.timeout(0)
@settings(max_examples=20_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(work=st.lists(jobs(), min_size=1, max_size=12), machine=machines())
def test_tokens_equal_a_naive_loop_for_long(work: list[Job], machine: dict[str, Any]) -> None:
    check_scenario(work, machine)


@pytest.mark.parametrize("overlap", OVERLAPS, ids=["none", "planned", "launched"])
@pytest.mark.parametrize("groups", sorted(GROUPS))
@pytest.mark.parametrize("num_blocks_each", [9, 60])
def test_small_pools_preempt_and_large_ones_hit(groups: str, overlap: dict[str, bool], num_blocks_each: int) -> None:
    """The machinery above is exercised, not avoided: a tiny pool preempts, a second turn hits."""
    engine = make_engine(
        groups=GROUPS[groups],
        num_blocks=1 + num_blocks_each * len(GROUPS[groups]),
        block_size=2,
        vocab_size=VOCAB,
        limits={"full_sequence_must_fit": False},
        **overlap,
    )
    params = SamplingParams(temperature=0.0, max_tokens=12, output_kind=OutputKind.FINAL_ONLY)
    requests = [make_request(engine, [3, 4, 5, 6, 7 + i], params, name=f"{i}") for i in range(4)]
    for request in requests:
        engine.add_request(request)
    outputs = {output.request_id: output for output in run(engine, after_step=lambda: check_pool(engine))}
    for request in requests:
        expected, _ = naive_loop(GROUPS[groups], VOCAB, request, seed=0, max_model_len=64)
        assert outputs[request.id].outputs[0].token_ids == expected
    if num_blocks_each == 9:
        assert engine.scheduler.num_preemptions > 0 or groups in ("state", "sliding")
        return
    last = requests[-1]
    turn = [*last.prompt_token_ids, *outputs[last.id].outputs[0].token_ids[:6], 9]
    again = make_request(engine, turn, params, name="again")
    engine.add_request(again)
    (output,) = run(engine, after_step=lambda: check_pool(engine))
    assert output.outputs[0].token_ids == naive_loop(GROUPS[groups], VOCAB, again, seed=0, max_model_len=64)[0]
    assert output.num_cached_tokens == 10  # twelve tokens: five full blocks, and one of two left to compute
    engine.close()

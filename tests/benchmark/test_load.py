"""Known timings in, right figures out: a replay server and scripted engines, on a clock that only waits can move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.benchmark.replay import (
    DONE,
    Answer,
    Hang,
    ReplayServer,
    Seen,
    Step,
    Wait,
    answer,
    chat_chunk,
    counting,
    error_answer,
    event,
    last_chunk,
    text_chunk,
    usage,
)
from tests.benchmark.virtual_time import run_virtual
from vkit.benchmark.arrivals import ClosedLoop, OpenLoop, send_times
from vkit.benchmark.datasets import Prompt
from vkit.benchmark.load import NO_USAGE, run_load
from vkit.benchmark.report import RequestRow
from vkit.benchmark.session import Sweep, Workload, make_requests, measure, submitted_ids
from vkit.benchmark.statistics import RequestRecord, Slo, Summary, summarize
from vkit.benchmark.targets import (
    Endpoint,
    EngineTarget,
    GeneratedPrompts,
    HttpTarget,
    Request,
    TargetEvent,
    requests_of,
)
from vkit.client import OpenAIClient, ServerError, Usage
from vkit.errors import RequestFailed, UsageError, VkitError
from vkit.types import CompletionOutput, FinishReason, RequestOutput, SamplingParams


@dataclass
class FakeTarget:
    """Answers request i with the i-th script: (seconds, tokens) pairs; an error instead of tokens raises it."""

    scripts: Sequence[Sequence[tuple[float, int | VkitError]]]
    in_flight: int = 0
    most_in_flight: int = 0
    sent_at: list[float] = field(default_factory=list)

    async def start(self) -> list[str]:
        return []

    async def generate(self, wanted: GeneratedPrompts) -> list[Prompt]:
        return [Prompt((i,)) for i in range(wanted.num_prompts)]

    def prepare(self, prompt: Prompt) -> Prompt:
        return prompt

    async def stream(self, request: Request) -> AsyncGenerator[TargetEvent, None]:
        self.sent_at.append(asyncio.get_running_loop().time())
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        total = 0
        try:
            for seconds, what in self.scripts[request.index % len(self.scripts)]:
                await asyncio.sleep(seconds)
                if isinstance(what, VkitError):
                    raise what
                total += what
                yield TargetEvent(what)
            yield TargetEvent(0, usage=Usage(10, total))
        finally:
            self.in_flight -= 1

    async def close(self) -> None:
        return None


def fake_requests(num: int) -> list[Request]:
    return [Request(i, (i,), 16) for i in range(num)]


def load(target: FakeTarget, num: int, loop: ClosedLoop | OpenLoop, seed: int = 0) -> list[RequestRecord]:
    return run_virtual(run_load(target, fake_requests(num), loop, seed=seed))


def test_closed_loop_keeps_its_number_in_flight_and_refills_at_once() -> None:
    target = FakeTarget([[(1.0, 1)], [(3.0, 1)], [(1.0, 1)], [(1.0, 1)], [(2.0, 1)]])
    records = load(target, 5, ClosedLoop(2))
    assert target.most_in_flight == 2
    assert [record.sent_s for record in records] == [0, 0, 1, 2, 3]
    assert [record.end_s for record in records] == [1, 3, 2, 3, 5]
    assert [record.index for record in records] == [0, 1, 2, 3, 4]


def test_more_concurrency_than_requests_sends_each_once() -> None:
    target = FakeTarget([[(1.0, 1)]])
    assert len(load(target, 3, ClosedLoop(64))) == 3
    assert target.most_in_flight == 3


def test_no_requests_make_no_records() -> None:
    assert load(FakeTarget([[]]), 0, ClosedLoop(2)) == []
    assert load(FakeTarget([[]]), 0, OpenLoop(2.0)) == []


def test_open_loop_sends_on_time_whatever_is_in_flight() -> None:
    target = FakeTarget([[(100.0, 1)]])
    records = load(target, 20, OpenLoop(5.0, 0.5), seed=3)
    expected = send_times(OpenLoop(5.0, 0.5), 20, 3)
    assert target.sent_at == pytest.approx(expected)
    assert [record.sent_s for record in records] == pytest.approx(expected)
    assert [RequestRow.of(record).send_delay_ms for record in records] == pytest.approx([0.0] * 20, abs=1e-6)
    assert target.most_in_flight == 20


def test_times_of_tokens_are_those_of_the_events() -> None:
    (record,) = load(FakeTarget([[(0.5, 1), (0.25, 2), (1.0, 1)]]), 1, ClosedLoop(1))
    assert record.ttft_s == 0.5
    assert record.e2e_s == 1.75
    assert record.itl_s == [0.125, 0.125, 1.0]
    assert record.is_split_exact


def test_a_failed_request_ends_alone() -> None:
    target = FakeTarget([[(0.5, 1), (0.5, 1)], [(0.1, 3), (0.1, RequestFailed("numeric failure"))]])
    records = load(target, 4, ClosedLoop(2))
    assert [record.error for record in records] == [None, "numeric failure", None, "numeric failure"]
    summary = summarize(records)
    assert (summary.completed, summary.failed, summary.total_output_tokens) == (2, 2, 4)
    assert summary.ttft_ms is not None
    assert (summary.ttft_ms.mean, summary.ttft_ms.p99) == pytest.approx((500, 500))


def test_a_defect_of_our_own_is_not_taken_for_a_failed_request() -> None:
    target = FakeTarget([[(0.0, "x")]])  # type: ignore[list-item]
    with pytest.raises(ExceptionGroup) as caught:
        load(target, 1, ClosedLoop(1))
    assert caught.group_contains(TypeError)


def test_a_sweep_runs_batches_one_after_the_other() -> None:
    target = FakeTarget([[(1.0, 1), (1.0, 1)]])
    plan = Sweep((1, 3), num_batches=2)
    runs = run_virtual(measure(target, fake_requests(plan.num_requests), plan, slo=Slo.parse("ttft:1000")))
    assert [(run.batch_size, len(run.records)) for run in runs] == [(1, 2), (3, 6)]
    assert target.sent_at == [0, 2, 4, 4, 4, 6, 6, 6]
    assert [record.sent_s for record in runs[1].records] == [0, 0, 0, 2, 2, 2]
    one, three = (run.summary for run in runs)
    assert (one.duration_s, one.output_tokens_per_s) == (4.0, 1.0)
    assert (three.duration_s, three.output_tokens_per_s) == (4.0, 3.0)
    assert three.goodput is not None
    assert three.goodput.share == 1.0


def http_run(
    script: Any, prompts: Sequence[str | tuple[int, ...]], *, concurrency: int = 1, **settings: Any
) -> tuple[list[RequestRecord], Summary, list[Seen], list[str]]:
    """Records of a run against a replay server on the virtual clock, their summary, the run's requests, the notes."""

    async def run() -> tuple[list[RequestRecord], Summary, list[Seen], list[str]]:
        async with ReplayServer(script) as server:
            target = HttpTarget(OpenAIClient(server.url), **settings)
            try:
                notes = await target.start()
                num_before = len(server.seen)
                requests = [Request(i, target.prepare(Prompt(item)).content, 16) for i, item in enumerate(prompts)]
                records = await run_load(target, requests, ClosedLoop(concurrency))
            finally:
                await target.close()
            return records, summarize(records), server.seen[num_before:], notes

    return run_virtual(run())


def pitfall_10(num_tokens: int = 8) -> Answer:
    """A role, three events that carry 4, 1 and 3 tokens, an event with empty text and the usage."""
    steps: list[Step] = [
        Wait(0.1),
        chat_chunk({"role": "assistant", "content": ""}),
        Wait(0.4),
        chat_chunk({"content": "aaaaaaaa"}),
        Wait(0.3),
        chat_chunk({"content": "bb"}),
        Wait(0.6),
        chat_chunk({"content": "cccccc"}),
        Wait(0.2),
        chat_chunk({"content": ""}, usage=usage(7, num_tokens)),
        DONE,
    ]
    return Answer(steps)


def test_pitfall_10_count_tokens_not_events() -> None:
    records, summary, _, _ = http_run(lambda _: pitfall_10(), ["hi"], endpoint=Endpoint.CHAT)
    (record,) = records
    assert record.error is None
    assert (record.input_tokens, record.output_tokens) == (7, 8)
    assert record.ttft_s == pytest.approx(0.5), "the first event with a token, not the role"
    assert len(record.itl_s) == 7
    assert sum(record.itl_s) == pytest.approx(0.9)
    assert record.e2e_s == pytest.approx(1.4), "the last token, not the usage"
    assert record.tpot_s == pytest.approx(0.9 / 7)
    assert (summary.total_output_tokens, summary.completed) == (8, 1)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.mean == pytest.approx(500)


def test_pitfall_10_usage_rules_even_below_the_limit() -> None:
    records, summary, seen, _ = http_run(lambda _: pitfall_10(5), ["hi"], endpoint=Endpoint.CHAT)
    assert seen[0].body["max_tokens"] == 16
    assert (records[0].output_tokens, len(records[0].itl_s), summary.total_output_tokens) == (5, 4, 5)


def test_pitfall_10_an_error_enters_no_latency() -> None:
    answers = [pitfall_10(), error_answer(500, "out of memory"), pitfall_10()]
    served = iter([pitfall_10(), *answers])
    records, summary, _, _ = http_run(lambda _: next(served), ["a", "b", "c"], endpoint=Endpoint.CHAT)
    assert [record.error is None for record in records] == [True, False, True]
    assert "HTTP 500: out of memory" in str(records[1].error)
    _, alone, _, _ = http_run(lambda _: pitfall_10(), ["a", "c"], endpoint=Endpoint.CHAT)
    assert (summary.failed, alone.failed) == (1, 0)
    assert (summary.ttft_ms, summary.tpot_ms, summary.itl_ms, summary.e2e_ms) == (
        alone.ttft_ms,
        alone.tpot_ms,
        alone.itl_ms,
        alone.e2e_ms,
    )


def stated(how: str) -> Answer:
    """4, 1 and 3 tokens whose texts say otherwise, stated by the server event by event, and an invisible ninth."""
    steps: list[Step] = []
    total = 0
    for seconds, text, count in ((0.5, "a", 4), (0.3, "bbbbbbbbb", 1), (0.6, "cc", 3), (0.1, "", 1)):
        total += count
        extra = {"usage": usage(7, total)} if how == "usage" else {"choice": {"token_ids": list(range(count))}}
        steps += [Wait(seconds), text_chunk(text, **extra)]
    return Answer([*steps, last_chunk(7, 9), DONE])


@pytest.mark.parametrize("how", ["usage", "ids"])
def test_counts_stated_with_each_event_are_taken_exactly(how: str) -> None:
    records, summary, _, _ = http_run(lambda _: stated(how), ["hi"])
    (record,) = records
    assert [arrival.num_tokens for arrival in record.arrivals] == [4, 1, 3, 1]
    assert record.is_split_exact
    assert summary.estimated_splits == 0
    assert record.itl_s == pytest.approx([0, 0, 0, 0.3, 0.2, 0.2, 0.2, 0.1])
    assert record.e2e_s == pytest.approx(1.5)


def test_a_bare_sum_is_split_by_text_and_said_to_be_an_estimate() -> None:
    records, summary, _, _ = http_run(lambda _: answer([(0.5, "aaaa"), (0.3, "b"), (0.6, "ccc")], 5, 8), ["hi"])
    assert [arrival.num_tokens for arrival in records[0].arrivals] == [4, 1, 3]
    assert not records[0].is_split_exact
    assert summary.estimated_splits == 1


def test_as_many_events_as_tokens_are_one_each() -> None:
    records, _, _, _ = http_run(lambda _: answer([(0.5, "long word"), (0.3, "b"), (0.6, "c")], 5, 3), ["hi"])
    assert [arrival.num_tokens for arrival in records[0].arrivals] == [1, 1, 1]
    assert records[0].itl_s == pytest.approx([0.3, 0.6])


def test_stated_counts_that_contradict_the_usage_give_way_to_it() -> None:
    steps = [
        Wait(0.5),
        text_chunk("ab", choice={"token_ids": [1, 2]}),
        Wait(0.5),
        text_chunk("cd", choice={"token_ids": [3]}),
    ]
    records, _, _, _ = http_run(lambda _: Answer([*steps, last_chunk(1, 4), DONE]), ["hi"])
    assert records[0].output_tokens == 4
    assert not records[0].is_split_exact
    assert records[0].token_ids == [1, 2, 3]


def failing(kind: str) -> Answer:
    start: list[Step] = [Wait(0.2), text_chunk("a")]
    return {
        "4xx": error_answer(429, "slow down"),
        "5xx": error_answer(503, "busy"),
        "disconnect": Answer([*start, Hang()]),
        "cut": Answer(start),
        "error event": Answer([*start, event({"error": {"message": "died"}}), DONE]),
        "finish_reason": Answer([*start, text_chunk("", choice={"finish_reason": "error"}), last_chunk(1, 1), DONE]),
        "no usage": Answer([*start, DONE]),
    }[kind]


@pytest.mark.parametrize("kind", ["4xx", "5xx", "disconnect", "cut", "error event", "finish_reason", "no usage"])
def test_every_kind_of_failure_counts_as_failed_and_nothing_else(kind: str) -> None:
    good = answer([(0.5, "a"), (0.5, "b")], 3, 2)
    served = iter([good, good, failing(kind), good])
    records, summary, _, _ = http_run(lambda _: next(served), ["a", "b", "c"])
    assert [record.error is None for record in records] == [True, False, True]
    assert (summary.completed, summary.failed, summary.total_output_tokens, summary.total_input_tokens) == (2, 1, 4, 6)
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.p99 == pytest.approx(1000)
    if kind == "no usage":
        assert records[1].error == NO_USAGE


def test_a_slow_start_and_overlapping_requests_give_the_known_figures() -> None:
    script = counting(lambda _, num: answer([(0.5, "a"), (0.1, "b"), (0.1, "c")], num, 3, delay_s=0.5))
    records, summary, _, _ = http_run(script, ["one two", "three", "four", "five six seven"], concurrency=2)
    assert [record.sent_s for record in records] == pytest.approx([0, 0, 1.2, 1.2])
    assert summary.duration_s == pytest.approx(2.4)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (11, 12)
    assert summary.output_tokens_per_s == pytest.approx(5.0)
    assert summary.requests_per_s == pytest.approx(4 / 2.4)
    assert summary.ttft_ms is not None
    assert summary.ttft_ms.median == pytest.approx(1000)
    assert summary.tpot_ms is not None
    assert summary.tpot_ms.p99 == pytest.approx(100)
    assert summary.e2e_ms is not None
    assert summary.e2e_ms.p90 == pytest.approx(1200)
    assert summary.stream_output_tokens_per_s == pytest.approx(10.0)


def test_what_is_sent() -> None:
    good = answer([(0, "a")], 1, 1)
    _, _, seen, notes = http_run(lambda _: good, ["some text", (5, 6)], model="m2")
    assert notes == []
    assert [request.path for request in seen] == ["/v1/completions"] * 2
    assert seen[0].body == {
        "model": "m2",
        "prompt": "some text",
        "max_tokens": 16,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    assert seen[1].body["prompt"] == [5, 6]


def test_chat_sends_a_user_message_and_takes_no_ids() -> None:
    _, _, seen, _ = http_run(lambda _: pitfall_10(), ["some text"], endpoint=Endpoint.CHAT)
    assert seen[0].body["messages"] == [{"role": "user", "content": "some text"}]
    assert "prompt" not in seen[0].body
    with pytest.raises(UsageError, match="--endpoint chat"):
        http_run(lambda _: pitfall_10(), [(1, 2)], endpoint=Endpoint.CHAT)


def strict_server(*refused: str) -> Any:
    def script(request: Seen) -> Answer:
        fields = {*request.body, *request.body["stream_options"]}
        for name in refused:
            if name in fields:
                return error_answer(400, f"unknown field {name}")
        return answer([(0.1, "a")], 3, 1)

    return script


@pytest.mark.parametrize(
    ("refused", "notes"),
    [
        ((), 0),
        (("continuous_usage_stats",), 1),
        (("ignore_eos",), 1),
        (("ignore_eos", "continuous_usage_stats"), 2),
    ],
)
def test_fields_a_server_refuses_are_left_out_and_said(refused: tuple[str, ...], notes: int) -> None:
    records, _, seen, said = http_run(strict_server(*refused), ["hi"])
    assert records[0].error is None
    assert len(said) == notes
    assert all(any(name in line for line in said) for name in refused)
    sent = {*seen[0].body, *seen[0].body["stream_options"]}
    assert sent & {"ignore_eos", "continuous_usage_stats"} == {"ignore_eos", "continuous_usage_stats"} - {*refused}


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (lambda _: error_answer(401, "no key"), "HTTP 401: no key"),
        (lambda _: error_answer(400, "never"), "HTTP 400: never"),
        (lambda _: Answer([text_chunk("a"), DONE]), "no usage"),
    ],
)
def test_a_server_that_cannot_be_measured_is_one_error(script: Any, message: str) -> None:
    with pytest.raises((ServerError, RequestFailed), match=message):
        http_run(script, ["hi"])


def test_a_server_without_models_asks_for_a_name() -> None:
    async def start() -> None:
        async with ReplayServer(lambda _: answer([], 0, 0), models=()) as server, OpenAIClient(server.url) as client:
            await HttpTarget(client).start()

    with pytest.raises(UsageError, match="--served-model-name"):
        run_virtual(start())


def test_ids_are_asked_for_and_a_server_without_them_is_refused() -> None:
    def with_ids(request: Seen) -> Answer:
        extra = {"choice": {"token_ids": [7, 8]}} if request.body.get("return_token_ids") else {}
        return Answer([text_chunk("ab", **extra), last_chunk(1, 2), DONE])

    records, _, _, _ = http_run(with_ids, ["hi"], wants_token_ids=True)
    assert records[0].token_ids == [7, 8]
    with pytest.raises(UsageError, match="--output-token-ids"):
        http_run(lambda _: answer([(0, "a")], 1, 1), ["hi"], wants_token_ids=True)


@pytest.mark.parametrize("prefix_len", [0, 60])
def test_generated_prompts_meet_their_length_by_the_servers_count(prefix_len: int) -> None:
    def three_per_word(request: Seen) -> Answer:
        return answer([(0, "a")], 7 + 3 * len(request.body["prompt"].split()), 1)

    async def generate() -> list[Prompt]:
        async with ReplayServer(three_per_word) as server:
            target = HttpTarget(OpenAIClient(server.url))
            await target.start()
            prompts = await target.generate(GeneratedPrompts(4, 100, prefix_len=prefix_len, seed=5))
            await target.close()
            return prompts

    prompts = run_virtual(generate())
    words = [str(prompt.content).split() for prompt in prompts]
    assert [len(item) for item in words] == [31] * 4
    assert len({tuple(item) for item in words}) == 4
    num_shared = 19 if prefix_len else 0  # 31 words of which 60 % are shared
    assert len({tuple(item[:num_shared]) for item in words}) == 1


class FakeTokenizer:
    vocab_size = 50
    special_ids = frozenset({0, 1})

    def encode(self, text: str) -> list[int]:
        return [2 + len(word) for word in text.split()]


@dataclass
class FakeEngine:
    """Emits `deltas` token counts, 0.1 s apart; the request whose first prompt id is 49 fails."""

    deltas: Sequence[int] = (2, 1)
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    seen: list[tuple[Any, SamplingParams, str]] = field(default_factory=list)
    is_shut_down: bool = False
    max_model_len: int = 4096

    async def generate(
        self, prompt: Any, params: SamplingParams, *, request_id: str, lora: str | None
    ) -> AsyncIterator[RequestOutput]:
        assert lora is None
        self.seen.append((prompt, params, request_id))
        ids: list[int] = prompt["prompt_token_ids"]
        for i, count in enumerate(self.deltas):
            await asyncio.sleep(0.1)
            is_last = i == len(self.deltas) - 1
            reason = FinishReason.LENGTH if is_last else None
            output = CompletionOutput(0, "", list(range(count)), finish_reason=reason)
            if ids[0] == 49 and is_last:
                output = CompletionOutput(0, "", [], finish_reason=FinishReason.ERROR, error="bad weights")
            yield RequestOutput(request_id, None, ids, [output], finished=is_last)

    async def shutdown(self) -> None:
        self.is_shut_down = True


def test_an_engine_in_this_process_is_measured_by_its_ids() -> None:
    engine = FakeEngine()
    target = EngineTarget(engine)

    async def run() -> list[RequestRecord]:
        assert await target.start() == []
        workload = Workload(prompts=[Prompt("three word prompt"), Prompt((49, 2), 9)], temperature=0.5, seed=11)
        records = await run_load(target, await make_requests(target, workload), ClosedLoop(1))
        await target.close()
        return records

    good, bad = run_virtual(run())
    assert (good.input_tokens, good.output_tokens, good.token_ids) == (3, 3, [0, 1, 0])
    assert (good.ttft_s, good.is_split_exact) == (pytest.approx(0.1), True)
    assert bad.error == "bad weights"
    assert engine.is_shut_down
    (_, *run_requests) = engine.seen
    assert [prompt["prompt_token_ids"] for prompt, _, _ in run_requests] == [[7, 6, 8], [49, 2]]
    assert [(params.max_tokens, params.seed) for _, params, _ in run_requests] == [(16, 11), (9, 12)]
    assert all(params.ignore_eos and params.temperature == 0.5 for _, params, _ in run_requests)
    assert len({request_id for _, _, request_id in engine.seen}) == 3


def test_generated_ids_are_ordinary_ids_of_the_asked_length() -> None:
    target = EngineTarget(FakeEngine())
    prompts = run_virtual(target.generate(GeneratedPrompts(20, 30, seed=1)))
    ids = [token_id for prompt in prompts for token_id in prompt.content]
    assert {len(prompt.content) for prompt in prompts} == {30}
    assert set(map(int, ids)) == set(range(2, 50))


@pytest.mark.parametrize(("asked", "entry", "expected"), [(None, None, 16), (None, 7, 7), (5, None, 5), (5, 7, 5)])
def test_the_length_asked_for_is_over_the_entrys_own(asked: int | None, entry: int | None, expected: int) -> None:
    (request,) = requests_of([Prompt("a", entry)], output_len=asked, default_output_len=16, temperature=0.0, seed=3)
    assert (request.max_tokens, request.seed) == (expected, None)


def test_ids_are_reported_in_the_order_of_submission() -> None:
    records = [RequestRecord(i, 0, 0, token_ids=[i]) for i in (0, 1, 2)]
    records[1].error = "no"
    runs = run_virtual(measure(FakeTarget([[(0.0, 1)]]), fake_requests(3), ClosedLoop(3)))
    assert submitted_ids(runs) == [None, None, None], "the fake sends no ids"
    runs[0].records[:] = records[::-1]
    assert submitted_ids(runs) == [[0], None, [2]]

"""The faces of the engine: LLM and AsyncLLM say the same, survive abuse, and end cleanly."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from tests.fakes import FULL, FakeRunner, ScriptedRunner, byte_tokenizer, make_loaded
from vkit.async_engine import AsyncLLM
from vkit.beam_search import BeamSearchParams
from vkit.errors import EngineDeadError, InvalidRequest
from vkit.inputs import PromptOptions
from vkit.llm import LLM
from vkit.types import FinishReason, OutputKind, RequestOutput, SamplingParams

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SEEDED = SamplingParams(temperature=1.0, seed=5, max_tokens=8)


def open_llm(runner: Any = None, **keywords: Any) -> LLM:
    keywords.setdefault("tokenizer", byte_tokenizer(chat_template=TEMPLATE))
    return LLM.from_loaded(make_loaded(runner, num_blocks=400, **keywords))


def open_async(runner: Any = None, **keywords: Any) -> AsyncLLM:
    keywords.setdefault("tokenizer", byte_tokenizer(chat_template=TEMPLATE))
    return AsyncLLM.from_loaded(make_loaded(runner, num_blocks=400, **keywords))


async def collect(outputs: Any) -> list[RequestOutput]:
    return [output async for output in outputs]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_generate_stream_and_async_give_the_same_tokens(async_scheduling: bool) -> None:
    prompts = ["hello", "hello there", [72, 73], {"prompt_token_ids": [5, 6]}, {"prompt": "hi"}]
    with open_llm(async_scheduling=async_scheduling) as llm:
        for params in (GREEDY, SEEDED):
            whole = llm.generate(prompts, params)
            assert [output.prompt_token_ids[:2] for output in whole] == [
                [104, 101],
                [104, 101],
                [72, 73],
                [5, 6],
                [104, 105],
            ]
            for prompt, output in zip(prompts, whole, strict=True):
                deltas = list(llm.stream(prompt, params))
                assert "".join(delta.outputs[0].text for delta in deltas) == output.outputs[0].text
                assert [i for delta in deltas for i in delta.outputs[0].token_ids] == output.outputs[0].token_ids

    async def run() -> None:
        engine = open_async(async_scheduling=async_scheduling)
        for params, kind in ((GREEDY, OutputKind.DELTA), (SEEDED, OutputKind.CUMULATIVE)):
            results = await asyncio.gather(
                *(collect(engine.generate(prompt, params.with_(output_kind=kind))) for prompt in prompts)
            )
            with open_llm() as reference:
                for outputs, expected in zip(results, reference.generate(prompts, params), strict=True):
                    if kind is OutputKind.DELTA:
                        text = "".join(output.outputs[0].text for output in outputs)
                    else:
                        text = outputs[-1].outputs[0].text
                    assert text == expected.outputs[0].text
        await engine.shutdown()

    asyncio.run(run())


def test_one_prompt_many_params_and_their_errors() -> None:
    with open_llm() as llm:
        assert len(llm.generate("a", GREEDY)) == 1
        assert len(llm.generate([1, 2, 3], GREEDY)) == 1
        both = llm.generate(["a", "a"], [GREEDY, GREEDY.with_(max_tokens=2)])
        assert [len(output.outputs[0].token_ids) for output in both] == [8, 2]
        with pytest.raises(InvalidRequest, match="params: 1 given for 2 prompts"):
            llm.generate(["a", "b"], [GREEDY])
        with pytest.raises(InvalidRequest, match="empty list"):
            llm.generate([], GREEDY)
        with pytest.raises(InvalidRequest, match="no tokens"):
            llm.generate(["a", ""], GREEDY)
        with pytest.raises(InvalidRequest, match="no tokens"):
            llm.stream("", GREEDY)
        assert llm.generate("a", GREEDY)[0].finished


def test_chat_renders_encodes_and_streams() -> None:
    messages = [{"role": "user", "content": "hi"}]
    with open_llm() as llm:
        assert llm.apply_chat_template(messages) == "<bos>[user]hi>"
        assert llm.apply_chat_template(messages, add_generation_prompt=False) == "<bos>[user]hi"
        assert llm.apply_chat_template(messages, chat_template="T{{ x }}", chat_template_kwargs={"x": 4}) == "T4"
        (output,) = llm.chat(messages, GREEDY)
        # The byte tokenizer parses no special tokens, so BOS comes out as letters; none is added in front of it.
        assert output.prompt_token_ids == [*b"<bos>[user]hi>"]
        streamed = list(llm.chat_stream(messages, GREEDY))
        assert "".join(delta.outputs[0].text for delta in streamed) == output.outputs[0].text
        assert len(llm.chat([messages, messages], GREEDY)) == 2
        assert len(llm.chat(messages)[0].outputs[0].token_ids) > 16  # fills the context: no limit was asked for
        with pytest.raises(InvalidRequest) as caught:
            llm.chat([], GREEDY)
        assert caught.value.param == "messages"
    with open_llm(tokenizer=byte_tokenizer()) as llm, pytest.raises(InvalidRequest, match="no chat template"):
        llm.chat(messages, GREEDY)


def test_tokenize_and_detokenize() -> None:
    with open_llm(tokenizer=byte_tokenizer(adds_bos=True)) as llm:
        assert llm.tokenize("hi") == [256, 104, 105]
        assert llm.tokenize("hi", add_special_tokens=False) == [104, 105]
        assert llm.detokenize([256, 104, 105]) == "hi"
        assert llm.detokenize([256, 104, 105], skip_special_tokens=False) == "<bos>hi"
        assert llm.tokenizer.vocab_size == 258


@pytest.mark.parametrize("prompt", [None, 5, b"abc", bytearray(b"abc"), [b"abc"], [None], [3, "a"], {"prompt": None}])
def test_what_is_no_prompt_is_refused_by_name(prompt: Any) -> None:
    with open_llm() as llm:
        with pytest.raises(InvalidRequest, match=r"^prompt: ") as caught:
            llm.generate(prompt, GREEDY)
        assert caught.value.param == "prompt"
        assert llm.generate("a", GREEDY)[0].finished


def test_arguments_of_the_wrong_type_are_refused_by_name() -> None:
    wrong: Any = {"max_tokens": 3}
    with open_llm() as llm:
        for call, name in (
            (lambda: llm.generate("a", wrong), "params"),
            (lambda: llm.generate(["a"], [wrong]), "params"),
            (lambda: llm.stream("a", wrong), "params"),
            (lambda: llm.generate("a", GREEDY, priority="high"), "priority"),  # type: ignore[arg-type]
            (lambda: llm.tokenize(5), "text"),  # type: ignore[arg-type]
            (lambda: llm.detokenize("abc"), "token_ids"),  # type: ignore[arg-type]
            (lambda: llm.detokenize(b"abc"), "token_ids"),
            (lambda: llm.detokenize(5), "token_ids"),  # type: ignore[arg-type]
            (lambda: llm.detokenize([999]), "token_ids"),
            (lambda: llm.detokenize([-1]), "token_ids"),
            (lambda: llm.detokenize([1.0]), "token_ids"),  # type: ignore[list-item]
        ):
            with pytest.raises(InvalidRequest, match=f"^{name}: ") as caught:
                call()
            assert caught.value.param == name
        assert llm.detokenize([]) == ""


def test_default_parameters_come_from_the_model() -> None:
    with open_llm(generation_config={"temperature": 0.0, "max_new_tokens": 3}) as llm:
        assert len(llm.generate("a")[0].outputs[0].token_ids) == 16  # completions keep their 16
        assert len(llm.chat([{"role": "user", "content": "a"}])[0].outputs[0].token_ids) == 3
        assert llm.generate("a")[0].outputs == llm.generate("a")[0].outputs


def test_closing_a_stream_early_aborts_its_request() -> None:
    with open_llm() as llm:
        stream = llm.stream("hello", GREEDY.with_(max_tokens=None))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        llm.generate("a", GREEDY)
        assert llm._thread.num_in_flight == 0
        assert llm._loaded.engine.metrics.success.by_label["abort"] == 1


def test_streams_of_a_closed_model_say_so() -> None:
    llm = open_llm()
    begun, ended = (llm.stream("hello", GREEDY.with_(max_tokens=count)) for count in (None, 4))
    assert next(begun).outputs
    assert next(ended).outputs
    while llm._thread.num_in_flight > 1:  # all of its outputs wait to be taken
        time.sleep(0.001)
    llm.close()
    for stream in (begun, ended):
        with pytest.raises(EngineDeadError, match="has been shut down"):
            next(stream)
        assert list(stream) == []


def test_works_inside_a_running_event_loop() -> None:
    async def run() -> str:
        with open_llm() as llm:
            return llm.generate("hello", GREEDY)[0].outputs[0].text

    with open_llm() as llm:
        assert asyncio.run(run()) == llm.generate("hello", GREEDY)[0].outputs[0].text


def test_sixty_four_threads_submit_at_once() -> None:
    with open_llm(limits={"max_num_seqs": 32}) as llm:
        expected = {i: llm.generate([i + 1, 7], SEEDED.with_(seed=i))[0].outputs[0].token_ids for i in range(64)}
        found: dict[int, list[int]] = {}

        def work(i: int) -> None:
            found[i] = llm.generate([i + 1, 7], SEEDED.with_(seed=i))[0].outputs[0].token_ids

        threads = [threading.Thread(target=work, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == expected


class Broken(FakeRunner):
    """Fails in the given step."""

    def __init__(self, step: int) -> None:
        super().__init__(FULL, 400, 4, vocab_size=258)
        self.failing_step = step

    def execute(self, batch: Any) -> torch.Tensor:
        if self.num_steps == self.failing_step:
            raise RuntimeError("the device is gone")
        return super().execute(batch)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_failing_device_ends_everyone_and_nobody_hangs(async_scheduling: bool) -> None:
    before = set(threading.enumerate())
    llm = open_llm(Broken(3), async_scheduling=async_scheduling)
    with pytest.raises(EngineDeadError, match="RuntimeError: the device is gone"):
        llm.generate(["a", "b"], GREEDY)
    for call in (
        lambda: llm.generate("a", GREEDY),
        llm.reset_prefix_cache,
        lambda: next(iter(llm.stream("a", GREEDY))),
    ):
        with pytest.raises(EngineDeadError):
            call()
    llm.close()
    assert not any(thread.name.startswith("vkit") for thread in set(threading.enumerate()) - before)

    async def run() -> None:
        engine = open_async(Broken(3), async_scheduling=async_scheduling)
        assert engine.is_healthy
        results = await asyncio.gather(
            *(collect(engine.generate(text, GREEDY)) for text in ("a", "b", "c")), return_exceptions=True
        )
        assert all(isinstance(result, EngineDeadError) for result in results)
        assert not engine.is_healthy
        with pytest.raises(EngineDeadError):
            engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine.generate("d", GREEDY))
        await engine.shutdown()

    asyncio.run(run())


def test_closing_is_clean_and_may_be_repeated() -> None:
    llm = open_llm()
    llm.generate("a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        llm.generate("a", GREEDY)
    assert not any(thread.name == "vkit-engine" for thread in threading.enumerate())


def test_engines_can_be_made_and_thrown_away_without_leaving_anything() -> None:
    before = set(threading.enumerate())
    runners = []
    for _ in range(20):
        runner = FakeRunner(FULL, 400, 4, vocab_size=258)
        runners.append(weakref.ref(runner))
        with open_llm(runner) as llm:
            llm.generate("a", GREEDY)
    del llm, runner
    gc.collect()
    assert all(runner() is None for runner in runners)
    assert not any(thread.name.startswith("vkit") for thread in set(threading.enumerate()) - before)


def test_control_reaches_the_engine() -> None:
    with open_llm() as llm:
        llm.generate("hello there", GREEDY)
        assert llm.generate("hello there", GREEDY)[0].num_cached_tokens == 8
        assert llm.reset_prefix_cache()
        assert llm.generate("hello there", GREEDY)[0].num_cached_tokens == 0
        assert {family.name for family in llm.metrics()} >= {"vllm:generation_tokens", "vllm:num_requests_running"}
        assert not llm.is_sleeping
        with pytest.raises(InvalidRequest, match="cannot give its memory back"):
            llm.sleep()


# Scoring and beams


def test_scores_are_sums_of_conditional_logprobs() -> None:
    with open_llm() as llm:
        prompt, after = "ab", "cd"
        (score,) = llm.score(prompt, after)
        ids = [*b"abcd"]
        request = llm.generate(ids, SamplingParams(prompt_logprobs=0, max_tokens=1))[0]
        assert request.prompt_logprobs is not None
        expected = sum(position[0].logprob for position in request.prompt_logprobs[2:] if position is not None)
        assert score == pytest.approx(expected)
        assert llm.score("ab", ["cd", "ce"])[0] == pytest.approx(score)
        assert len(llm.score(["a", "b"], ["c", "d"])) == 2
        with pytest.raises(InvalidRequest, match="2 prompts and 3 continuations"):
            llm.score(["a", "b"], ["c", "d", "e"])
        with pytest.raises(InvalidRequest, match="at least one token"):
            llm.score("a", "")


def test_label_scores_normalise_over_labels_or_vocabulary() -> None:
    with open_llm() as llm:
        (scores,) = llm.score_labels("ab", [99, 5, 200])
        assert sum(scores.probabilities.values()) == pytest.approx(1.0)
        assert list(scores.probabilities) == [99, 5, 200]
        assert scores.score == scores.probabilities[99]
        every = llm.generate("ab", SamplingParams(logprobs=-1, max_tokens=1), options=PromptOptions(max_logprobs=-1))
        positions = every[0].outputs[0].logprobs
        assert positions is not None
        truth = {entry.token_id: entry.logprob for entry in positions[0]}
        assert scores.logprobs == pytest.approx({i: truth[i] for i in (99, 5, 200)})
        (raw,) = llm.score_labels("ab", [99, 5], apply_softmax=False)
        assert sum(raw.probabilities.values()) < 0.5
        for bad in ([], [1, 1], [258]):
            with pytest.raises(InvalidRequest):
                llm.score_labels("ab", bad)


class Tree:
    """Next-token probabilities by context, for a vocabulary of four; id 3 ends."""

    def __init__(self, tree: dict[tuple[int, ...], list[float]]) -> None:
        self.tree = tree

    def prepare(self, plan: Any) -> Any:
        return [tuple(item.sequence.token_ids) for item in plan.scheduled for _ in range(item.num_logits)]

    def execute(self, contexts: Any) -> torch.Tensor:
        rows = torch.full((len(contexts), 258), -1e9)
        for row, context in enumerate(contexts):
            rows[row, :4] = torch.tensor(self.tree.get(context[1:], [0.25] * 4)).log()
        return rows


def test_beam_search_finds_what_greedy_misses() -> None:
    tree = {
        (): [0.6, 0.4, 0.0001, 0.0001],
        (0,): [0.3, 0.3, 0.3, 0.1],
        (1,): [0.01, 0.01, 0.97, 0.01],
    }
    with open_llm(Tree(tree)) as llm:
        (greedy,) = llm.generate([9], GREEDY.with_(max_tokens=2))
        assert greedy.outputs[0].token_ids == [0, 0]
        (found,) = llm.beam_search([[9]], BeamSearchParams(beam_width=2, max_tokens=2))
        assert [completion.token_ids for completion in found.outputs] == [[1, 2], [0, 0]]
        assert found.outputs[0].cumulative_logprob == pytest.approx(torch.tensor(0.4 * 0.97).log().item(), abs=1e-3)
        assert [completion.finish_reason for completion in found.outputs] == [FinishReason.LENGTH] * 2


def test_beams_that_end_are_scored_without_their_end() -> None:
    tree = {(): [0.9, 0.1, 1e-9, 1e-9], (0,): [0.05, 0.05, 0.0, 0.9], (0, 0): [0.25] * 4}
    tokenizer = byte_tokenizer()
    tokenizer.eos_token_id = 3
    with open_llm(Tree(tree), tokenizer=tokenizer) as llm:
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        (found,) = llm.beam_search([[9]], params)
        best = found.outputs[0]
        assert best.token_ids == [0, 3]
        assert best.finish_reason is FinishReason.STOP
        assert best.text == "\x00"
        (through,) = llm.beam_search([[9]], BeamSearchParams(beam_width=2, max_tokens=3, ignore_eos=True))
        assert all(len(completion.token_ids) == 3 for completion in through.outputs)
        # Temperature sharpens or flattens before sums are formed.
        hot = llm.beam_search([[9]], BeamSearchParams(beam_width=2, max_tokens=1, temperature=2.0))[0]
        logprobs = torch.log_softmax(torch.tensor(tree[()]).log() / 2, 0)
        assert hot.outputs[0].cumulative_logprob == pytest.approx(logprobs[0].item(), abs=1e-3)
    for bad in ({"beam_width": 0}, {"max_tokens": 0}, {"temperature": float("nan")}, {"length_penalty": -1.0}):
        with pytest.raises(InvalidRequest, match=next(iter(bad))):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **bad})


def test_beams_are_bounded_by_the_vocabulary_and_by_number() -> None:
    with pytest.raises(InvalidRequest, match=r"^beam_width: must be in 1\.\.1024, got 1000000"):
        BeamSearchParams(beam_width=1_000_000, max_tokens=2)
    with pytest.raises(InvalidRequest, match=r"^ignore_eos: "):
        BeamSearchParams(beam_width=2, max_tokens=2, ignore_eos=1)  # type: ignore[arg-type]
    with open_llm() as llm:
        vocab_size = llm._inputs.vocab_size
        with pytest.raises(InvalidRequest, match=f"{vocab_size + 1} is above the vocabulary's {vocab_size} tokens"):
            llm.beam_search("a", BeamSearchParams(beam_width=vocab_size + 1, max_tokens=2))
        with pytest.raises(InvalidRequest, match=r"^params: "):
            llm.beam_search("a", GREEDY)  # type: ignore[arg-type]
        (found,) = llm.beam_search("a", BeamSearchParams(beam_width=vocab_size, max_tokens=1))
        assert sorted(completion.token_ids[0] for completion in found.outputs) == list(range(vocab_size))


# AsyncLLM


def test_known_pitfall_17_leaving_consumers_abort_and_slow_ones_get_merged_news() -> None:
    async def run() -> None:
        engine = open_async()
        params = GREEDY.with_(max_tokens=None, output_kind=OutputKind.DELTA, ignore_eos=True)
        outputs = engine.generate("hello", params, request_id="leaves")
        await anext(outputs)
        await outputs.aclose()  # type: ignore[attr-defined]
        slow = engine.generate("hello", params, request_id="slow")
        first = await anext(slow)
        await asyncio.sleep(0.3)
        rest = await collect(slow)
        assert len(rest) < 30
        ids = [i for output in (first, *rest) for i in output.outputs[0].token_ids]
        assert len(ids) == 64 - 5
        whole = await collect(engine.generate("hello", params.with_(output_kind=OutputKind.FINAL_ONLY)))
        assert whole[0].outputs[0].token_ids == ids
        assert engine.stats().num_running == 0
        assert engine._loaded.engine.metrics.success.by_label["abort"] == 1
        await engine.shutdown()

    asyncio.run(run())


def test_abort_by_name_ends_the_iterator_with_what_there_was() -> None:
    class Slow(ScriptedRunner):
        def execute(self, batch: Any) -> torch.Tensor:
            time.sleep(0.01)
            return super().execute(batch)

    async def run() -> None:
        engine = open_async(Slow([65] * 200, 258), limits={"max_model_len": 300})
        params = SamplingParams(temperature=0.0, max_tokens=200, output_kind=OutputKind.FINAL_ONLY)
        task = asyncio.create_task(collect(engine.generate("x", params, request_id="mine")))
        await asyncio.sleep(0.1)
        await engine.abort(["mine", "unknown"])
        (output,) = await task
        assert output.request_id == "mine"
        assert output.outputs[0].finish_reason is FinishReason.ABORT
        assert 0 < len(output.outputs[0].token_ids) < 200
        task = asyncio.create_task(collect(engine.generate("x", params)))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0.1)
        assert engine.stats().num_running == 0
        await engine.shutdown()

    asyncio.run(run())


def test_shutdown_drains_for_as_long_as_it_is_told() -> None:
    class Slow(FakeRunner):
        def execute(self, batch: Any) -> torch.Tensor:
            time.sleep(0.01)
            return super().execute(batch)

    async def run(drain_s: float) -> FinishReason | None:
        engine = open_async(Slow(FULL, 400, 4, vocab_size=258))
        params = GREEDY.with_(max_tokens=20, output_kind=OutputKind.FINAL_ONLY, ignore_eos=True)
        task = asyncio.create_task(collect(engine.generate("x", params)))
        await asyncio.sleep(0.05)
        await engine.shutdown(drain_s)
        return (await task)[-1].outputs[0].finish_reason

    assert asyncio.run(run(5.0)) is FinishReason.LENGTH
    assert asyncio.run(run(0.0)) is FinishReason.ABORT


def test_pausing_through_the_async_face() -> None:
    async def run() -> None:
        engine = open_async()
        params = GREEDY.with_(output_kind=OutputKind.FINAL_ONLY)
        task = asyncio.create_task(collect(engine.generate("x", params)))
        await asyncio.sleep(0)
        await engine.pause_generation("wait")
        held = asyncio.create_task(collect(engine.generate("x", params)))
        await asyncio.sleep(0.05)
        assert task.done() or (await task)
        assert not held.done()
        await engine.resume_generation()
        assert (await held)[0].outputs == (await task)[0].outputs
        with pytest.raises(ValueError, match="later"):
            await engine.pause_generation("later")
        assert await engine.reset_prefix_cache()
        await engine.shutdown()

    asyncio.run(run())


def test_event_loops_come_and_go() -> None:
    engine = open_async()
    texts = [asyncio.run(collect(engine.generate("x", GREEDY)))[-1].outputs[0].text for _ in range(3)]
    assert len(set(texts)) == 1
    engine.close()


def test_what_a_server_asks_of_it() -> None:
    engine = open_async(generation_config={"top_k": 4})
    assert engine.tokenizer.vocab_size == 258
    assert engine.chat_template is not None
    assert engine.compile_template("X{{ messages[0].content }}").render([{"role": "user", "content": "y"}]) == "Xy"
    with pytest.raises(InvalidRequest):
        engine.compile_template("{% if %}")
    assert engine.max_model_len == 64
    assert engine.max_num_seqs == 4
    assert engine.generation_config == {"top_k": 4}
    assert engine.tokenizer_info["chat_template"] == TEMPLATE
    assert engine.render_chat([{"role": "user", "content": "y"}]) == [*b"<bos>[user]y>"]
    engine.check_health()
    engine.close()


@pytest.mark.parametrize("face", [LLM, AsyncLLM])
def test_a_model_that_nobody_holds_any_more_is_freed(face: Any) -> None:
    freed = threading.Event()
    loaded = make_loaded()
    loaded.on_close = freed.set
    llm = face.from_loaded(loaded)
    thread = llm._thread._thread
    tokenizer = llm.tokenizer
    ids = tokenizer.encode("left behind", add_special_tokens=False)
    del llm, loaded
    gc.collect()
    assert freed.wait(10)
    thread.join(120)
    assert not thread.is_alive()
    assert tokenizer.decode(ids) == "left behind"  # what was taken out of it goes on working

"""Text and deltas: stop strings, half characters, min_tokens, n, best_of, merging. Streamed and whole always agree."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.fakes import EOS_ID, ScriptedRunner, byte_tokenizer, make_engine, make_request, run
from vkit.outputs import merge_outputs
from vkit.types import FinishReason, OutputKind, RequestOutput, SamplingParams


def say(
    script: list[int], params: dict[str, Any], *, merges: list[str] | None = None, async_scheduling: bool = False
) -> tuple[RequestOutput, list[RequestOutput]]:
    """The whole answer and the streamed one, which must tell the same."""
    tokenizer = byte_tokenizer(merges or [])
    values = {"temperature": 0.0, "max_tokens": len(script), **params}
    found = {}
    for kind in OutputKind:
        engine = make_engine(
            ScriptedRunner(script, tokenizer.vocab_size), tokenizer=tokenizer, async_scheduling=async_scheduling
        )
        engine.add_request(make_request(engine, "x", SamplingParams(output_kind=kind, **values), tokenizer=tokenizer))
        found[kind] = run(engine)
        assert engine.pool.num_free == engine.pool.num_usable
        engine.close()
    (whole,) = found[OutputKind.FINAL_ONLY]
    deltas = found[OutputKind.DELTA]
    assert "".join(delta.outputs[0].text for delta in deltas) == whole.outputs[0].text
    assert [i for delta in deltas for i in delta.outputs[0].token_ids] == whole.outputs[0].token_ids
    assert deltas[-1].outputs[0].finish_reason == whole.outputs[0].finish_reason
    assert deltas[-1].outputs[0].stop_reason == whole.outputs[0].stop_reason
    last = found[OutputKind.CUMULATIVE][-1]
    assert last.outputs == whole.outputs
    texts = [output.outputs[0].text for output in found[OutputKind.CUMULATIVE]]
    assert all(after.startswith(before) for before, after in pairwise(texts))
    return whole, deltas


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_known_pitfall_1_stop_strings_that_span_tokens(async_scheduling: bool) -> None:
    merges = ["AB", "CDE", "FG"]
    script = [258, 259, 260, ord("x")]
    whole, deltas = say(script, {"stop": ["CDEF"]}, merges=merges, async_scheduling=async_scheduling)
    assert whole.outputs[0].text == "AB"
    assert whole.outputs[0].finish_reason is FinishReason.STOP
    assert whole.outputs[0].stop_reason == "CDEF"
    assert whole.outputs[0].token_ids == script[:3]  # ids are not cut
    assert not any("C" in delta.outputs[0].text for delta in deltas)
    whole, deltas = say(script, {"stop": ["CDEFZ"]}, merges=merges, async_scheduling=async_scheduling)
    assert whole.outputs[0].text == "ABCDEFGx"
    assert [delta.outputs[0].text for delta in deltas] == ["AB", "", "CDEFG", "x"]
    whole, _ = say(script[:2], {"stop": ["CDEFZ"]}, merges=merges)
    assert whole.outputs[0].text == "ABCDE"  # held text is released at the end
    whole, _ = say(script, {"stop": ["CDEF"], "include_stop_str_in_output": True}, merges=merges)
    assert whole.outputs[0].text == "ABCDEF"


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["b", "c"], "a", "b"),  # both inside one token: the one that ends first
        (["abc", "b"], "a", "b"),  # one inside the other
        (["bc", "c"], "a", "bc"),  # ending at the same place: the longest
        (["bcd", "bc"], "a", "bc"),  # one a prefix of the other
    ],
)
def test_the_stop_that_ends_first_wins(stops: list[str], text: str, stop: str) -> None:
    whole, _ = say([258, ord("d")], {"stop": stops}, merges=["abc"])
    assert (whole.outputs[0].text, whole.outputs[0].stop_reason) == (text, stop)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_known_pitfall_2_min_tokens_against_stop(async_scheduling: bool) -> None:
    script = [*b"a\nbc\nd"]
    whole, _ = say(script, {"stop": ["\n"], "min_tokens": 4}, async_scheduling=async_scheduling)
    assert whole.outputs[0].text == "a\nbc"
    assert len(whole.outputs[0].token_ids) == 5
    # The same floor for EOS and for stop ids: the script wants them twice, the first time too early.
    whole, _ = say([*b"a", EOS_ID, *b"bc", EOS_ID, *b"d"], {"min_tokens": 4}, async_scheduling=async_scheduling)
    assert len(whole.outputs[0].token_ids) == 5
    assert (whole.outputs[0].finish_reason, whole.outputs[0].stop_reason) == (FinishReason.STOP, None)
    whole, _ = say(script, {"stop_token_ids": (10,), "min_tokens": 4}, async_scheduling=async_scheduling)
    assert len(whole.outputs[0].token_ids) == 5
    assert whole.outputs[0].stop_reason == 10


def test_known_pitfall_3_characters_split_over_tokens() -> None:
    script = [*"é😀".encode()]
    whole, deltas = say(script, {})
    assert whole.outputs[0].text == "é😀"
    assert not any("�" in delta.outputs[0].text for delta in deltas)
    whole, _ = say([*script[:-2], 258, 259], {}, merges=[" word", "!"])
    assert whole.outputs[0].text == "é� word!"
    whole, deltas = say(script, {"max_tokens": 4})  # two of the emoji's four bytes
    assert whole.outputs[0].text == "é�"
    assert whole.outputs[0].finish_reason is FinishReason.LENGTH


def test_what_ends_the_output_has_no_text_unless_asked_for() -> None:
    whole, _ = say([*b"ab", EOS_ID], {"skip_special_tokens": False})
    assert whole.outputs[0].text == "ab"
    assert whole.outputs[0].token_ids[-1] == EOS_ID
    whole, _ = say([*b"abc"], {"stop_token_ids": (ord("c"),)})
    assert whole.outputs[0].text == "ab"
    whole, _ = say([*b"abc"], {"stop_token_ids": (ord("c"),), "include_stop_str_in_output": True})
    assert whole.outputs[0].text == "abc"
    whole, _ = say([*b"a", 256, *b"b"], {})
    assert whole.outputs[0].text == "ab"
    whole, _ = say([*b"a", 256, *b"b"], {"skip_special_tokens": False})
    assert whole.outputs[0].text == "a<bos>b"
    whole, _ = say([*b"ab"], {"detokenize": False})
    assert whole.outputs[0].text == ""


def test_further_eos_ids_of_the_checkpoint_end_like_stop_ids() -> None:
    tokenizer = byte_tokenizer()
    for ignore, expected in ((False, b"ab"), (True, b"abc")):
        engine = make_engine(ScriptedRunner([*b"abc"], tokenizer.vocab_size), tokenizer=tokenizer)
        params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=ignore)
        request = make_request(engine, "x", params, tokenizer=tokenizer, generation_config={"eos_token_id": [257, 98]})
        engine.add_request(request)
        completion = run(engine)[-1].outputs[0]
        assert completion.token_ids == [*expected]
        assert completion.stop_reason == (None if ignore else 98)


def test_stop_strings_are_not_looked_for_in_the_prompt() -> None:
    tokenizer = byte_tokenizer()
    engine = make_engine(ScriptedRunner([*b"bc"], tokenizer.vocab_size), tokenizer=tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=2, stop=("ab",))
    engine.add_request(make_request(engine, "xa", params, tokenizer=tokenizer))
    assert run(engine)[-1].outputs[0].text == "bc"


def test_logprobs_are_cut_with_the_tokens_and_carry_text() -> None:
    whole, deltas = say([*b"abcd"], {"stop": ["c"], "logprobs": 1})
    logprobs = whole.outputs[0].logprobs
    assert logprobs is not None
    assert [position[0].text for position in logprobs] == ["a", "b", "c"]
    assert [position for delta in deltas for position in delta.outputs[0].logprobs or []] == logprobs


def test_n_outputs_are_joined_under_one_request() -> None:
    tokenizer = byte_tokenizer()
    engine = make_engine(tokenizer=tokenizer, num_blocks=200, limits={"max_num_seqs": 8})
    params = SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=6, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request(make_request(engine, "hello there", params, name="w", tokenizer=tokenizer))
    (whole,) = run(engine)
    assert [completion.index for completion in whole.outputs] == [0, 1, 2]
    assert engine.metrics.prompt_tokens.value == 11
    assert engine.metrics.success.by_label["length"] == 3
    engine.add_request(
        make_request(engine, "hello there", params.with_(output_kind=OutputKind.DELTA), name="d", tokenizer=tokenizer)
    )
    texts = ["", "", ""]
    outputs = run(engine)
    for output in outputs:
        for completion in output.outputs:
            texts[completion.index] += completion.text
    assert texts == [completion.text for completion in whole.outputs]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    engine.add_request(
        make_request(
            engine, "hello there", params.with_(output_kind=OutputKind.CUMULATIVE), name="c", tokenizer=tokenizer
        )
    )
    assert [completion.text for completion in run(engine)[-1].outputs] == texts


def test_aborting_a_request_aborts_all_its_outputs() -> None:
    engine = make_engine(num_blocks=200, limits={"max_num_seqs": 2})
    engine.add_request(make_request(engine, [2, 3], SamplingParams(n=4, max_tokens=40), name="n"))
    engine.step()
    engine.abort("n")
    (output,) = [output for output in run(engine) if output.finished]
    assert [completion.finish_reason for completion in output.outputs] == [FinishReason.ABORT] * 4
    assert engine.pool.num_free == engine.pool.num_usable


def test_best_of_returns_the_likeliest_first() -> None:
    engine = make_engine(num_blocks=300, limits={"max_num_seqs": 8})
    params = SamplingParams(temperature=1.5, seed=1, n=8, max_tokens=5, logprobs=0, output_kind=OutputKind.FINAL_ONLY)
    engine.add_request(make_request(engine, [2, 3], params, name="all"))
    (every,) = run(engine)

    def mean(completion: Any) -> float:
        return completion.cumulative_logprob / len(completion.token_ids)

    expected = sorted(every.outputs, key=mean, reverse=True)[:2]
    engine.add_request(make_request(engine, [2, 3], params.with_(n=2, best_of=8, logprobs=None), name="best"))
    (best,) = run(engine)
    assert [completion.token_ids for completion in best.outputs] == [completion.token_ids for completion in expected]
    assert [completion.index for completion in best.outputs] == [0, 1]
    assert best.outputs[0].logprobs is None


def test_merging_concatenates_deltas_and_keeps_the_latest_of_the_rest() -> None:
    _, deltas = say([*b"abcd"], {"logprobs": 0})
    merged = deltas[0]
    for delta in deltas[1:]:
        merged = merge_outputs(merged, delta, OutputKind.DELTA)
    completion = merged.outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == (
        "abcd",
        [*b"abcd"],
        FinishReason.LENGTH,
    )
    assert len(completion.logprobs or []) == 4
    assert merged.finished
    assert merge_outputs(deltas[0], deltas[1], OutputKind.CUMULATIVE) is deltas[1]

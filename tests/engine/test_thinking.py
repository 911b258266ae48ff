"""Thinking budgets: what is counted, and that the end of reasoning comes exactly when the budget is used up."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import (
    EOS_ID,
    FULL,
    FakeRunner,
    GuessingProposer,
    ScriptedRunner,
    byte_tokenizer,
    check_pool,
    make_engine,
    make_loaded,
    make_request,
    run,
)
from vkit.errors import InvalidRequest
from vkit.inputs import InputProcessor
from vkit.llm import LLM
from vkit.structured.compiler import GrammarCompiler
from vkit.thinking import ThinkingCounter, thinking_budget
from vkit.types import CompletionOutput, FinishReason, OutputKind, ReasoningMarks, SamplingParams, StructuredOutputs

WHOLE = byte_tokenizer(["<think>", "</think>", "ab"])
"""Marks are tokens of their own."""
START, END, AB = 258, 259, 260
SPELT = byte_tokenizer([])
"""Marks are spelt byte by byte."""
OPEN = ReasoningMarks("</think>", repeated="<think>")
"""The prompt has begun the reasoning."""
MAYBE = ReasoningMarks("</think>", "<think>")
LATE = ReasoningMarks("</think>", "<think>", may_start_late=True)


def ids(text: str, tokenizer: Any = WHOLE) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False, parse_special=True)


def answer(
    script: str | list[int],
    budget: int,
    marks: ReasoningMarks,
    tokenizer: Any = WHOLE,
    drafts: list[int] | None = None,
    **values: Any,
) -> CompletionOutput:
    """What a model that wants to say `script` gets to say."""
    script = ids(script, tokenizer) if isinstance(script, str) else script
    proposer = None
    if drafts:
        proposer = GuessingProposer(lambda sequence: drafts[sequence.num_output_tokens :], max_drafts=4)
    engine = make_engine(ScriptedRunner(script, tokenizer.vocab_size), tokenizer=tokenizer, proposer=proposer)
    params = SamplingParams(
        **{
            "temperature": 0.0,
            "max_tokens": len(script),
            "thinking_token_budget": budget,
            "reasoning_marks": marks,
            "output_kind": OutputKind.FINAL_ONLY,
            "skip_special_tokens": False,
            **values,
        }
    )
    engine.add_request(make_request(engine, [1, 2, 3], params, tokenizer=tokenizer))
    (output,) = run(engine, after_step=lambda: check_pool(engine))
    engine.close()
    return output.outputs[0]


@pytest.mark.parametrize(
    ("script", "budget", "marks", "said"),
    [
        ("thoughts</think>yes", 3, OPEN, "tho</think>"),
        ("thoughts</think>yes", 0, OPEN, "</think>h"),
        ("thoughts</think>yes", 8, OPEN, "thoughts</think>yes"),
        ("thoughts</think>yes", 100, OPEN, "thoughts</think>yes"),
        ("thoughts</think>yes", -1, OPEN, "thoughts</think>yes"),
        ("<think>thoughts</think>yes", 3, MAYBE, "<think>tho</think>"),
        ("<think>thoughts</think>yes", 0, MAYBE, "<think></think>h"),
        ("\n <think>thoughts</think>yes", 2, MAYBE, "\n <think>th</think>"),
        ("no thoughts at all", 2, MAYBE, "no thoughts at all"),
        ("say <think>thoughts</think>", 2, MAYBE, "say <think>thoughts</think>"),
        ("say <think>thoughts</think>", 2, LATE, "say <think>th</think>"),
        ("<think>thoughts</think>yes", 3, OPEN, "<think>tho</think>"),
        ("a</think>b<think>later thoughts", 2, OPEN, "a</think>b<think>later thoughts"),
    ],
)
@pytest.mark.parametrize("tokenizer", [WHOLE, SPELT], ids=["whole marks", "spelt marks"])
def test_the_end_is_forced_when_the_budget_is_used_up(
    script: str, budget: int, marks: ReasoningMarks, said: str, tokenizer: Any
) -> None:
    got = answer(script, budget, marks, tokenizer)
    # The script goes on by position, so what it says after a forced mark is not its own text; the head is what counts.
    head = said[: said.index("</think>") + len("</think>")] if "</think>" in said else said
    if tokenizer is SPELT and script.startswith("<think>") and marks is OPEN:
        head = "<th</think>"  # three tokens are used up before the mark is known to be one
    assert got.text.startswith(head), got.text
    assert got.finish_reason is FinishReason.LENGTH
    for drafts in (got.token_ids, ids(script, tokenizer)):  # right ones; those that ignore the budget
        assert answer(script, budget, marks, tokenizer, drafts).token_ids == got.token_ids


def test_a_mark_the_model_has_begun_is_completed() -> None:
    script = [*b"ab</thi", *b"zzzzzz"]
    assert answer(script, 4, OPEN, SPELT).text.startswith("ab</think>")
    assert answer(script, 3, OPEN, SPELT).text.startswith("ab</think>")


def test_the_forced_mark_stands_above_everything_else() -> None:
    penalised = {"presence_penalty": 2.0, "repetition_penalty": 1.5, "frequency_penalty": 2.0}
    banned = {"logit_bias": {END: -100.0}, "min_tokens": 6, "bad_words": ["</think>"]}
    for values in (penalised, banned, {"allowed_token_ids": [97, 98, EOS_ID]}):
        assert answer("abababababab", 2, OPEN, **values).token_ids[2] == END

    def forbid(output: Any, row: Any) -> None:
        row[END] = float("-inf")

    got = answer("xxxxxx", 2, OPEN, logits_processors=[forbid], temperature=1.0, seed=3, top_k=1)
    assert got.token_ids[2] == END
    assert got.error is None


def test_log_probabilities_are_the_models_own() -> None:
    got = answer("xxxxxx", 2, OPEN, logprobs=1)
    assert got.logprobs is not None
    forced = got.logprobs[2]
    assert forced[0].token_id == END
    assert forced[0].logprob < -9.0  # the script's token is the likely one
    assert forced[1].token_id == ord("x")


def test_stop_strings_and_stop_tokens_may_name_the_end_mark() -> None:
    got = answer("xxxxxx", 2, OPEN, stop=["</think>"])
    assert (got.text, got.finish_reason, got.stop_reason) == ("xx", FinishReason.STOP, "</think>")
    got = answer("xxxxxx", 2, OPEN, stop_token_ids=[END])
    assert (got.finish_reason, got.stop_reason) == (FinishReason.STOP, END)


def test_a_constraint_begins_after_the_forced_mark() -> None:
    for tokenizer in (WHOLE, SPELT):
        compiler = GrammarCompiler(tokenizer, tokenizer.eos_token_ids)
        engine = make_engine(tokenizer=tokenizer)
        for name in "abc":
            params = SamplingParams(
                temperature=1.0,
                seed=ord(name),
                max_tokens=40,
                thinking_token_budget=5,
                reasoning_marks=OPEN,
                structured_outputs=StructuredOutputs(regex="yes|no", begins_after=OPEN),
                output_kind=OutputKind.FINAL_ONLY,
            )
            request = make_request(
                engine, [1, 2], params, name=name, tokenizer=tokenizer, compile_grammar=compiler.compile
            )
            assert request.is_enforceable is not None
            request.is_enforceable.result()
            engine.add_request(request)
        for output in run(engine):
            (got,) = output.outputs
            assert got.error is None
            said = b"".join(tokenizer.token_bytes(token_id) for token_id in got.token_ids if token_id != EOS_ID)
            _, _, said_after = said.partition(b"</think>")
            assert said_after in (b"yes", b"no"), said
            assert len(got.token_ids) <= 5 + len(ids("</think>", tokenizer)) + 4
        engine.close()


def run_mixture(**settings: Any) -> dict[tuple[str, int], tuple[int, ...]]:
    limits = {"max_num_seqs": settings.pop("seqs", 4), "max_num_batched_tokens": settings.pop("tokens", 16)}
    num_blocks = settings.pop("num_blocks", 64)
    engine = make_engine(
        FakeRunner(FULL, num_blocks, 4, vocab_size=WHOLE.vocab_size),
        tokenizer=WHOLE,
        num_blocks=num_blocks,
        limits=limits,
        **settings,
    )
    for index, budget in enumerate([0, 1, 4, 9, None, 30]):
        params = SamplingParams(
            n=1 + index % 2,
            temperature=1.2,
            seed=index,
            max_tokens=20,
            ignore_eos=True,
            thinking_token_budget=budget,
            reasoning_marks=OPEN,
            output_kind=OutputKind.FINAL_ONLY,
        )
        prompt = list(range(1, 9 + 3 * index))
        engine.add_request(make_request(engine, prompt, params, name=f"{index}", tokenizer=WHOLE))
    found = {}
    for output in run(engine, after_step=lambda: check_pool(engine)):
        for part in output.outputs:
            assert part.error is None
            found[output.request_id, part.index] = tuple(part.token_ids)
    found["preemptions", 0] = (int(engine.scheduler.num_preemptions > 0),)
    engine.close()
    return found


def test_budgets_hold_whatever_happens_on_the_way() -> None:
    plain = run_mixture()
    plain.pop(("preemptions", 0))
    for (name, _), token_ids in plain.items():
        budget = [0, 1, 4, 9, None, 30][int(name)]
        if budget is not None and budget < 20:
            assert END in token_ids[: budget + 1]
    assert plain["1", 0] != plain["1", 1]
    has_preempted = False
    for settings_ in (
        {"async_scheduling": True},
        {"tokens": 5, "seqs": 3},
        {"num_blocks": 16},
        {"num_blocks": 16, "async_scheduling": True, "tokens": 7},
        {"seqs": 1, "enable_prefix_caching": False},
    ):
        other = run_mixture(**settings_)
        has_preempted |= bool(other.pop(("preemptions", 0))[0])
        assert other == plain, settings_
    assert has_preempted, "the small pool must make somebody give way"


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([START, END, AB, *b"<think>/ x"]), max_size=24),
    st.integers(0, 6),
    st.sampled_from([OPEN, MAYBE, LATE]),
)
def test_counting_token_by_token_agrees_with_the_whole_text(
    wanted: list[int], limit: int, marks: ReasoningMarks
) -> None:
    """The output of a model that obeys the counter, judged by its text alone."""
    output: list[int] = []
    counter = ThinkingCounter(thinking_budget(limit, marks, WHOLE), output)
    forced_at = []
    for token_id in wanted:
        forced = counter.forced_id()
        if forced is not None:
            forced_at.append(len(output))
        output.append(token_id if forced is None else forced)
    assert len(forced_at) <= 1
    if not forced_at:
        return
    assert output[forced_at[0]] == END
    before = b"".join(WHOLE.token_bytes(token_id) for token_id in output[: forced_at[0]]).decode()
    if marks is not OPEN:
        pattern = r".*?<think>" if marks.may_start_late else r"\s*<think>"
        head = re.match(pattern, before, re.DOTALL)
        assert head is not None
        before = before[head.end() :]
    assert "</think>" not in before
    assert len(before) >= limit, "each token has at least one byte"


def test_without_a_parser_a_budget_is_refused_by_name() -> None:
    with LLM.from_loaded(make_loaded(tokenizer=WHOLE)) as llm:
        for budget in (0, 5, -1):
            with pytest.raises(InvalidRequest, match="thinking_token_budget: needs a reasoning parser") as caught:
                llm.generate("hello", SamplingParams(thinking_token_budget=budget))
            assert caught.value.param == "thinking_token_budget"
            assert "--reasoning-parser" in (caught.value.remedy or "")
        assert llm.generate("hello", SamplingParams(max_tokens=2))[0].finished


def test_the_engines_own_parser_says_where_thoughts_begin() -> None:
    asked: list[tuple[str, Any]] = []

    def marks(prompt: str, variables: Any) -> ReasoningMarks | None:
        asked.append((prompt, dict(variables)))
        return None if prompt.endswith("</think>") else OPEN if prompt.endswith("<think>") else MAYBE

    tokenizer = byte_tokenizer(
        ["<think>", "</think>"], chat_template="{{ messages[0].content }}{% if think %}<think>{% endif %}"
    )
    script = [ord("x")] * 8
    loaded = make_loaded(ScriptedRunner(script, tokenizer.vocab_size), tokenizer=tokenizer)
    loaded.inputs.reasoning_marks = marks
    params = SamplingParams(temperature=0.0, max_tokens=8, thinking_token_budget=2, skip_special_tokens=False)
    with LLM.from_loaded(loaded) as llm:
        said = [output.outputs[0].text for output in llm.generate(["a<think>", "a</think>", "a"], params)]
        assert said == ["xx</think>xxxxx", "xxxxxxxx", "xxxxxxxx"]
        assert llm.generate([{"prompt_token_ids": ids("a<think>", tokenizer)}], params)[0].outputs[0].text == said[0]
        (reply,) = llm.chat([{"role": "user", "content": "hi"}], params, chat_template_kwargs={"think": True})
        assert reply.outputs[0].text == said[0]
        streamed = llm.chat_stream([{"role": "user", "content": "hi"}], params, chat_template_kwargs={"think": True})
        assert "".join(part.outputs[0].text for part in streamed) == said[0]
    assert asked[0] == ("a<think>", {})
    assert asked[-1] == ("hi<think>", {"think": True})


def test_marks_that_cannot_be_spelt_are_refused() -> None:
    class Mute:
        vocab_size, eos_token_id, eos_token_ids = 8, None, frozenset[int]()

        def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]:
            return [1]

        def decode(self, token_ids: Any, *, skip_special_tokens: bool = True) -> str:
            return "?"

        def token_bytes(self, token_id: int) -> bytes:
            return b"?"

    inputs = InputProcessor(64, 8, Mute())
    with pytest.raises(InvalidRequest, match="cannot spell '</think>'"):
        inputs.process([1], SamplingParams(thinking_token_budget=1, reasoning_marks=OPEN), request_id="r")
    inputs = InputProcessor(64, 8, None)
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        inputs.process([1], SamplingParams(thinking_token_budget=1, reasoning_marks=OPEN), request_id="r")
    with pytest.raises(InvalidRequest, match="reasoning_marks: expected ReasoningMarks"):
        SamplingParams(reasoning_marks="</think>")  # type: ignore[arg-type]

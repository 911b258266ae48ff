"""The object the routes use: order of parsers, finish reasons, prompts that opened the block, token counts."""

from __future__ import annotations

import pytest

from tests.parsers.kit import function
from vkit.parsers.events import ContentDelta, ReasoningDelta, ReplyContext, ToolCallDelta, merged
from vkit.parsers.output import OutputParser, OutputParsers, open_parsers
from vkit.parsers.reasoning_reader import Opening, opening_of
from vkit.parsers.registry import TOOL_PARSERS, reasoning_parser_for
from vkit.parsers.tool_reader import Forcing
from vkit.types import FinishReason, ReasoningMarks

TOOLS = [function("f", a={"type": "string"}), function("g")]
CALL = '<tool_call>{"name":"f","arguments":{"a":"xxxxxxxx"}}</tool_call>'


def context(choice: str = "auto", prompt: str = "", *, name: str | None = None, parallel: bool = True) -> ReplyContext:
    """A request with tools."""
    return ReplyContext(prompt, [], TOOLS, choice, name, parallel)


def finish_reason(parser: OutputParser, reason: FinishReason) -> str:
    """As routes tell it."""
    return "tool_calls" if reason is FinishReason.STOP and parser.has_only_complete_calls else reason.value


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
@pytest.mark.parametrize("reasoning", ["none", "think_auto"])
def test_a_call_cut_by_the_token_limit(choice: str, reasoning: str) -> None:
    """Pitfall 7: whatever `max_tokens`, streamed and whole answers give the same finish reason."""
    parsers = open_parsers("hermes", reasoning)
    text = CALL if reasoning == "none" else f"<think>hm</think>{CALL}"
    for num_tokens in range(1, len(text) + 1):
        is_all = num_tokens == len(text)
        for reason in (FinishReason.LENGTH, FinishReason.STOP):
            was_cut = reason is FinishReason.LENGTH
            stream, whole = (parsers.open(context(choice, name="f")) for _ in range(2))
            events = [event for char in text[:num_tokens] for event in stream.push(char, (0,))]
            streamed = merged([*events, *stream.finish(was_cut=was_cut)])
            reply = whole.parse(text[:num_tokens], range(num_tokens), was_cut=was_cut)
            assert finish_reason(stream, reason) == finish_reason(whole, reason)
            if was_cut:
                assert finish_reason(stream, reason) == "length"
            elif is_all:
                assert finish_reason(stream, reason) == "tool_calls"
            if num_tokens < text.index("}</tool"):
                assert not stream.has_only_complete_calls
                assert not any(call.is_complete for call in streamed.tool_calls)
                kept = [*(call.arguments for call in reply.tool_calls), reply.content or "", reply.reasoning or ""]
                assert text[num_tokens - 1] in "".join(kept) or text[num_tokens - 1] in '<>/{\n"think'
            if choice == "auto" and was_cut and not whole.has_only_complete_calls:
                assert reply.tool_calls == []
                assert text[:num_tokens].endswith(reply.content or "")
            if reply.tool_calls or streamed.tool_calls == []:
                assert [(c.name, c.arguments) for c in reply.tool_calls] == [
                    (c.name, c.arguments) for c in streamed.tool_calls
                ]


def test_the_text_of_a_cut_call_is_content() -> None:
    parser = open_parsers("hermes").open(context())
    reply = parser.parse("Sure. " + CALL[:40], was_cut=True)
    assert reply.content == "Sure. " + CALL[:40]
    assert reply.tool_calls == []


def test_a_forced_call_that_was_cut_is_returned_as_far_as_it_goes() -> None:
    reply = open_parsers("hermes").open(context("required")).parse(CALL[:40], was_cut=True)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments, call.is_complete) == ("f", '{"a":', False)
    named = open_parsers("pythonic").open(context("named", name="g"))
    (call,) = named.parse('{"x": 1', was_cut=True).tool_calls
    assert (call.name, call.arguments, call.is_complete) == ("g", '{"x": 1', False)


def test_events_of_a_call() -> None:
    parser = open_parsers("hermes").open(context())
    events = [event for char in f"Hi \n{CALL}" for event in parser.push(char)] + parser.finish()
    assert [event.text for event in events if isinstance(event, ContentDelta)] == ["H", "i"]
    calls = [event for event in events if isinstance(event, ToolCallDelta)]
    assert calls[0].name == "f"
    assert calls[0].arguments == ""
    assert calls[0].id is not None
    assert calls[0].id.startswith("call_")
    assert all(event.id is None and event.name is None and event.arguments for event in calls[1:])
    assert [event.is_complete for event in calls] == [False] * (len(calls) - 1) + [True]
    assert "".join(event.arguments for event in calls) == '{"a":"xxxxxxxx"}'
    assert len(calls) > 5, "arguments are sent as they come"


@pytest.mark.parametrize("choice", ["none", "auto"])
def test_text_stays_as_it_is_without_tools(choice: str) -> None:
    parsers = open_parsers("hermes")
    plain = ReplyContext("", [], (), "none") if choice == "auto" else context("none")
    assert parsers.open(plain).parse(CALL).content == CALL
    assert parsers.open(plain).push(CALL) == [ContentDelta(CALL)]
    assert not parsers.needs_special_tokens(plain)
    assert parsers.needs_special_tokens(context())
    assert open_parsers("none").open(context()).parse(CALL).content == CALL


def test_a_call_inside_thoughts_is_no_call() -> None:
    text = f"<think>perhaps {CALL}</think>no"
    for reply in (
        open_parsers("hermes", "think_auto").open(context()).parse(text),
        merged(open_parsers("hermes", "think_auto").open(context()).push(text)),
    ):
        assert (reply.reasoning, reply.content, reply.tool_calls) == (f"perhaps {CALL}", "no", [])


def test_one_call_at_most() -> None:
    parsers = open_parsers("hermes")
    for text in (CALL + CALL, CALL + "\n" + CALL):
        whole = parsers.open(context(parallel=False)).parse(text)
        parser = parsers.open(context(parallel=False))
        streamed = merged([*(event for char in text for event in parser.push(char)), *parser.finish()])
        assert len(whole.tool_calls) == len(streamed.tool_calls) == 1
        assert whole.tool_calls[0].arguments == streamed.tool_calls[0].arguments


def test_content_of_calls_alone_is_none() -> None:
    reply = open_parsers("hermes", "deepseek_r1").open(context()).parse(f"hm</think>\n\n{CALL}")
    assert (reply.reasoning, reply.content, len(reply.tool_calls)) == ("hm", None, 1)
    assert open_parsers("hermes").open(context()).parse("").content == ""


# Reasoning and the prompt


@pytest.mark.parametrize(
    ("prompt", "opening"),
    [
        ("<|im_start|>assistant\n<think>\n", Opening.THINKING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Opening.ANSWERING),
        ("<|im_start|>assistant\n<think>\nthe prefix of a thought", Opening.THINKING),
        ("<|im_start|>assistant\n<think>\nhm\n</think>\nthe prefix of an answer", Opening.ANSWERING),
        ("<|im_start|>assistant\nx</think>y<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", None),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", None),
        ("<｜User｜>hi<｜Assistant｜><think>\n", Opening.THINKING),
        ("User: hi\nAssistant: <think>\n", Opening.THINKING),
        ("Assistant: <think>a</think>b\nUser: hi\nAssistant: ", None),
        ("", None),
    ],
)
def test_where_the_prompt_left_the_model(prompt: str, opening: Opening | None) -> None:
    parser = reasoning_parser_for("think_auto")
    assert parser is not None
    assert opening_of(prompt, parser) is (opening or Opening.UNKNOWN)


def test_a_prompt_that_opened_the_block() -> None:
    """Pitfall 8, as far as parsing goes."""
    parsers = open_parsers("hermes", "think_auto")
    thinking = context("none", "<|assistant|><think>\n")
    reply = parsers.open(thinking).parse('because</think>{"a": 1}')
    assert (reply.reasoning, reply.content) == ("because", '{"a": 1}')
    cut = parsers.open(thinking).parse("because", was_cut=True)
    assert (cut.reasoning, cut.content) == ("because", None)
    parser = parsers.open(thinking)
    assert not parser.has_reasoning_ended
    assert parser.push("because</think>{") == [ReasoningDelta("because"), ContentDelta("{")]
    assert parser.has_reasoning_ended
    assert parsers.reasoning_marks(thinking) == ReasoningMarks("</think>", repeated="<think>")
    assert parsers.reasoning_marks(context("none")) == ReasoningMarks("</think>", "<think>")
    assert parsers.reasoning_marks(context("none", "<|assistant|><think>\n\n</think>\n\n")) is None
    assert open_parsers("hermes").reasoning_marks(thinking) is None
    late = ReasoningMarks("[/THINK]", "[THINK]", may_start_late=True)
    assert open_parsers("hermes", "mistral").reasoning_marks(context("none")) == late
    assert parsers.starts_reasoning(thinking)
    assert not parsers.starts_reasoning(context("none", "<|assistant|><think>\n\n</think>\n\n"))


@pytest.mark.parametrize("name", ["think_auto", "deepseek_r1", "minimax_m2", "step3", "olmo3"])
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_reasoning_tokens(name: str, size: int) -> None:
    """One character is one token; the marks count, what follows them does not."""
    text = "<think>some thoughts</think>and an answer"
    parsers = OutputParsers(None, reasoning_parser_for(name), text_of=lambda ids: "".join(map(chr, ids)))
    ids = [ord(char) for char in text]
    parser = parsers.open(context())
    for start in range(0, len(text), size):
        parser.push(text[start : start + size], ids[start : start + size])
    parser.finish()
    wanted = text.index("</think>") + len("</think>")
    assert parser.num_reasoning_tokens == wanted
    assert parsers.open(context()).parse(text, ids).num_reasoning_tokens == wanted


def test_no_thoughts_no_tokens() -> None:
    parsers = open_parsers("hermes", "think_auto")
    parser = parsers.open(context())
    parser.push("an answer", range(9))
    assert parser.num_reasoning_tokens == 0
    assert parsers.open(context()).parse("an answer", range(9)).num_reasoning_tokens == 0
    cut = parsers.open(context())
    cut.push("<think>hm", range(9))
    assert cut.num_reasoning_tokens == 9


# Forced choices


@pytest.mark.parametrize("name", TOOL_PARSERS.names())
def test_every_family_forces_a_call_or_says_that_it_cannot(name: str) -> None:
    parsers = open_parsers(name)
    named, required = context("named", name="f"), context("required")
    assert parsers.forced_constraint(context("auto")) is None
    for wanted in (named, required):
        constraint = parsers.forced_constraint(wanted)
        assert constraint is not None
        assert (constraint.json is None) == (parsers.forcing is not Forcing.JSON)


def test_families_forced_by_their_own_tags() -> None:
    tagged = {name for name in TOOL_PARSERS.names() if TOOL_PARSERS.get(name).forcing is Forcing.TAGS}
    assert tagged == {
        *("hermes", "qwen3", "longcat", "llama3_json", "llama4_json"),
        *("deepseek_v3", "deepseek_v31", "mistral", "kimi_k2"),
    }


@pytest.mark.parametrize("name", sorted({"hermes", "longcat", "llama3_json", "deepseek_v3", "deepseek_v31", "mistral"}))
def test_native_tags_are_read_back(name: str) -> None:
    """Text made of the tags that a forced choice is constrained to is parsed as the calls it stands for."""
    parser = TOOL_PARSERS.get(name)
    separator = parser.native_separator
    assert separator is not None
    calls = [parser.native_tags(tool) for tool in ("f", "g")]
    before, after = parser.native_block
    text = before + separator.join(f"{tags[0]}{{}}{tags[1]}" for tags in calls if tags) + after
    for choice in ("required", "auto"):
        reply = open_parsers(name).open(context(choice)).parse(text)
        assert [(call.name, call.arguments, call.is_complete) for call in reply.tool_calls] == [
            ("f", "{}", True),
            ("g", "{}", True),
        ]
        assert not reply.content

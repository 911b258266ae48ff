from __future__ import annotations

import json
import time
from typing import Any, ClassVar

import pytest

from vkit.errors import InvalidRequest
from vkit.text.template import ChatTemplate, ContentFormat
from vkit.text.tokenizer import Tokenizer

USER = [{"role": "user", "content": "Hi <b> & 'é'"}]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = "{% for m in messages %}{% for p in m.content %}[{{ p.type }}:{{ p.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text if p.type == 'text' else '<' ~ p.type ~ '>' }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source).render(USER if messages is None else messages, **variables)


class TestLanguage:
    def test_golden_template(self, golden_tokenizer: Tokenizer) -> None:
        template = ChatTemplate.for_tokenizer(golden_tokenizer)
        rendered = "<|im_start|>user\nHi <b> & 'é'<|im_end|>"  # its {%- endfor %} takes the line feed before it
        assert template.render(USER, add_generation_prompt=False) == rendered
        assert template.render(USER) == rendered + "<|im_start|>assistant"

    def test_blocks_are_trimmed(self) -> None:
        assert render("  {% if true %}\n  a\n  {% endif %}\nb") == "  a\nb"

    def test_loop_controls(self) -> None:
        assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"

    def test_generation_tag(self) -> None:
        assert render("a{% generation %}{{ messages[0].role }}{% endgeneration %}b") == "auserb"

    @pytest.mark.parametrize(
        "arguments", ["", "indent=2", "sort_keys=True", "separators=(',', ':')", "ensure_ascii=True"]
    )
    def test_tojson(self, arguments: str) -> None:
        value = {"b": "<é> & 'x'", "a": [1, None, True]}
        options = {"ensure_ascii": False} | eval(f"dict({arguments})")
        call = f"tojson({arguments})" if arguments else "tojson"
        assert render("{{ v | " + call + " }}", v=value) == json.dumps(value, **options)

    def test_strftime_now(self) -> None:
        assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")

    def test_variables(self) -> None:
        template = ChatTemplate("{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ documents }}", bos_token="<s>")
        assert template.render(USER, enable_thinking=False, documents=[1]) == "<s>False[1]"
        # What nobody set stays undefined, so that the template's own default holds.
        assert render("{{ 'on' if enable_thinking is not defined else 'off' }}") == "on"

    def test_raise_exception_is_the_templates_refusal(self) -> None:
        with pytest.raises(InvalidRequest, match="only user roles, please") as caught:
            render("{{ raise_exception('only user\\nroles, please') }}")
        assert caught.value.param == "messages"
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("source", ["{% if %}", "{{ x | nofilter }}", "{% for %}", "{{ 1 +", "{% include 'x' %}"])
    def test_faulty_templates_are_refused_in_one_line(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="chat template: ") as caught:
            render(source)
        assert "\n" not in str(caught.value)

    def test_the_line_of_a_syntax_error_is_named(self) -> None:
        with pytest.raises(InvalidRequest, match="line 3"):
            ChatTemplate("a\nb\n{% if %}")

    @pytest.mark.parametrize("source", ["{{ messages.x.y }}", "{{ 1 + 'a' }}", "{{ 1 / 0 }}", "{{ messages[5].role }}"])
    def test_failures_while_rendering(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="chat template: "):
            render(source)


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__ }}",
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{{ messages[0].update(role='x') }}",
            "{{ raise_exception.__globals__ }}",
            "{{ self._TemplateReference__context }}",
            "{{ (''|attr('__class__')) }}",
            "{{ '{0.__class__}'.format(1) }}",
            "{{ (5).to_bytes(9, 'big') }}",
            "{{ 'a'.encode() }}",
        ],
    )
    def test_forbidden(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="not allowed"):
            render(source)
        assert USER == [{"role": "user", "content": "Hi <b> & 'é'"}]

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 'a' * 100000000 }}",
            "{{ 'a' * 8000000 }}{{ 'a' * 8000000 }}",
            "{{ [0] * 10000000 }}",
            "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
            "{% set n = namespace(x='a') %}{% for i in range(99) %}"
            "{% set q %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = q %}{% endfor %}",
            "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='a') %}"
            "{% for i in range(99) %}{% set n.x = m(n.x) %}{% endfor %}",
            "{{ 'a'.center(1000000000) }}",
            "{{ 'a' | center(1000000000) }}",
            "{{ ('a\n' * 1000000) | indent(99999) }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%1000000000d' | format(1) }}",
            "{{ '{:1000000000}'.format(1) }}",
            "{{ '{:{}}'.format(1, 1000000000) }}",
            "{{ ('a' * 8000000).replace('a', 'b' * 100000) }}",
            "{{ ('a' * 8000000) | replace('a', 'b' * 100000) }}",
            "{{ range(100000) | join('a' * 100000) }}",
            "{{ ('a' * 100000).join(['b'] * 100000) }}",
            "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}{{ c }}",
            "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}{{ c | tojson }}",
            "{% set a = [1] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}{{ 'x' ~ c }}",
            "{% set l = [['a' * 8000000]] * 100000 %}{{ l | sum(start=[]) | length }}",
            "{{ ('a' * 8000000) | list | length }}",
            "{{ ('a' * 8000000) | batch(1) | list | length }}",
            "{% for i in range(100000) %}{% set z = 'x' * 8000000 %}{% endfor %}",
            "{{ 9 ** 99999999 }}",
            "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        ],
    )
    def test_giant_texts_are_stopped_before_they_exist(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="chat template: stopped"):
            render(source)

    def test_endless_loops_are_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vkit.text.sandbox.MAX_RENDER_S", 0.2)
        source = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        with pytest.raises(InvalidRequest, match="took more than"):
            render(source)

    @pytest.mark.parametrize("source", ["{{ range(10000000) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"])
    def test_other_ways_out_of_hand(self, source: str) -> None:
        with pytest.raises(InvalidRequest):
            render(source)

    def test_long_conversations_are_no_abuse(self) -> None:
        messages = [{"role": "user", "content": "word " * 2000}] * 400
        assert len(render(CHATML, messages)) > 4_000_000

    def test_the_limits_of_one_rendering_do_not_add_up(self) -> None:
        template = ChatTemplate("{{ 'a' * 8000000 }}")
        for _ in range(40):
            assert len(template.render(USER)) == 8_000_000


class TestContents:
    TEXTS: ClassVar = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]

    @pytest.mark.parametrize(
        ("source", "found", "rendered"),
        [
            (CHATML, ContentFormat.STRING, "<|im_start|>user\none\ntwo<|im_end|>\n"),
            (PARTS, ContentFormat.OPENAI, "[text:one][text:two]"),
            (BOTH, ContentFormat.OPENAI, "onetwo"),
        ],
    )
    def test_the_format_is_found_out(self, source: str, found: ContentFormat, rendered: str) -> None:
        template = ChatTemplate(source)
        assert template.content_format is found
        assert template.render(self.TEXTS, add_generation_prompt=False) == rendered

    def test_a_string_is_wrapped_only_where_it_must_be(self) -> None:
        text = [{"role": "user", "content": "abc"}]
        assert render(PARTS, text) == "[text:abc]"
        assert render(BOTH, text) == "abc"
        assert ChatTemplate(BOTH, content_format="openai").render(text) == "abc"

    def test_the_format_can_be_given(self) -> None:
        assert ChatTemplate(BOTH, content_format="string").render(self.TEXTS) == "one\ntwo"
        assert (
            ChatTemplate(CHATML, content_format="openai")
            .render(self.TEXTS, add_generation_prompt=False)
            .startswith("<|im_start|>user\n[{")
        )

    def test_aliases_of_text_parts(self) -> None:
        parts = ["a", {"type": "input_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
        assert render(PARTS, [{"role": "user", "content": parts}]) == "[text:a][text:b][text:c]"
        assert "a\nb\nc" in render(CHATML, [{"role": "user", "content": parts}])

    def test_media_parts_need_a_template_for_them(self) -> None:
        messages = [{"role": "user", "content": [{"type": "image", "url": "x"}, {"type": "text", "text": "?"}]}]
        assert render(BOTH, messages) == "<image>?"
        with pytest.raises(InvalidRequest, match="text only") as caught:
            render(CHATML, messages)
        assert caught.value.param == "messages.0.content.0"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            ("Hi", "messages"),
            ([{"content": "x"}], "messages.0"),
            (["x"], "messages.0"),
            ([{"role": "user", "content": 5}], "messages.0.content"),
            ([{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
            ([*USER, {"role": "assistant", "tool_calls": ["x"]}], "messages.1.tool_calls.0"),
        ],
    )
    def test_what_cannot_be_used_is_named(self, messages: Any, param: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            ChatTemplate(CHATML).render(messages)
        assert caught.value.param == param

    def test_null_content(self) -> None:
        messages = [{"role": "assistant", "content": None}]
        assert render("{% for m in messages %}{{ m.content }}|{% endfor %}", messages) == "|"
        asks = "{% for m in messages %}{{ 'null' if m.content is none else m.content }}{% endfor %}"
        assert render(asks, messages) == "null"
        # Asking in one place does not keep a template from failing in another.
        assert render(asks + "{{ messages[0].content | length }}", messages) == "0"

    def test_roles_and_reasoning(self) -> None:
        source = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}{{ m.reasoning }};{% endfor %}"
        messages = [{"role": "developer", "content": "x"}, {"role": "assistant", "content": "y", "reasoning": "r"}]
        assert render(source, messages) == "system:;assistant:rr;"
        assert render("{# developer #}" + source, messages).startswith("developer")


class TestTools:
    CALL: ClassVar = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é", "b": [1]}'}}
    CONVERSATION: ClassVar = [*USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}]

    def test_arguments_are_given_as_an_object(self) -> None:
        source = "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }};{% endfor %}"
        assert render(source, self.CONVERSATION) == "a=é;b=[1];"
        as_object = json.loads(json.dumps(self.CONVERSATION))
        as_object[1]["tool_calls"][0]["function"]["arguments"] = {"k": 1}
        assert render(source, as_object) == "k=1;"

    def test_as_text_where_the_template_joins_them_to_text(self) -> None:
        source = "{{ 'args: ' + messages[1].tool_calls[0].function.arguments }}"
        assert render(source, self.CONVERSATION) == 'args: {"a": "é", "b": [1]}'

    def test_no_arguments(self) -> None:
        call = {"function": {"name": "f", "arguments": ""}}
        messages = [{"role": "assistant", "tool_calls": [call]}]
        assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == "{}"

    def test_arguments_that_are_no_json(self) -> None:
        messages = [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}]
        with pytest.raises(InvalidRequest, match="not JSON") as caught:
            render(CHATML, messages)
        assert caught.value.param == "messages.1.tool_calls.0.function.arguments"

    def test_the_template_for_tools(self) -> None:
        template = ChatTemplate({"default": "plain {{ tools is none }}", "tool_use": "tools {{ tools | length }}"})
        assert template.render(USER) == "plain True"
        assert template.render(USER, tools=[{"type": "function"}]) == "tools 1"
        assert template.source == "plain {{ tools is none }}"

    def test_nothing_to_choose(self) -> None:
        assert ChatTemplate({"only": "x"}).render(USER) == "x"
        with pytest.raises(InvalidRequest, match="none of a, b"):
            ChatTemplate({"a": "x", "b": "y"}).render(USER)


class TestContinuing:
    MESSAGES: ClassVar = [*USER, {"role": "assistant", "content": "So far "}]

    def test_the_last_message_stays_open(self) -> None:
        text = render(CHATML, self.MESSAGES, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nSo far ")

    def test_parts_too(self) -> None:
        messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
        assert render(PARTS, messages, add_generation_prompt=False, continue_final_message=True) == "[text:a][text:b"

    def test_both_at_once_are_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="continue_final_message"):
            render(CHATML, self.MESSAGES, continue_final_message=True)

    @pytest.mark.parametrize("source", ["{{ messages[0].content }}", "constant"])
    def test_a_template_that_drops_the_last_message(self, source: str) -> None:
        with pytest.raises(InvalidRequest, match="leaves out the end"):
            render(source, self.MESSAGES, add_generation_prompt=False, continue_final_message=True)


class TestPitfall13:
    """The model's template, an override, or none at all; never an invented one."""

    def test_a_gguf_brings_its_own(self, demo_tokenizer: Tokenizer) -> None:
        template = ChatTemplate.for_tokenizer(demo_tokenizer)
        assert template.source == demo_tokenizer.chat_templates["default"]
        assert template.render([{"role": "user", "content": "Hi"}]) == (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_an_override_wins(self, demo_tokenizer: Tokenizer) -> None:
        template = ChatTemplate.for_tokenizer(demo_tokenizer, override="{{ bos_token }}!")
        assert template.render(USER) == "<|im_start|>!"

    def test_none_is_refused(self, sentencepiece_tokenizer: Tokenizer) -> None:
        with pytest.raises(InvalidRequest, match="no chat template") as caught:
            ChatTemplate.for_tokenizer(sentencepiece_tokenizer)
        assert "--chat-template" in str(caught.value)


def test_any_template_of_the_model_may_mention_a_name() -> None:
    template = ChatTemplate({"default": "{{ messages }}", "tool_use": "{{ tools }}"})
    assert template.mentions("tools")
    assert not template.mentions("documents")

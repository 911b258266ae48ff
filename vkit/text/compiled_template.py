"""One chat template, compiled: what it can take, and the text it makes. Bound to jinja2, which is imported with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from vkit.errors import InvalidRequest
from vkit.text.sandbox import MAX_RENDERED_CHARS, RaisedByTemplate, TemplateEnvironment, TooMuch
from vkit.text.template import ContentFormat, Message

_NONE_TEST = re.compile(r"\bcontent['\"\])]*\s+(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.IGNORECASE)
_PROBE = "vkit-probe-text"

# What rendering can raise besides jinja2's own errors: a template is a program over data it may not expect.
_DATA_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)

environment = TemplateEnvironment()
"""Where every template runs."""


class CompiledTemplate:
    """One template and what it can take."""

    def __init__(self, source: str, content_format: ContentFormat) -> None:
        self.source = source
        self._wanted_format = content_format
        try:
            self._template: Template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidRequest(
                f"chat template: line {error.lineno}: {_one_line(error.message or 'syntax error')}",
                param="chat_template",
            ) from error
        except (TemplateError, *_DATA_ERRORS) as error:
            raise InvalidRequest(f"chat template: {_one_line(error)}", param="chat_template") from error

    @cached_property
    def content_format(self) -> ContentFormat:
        if self._wanted_format is not ContentFormat.AUTO:
            return self._wanted_format
        return ContentFormat.OPENAI if self._writes([{"type": "text", "text": _PROBE}]) else ContentFormat.STRING

    @cached_property
    def needs_parts(self) -> bool:
        """Whether a plain string must be wrapped into a list of parts."""
        if self._wanted_format is not ContentFormat.AUTO:
            return self._wanted_format is ContentFormat.OPENAI
        return self.content_format is ContentFormat.OPENAI and not self._writes(_PROBE)

    @cached_property
    def knows_developer(self) -> bool:
        """Whether the template has something to say on the role `developer`."""
        return "developer" in self.source

    @cached_property
    def knows_null_content(self) -> bool:
        """Whether the template asks if a content is none; any other would fail on one, or write "None"."""
        return _NONE_TEST.search(self.source) is not None

    def render(self, values: Mapping[str, Any]) -> str:
        """The text the template makes of `values`.

        Raises:
            InvalidRequest: it fails, refuses, or goes over the limits.
        """
        try:
            with environment.metered():
                return self._collect(values)
        except RaisedByTemplate as error:
            raise InvalidRequest(f"chat template: {_one_line(error)}", param="messages") from error
        except TooMuch as error:
            raise InvalidRequest(f"chat template: stopped: {_one_line(error)}", param="chat_template") from error
        except SecurityError as error:
            raise InvalidRequest(f"chat template: not allowed: {_one_line(error)}", param="chat_template") from error
        except TemplateError as error:
            raise InvalidRequest(f"chat template: {_one_line(error)}", param="chat_template") from error

    def render_conversation(self, values: dict[str, Any], messages: Sequence[Message]) -> str:
        """As `render`; a template that fails on tool arguments as objects, or on a null content, gets them as text."""
        first_error: Exception | None = None
        for variant in (values["messages"], *_plainer_variants(values["messages"], messages)):
            try:
                return self.render({**values, "messages": variant})
            except _DATA_ERRORS as error:
                first_error = first_error or error
        what = _one_line(first_error) or type(first_error).__name__
        raise InvalidRequest(f"chat template: cannot render these messages: {what}", param="messages") from first_error

    def _collect(self, values: Mapping[str, Any]) -> str:
        chunks: list[str] = []
        num_chars = 0
        for chunk in self._template.generate(values):
            num_chars += len(chunk)
            if num_chars > MAX_RENDERED_CHARS:
                raise TooMuch(f"the text is longer than {MAX_RENDERED_CHARS} characters")
            chunks.append(chunk)
        return "".join(chunks)

    def _writes(self, content: object) -> bool:
        """Whether a message with this content has its text, and nothing of its structure, written out."""
        message = {"role": "user", "content": content}
        try:
            text = self.render({"messages": [message], "add_generation_prompt": False})
        except (InvalidRequest, *_DATA_ERRORS):
            return False
        return _PROBE in text and f"'{_PROBE}'" not in text and f'"{_PROBE}"' not in text


def _plainer_variants(prepared: list[dict[str, Any]], original: Sequence[Message]) -> Iterator[list[dict[str, Any]]]:
    """The prepared messages with null contents as empty strings, with tool arguments as JSON text, and with both."""
    without_null = [{**m, "content": ""} if "content" in m and m["content"] is None else m for m in prepared]
    if without_null != prepared:
        yield without_null
    if any(message.get("tool_calls") for message in prepared):
        yield _with_arguments_as_text(prepared, original)
        if without_null != prepared:
            yield _with_arguments_as_text(without_null, original)


def _with_arguments_as_text(prepared: list[dict[str, Any]], original: Sequence[Message]) -> list[dict[str, Any]]:
    return [
        {**message, "tool_calls": [_arguments_as_text(*pair) for pair in zip(calls, before["tool_calls"], strict=True)]}
        if (calls := message.get("tool_calls"))
        else message
        for message, before in zip(prepared, original, strict=True)
    ]


def _arguments_as_text(call: Mapping[str, Any], original: Mapping[str, Any]) -> dict[str, Any]:
    arguments = original["function"].get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

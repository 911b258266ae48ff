"""Chat messages to prompt text, through the model's own template and nothing else.

No format is ever invented: a model without a template cannot chat. Rendering may take a while: not on the event loop.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from vkit.errors import InvalidRequest
from vkit.text.sandbox import MAX_RENDERED_CHARS, RaisedByTemplate, TemplateEnvironment, TooMuch
from vkit.text.settings import DEFAULT_TEMPLATE
from vkit.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

TOOL_TEMPLATE = "tool_use"
"""Name of the template that some models keep for conversations with tools."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_NONE_TEST = re.compile(r"\bcontent['\"\])]*\s+(?:is\s+(?:not\s+)?|[!=]=\s*)none", re.IGNORECASE)
_PROBE = "vkit-probe-text"
_OPEN_END = "\ue000vkit-open-end\ue001"

# What rendering can raise besides jinja2's own errors: a template is a program over data it may not expect.
_DATA_ERRORS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError, MemoryError)

_environment = TemplateEnvironment()


class ContentFormat(StrEnum):
    """How a template wants the content of a message."""

    AUTO = "auto"
    STRING = "string"
    OPENAI = "openai"


class ChatTemplate:
    """The chat template of a model: one, or several by name, of which the right one is chosen by itself."""

    def __init__(
        self,
        templates: str | Mapping[str, str],
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        content_format: ContentFormat | str = ContentFormat.AUTO,
    ) -> None:
        """
        Raises:
            InvalidRequest: a template is not valid Jinja; the message has its line.
        """
        named = {DEFAULT_TEMPLATE: templates} if isinstance(templates, str) else templates
        self._compiled = {name: _Compiled(source, ContentFormat(content_format)) for name, source in named.items()}
        self._tokens = {
            name: text for name, text in (("bos_token", bos_token), ("eos_token", eos_token)) if text is not None
        }

    @classmethod
    def for_tokenizer(
        cls,
        tokenizer: Tokenizer,
        *,
        override: str | None = None,
        content_format: ContentFormat | str = ContentFormat.AUTO,
    ) -> ChatTemplate:
        """The model's template, or `override` (Jinja source) in its place.

        Raises:
            InvalidRequest: there is neither, or it is not valid Jinja.
        """
        templates = tokenizer.chat_templates if override is None else {DEFAULT_TEMPLATE: override}
        if not templates:
            raise InvalidRequest(
                "the model has no chat template", param="messages", remedy="give one with --chat-template"
            )
        return cls(
            templates, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token, content_format=content_format
        )

    @property
    def source(self) -> str:
        """The Jinja source of the template that plain conversations use."""
        return self._choose(has_tools=False).source

    def mentions(self, name: str) -> bool:
        """Whether any of the model's templates speaks of this variable or key."""
        return any(name in compiled.source for compiled in self._compiled.values())

    @property
    def content_format(self) -> ContentFormat:
        """Whether message contents are handed over as lists of parts (`openai`) or as strings."""
        return self._choose(has_tools=False).content_format

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation. `variables` are the template's own, such as `enable_thinking`.

        With `continue_final_message` the last message is left open, to be gone on with.

        Raises:
            InvalidRequest: messages or template cannot be used; the message says why.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message: cannot be combined with add_generation_prompt", param="continue_final_message"
            )
        template = self._choose(has_tools=tools is not None)
        with _environment.metered():  # finding out what the template takes counts too
            prepared = prepare_messages(messages, template)
            if continue_final_message:
                prepared = _mark_open_end(prepared)
            values = {
                **self._tokens,
                "messages": prepared,
                "tools": tools,
                "documents": documents,
                "add_generation_prompt": add_generation_prompt,
                **variables,
            }
            text = template.render_conversation(values, messages)
        return _cut_open_end(text) if continue_final_message else text

    def _choose(self, *, has_tools: bool) -> _Compiled:
        if has_tools and TOOL_TEMPLATE in self._compiled:
            return self._compiled[TOOL_TEMPLATE]
        if DEFAULT_TEMPLATE in self._compiled:
            return self._compiled[DEFAULT_TEMPLATE]
        if len(self._compiled) == 1:
            return next(iter(self._compiled.values()))
        raise InvalidRequest(
            f"chat template: none of {', '.join(sorted(self._compiled))} is named {DEFAULT_TEMPLATE!r}",
            param="chat_template",
        )


class _Compiled:
    """One template and what it can take."""

    def __init__(self, source: str, content_format: ContentFormat) -> None:
        self.source = source
        self._wanted_format = content_format
        try:
            self._template: Template = _environment.from_string(source)
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
            with _environment.metered():
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


def prepare_messages(messages: Sequence[Message], template: _Compiled) -> list[dict[str, Any]]:
    """The messages as the template takes them: roles, contents and tool arguments brought into form.

    Raises:
        InvalidRequest: `param` names the place, such as messages.1.content.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages: expected a non-empty list of messages", param="messages")
    return [_prepare_message(message, f"messages.{i}", template) for i, message in enumerate(messages)]


def _prepare_message(message: Message, place: str, template: _Compiled) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{place}: expected an object with a role, got {message!r:.80}", param=place)
    prepared = dict(message)
    if prepared["role"] == "developer" and not template.knows_developer:
        prepared["role"] = "system"
    if "content" in prepared:
        prepared["content"] = _prepare_content(prepared["content"], f"{place}.content", template)
    for name, alias in (("reasoning_content", "reasoning"), ("reasoning", "reasoning_content")):
        if prepared.get(name) is None and prepared.get(alias) is not None:
            prepared[name] = prepared[alias]
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [
            _prepare_tool_call(call, f"{place}.tool_calls.{i}") for i, call in enumerate(prepared["tool_calls"])
        ]
    return prepared


def _prepare_content(content: object, place: str, template: _Compiled) -> object:
    if content is None:
        return None if template.knows_null_content else ""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if template.needs_parts else content
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{place}: expected a string or a list of parts, got {content!r:.80}", param=place)
    parts = [_prepare_part(part, f"{place}.{i}") for i, part in enumerate(content)]
    if template.content_format is ContentFormat.OPENAI:
        return parts
    for i, part in enumerate(parts):
        if part["type"] != "text":
            raise InvalidRequest(
                f"{place}.{i}: the chat template takes text only, got a part of type {part['type']!r}",
                param=f"{place}.{i}",
            )
    return "\n".join(part["text"] for part in parts)


def _prepare_part(part: object, place: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{place}: expected a part with a type, got {part!r:.80}", param=place)
    key = _TEXT_PARTS.get(part["type"])
    if key is None:
        return dict(part)
    if not isinstance(part.get(key), str):
        raise InvalidRequest(f"{place}.{key}: expected a string, got {part.get(key)!r:.80}", param=f"{place}.{key}")
    return {**part, "type": "text", "text": part[key]}


def _prepare_tool_call(call: object, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InvalidRequest(f"{place}: expected an object with a function, got {call!r:.80}", param=place)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    where = f"{place}.function.arguments"
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{where}: not JSON: {error}", param=where) from error
    return {**call, "function": {**function, "arguments": value}}


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


def _mark_open_end(prepared: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a mark at the end of the last one's text; everything after it is cut off later."""
    last = prepared[-1]
    content = last.get("content")
    if isinstance(content, str):
        return [*prepared[:-1], {**last, "content": content + _OPEN_END}]
    if isinstance(content, list) and content and content[-1].get("type") == "text":
        part = {**content[-1], "text": content[-1]["text"] + _OPEN_END}
        return [*prepared[:-1], {**last, "content": [*content[:-1], part]}]
    raise InvalidRequest(
        "continue_final_message: the last message has no text to go on with", param="continue_final_message"
    )


def _cut_open_end(text: str) -> str:
    head, mark, _ = text.rpartition(_OPEN_END)
    if not mark:
        raise InvalidRequest(
            "continue_final_message: the chat template leaves out the end of the last message",
            param="continue_final_message",
        )
    return head.replace(_OPEN_END, "")


def _one_line(error: object) -> str:
    return " ".join(str(error).split())

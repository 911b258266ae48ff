"""Chat messages to prompt text, through the model's own template and nothing else.

No format is ever invented: a model without a template cannot chat. Rendering may take a while: not on the event loop.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vkit.errors import InvalidRequest
from vkit.text.settings import DEFAULT_TEMPLATE
from vkit.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from vkit.text.compiled_template import CompiledTemplate

Message = Mapping[str, Any]

TOOL_TEMPLATE = "tool_use"
"""Name of the template that some models keep for conversations with tools."""

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_OPEN_END = "\ue000vkit-open-end\ue001"


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
        compiles_late: bool = False,
    ) -> None:
        """`compiles_late`: not before the first conversation, which then is what fails.

        Raises:
            InvalidRequest: a template is not valid Jinja; the message has its line.
        """
        self._sources = {DEFAULT_TEMPLATE: templates} if isinstance(templates, str) else dict(templates)
        self._wanted_format = ContentFormat(content_format)
        self._compiled: dict[str, CompiledTemplate] = {}
        for name in () if compiles_late else self._sources:
            self._compile(name)
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
        compiles_late: bool = False,
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
            templates,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            content_format=content_format,
            compiles_late=compiles_late,
        )

    @property
    def source(self) -> str:
        """The Jinja source of the template that plain conversations use."""
        return self._sources[self._chosen(has_tools=False)]

    def mentions(self, name: str) -> bool:
        """Whether any of the model's templates speaks of this variable or key."""
        return any(name in source for source in self._sources.values())

    @property
    def content_format(self) -> ContentFormat:
        """Whether message contents are handed over as lists of parts (`openai`) or as strings."""
        return self._compile(self._chosen(has_tools=False)).content_format

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
        from vkit.text.compiled_template import environment

        template = self._compile(self._chosen(has_tools=tools is not None))
        with environment.metered():  # finding out what the template takes counts too
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

    def _chosen(self, *, has_tools: bool) -> str:
        """The name of the template for a conversation."""
        if has_tools and TOOL_TEMPLATE in self._sources:
            return TOOL_TEMPLATE
        if DEFAULT_TEMPLATE in self._sources:
            return DEFAULT_TEMPLATE
        if len(self._sources) == 1:
            return next(iter(self._sources))
        raise InvalidRequest(
            f"chat template: none of {', '.join(sorted(self._sources))} is named {DEFAULT_TEMPLATE!r}",
            param="chat_template",
        )

    def _compile(self, name: str) -> CompiledTemplate:
        """The template of that name, ready to run."""
        if name not in self._compiled:
            from vkit.text.compiled_template import CompiledTemplate

            self._compiled[name] = CompiledTemplate(self._sources[name], self._wanted_format)
        return self._compiled[name]


def prepare_messages(messages: Sequence[Message], template: CompiledTemplate) -> list[dict[str, Any]]:
    """The messages as the template takes them: roles, contents and tool arguments brought into form.

    Raises:
        InvalidRequest: `param` names the place, such as messages.1.content.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest("messages: expected a non-empty list of messages", param="messages")
    return [_prepare_message(message, f"messages.{i}", template) for i, message in enumerate(messages)]


def _prepare_message(message: Message, place: str, template: CompiledTemplate) -> dict[str, Any]:
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


def _prepare_content(content: object, place: str, template: CompiledTemplate) -> object:
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

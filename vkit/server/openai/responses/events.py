"""From parsed text to output items, with every event a stream must carry on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from vkit.server.openai.responses.items import item_id
from vkit.server.parsing import ContentDelta, ReasoningDelta, ReplyEvent, ToolCallDelta
from vkit.server.schema import Json

Emit = Callable[[str, Json], None]
"""(event type, its payload)"""


class OutputBuilder:
    """Builds the output items of one response, one open at a time, and tells of each change."""

    def __init__(
        self, output: list[Json], emit: Emit, *, custom_names: frozenset[str], namespaces: Mapping[str, tuple[str, str]]
    ) -> None:
        self.output = output
        self._emit = emit
        self._custom_names = custom_names
        self._namespaces = namespaces
        self._open: Json | None = None
        self._call_arguments = ""

    def add(self, event: ReplyEvent, logprobs: list[Any]) -> None:
        """Take in what the parser found. `logprobs` belong to text."""
        if isinstance(event, ReasoningDelta):
            self._add_reasoning(event.text)
        elif isinstance(event, ContentDelta):
            self._add_text(event.text, logprobs)
        else:
            self._add_call(event)

    def close(self, status: str = "completed") -> None:
        """End the open item."""
        item = self._open
        if item is None:
            return
        self._open = None
        kind = item["type"]
        if kind == "message":
            self._close_text(item)
        elif kind == "reasoning":
            self._close_reasoning(item)
        else:
            self._close_call(item)
        item["status"] = status
        self._emit("response.output_item.done", {"output_index": len(self.output) - 1, "item": item})

    def finish(self, status: str = "completed") -> None:
        """End the open item; an empty message when there was nothing at all."""
        self.close(status)
        if not self.output:
            self._start(_message_item())
            item = self._open
            assert item is not None
            self._open = None
            item["status"] = status
            self._emit("response.output_item.done", {"output_index": 0, "item": item})

    def _start(self, item: Json) -> None:
        self.close()
        self.output.append(item)
        self._open = item
        self._emit("response.output_item.added", {"output_index": len(self.output) - 1, "item": item})

    def _place(self, item: Json) -> Json:
        return {"item_id": item["id"], "output_index": len(self.output) - 1}

    def _part_place(self, item: Json) -> Json:
        return {**self._place(item), "content_index": 0}

    def _ensure(self, kind: str, make: Callable[[], Json], part: Json) -> Json:
        if self._open is None or self._open["type"] != kind:
            self._start(make())
        item = self._open
        assert item is not None
        if not item["content"]:
            item["content"].append(part)
            self._emit("response.content_part.added", {**self._part_place(item), "part": part})
        return item

    def _add_text(self, text: str, logprobs: list[Any]) -> None:
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        item = self._ensure("message", _message_item, part)
        item["content"][0]["text"] += text
        item["content"][0]["logprobs"].extend(logprobs)
        self._emit("response.output_text.delta", {**self._part_place(item), "delta": text, "logprobs": logprobs})

    def _close_text(self, item: Json) -> None:
        if not item["content"]:
            return
        part = item["content"][0]
        place = self._part_place(item)
        self._emit("response.output_text.done", {**place, "text": part["text"], "logprobs": part["logprobs"]})
        self._emit("response.content_part.done", {**place, "part": part})

    def _add_reasoning(self, text: str) -> None:
        item = self._ensure("reasoning", _reasoning_item, {"type": "reasoning_text", "text": ""})
        item["content"][0]["text"] += text
        self._emit("response.reasoning_text.delta", {**self._part_place(item), "delta": text})

    def _close_reasoning(self, item: Json) -> None:
        part = item["content"][0]
        place = self._part_place(item)
        self._emit("response.reasoning_text.done", {**place, "text": part["text"]})
        self._emit("response.content_part.done", {**place, "part": part})

    def _add_call(self, event: ToolCallDelta) -> None:
        if event.name is not None:
            kind = "custom_tool_call" if event.name in self._custom_names else "function_call"
            namespace, name = self._namespaces.get(event.name, (None, event.name))
            item: Json = {"type": kind, "id": item_id(kind), "call_id": event.id, "name": name}
            if namespace is not None:
                item["namespace"] = namespace
            item |= {"input": ""} if kind == "custom_tool_call" else {"arguments": ""}
            self._start({**item, "status": "in_progress"})
            self._call_arguments = ""
        item_open = self._open
        if item_open is None or not event.arguments:
            return
        self._call_arguments += event.arguments
        if item_open["type"] == "function_call":
            item_open["arguments"] += event.arguments
            self._emit("response.function_call_arguments.delta", {**self._place(item_open), "delta": event.arguments})

    def _close_call(self, item: Json) -> None:
        place = self._place(item)
        if item["type"] == "function_call":
            done = {**place, "arguments": item["arguments"], "name": item["name"]}
            self._emit("response.function_call_arguments.done", done)
            return
        # The model wrote {"input": text}; only complete can it be taken apart, so the text comes as one delta.
        item["input"] = _custom_input(self._call_arguments)
        if item["input"]:
            self._emit("response.custom_tool_call_input.delta", {**place, "delta": item["input"]})
        self._emit("response.custom_tool_call_input.done", {**place, "input": item["input"]})


def _message_item() -> Json:
    return {
        "type": "message",
        "id": item_id("message"),
        "role": "assistant",
        "status": "in_progress",
        "content": [],
    }


def _reasoning_item() -> Json:
    return {
        "type": "reasoning",
        "id": item_id("reasoning"),
        "summary": [],
        "content": [],
        "encrypted_content": None,
        "status": "in_progress",
    }


def _custom_input(arguments: str) -> str:
    try:
        value = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def replayed(output: list[Json], emit: Emit) -> None:
    """The events of finished items, as a stream of them would have carried."""
    for index, item in enumerate(output):
        place = {"item_id": item["id"], "output_index": index}
        parts = item.get("content") or []
        bare = {**item, "status": "in_progress"}
        for key, empty in (("content", []), ("arguments", ""), ("input", "")):
            if key in bare:
                bare[key] = empty
        emit("response.output_item.added", {"output_index": index, "item": bare})
        for part in parts:
            _replay_part(part, {**place, "content_index": 0}, emit)
        if item["type"] == "function_call":
            emit("response.function_call_arguments.delta", {**place, "delta": item["arguments"]})
            done = {**place, "arguments": item["arguments"], "name": item["name"]}
            emit("response.function_call_arguments.done", done)
        elif item["type"] == "custom_tool_call":
            emit("response.custom_tool_call_input.delta", {**place, "delta": item["input"]})
            emit("response.custom_tool_call_input.done", {**place, "input": item["input"]})
        emit("response.output_item.done", {"output_index": index, "item": item})


def _replay_part(part: Json, place: Json, emit: Emit) -> None:
    is_text = part["type"] == "output_text"
    name = "output_text" if is_text else "reasoning_text"
    extra = {"logprobs": part["logprobs"]} if is_text else {}
    empty = {**part, "text": "", **({"logprobs": []} if is_text else {})}
    emit("response.content_part.added", {**place, "part": empty})
    emit(f"response.{name}.delta", {**place, "delta": part["text"], **extra})
    emit(f"response.{name}.done", {**place, "text": part["text"], **extra})
    emit("response.content_part.done", {**place, "part": part})

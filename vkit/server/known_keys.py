"""Which keys the objects inside a request may have, where the body's own types leave them open. Names the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

_PART = frozenset(
    {
        *("type", "text", "refusal", "image_url", "video_url", "audio_url", "input_audio", "detail", "uuid"),
        *("file", "file_id", "file_data", "filename", "annotations", "logprobs"),
    }
)
_MEDIA = frozenset({"url", "detail", "data", "format"})
_MESSAGE = frozenset(
    {
        *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"),
        *("annotations", "audio"),  # of no effect, and named as such: clients send back what they were sent
    }
)
_CALL = frozenset({"id", "type", "function", "index"})
_CALLED = frozenset({"name", "arguments"})
_TOOL = frozenset({"type", "function"})
_FUNCTION = frozenset({"name", "description", "parameters", "strict"})

_BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type", "text", "cache_control", "citations"}),
    "image": frozenset({"type", "source", "cache_control"}),
    "document": frozenset({"type", "source", "title", "context", "cache_control", "citations"}),
    "thinking": frozenset({"type", "thinking", "signature", "cache_control"}),
    "tool_use": frozenset({"type", "id", "name", "input", "cache_control", "caller"}),
    "tool_result": frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}),
}
_BLOCK_SOURCE = frozenset({"type", "media_type", "data", "url"})
_BLOCK_TOOL = frozenset({"type", "name", "description", "input_schema", "strict", "cache_control"})
_BLOCK_FIELDS: Mapping[str, frozenset[str]] = {
    "thinking": frozenset({"type", "budget_tokens", "display"}),
    "tool_choice": frozenset({"type", "name", "disable_parallel_tool_use"}),
    "output_config": frozenset({"effort", "format"}),
}

_ITEM = frozenset({"type", "id", "status"})
_ITEMS: Mapping[str, frozenset[str]] = {
    "message": _ITEM | {"role", "content", "phase"},
    "reasoning": _ITEM | {"summary", "content", "encrypted_content"},
    "function_call": _ITEM | {"call_id", "name", "arguments", "namespace"},
    "custom_tool_call": _ITEM | {"call_id", "name", "input", "namespace"},
    "function_call_output": _ITEM | {"call_id", "output"},
    "custom_tool_call_output": _ITEM | {"call_id", "output"},
    "item_reference": _ITEM,
}
_ITEM_TOOLS: Mapping[str, frozenset[str]] = {
    "function": _FUNCTION | {"type"},
    "custom": frozenset({"type", "name", "description", "format"}),
    "namespace": frozenset({"type", "name", "description", "tools"}),
}


def unknown_in_chat(messages: Any, tools: Any) -> Iterator[str]:
    """Dotted names of the unknown keys in chat messages and tools."""
    for where, message in _objects(messages, "messages"):
        yield from _others(message, _MESSAGE, where)
        yield from _unknown_in_parts(message.get("content"), f"{where}.content")
        for place, call in _objects(message.get("tool_calls"), f"{where}.tool_calls"):
            yield from _others(call, _CALL, place)
            yield from _others(call.get("function"), _CALLED, f"{place}.function")
    for where, tool in _objects(tools, "tools"):
        yield from _others(tool, _TOOL, where)
        yield from _others(tool.get("function"), _FUNCTION, f"{where}.function")


def unknown_in_blocks(messages: Any, system: Any, tools: Any, fields: Mapping[str, Any]) -> Iterator[str]:
    """Dotted names of the unknown keys in Messages requests. `fields`: other objects of the body, by name."""
    yield from _unknown_in_content(system, "system")
    for where, message in _objects(messages, "messages"):
        yield from _others(message, ("role", "content"), where)
        yield from _unknown_in_content(message.get("content"), f"{where}.content")
    for where, tool in _objects(tools, "tools"):
        if isinstance(tool.get("input_schema"), dict):  # others run elsewhere and are named whole
            yield from _others(tool, _BLOCK_TOOL, where)
    for name, value in fields.items():
        yield from _others(value, _BLOCK_FIELDS[name], name)


def unknown_in_items(items: Any, tools: Any) -> Iterator[str]:
    """Dotted names of the unknown keys in response items and their tools."""
    for where, item in _objects(items, "input"):
        kind = item.get("type") or "message"
        if isinstance(kind, str) and kind in _ITEMS:
            yield from _others(item, _ITEMS[kind], where)
            for key in ("content", "output", "summary"):
                yield from _unknown_in_parts(item.get(key), f"{where}.{key}")
    for where, tool in _objects(tools, "tools"):
        kind = tool.get("type")
        if isinstance(kind, str) and kind in _ITEM_TOOLS:
            yield from _others(tool, _ITEM_TOOLS[kind], where)


def _unknown_in_parts(content: Any, where: str) -> Iterator[str]:
    for place, part in _objects(content, where):
        yield from _others(part, _PART, place)
        for key in ("image_url", "video_url", "audio_url", "input_audio"):
            yield from _others(part.get(key), _MEDIA, f"{place}.{key}")


def _unknown_in_content(content: Any, where: str) -> Iterator[str]:
    for place, block in _objects(content, where):
        kind = block.get("type")
        if isinstance(kind, str) and kind in _BLOCKS:
            yield from _others(block, _BLOCKS[kind], place)
            yield from _others(block.get("source"), _BLOCK_SOURCE, f"{place}.source")
            if kind == "tool_result":
                yield from _unknown_in_content(block.get("content"), f"{place}.content")


def _objects(values: Any, where: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """The objects of a list and their places; what is no list or no object is refused by whoever reads it."""
    if isinstance(values, list):
        for i, value in enumerate(values):
            if isinstance(value, dict):
                yield f"{where}.{i}", value


def _others(value: Any, known: Collection[str], where: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key in value:
            if key not in known and value[key] is not None:
                yield f"{where}.{key}"

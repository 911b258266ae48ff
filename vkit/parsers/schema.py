"""Types of tool arguments that a model writes as text, found in the tool's JSON schema.

Source: the project's parser contract, section A.7 (coercion by schema).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]

_ALIASES = {
    **dict.fromkeys(("int", "int64", "long"), "integer"),
    **dict.fromkeys(("float", "double"), "number"),
    **dict.fromkeys(("bool",), "boolean"),
    **dict.fromkeys(("dict",), "object"),
    **dict.fromkeys(("list", "arr"), "array"),
    **dict.fromkeys(("str", "text", "enum"), "string"),
}
_TYPE_OF_VALUE: dict[type, str] = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
STRING = frozenset({"string"})
"""The types of a parameter that nothing more is known of."""

_MAX_REFERENCES = 16
"""Longer chains of `$ref` are taken for circles."""


class ToolSchemas:
    """The parameters of a request's tools, by tool name."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._parameters: dict[str, Schema] = {}
        for tool in tools:
            function = tool.get("function")
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                parameters = function.get("parameters")
                self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def declares(self, tool: str) -> bool:
        """Whether the request has such a tool."""
        return tool in self._parameters

    def properties(self, tool: str) -> Schema:
        """Schemas of a tool's parameters by name."""
        found = self._parameters.get(tool, {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def required(self, tool: str) -> list[str]:
        """Names of the parameters that a call must have."""
        found = self._parameters.get(tool, {}).get("required")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []

    def types(self, tool: str, parameter: str) -> frozenset[str]:
        """What types a parameter may have; string when nothing is known."""
        return self.types_of(tool, self.properties(tool).get(parameter))

    def types_of(self, tool: str, schema: object) -> frozenset[str]:
        """What types a value described by `schema`, a part of the tool's schema, may have."""
        return frozenset(self._found(tool, schema, 0)) or STRING

    def child(self, tool: str, schema: object, key: str | None) -> object:
        """The schema of a value inside one described by `schema`: at `key` of an object, or any item (None)."""
        for part in self._alternatives(tool, schema, 0):
            inner = part.get("items")
            if key is not None:
                properties = part.get("properties")
                inner = properties.get(key) if isinstance(properties, Mapping) else None
            if inner is not None:
                return inner
        return None

    def _alternatives(self, tool: str, schema: object, depth: int) -> Iterable[Schema]:
        if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
            return
        yield schema
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            for branch in branches if isinstance(branches, list) else ():
                yield from self._alternatives(tool, branch, depth + 1)
        if isinstance(schema.get("$ref"), str):
            yield from self._alternatives(tool, self._resolved(tool, schema["$ref"]), depth + 1)

    def _found(self, tool: str, schema: object, depth: int) -> Iterable[str]:
        for part in self._alternatives(tool, schema, depth):
            kinds = part.get("type")
            for kind in [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else ():
                if isinstance(kind, str):
                    yield _ALIASES.get(kind.lower(), kind.lower())
            values = part.get("enum")
            for value in values if isinstance(values, list) else ():
                yield _TYPE_OF_VALUE.get(type(value), "string")

    def _resolved(self, tool: str, reference: str) -> object:
        found: object = self._parameters.get(tool, {})
        if not reference.startswith("#"):
            return None
        for step in reference[1:].split("/")[1:]:
            if not isinstance(found, Mapping):
                return None
            found = found.get(step.replace("~1", "/").replace("~0", "~"))
        return found


def dumps(value: object) -> str:
    """JSON text of a value, characters unescaped.

    Raises:
        ValueError: the value has a number that JSON cannot hold, or is nested too deep.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        raise ValueError("nested too deep") from None


def loads(text: str) -> Any:
    """The value of JSON text.

    Raises:
        ValueError: not JSON, or nested too deep.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deep") from None


def coerced(text: str, types: frozenset[str]) -> str:
    """JSON text of the value that `text` stands for: the first type that fits, in a fixed order."""
    for kind, convert in _CONVERSIONS.items():
        if kind in types:
            try:
                return convert(text)
            except ValueError:
                continue
    try:
        return dumps(loads(text))
    except ValueError:
        return dumps(text)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _null(text: str) -> str:
    if text.strip().lower() != "null":
        raise ValueError(text)
    return "null"


def _integer(text: str) -> str:
    return str(int(text.strip()))


def _number(text: str) -> str:
    value = float(text.strip())
    if not math.isfinite(value):
        raise ValueError(text)
    return str(int(value)) if value.is_integer() else repr(value)


def _boolean(text: str) -> str:
    word = text.strip().lower()
    if word in ("true", "1"):
        return "true"
    if word in ("false", "0"):
        return "false"
    raise ValueError(text)


def _container(kind: type) -> Callable[[str], str]:
    def convert(text: str) -> str:
        value = loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return dumps(value)

    return convert


_CONVERSIONS: dict[str, Callable[[str], str]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container(dict),
    "array": _container(list),
    "string": dumps,
}

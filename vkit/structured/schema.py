"""JSON schemas, made ready for the grammar library: what it would pass over in silence is refused or brought to a form
it enforces. Knows the keywords, not how they become a grammar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from vkit.structured.messages import clip, refused

MAX_DEPTH = 64
"""Levels of nesting a schema may have."""

Schema = dict[str, Any]

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_FORMATS = frozenset(
    {"date", "time", "date-time", "duration", "uuid", "email", "ipv4", "ipv6", "uri", "hostname"},
)
_YEAR = "(000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DAY = "((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
_LEAP_YEAR = "([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DATE = f"({_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_CALENDAR = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}[Tt]"}
"""Patterns beside the library's formats, which know no calendar: they would let February have 31 days."""
_ONE_SCHEMA = frozenset({"items", "additionalItems", "additionalProperties"})
_SCHEMA_LISTS = frozenset({"prefixItems", "anyOf", "oneOf", "allOf"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties"})
_DEFINITIONS = frozenset({"$defs", "definitions"})
_VALUES = frozenset(
    {
        *("type", "enum", "const", "required", "minProperties", "maxProperties", "minItems", "maxItems"),
        *("minLength", "maxLength", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "multipleOf", "$ref", "nullable", "$schema"),
    }
)
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$id", "id", "$anchor", "$vocabulary", "contentMediaType", "contentEncoding", "contentSchema"),
        *("discriminator", "externalDocs", "xml", "markdownDescription", "enumDescriptions", "propertyOrdering"),
    }
)
_IDLE = {"uniqueItems": False, "unevaluatedProperties": True, "unevaluatedItems": True}
"""Keywords that cannot be enforced, and the value with which they ask for nothing."""


@dataclass(slots=True)
class PreparedSchema:
    """A schema the library may compile, and its patterns by place, to find the culprit when it cannot."""

    schema: Schema
    patterns: list[tuple[str, str]] = field(default_factory=list)


def parsed(text: str, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        InvalidRequest: not JSON; `what` is the field.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise refused(what, f"not JSON: {error}") from None


def prepared_schema(
    given: Mapping[str, Any] | bool | str, *, closes_objects: bool = False, what: str = "json"
) -> PreparedSchema:
    """The schema as it will be enforced. `closes_objects`: objects have no undeclared keys unless the schema says so.

    Raises:
        InvalidRequest: a keyword or value that cannot be enforced; the message names it and its place.
    """
    value = parsed(given, what) if isinstance(given, str) else given
    if value is True:
        return PreparedSchema({})
    if value is False:
        raise refused(what, "the schema is false: no output is valid")
    if not isinstance(value, Mapping):
        raise refused(what, f"a schema is an object or a boolean, got {clip(json.dumps(value, default=str))}")
    check_json(value, what)
    walk = _Walk(deepcopy(dict(value)), closes_objects, what)
    return walk.run()


def check_json(value: Any, what: str) -> None:
    """Refuse what is no JSON or nests too deeply.

    Raises:
        InvalidRequest: naming the fault.
    """
    for depth, item in _leaves(value):
        if depth > MAX_DEPTH:
            raise refused(what, f"nested deeper than {MAX_DEPTH} levels")
        if isinstance(item, float) and not math.isfinite(item):
            raise refused(what, f"{item} is no JSON number")
        if item is not None and not isinstance(item, str | int | float):
            raise refused(what, f"{clip(repr(item))} is no JSON value")
        if isinstance(item, str) and not item.isascii():
            try:
                item.encode()
            except UnicodeEncodeError:
                raise refused(what, f"{item!r} holds a lone surrogate") from None


def _leaves(value: Any) -> Iterator[tuple[int, Any]]:
    """(depth, value) of every scalar and key, and of empty containers as None."""
    waiting = [(0, value)]
    while waiting:
        depth, item = waiting.pop()
        if depth > MAX_DEPTH:
            yield depth, None
        elif isinstance(item, Mapping):
            yield depth + 1, None
            for key, child in item.items():
                yield depth, key
                waiting.append((depth + 1, child))
        elif isinstance(item, list | tuple):
            yield depth + 1, None
            waiting.extend((depth + 1, child) for child in item)
        else:
            yield depth, item


class _Walk:
    """One pass over a schema, rewriting it in place. Definitions are visited when something refers to them."""

    def __init__(self, root: Schema, closes_objects: bool, what: str) -> None:
        self._root = root
        self._closes_objects = closes_objects
        self._what = what
        self._patterns: list[tuple[str, str]] = []
        self._seen: set[int] = set()

    def run(self) -> PreparedSchema:
        """Visit everything that can matter."""
        self._visit(self._root, "")
        return PreparedSchema(self._root, self._patterns)

    def _refuse(self, place: str, message: str) -> Exception:
        return refused(self._what, f"{message} at {place}" if place else message)

    def _visit(self, node: Any, place: str) -> None:
        if isinstance(node, bool):
            return
        if not isinstance(node, dict):
            raise self._refuse(place, f"a schema is an object or a boolean, got {clip(json.dumps(node))}")
        if id(node) in self._seen:
            return
        self._seen.add(id(node))
        self._drop_annotations(node, place)
        self._check_values(node, place)
        for key in list(node):
            self._visit_children(key, node[key], f"{place}/{key}")
        if self._closes_objects and _is_object(node) and not {"additionalProperties", "patternProperties"} & set(node):
            node["additionalProperties"] = False
        if node.pop("nullable", False):
            inner = dict(node)
            definitions = {key: inner.pop(key) for key in ("$schema", *_DEFINITIONS) if key in inner}
            node.clear()
            node.update(definitions)
            node["anyOf"] = [inner, {"type": "null"}]

    def _drop_annotations(self, node: Schema, place: str) -> None:
        known = _ONE_SCHEMA | _SCHEMA_LISTS | _SCHEMA_MAPS | _DEFINITIONS | _VALUES
        for key in list(node):
            if key in known:
                continue
            is_idle = key in _IDLE and node[key] is _IDLE[key]
            if not (is_idle or key in _ANNOTATIONS or key.startswith("x-")):
                raise self._refuse(place, f"the keyword {clip(repr(key))} cannot be enforced")
            del node[key]

    def _check_values(self, node: Schema, place: str) -> None:
        types = _types(node)
        for name in types:
            if not isinstance(name, str) or name not in _TYPES:
                raise self._refuse(place, f"unknown type {clip(json.dumps(name))}")
        if "format" in node:
            self._check_format(node, types, place)
        if "pattern" in node:
            if not isinstance(node["pattern"], str):
                raise self._refuse(place, f"pattern: expected a string, got {clip(json.dumps(node['pattern']))}")
            self._patterns.append((place, node["pattern"]))
        for bound, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(node.get(bound), bool):  # draft 4 wrote a flag beside the limit
                is_exclusive = node.pop(bound)
                if is_exclusive and limit in node:
                    node[bound] = node.pop(limit)
        if not isinstance(node.get("nullable", False), bool):
            raise self._refuse(place, f"nullable: expected true or false, got {clip(json.dumps(node['nullable']))}")

    def _check_format(self, node: Schema, types: list[Any], place: str) -> None:
        name = node["format"]
        if types and "string" not in types:
            del node["format"]  # of numbers it describes the storage, not the text
        elif not isinstance(name, str) or name not in _FORMATS:
            raise self._refuse(place, f"the format {clip(json.dumps(name))} cannot be enforced")
        elif name in _CALENDAR and isinstance(node.setdefault("allOf", []), list):
            node["allOf"].append({"pattern": _CALENDAR[name]})

    def _visit_children(self, key: str, value: Any, place: str) -> None:
        if key == "$ref":
            self._follow(value, place)
        elif key in _ONE_SCHEMA and not isinstance(value, list):
            self._visit(value, place)
        elif key in _SCHEMA_LISTS or key in _ONE_SCHEMA:
            if not isinstance(value, list):
                raise self._refuse(place, f"expected a list of schemas, got {clip(json.dumps(value))}")
            for index, child in enumerate(value):
                self._visit(child, f"{place}/{index}")
        elif key in _SCHEMA_MAPS:
            if not isinstance(value, dict):
                raise self._refuse(place, f"expected an object of schemas, got {clip(json.dumps(value))}")
            for name, child in value.items():
                if key == "patternProperties":
                    self._patterns.append((place, name))
                self._visit(child, f"{place}/{name}")

    def _follow(self, ref: Any, place: str) -> None:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise self._refuse(place, f"only references inside the schema are followed, got {clip(json.dumps(ref))}")
        node: Any = self._root
        for step in ref[2:].split("/") if ref != "#" else []:
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and name in node:
                node = node[name]
            elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
                node = node[int(name)]
            else:
                raise self._refuse(place, f"{clip(json.dumps(ref))} refers to nothing")
        self._visit(node, ref.removeprefix("#"))


def _types(node: Schema) -> list[Any]:
    given = node.get("type", [])
    return given if isinstance(given, list) else [given]


def _is_object(node: Schema) -> bool:
    return "properties" in node or "object" in _types(node)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")

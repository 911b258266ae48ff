"""Calls in a family's own syntax, as structural-tag nodes made from the tools' schemas.

For families whose values are not JSON: the nodes allow what the family's parser reads back as arguments that the schema
accepts. What cannot be held to its schema in such a syntax is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vkit.errors import InvalidRequest
from vkit.parsers.schema import STRING, ToolSchemas, dumps

Node = dict[str, Any]
Schema = Mapping[str, Any]

MAX_ITEMS = 64
"""Longest array whose length can be held to a limit."""
MAX_REFERENCES = 16
_NOTES = frozenset(
    {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"}
)
"""Keywords that no value depends on."""
_OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
)
_STRING = frozenset({"type", "enum", "const", "minLength", "maxLength", "pattern"})
_NUMBER = frozenset(
    {"type", "enum", "const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
)
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"})
_SCALARS = ("integer", "number", "boolean", "null")


def literal(text: str) -> Node:
    """Fixed text."""
    return {"type": "const_string", "value": text}


def sequence(*nodes: Node) -> Node:
    """One after another."""
    return {"type": "sequence", "elements": list(nodes)}


def either(*nodes: Node) -> Node:
    """One of them."""
    return {"type": "or", "elements": list(nodes)}


NOTHING = literal("")


def optional(*nodes: Node) -> Node:
    """All of them, or nothing."""
    return either(sequence(*nodes), NOTHING)


class CallSyntax:
    """Writes the arguments of one tool's calls. A family says how a pair and its value look."""

    def __init__(self, tool: Mapping[str, Any]) -> None:
        function = tool["function"]
        self.tool: str = function["name"]
        parameters = function.get("parameters")
        self.parameters: Schema = parameters if isinstance(parameters, Mapping) else {}
        self._schemas = ToolSchemas([tool])

    def refused(self, where: str, why: str) -> InvalidRequest:
        """The error about a part of the schema."""
        return InvalidRequest(
            f"tool_choice: {self.tool}: {where}: {why}, so a call cannot be forced in this model's syntax",
            param="tool_choice",
        )

    def only(self, schema: Schema, allowed: frozenset[str], where: str) -> None:
        """Refuse keywords that nothing here holds to.

        Raises:
            InvalidRequest: naming the keyword.
        """
        unknown = sorted(str(key) for key in schema.keys() - allowed - _NOTES)
        if unknown:
            raise self.refused(where, f"{unknown[0]} cannot be enforced")

    def pairs(
        self,
        schema: Schema,
        pair: Callable[[str, object, str], Node],
        *,
        separator: str = "",
        where: str = "parameters",
    ) -> Node:
        """An object's properties: the required ones first, then any of the others, each group in the schema's order.

        `pair(name, schema, where)` writes one.

        Raises:
            InvalidRequest: a keyword that cannot be enforced.
        """
        self.only(schema, _OBJECT, where)
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        names = schema.get("required")
        names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
        for name in names:
            if name not in properties:
                raise self.refused(where, f"{name} is required and not described")
        needed = [pair(name, properties[name], f"{where}.{name}") for name in properties if name in names]
        others = [pair(name, item, f"{where}.{name}") for name, item in properties.items() if name not in names]
        comma = literal(separator)
        nodes: list[Node] = []
        for node in needed:
            nodes += [comma, node] if nodes else [node]
        if needed or not separator:
            nodes += [optional(comma, node) for node in others]
        elif others:
            starts = [
                sequence(node, *(optional(comma, later) for later in others[i + 1 :])) for i, node in enumerate(others)
            ]
            nodes = [either(NOTHING, *starts)]
        return sequence(*nodes) if nodes else NOTHING

    def types(self, schema: object) -> frozenset[str]:
        """What types a value may have; string when nothing is known."""
        return self._schemas.types_of(self.tool, schema)

    def text(self, schema: Schema, end: str, where: str) -> Node:
        """The bare characters of a string, and the text that ends it.

        Raises:
            InvalidRequest: a keyword that cannot be enforced.
        """
        self.only(schema, _STRING, where)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            if not values or not all(isinstance(value, str) and end not in value for value in values):
                raise self.refused(where, "its values are not all strings")
            return sequence(either(*map(literal, values)), literal(end))
        pattern, least, most = schema.get("pattern"), schema.get("minLength", 0), schema.get("maxLength")
        if pattern is not None:
            if least or most is not None:
                raise self.refused(where, "pattern beside minLength or maxLength cannot be enforced")
            return sequence({"type": "regex", "pattern": searched(pattern)}, literal(end))
        if least or most is not None:
            bounds = f"{least},{most if most is not None else ''}"
            return sequence({"type": "regex", "pattern": f"[^<]{{{bounds}}}"}, literal(end))
        return sequence({"type": "any_text"}, literal(end))

    def json(self, schema: Schema) -> Node:
        """JSON that the schema accepts; its references find what they refer to."""
        if "$ref" in dumps(schema):
            moved = _moved(self.parameters)
            schema = {**_moved(schema), "$defs": {"parameters": moved}}
        return {"type": "json_schema", "json_schema": schema}


class KeyValueSyntax(CallSyntax):
    """Pairs of tags around keys and values: strings bare, everything else JSON."""

    def __init__(self, tool: Mapping[str, Any], tags: Sequence[str]) -> None:
        """`tags`: what opens and closes a key, what opens and closes a value."""
        super().__init__(tool)
        self._key, self._key_end, self._value, self._value_end = tags

    def call(self, begin: str, end: str) -> Node:
        """A whole call."""
        line = optional(literal("\n"))
        inner = self.pairs(self.parameters, lambda name, schema, where: sequence(line, self._pair(name, schema, where)))
        return sequence(literal(f"{begin}{self.tool}"), inner, line, literal(end))

    def _pair(self, name: str, schema: object, where: str) -> Node:
        if self._key_end in name or name.strip() != name:
            raise self.refused(where, "such a name cannot be written")
        head = literal(f"{self._key}{name}{self._key_end}")
        begin, line = literal(self._value), optional(literal("\n"))
        return sequence(head, line, begin, self._written(schema, where))

    def _written(self, schema: object, where: str) -> Node:
        known = schema if isinstance(schema, Mapping) else {}
        types = self.types(known)
        if types == STRING:
            if known.keys() & {"$ref", "anyOf", "oneOf", "allOf"}:
                known = self._sole(known, where)
            return self.text(known, self._value_end, where)
        if "string" not in types:
            return sequence(self.json(known), literal(self._value_end))
        values = known.get("enum")
        if isinstance(values, list):
            texts = [value if isinstance(value, str) else dumps(value) for value in values]
            return sequence(either(*map(literal, texts)), literal(self._value_end))
        raise self.refused(where, "a value that is a string or something else cannot be told apart")

    def _sole(self, schema: Schema, where: str) -> Schema:
        """The one schema behind references and lone branches.

        Raises:
            InvalidRequest: there are several.
        """
        for _ in range(MAX_REFERENCES):
            branches = next((schema[key] for key in ("anyOf", "oneOf", "allOf") if key in schema), None)
            if isinstance(branches, list) and len(branches) == 1 and isinstance(branches[0], Mapping):
                schema = branches[0]
            elif isinstance(schema.get("$ref"), str):
                schema = target(self.parameters, schema["$ref"])
            elif branches is not None:
                raise self.refused(where, "alternatives of strings cannot be enforced")
            else:
                return schema
        raise self.refused(where, "its references run in a circle")


def searched(pattern: str) -> str:
    """The pattern for a whole text that `pattern` matches somewhere, as JSON Schema means it."""
    begin = "" if pattern.startswith("^") else "[^<]*"
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern.removeprefix("^")
    return f"{begin}({inner[:-1] if ends else inner}){'' if ends else '[^<]*'}"


def target(root: Schema, reference: str) -> Schema:
    """What a reference inside `root` leads to; an empty schema when it leads nowhere."""
    found: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _moved(node: Any) -> Any:
    """A copy whose references into the parameters hold where those are a definition called `parameters`."""
    if isinstance(node, Mapping):
        return {
            key: f"#/$defs/parameters{value[1:]}"
            if key == "$ref" and isinstance(value, str) and value.startswith("#")
            else _moved(value)
            for key, value in node.items()
        }
    return [_moved(item) for item in node] if isinstance(node, list) else node


class DialectSyntax(CallSyntax):
    """{key:value,…}: strings in quotes of their own, objects and arrays in the same dialect, scalars as in JSON."""

    def __init__(self, tool: Mapping[str, Any], quote: str) -> None:
        super().__init__(tool)
        self._quote = quote

    def call(self, begin: str, end: str) -> Node:
        """A whole call."""
        return sequence(literal(f"{begin}{self.tool}"), self._object(self.parameters, "parameters", 0), literal(end))

    def _object(self, schema: Schema, where: str, depth: int) -> Node:
        inner = self.pairs(
            schema, lambda name, item, place: self._pair(name, item, place, depth), separator=",", where=where
        )
        return sequence(literal("{"), inner, literal("}"))

    def _pair(self, name: str, schema: object, where: str, depth: int) -> Node:
        is_plain = name.replace("_", "").replace("-", "").isalnum()
        if self._quote in name:
            raise self.refused(where, "such a name cannot be written")
        key = name if is_plain else f"{self._quote}{name}{self._quote}"
        return sequence(literal(f"{key}:"), self._written(schema, where, depth))

    def _written(self, schema: object, where: str, depth: int) -> Node:
        if depth > MAX_REFERENCES:
            raise self.refused(where, "it is nested too deep, or in itself")
        known = schema if isinstance(schema, Mapping) else {}
        if isinstance(known.get("$ref"), str):
            self.only(known, frozenset({"$ref"}), where)
            return self._written(target(self.parameters, known["$ref"]), where, depth + 1)
        for key in ("anyOf", "oneOf", "allOf"):
            branches = known.get(key)
            if isinstance(branches, list):
                self.only(known, frozenset({key}), where)
                if key == "allOf" and len(branches) > 1:
                    raise self.refused(where, "allOf cannot be enforced")
                return either(*(self._written(branch, where, depth + 1) for branch in branches))
        values = [known["const"]] if "const" in known else known.get("enum")
        if isinstance(values, list):
            return either(*(self._constant(value, where) for value in values))
        kinds = known.get("type")
        if kinds is None:
            self.only(known, frozenset(), where)
            kinds = ["string", "number", "boolean", "null"]
        kinds = [kinds] if isinstance(kinds, str) else kinds
        return either(*(self._of_type(kind, known, where, depth, len(kinds) == 1) for kind in kinds))

    def _constant(self, value: object, where: str) -> Node:
        if isinstance(value, str):
            if self._quote in value:
                raise self.refused(where, "such a value cannot be written")
            return literal(f"{self._quote}{value}{self._quote}")
        if isinstance(value, list | dict):
            raise self.refused(where, "an enum of lists or objects cannot be enforced")
        return literal(dumps(value))

    def _of_type(self, kind: str, schema: Schema, where: str, depth: int, is_only: bool) -> Node:
        own = {"string": _STRING, "array": _ARRAY, "object": _OBJECT}.get(kind, _NUMBER)
        if is_only:
            self.only(schema, own, where)
        schema = {key: value for key, value in schema.items() if key in own}
        if kind == "string":
            return sequence(literal(self._quote), self.text(schema, self._quote, where))
        if kind == "object":
            return self._object(schema, where, depth + 1)
        if kind == "array":
            return self._array(schema, where, depth)
        if kind not in _SCALARS:
            raise self.refused(where, f"type {kind!r} cannot be enforced")
        return {"type": "json_schema", "json_schema": {**schema, "type": kind}}

    def _array(self, schema: Schema, where: str, depth: int) -> Node:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if max(least, most or 0) > MAX_ITEMS:
            raise self.refused(where, f"an array of more than {MAX_ITEMS} items cannot be enforced")
        if most == 0:
            return literal("[]")
        item, comma = self._written(schema.get("items"), f"{where}.items", depth + 1), literal(",")
        needed = [item, *[comma, item] * (max(least, 1) - 1)]
        if most is None:
            repeated = {"type": "tag", "begin": ",", "content": item, "end": ""}
            rest = {"type": "tags_with_separator", "tags": [repeated], "separator": ""}
        else:
            rest = NOTHING
            for _ in range(most - max(least, 1)):
                rest = optional(comma, item, rest)
        items = sequence(*needed, rest)
        return sequence(literal("["), items if least else either(items, NOTHING), literal("]"))

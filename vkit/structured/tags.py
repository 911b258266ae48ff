"""Structural tags: free text in which tagged sections follow a constraint, written as one Lark grammar.

Forms: `{"type": "structural_tag", "format": NODE}`, and the older `{"type": "structural_tag", "structures": [{"begin",
"schema", "end"}], "triggers": [...]}`. A node has a `type`:

- `const_string` value; `json_schema` json_schema; `regex` pattern; `grammar` grammar; `any_text`
- `sequence` elements; `or` elements; `tag` begin, content, end
- `triggered_tags` triggers, tags, at_least_one, stop_after_first: text is free until a trigger appears; then a tag
  that begins with it must follow
- `tags_with_separator` tags, separator, at_least_one, stop_after_first
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vkit.structured.gbnf import gbnf_to_lark, is_gbnf
from vkit.structured.messages import clip, refused
from vkit.structured.schema import check_json, parsed

SchemaWriter = Callable[[Any, str], str]
"""(schema, what) -> the JSON text of the schema with the library's options in it."""


@dataclass(frozen=True, slots=True)
class _Free:
    """Any text."""


@dataclass(frozen=True, slots=True)
class _Literal:
    text: str


@dataclass(frozen=True, slots=True)
class _Rule:
    """A piece of Lark that stands for itself."""

    lark: str


_Piece = _Free | _Literal | _Rule

_FIELDS: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    # type -> (required fields, optional ones)
    "const_string": (frozenset({"value"}), frozenset()),
    "json_schema": (frozenset({"json_schema"}), frozenset()),
    "any_text": (frozenset(), frozenset()),
    "grammar": (frozenset({"grammar"}), frozenset()),
    "regex": (frozenset({"pattern"}), frozenset()),
    "sequence": (frozenset({"elements"}), frozenset()),
    "or": (frozenset({"elements"}), frozenset()),
    "tag": (frozenset({"begin", "content", "end"}), frozenset()),
    "triggered_tags": (frozenset({"triggers", "tags"}), frozenset({"at_least_one", "stop_after_first"})),
    "tags_with_separator": (frozenset({"tags", "separator"}), frozenset({"at_least_one", "stop_after_first"})),
}


def structural_tag_grammar(
    given: str | Mapping[str, Any], write_schema: SchemaWriter, special_texts: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The grammars of a structural tag, the main one first. `special_texts`: control tokens by text, which may stand
    for it.

    Raises:
        InvalidRequest: a form that cannot be enforced.
    """
    value = parsed(given, "structural_tag") if isinstance(given, str) else given
    if not isinstance(value, Mapping):
        raise _refused("", f"expected an object, got {clip(json.dumps(value))}")
    check_json(value, "structural_tag")
    if value.get("type") != "structural_tag":
        raise _refused("type", f"expected 'structural_tag', got {clip(json.dumps(value.get('type')))}")
    writer = _Writer(write_schema, special_texts)
    return writer.write(_format_of(value))


def _format_of(value: Mapping[str, Any]) -> Any:
    """The format node; the older form as the node it stands for."""
    if "format" in value:
        _only(value, frozenset({"type", "format"}), "")
        return value["format"]
    _only(value, frozenset({"type", "structures", "triggers"}), "")
    tags = []
    for index, item in enumerate(_a_list(value.get("structures"), "structures")):
        where = f"structures.{index}"
        if not isinstance(item, Mapping) or "begin" not in item or "end" not in item:
            raise _refused(where, "expected an object with begin, schema and end")
        _only(item, frozenset({"begin", "schema", "end"}), where)
        content = {"type": "json_schema", "json_schema": item.get("schema", True)}
        tags.append({"type": "tag", "begin": item["begin"], "content": content, "end": item["end"]})
    return {"type": "triggered_tags", "triggers": value.get("triggers"), "tags": tags}


class _Writer:
    """Turns nodes into rules. A node is first a row of pieces; free text is joined to the text that ends it."""

    def __init__(self, write_schema: SchemaWriter, special_texts: Mapping[str, int]) -> None:
        self._write_schema = write_schema
        self._special_texts = sorted(special_texts.items(), key=lambda item: -len(item[0]))
        self._lines: list[str] = []
        self._side: list[dict[str, Any]] = []
        self._num_names = 0

    def write(self, node: Any) -> list[dict[str, Any]]:
        """All grammars."""
        body = self._row(self._pieces(node, "format"), "format", is_last=True)
        lark = "\n".join([f"start: {body}", r"TEXT: /(?s:.*)/", *self._lines]) + "\n"
        return [{"lark_grammar": lark}, *self._side]

    # Nodes

    def _pieces(self, node: Any, where: str) -> list[_Piece]:
        if not isinstance(node, Mapping) or node.get("type") not in _FIELDS:
            kinds = ", ".join(_FIELDS)
            found = node.get("type") if isinstance(node, Mapping) else node
            raise _refused(where, f"expected an object whose type is one of {kinds}; got {clip(json.dumps(found))}")
        kind = node["type"]
        required, optional = _FIELDS[kind]
        _only(node, required | optional | {"type"}, where)
        missing = sorted(required - set(node))
        if missing:
            raise _refused(where, f"{kind} needs {missing[0]}")
        match kind:
            case "const_string":
                return [_Literal(_text(node["value"], f"{where}.value"))]
            case "any_text":
                return [_Free()]
            case "json_schema":
                return [self._schema(node["json_schema"], f"{where}.json_schema")]
            case "regex":
                return [self._regex(node["pattern"], f"{where}.pattern")]
            case "grammar":
                return [self._grammar(node["grammar"], f"{where}.grammar")]
            case "sequence":
                elements = _a_list(node["elements"], f"{where}.elements")
                return [
                    piece for i, item in enumerate(elements) for piece in self._pieces(item, f"{where}.elements.{i}")
                ]
            case "or":
                return [self._either(node["elements"], where)]
            case "tag":
                return self._tag(node, where)
            case "triggered_tags":
                return self._triggered(node, where)
            case _:
                return [self._separated(node, where)]

    def _tag(self, node: Any, where: str, *, skip: int = 0) -> list[_Piece]:
        """A tag, without the first `skip` characters of its begin."""
        if not isinstance(node, Mapping) or node.get("type", "tag") != "tag":
            raise _refused(where, "expected a tag")
        _only(node, frozenset({"type", "begin", "content", "end"}), where)
        for name in ("begin", "content", "end"):
            if name not in node:
                raise _refused(where, f"tag needs {name}")
        begin, end = _text(node["begin"], f"{where}.begin"), _text(node["end"], f"{where}.end")
        return [_Literal(begin[skip:]), *self._pieces(node["content"], f"{where}.content"), _Literal(end)]

    def _schema(self, schema: Any, where: str) -> _Rule:
        return _Rule(f"%json {self._write_schema(schema, f'structural_tag: {where}')}")

    def _regex(self, pattern: Any, where: str) -> _Rule:
        from llguidance import regex_to_lark

        if not isinstance(pattern, str) or not pattern:
            raise _refused(where, "expected a non-empty string")
        return _Rule(self._named(f"/{regex_to_lark(pattern, '')}/", terminal=True))

    def _grammar(self, text: Any, where: str) -> _Rule:
        if not isinstance(text, str) or not text.strip():
            raise _refused(where, "expected a non-empty string")
        name = f"g{len(self._side)}"
        self._side.append({"name": name, "lark_grammar": gbnf_to_lark(text) if is_gbnf(text) else text})
        return _Rule(f"@{name}")

    def _either(self, elements: Any, where: str) -> _Rule:
        options = [
            self._row(self._pieces(item, f"{where}.elements.{i}"), f"{where}.elements.{i}", is_last=False)
            for i, item in enumerate(_a_list(elements, f"{where}.elements"))
        ]
        return _Rule(self._named(" | ".join(options)))

    def _triggered(self, node: Mapping[str, Any], where: str) -> list[_Piece]:
        triggers = [
            _text(item, f"{where}.triggers.{i}")
            for i, item in enumerate(_a_list(node["triggers"], f"{where}.triggers"))
        ]
        if "" in triggers:
            raise _refused(f"{where}.triggers", "a trigger must not be empty")
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, tag in enumerate(_a_list(node["tags"], f"{where}.tags")):
            place = f"{where}.tags.{i}"
            begin = tag.get("begin") if isinstance(tag, Mapping) else None
            trigger = next((item for item in triggers if isinstance(begin, str) and begin.startswith(item)), None)
            if trigger is None:
                raise _refused(place, f"begins with none of the triggers ({clip(', '.join(triggers))})")
            by_trigger[trigger].append(self._row(self._tag(tag, place, skip=len(trigger)), place, is_last=False))
        unused = [trigger for trigger, tags in by_trigger.items() if not tags]
        if unused:
            raise _refused(f"{where}.triggers", f"no tag begins with {unused[0]!r}")
        options = [f"{self._after_text(trigger)} ({' | '.join(tags)})" for trigger, tags in by_trigger.items()]
        section = self._named(" | ".join(options))
        needs_one, only_one = _flag(node, "at_least_one", where), _flag(node, "stop_after_first", where)
        if only_one:
            return [_Rule(section if needs_one else self._named(f"{section} | TEXT"))]
        return [_Rule(f"{section}{'+' if needs_one else '*'}"), _Free()]

    def _separated(self, node: Mapping[str, Any], where: str) -> _Rule:
        tags = [
            self._row(self._tag(tag, f"{where}.tags.{i}"), f"{where}.tags.{i}", is_last=False)
            for i, tag in enumerate(_a_list(node["tags"], f"{where}.tags"))
        ]
        one = self._named(" | ".join(tags))
        separator = self._literal(_text(node["separator"], f"{where}.separator"))
        body = one if _flag(node, "stop_after_first", where) else f"{one} ({separator} {one})*"
        return _Rule(f"({body})" if _flag(node, "at_least_one", where) else f"({body})?")

    # Rows

    def _row(self, pieces: list[_Piece], where: str, *, is_last: bool) -> str:
        """The pieces one after another. Free text must run up to a literal, or be the very end (`is_last`)."""
        written: list[str] = []
        pieces = [piece for piece in pieces if not (isinstance(piece, _Literal) and not piece.text)]
        for index, piece in enumerate(pieces):
            before = pieces[index - 1] if index else None
            if isinstance(piece, _Literal):
                # The text that ends free text is part of its rule.
                written.append(self._after_text(piece.text) if isinstance(before, _Free) else self._literal(piece.text))
            elif isinstance(piece, _Rule):
                if isinstance(before, _Free):
                    raise _refused(where, "any_text must be followed by fixed text, or be the last thing")
                written.append(piece.lark)
        if pieces and isinstance(pieces[-1], _Free):
            if not is_last:
                raise _refused(where, "any_text must be followed by fixed text, or be the last thing")
            written.append("TEXT")
        return " ".join(written) or '""'

    def _after_text(self, literal: str) -> str:
        """Free text up to and including the first place where the literal appears."""
        name = f"t{self._next()}"
        self._lines.append(f"{name}[lazy]: /(?s:.*)/ {_quoted(literal)}")
        leading = next((entry for entry in self._special_texts if literal.startswith(entry[0])), None)
        if leading is None:
            return name
        text, token_id = leading
        rest = literal[len(text) :]
        return self._named(f"{name} | TEXT <[{token_id}]>" + (f" {self._literal(rest)}" if rest else ""))

    def _literal(self, text: str) -> str:
        """Fixed text; what spells a control token is that token, and never its letters."""
        for special, token_id in self._special_texts:
            before, found, after = text.partition(special)
            if found:
                parts = [f"<[{token_id}]>"]
                if before:
                    parts.insert(0, self._literal(before))
                if after:
                    parts.append(self._literal(after))
                return " ".join(parts)
        return _quoted(text)

    def _named(self, body: str, *, terminal: bool = False) -> str:
        name = f"{'N' if terminal else 'n'}{self._next()}"
        self._lines.append(f"{name}: {body}")
        return name

    def _next(self) -> int:
        self._num_names += 1
        return self._num_names


def _refused(where: str, message: str) -> Exception:
    return refused("structural_tag", f"{where}: {message}" if where else message)


def _only(node: Mapping[str, Any], allowed: frozenset[str], where: str) -> None:
    unknown = sorted(str(key) for key in set(node) - allowed)
    if unknown:
        raise _refused(where, f"unknown field {unknown[0]!r}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _refused(where, f"expected a string, got {clip(json.dumps(value))}")
    return value


def _a_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list | tuple) or not value:
        raise _refused(where, "expected a non-empty list")
    return list(value)


def _flag(node: Mapping[str, Any], name: str, where: str) -> bool:
    value = node.get(name, False)
    if not isinstance(value, bool):
        raise _refused(f"{where}.{name}", f"expected true or false, got {clip(json.dumps(value))}")
    return value


def _quoted(text: str) -> str:
    """The text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)

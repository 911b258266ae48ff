"""GBNF, the grammar notation of llama.cpp, brought to the Lark notation of the grammar library.

GBNF describes characters; the library splits text into terminals and matches the longest first. So that no text is
lost to that, everything regular becomes one terminal: a whole rule that does not refer to itself, and each run of
regular items inside a rule that does.

Source: the grammar guide of llama.cpp (grammars/README.md).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

from vkit.structured.messages import refused

MAX_REPEAT = 10_000
"""Most times an item may be asked to repeat."""

_IS_GBNF = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_BLANK = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANK_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_REPEAT = re.compile(r"\{\s*(\d+)\s*(?:(,)\s*(\d*)\s*)?\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-", "^": "^"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF rather than Lark: some rule is defined with ::=."""
    return _IS_GBNF.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """The same language in Lark notation; the start rule `root` becomes `start`.

    Raises:
        InvalidRequest: a syntax error, with its line and column, or a rule that does not exist.
    """
    return _Writer(_Parser(text).rules()).write()


@dataclass(frozen=True, slots=True)
class _Chars:
    """One character out of a class, or a literal: a piece of regex, with the code point of each single character."""

    regex: str


@dataclass(frozen=True, slots=True)
class _Name:
    rule: str
    at: int


@dataclass(frozen=True, slots=True)
class _Repeat:
    item: _Node
    suffix: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    options: tuple[_Node, ...]


_Node = _Chars | _Name | _Repeat | _Sequence | _Either


class _Parser:
    """Reads GBNF. Positions are offsets into the text until an error turns one into line and column."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, _Node]:
        """Rules by name."""
        found: dict[str, _Node] = {}
        names: list[_Name] = []
        self._names = names
        self._skip(_BLANK_AND_LINES)
        while self._at < len(self._text):
            start = self._at
            name = self._take(_NAME, "a rule name")
            self._skip(_BLANK)
            self._expect("::=")
            self._skip(_BLANK_AND_LINES)
            if name in found:
                self._fail(f"the rule {name!r} is defined twice", start)
            found[name] = self._alternatives(is_nested=False)
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail(f"unexpected {self._text[self._at]!r}")
            self._skip(_BLANK_AND_LINES)
        for used in names:
            if used.rule not in found:
                self._fail(f"there is no rule {used.rule!r}", used.at)
        if "root" not in found:
            raise refused("grammar", "there is no rule named root")
        return found

    def _alternatives(self, *, is_nested: bool) -> _Node:
        options = [self._sequence(is_nested=is_nested)]
        while self._next_is_bar(is_nested):
            self._at += 1
            self._skip(_BLANK_AND_LINES)
            options.append(self._sequence(is_nested=is_nested))
        return options[0] if len(options) == 1 else _Either(tuple(options))

    def _next_is_bar(self, is_nested: bool) -> bool:
        self._skip(_BLANK_AND_LINES if is_nested else _BLANK)
        if self._peek() == "|":
            return True
        # A line that begins with | goes on with the rule above it.
        match = _BLANK_AND_LINES.match(self._text, self._at)
        if match is not None and self._text[match.end() : match.end() + 1] == "|":
            self._at = match.end()
            return True
        return False

    def _sequence(self, *, is_nested: bool) -> _Node:
        items: list[_Node] = []
        while True:
            self._skip(_BLANK_AND_LINES if is_nested else _BLANK)
            item = self._item()
            if item is None:
                return items[0] if len(items) == 1 else _Sequence(tuple(items))
            suffix = self._suffix(is_nested)
            while suffix:
                item = _Repeat(item, suffix)
                suffix = self._suffix(is_nested)
            items.append(item)

    def _item(self) -> _Node | None:
        char = self._peek()
        if char == '"':
            return self._literal()
        if char == "[":
            return self._char_class()
        if char == "(":
            return self._group()
        if char == ".":
            self._at += 1
            return _Chars("(?s:.)")
        match = _NAME.match(self._text, self._at)
        if match is None:
            return None
        name = _Name(match.group(), self._at)
        self._at = match.end()
        self._names.append(name)
        return name

    def _literal(self) -> _Node:
        start = self._at
        self._at += 1
        pieces = []
        while self._peek() != '"':
            if self._peek() in ("", "\n", "\r"):
                self._fail("this text has no closing quote", start)
            pieces.append(_escaped(self._char()))
        self._at += 1
        return _Chars("".join(pieces)) if pieces else _Sequence(())

    def _char_class(self) -> _Chars:
        start = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        ranges = []
        while self._peek() != "]":
            if self._peek() == "":
                self._fail("this character class has no closing bracket", start)
            low = high = self._char()
            if self._peek() == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._char()
                if high < low:
                    self._fail(f"the range {low!r} to {high!r} is empty", start)
            ranges.append(_escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}")
        self._at += 1
        if not ranges:
            self._fail("this character class is empty", start)
        return _Chars(f"[{'^' if negated else ''}{''.join(ranges)}]")

    def _group(self) -> _Node:
        start = self._at
        self._depth += 1
        if self._depth > 100:
            self._fail("groups are nested too deeply")
        self._at += 1
        inner = self._alternatives(is_nested=True)
        if self._peek() != ")":
            self._fail("this group has no closing parenthesis", start)
        self._at += 1
        self._depth -= 1
        return inner

    def _suffix(self, is_nested: bool) -> str:
        before = self._at
        self._skip(_BLANK_AND_LINES if is_nested else _BLANK)
        char = self._peek()
        if char and char in "*+?":
            self._at += 1
            return char
        if char == "{":
            match = _REPEAT.match(self._text, self._at)
            if match is None:
                self._fail("expected {n}, {n,} or {n,m}")
            low, comma, high = match.groups()
            if max(int(low), int(high or 0)) > MAX_REPEAT or (high and int(high) < int(low)):
                self._fail(f"cannot repeat {match.group()} times (at most {MAX_REPEAT})")
            self._at = match.end()
            return f"{{{low}{comma or ''}{high or ''}}}"
        self._at = before
        return ""

    def _char(self) -> str:
        char = self._peek()
        if not char:
            self._fail("unexpected end")
        self._at += 1
        if char != "\\":
            return char
        kind = self._peek()
        self._at += 1
        if kind in _HEX_DIGITS:
            digits = self._text[self._at : self._at + _HEX_DIGITS[kind]]
            self._at += len(digits)
            if len(digits) == _HEX_DIGITS[kind] and re.fullmatch("[0-9a-fA-F]+", digits):
                value = int(digits, 16)
                if value < 0x110000 and not 0xD800 <= value < 0xE000:
                    return chr(value)
        elif kind in _ESCAPES:
            return _ESCAPES[kind]
        return self._fail(f"unknown escape \\{kind}", self._at - 2)

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None, "blanks may be empty"
        self._at = match.end()

    def _take(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            self._fail(f"expected {expected}")
        self._at = match.end()
        return match.group()

    def _expect(self, token: str) -> None:
        if not self._text.startswith(token, self._at):
            self._fail(f"expected {token}")
        self._at += len(token)

    def _fail(self, message: str, at: int | None = None) -> NoReturn:
        at = self._at if at is None else at
        line = self._text.count("\n", 0, at) + 1
        column = at - (self._text.rfind("\n", 0, at) + 1) + 1
        raise refused("grammar", f"line {line}, column {column}: {message}")


@dataclass(slots=True)
class _Writer:
    """Writes rules in Lark: lower-case names derive, upper-case names are terminals."""

    rules: dict[str, _Node]
    lines: list[str] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)

    def write(self) -> str:
        recursive = self._recursive()
        for index, name in enumerate(self.rules):
            self.names[name] = f"r{index}" if name in recursive else f"T{index}"
        for name, node in self.rules.items():
            body = self._derived(node) if name in recursive else self._terminal(node)
            self.lines.append(f"{self.names[name]}: {body}")
        return "\n".join([f"start: {self.names['root']}", *self.lines]) + "\n"

    def _recursive(self) -> set[str]:
        """Rules that refer to themselves, directly or through others, and the rules that use those."""
        uses = {name: set(_names_in(node)) for name, node in self.rules.items()}
        reaches = {name: set(direct) for name, direct in uses.items()}
        changed = True
        while changed:
            changed = False
            for reached in reaches.values():
                more = set().union(*(reaches[name] for name in reached)) - reached if reached else set()
                if more:
                    reached |= more
                    changed = True
        loops = {name for name, reached in reaches.items() if name in reached}
        return loops | {name for name, reached in reaches.items() if reached & loops}

    def _is_regular(self, node: _Node) -> bool:
        return all(self.names[name].startswith("T") for name in _names_in(node))

    def _terminal(self, node: _Node) -> str:
        """A regular node in the notation of terminals."""
        match node:
            case _Chars(regex):
                return f"/{regex}/"
            case _Name(rule, _):
                return self.names[rule]
            case _Repeat(item, suffix):
                return f"({self._terminal(item)}){suffix}"
            case _Sequence(items):
                return " ".join(self._terminal(item) for item in items) or '""'
            case _Either(options):
                return "(" + " | ".join(self._terminal(option) for option in options) + ")"

    def _derived(self, node: _Node) -> str:
        """A node that refers to derived rules somewhere."""
        if self._is_regular(node):
            return self._named_terminal(node)
        match node:
            case _Name(rule, _):
                return self.names[rule]
            case _Repeat(item, suffix):
                return f"({self._derived(item)}){suffix}"
            case _Sequence(items):
                return " ".join(self._derived(run) for run in self._runs(items))
            case _Either(options):
                return "(" + " | ".join(self._derived(option) for option in options) + ")"
            case _:
                raise AssertionError("characters are regular")

    def _runs(self, items: tuple[_Node, ...]) -> list[_Node]:
        """The items, neighbours that are regular joined."""
        runs: list[list[_Node]] = []
        for item in items:
            if runs and self._is_regular(item) and self._is_regular(runs[-1][-1]):
                runs[-1].append(item)
            else:
                runs.append([item])
        return [run[0] if len(run) == 1 else _Sequence(tuple(run)) for run in runs]

    def _named_terminal(self, node: _Node) -> str:
        if isinstance(node, _Name):
            return self.names[node.rule]
        if isinstance(node, _Sequence) and not node.items:
            return '""'
        name = f"X{len(self.lines)}"
        self.lines.append(f"{name}: {self._terminal(node)}")
        return name


def _names_in(node: _Node) -> list[str]:
    match node:
        case _Name(rule, _):
            return [rule]
        case _Repeat(item, _):
            return _names_in(item)
        case _Sequence(children) | _Either(children):
            return [name for child in children for name in _names_in(child)]
        case _:
            return []


def _escaped(char: str) -> str:
    """The character in a regex, inside or outside a class."""
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}"

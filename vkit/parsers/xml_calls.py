"""Calls written as tags around parameters, whose values are text and get their types from the tool's schema."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from vkit.parsers.call_syntax import KeyValueSyntax
from vkit.parsers.scan import Malformed, Steps, marks_of
from vkit.parsers.schema import STRING, coerced, dumps, loads
from vkit.parsers.tool_reader import KEEP, LINES, STRIP, ToolReader, checked_name

_ATTRIBUTE = re.compile(r"""([\w:.-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")


class XmlCalls(ToolReader):
    """Steps that read parameters and send them typed. String values are sent piece by piece."""

    spacing: ClassVar[str] = KEEP
    unwrapped: ClassVar[tuple[str, ...]] = ()
    """Names of a lone parameter, unknown to the schema, whose object is the arguments themselves."""

    def convert(self, text: str, types: frozenset[str]) -> str:
        """JSON text of a value that may be something else than a string."""
        return coerced(text, types)

    def parameter(self, tool: str, key: str, *ends: str, is_string: bool | None = None) -> Steps[str]:
        """Consume a value up to and with one of `ends` and send it; which end it was."""
        types = self.tools.types(tool, key)
        if is_string if is_string is not None else types == STRING:
            if self._is_whole or self._may_unwrap(tool, key):
                text, end = yield from self.take_until(*ends)
                yield from self._whole_parameter(tool, key, dumps(self.trimmed(text)), end)
                return end
            return (yield from self._string_parameter(key, *ends))
        text, end = yield from self.take_until(*ends)
        yield from self._whole_parameter(tool, key, self.convert(self.trimmed(text), types), end)
        return end

    def trimmed(self, text: str) -> str:
        """A value without the white space that is markup."""
        if self.spacing == STRIP:
            return text.strip()
        if self.spacing == LINES:
            return text.removeprefix("\n").removesuffix("\n")
        return text

    def _may_unwrap(self, tool: str, key: str) -> bool:
        return not self._num_pairs and key in self.unwrapped and key not in self.tools.properties(tool)

    def _whole_parameter(self, tool: str, key: str, value: str, end: str) -> Steps[None]:
        if self._may_unwrap(tool, key) and (yield from self.is_last_parameter(end)):
            inner = object_of(value)
            if inner is not None:
                for inner_key, item in inner.items():
                    self.write_pair(inner_key, dumps(item))
                return
        self.write_pair(key, value)

    def is_last_parameter(self, end: str) -> Steps[bool]:
        """Whether no parameter follows the one that ended with `end`."""
        return False
        yield

    def _string_parameter(self, key: str, *ends: str) -> Steps[str]:
        self.open_pair(key)
        self.write('"')
        self._is_in_value = True
        end = yield from self.trimmed_until(marks_of(*ends), self.spacing, self._write_text)
        self.write('"')
        self._is_in_value = False
        return end

    def _write_text(self, text: str) -> None:
        self.write(dumps(text)[1:-1])


class TaggedXmlCalls(XmlCalls):
    """BLOCK (<call N> (<param K> V </param>)* </call>)* BLOCK_END: text before is content, text after is dropped.

    Names stand in the opening tags, as attribute `name` or bare: `<invoke name="N">`, `<function=N>`.
    """

    block: ClassVar[str]
    block_end: ClassVar[str]
    call: ClassVar[str]
    """Opening tag of a call up to its name or attributes."""
    call_end: ClassVar[str]
    param: ClassVar[str]
    param_end: ClassVar[str]
    ends_at_next: ClassVar[bool] = True
    """Whether a parameter without closing tag ends where the next one or the end of the call stands."""
    keeps_partial = True

    def read(self) -> Steps[None]:
        """Blocks."""
        found = yield from self.prose(self.block)
        while found is not None:
            yield from self.calls()
            found = yield from self.drop(self.block)

    def calls(self) -> Steps[None]:
        """Consume a block after its opening tag, and send its calls."""
        yield from self.space()
        yield from self.expect(self.call)
        while (yield from self.one_call()) != self.block_end:
            yield from self.space()
            wanted = (self.block_end, self.call)
            found = yield from self.expect_or_end(*wanted) if self.keeps_partial else self.expect(*wanted)
            if found == self.block_end:
                self.commit()
                return

    def one_call(self) -> Steps[str]:
        """Consume a call after the start of its opening tag; what ended it."""
        tag, end = yield from self.take_until(">", "<", "\n")
        if end == "<":  # the opening tag was never closed, and this is the next one
            self._pos -= 1
        name = checked_name(name_in(tag))
        self.open_call(name)
        return (yield from self.parameters(name))

    def parameters(self, tool: str) -> Steps[str]:
        """Consume parameters up to and with the end of the call, and send them; what ended it."""
        end = ""
        while end not in (self.call_end, self.block_end):
            if end != self.param:
                yield from self.solid()
                end = yield from self.expect(self.param, self.call_end, self.block_end)
            if end == self.param:
                tag, _ = yield from self.take_until(">")
                end = yield from self.tagged_parameter(tool, tag)
        yield from self.end_call(end)
        return end

    def tagged_parameter(self, tool: str, tag: str) -> Steps[str]:
        """Consume a value after its opening tag, whose inside is `tag`; what ended it."""
        return (yield from self.parameter(tool, name_in(tag), *self.value_ends))

    @property
    def value_ends(self) -> tuple[str, ...]:
        """What may end a value."""
        return (self.param_end, self.param, self.call_end) if self.ends_at_next else (self.param_end,)

    def is_last_parameter(self, end: str) -> Steps[bool]:
        """Whether no parameter follows the one that ended with `end`."""
        if end != self.param_end:
            return end != self.param
        yield from self.solid()
        rest = self.param
        while len(self._text) - self._pos < len(rest) and not self._is_ended:
            if not rest.startswith(self._text[self._pos :]):
                break
            yield
        return not self._text.startswith(rest, self._pos)

    def end_call(self, end: str) -> Steps[None]:
        """Close the call that `end` ended."""
        self.close_call()
        return
        yield


class KeyValueCalls(XmlCalls):
    """CALL N (<arg_key>K</arg_key> <arg_value>V</arg_value>)* CALL_END: text before is content, text after dropped."""

    call: ClassVar[str] = "<tool_call>"
    call_end: ClassVar[str] = "</tool_call>"
    key: ClassVar[str] = "<arg_key>"
    key_end: ClassVar[str] = "</arg_key>"
    value: ClassVar[str] = "<arg_value>"
    value_end: ClassVar[str] = "</arg_value>"

    @classmethod
    def native_call(cls, tool: Mapping[str, Any]) -> dict[str, Any] | None:
        """A call whose values are what the schema takes."""
        return KeyValueSyntax(tool, (cls.key, cls.key_end, cls.value, cls.value_end)).call(cls.call, cls.call_end)

    def read(self) -> Steps[None]:
        """Calls."""
        found = yield from self.prose(self.call)
        while found is not None:
            yield from self.one_call()
            found = yield from self.drop(self.call)

    def one_call(self) -> Steps[None]:
        """Consume a call after its opening tag and send it."""
        text, end = yield from self.take_until(self.key, self.call_end)
        name = checked_name(text.strip())
        self.open_call(name)
        yield from self.key_values(name, end)

    def key_values(self, tool: str, end: str, suffix: str = "") -> Steps[None]:
        """Consume pairs after `end`, which is a key's opening tag or the end of the call, and send them."""
        key_tag, call_end = with_suffix(self.key, suffix), with_suffix(self.call_end, suffix)
        while end == key_tag:
            key, _ = yield from self.take_until(with_suffix(self.key_end, suffix))
            yield from self.solid()
            yield from self.expect(with_suffix(self.value, suffix))
            yield from self.parameter(tool, key.strip(), with_suffix(self.value_end, suffix))
            yield from self.solid()
            end = yield from self.expect(key_tag, call_end)
        self.close_call()


def with_suffix(tag: str, suffix: str) -> str:
    return f"{tag[:-1]}{suffix}>" if suffix else tag


def attributes_in(tag: str) -> dict[str, str]:
    """Attributes inside a tag; their quotes may be double, single or absent."""
    return {match[1]: match[2] or match[3] or match[4] or "" for match in _ATTRIBUTE.finditer(tag)}


def name_in(tag: str) -> str:
    """The name inside a tag: its attribute `name`, else all of it.

    Raises:
        Malformed: neither.
    """
    name = attributes_in(tag).get("name") or tag.strip()
    if not name:
        raise Malformed("a tag without a name")
    return name


def object_of(value: str) -> dict[str, object] | None:
    try:
        found = loads(value)
        if isinstance(found, str):
            found = loads(found)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None

"""A jinja2 environment for chat templates that come from strangers.

On top of jinja2's immutable sandbox (no private attributes, no changes to what is passed in) it meters what a template
makes: how much text, and for how long. A template may come with a request, so neither may depend on its good will.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 8 * 2**20
"""Longest text a template may make, at any point."""

MAX_TOTAL_CHARS = 32 * MAX_RENDERED_CHARS
"""Sum of all texts a template may make on the way."""

MAX_RENDER_S = 2.0
MAX_PADDING = 100_000
MAX_ELEMENTS = 200_000
CHARS_PER_ELEMENT = 8
"""What an element of a list counts for: it takes about as much memory."""

MAX_INTEGER_BITS = 10_000

_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_PADDING_FILTERS = frozenset({"center", "indent", "batch", "slice", "truncate", "tojson", "round"})
# Not for prompts, and some take time that grows faster than their input.
_DROPPED_FILTERS = frozenset({"urlize", "xmlattr", "pprint", "random", "wordwrap", "striptags", "filesizeformat"})
_WRITING_FILTERS = frozenset(
    {
        *("string", "trim", "upper", "lower", "capitalize", "title", "tojson", "e", "escape", "safe", "forceescape"),
        *("urlencode", "indent", "center", "truncate", "wordcount", "format"),
    }
)
_ITERATING_FILTERS = frozenset(["list", "batch", "slice", "sort", "unique", "join", "reverse", "sum", "min", "max"])
_PLAIN_FILTERS = frozenset(
    ["map", "select", "reject", "selectattr", "rejectattr", "groupby", "default", "d", "attr"]
)  # they write nothing out, and jinja2 calls them with marks of its own
_LONG_NUMBER = re.compile(r"\d{6}")
_VARIABLE_WIDTH = re.compile(r":[^{}]*\{")


class RaisedByTemplate(TemplateError):
    """The template itself refused its input, through `raise_exception`."""


class TooMuch(SecurityError):
    """A template went over one of the limits."""


@dataclass
class _Meter:
    deadline: float
    chars_left: int = MAX_TOTAL_CHARS


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment in which chat templates are compiled and rendered."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationTag], cache_size=0
        )
        self._meters = threading.local()
        self.concat = self.bounded_concat  # type: ignore[method-assign]  # compiled templates join buffers with it
        self.finalize = self._checked_output
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        metered = {name: self._metered_filter(name, f) for name, f in FILTERS.items() if name not in _DROPPED_FILTERS}
        self.filters = metered | {
            "tojson": self._metered_filter("tojson", _tojson),
            "replace": self._replace,
            "join": self._metered_filter("join", self._checked_join),
            "sum": self._metered_filter("sum", self._checked_sum),
        }

    @contextmanager
    def metered(self) -> Iterator[None]:
        """Counts what this thread renders inside the block against fresh limits; an inner block shares the outer's."""
        if getattr(self._meters, "current", None) is not None:
            yield
            return
        self._meters.current = _Meter(time.monotonic() + MAX_RENDER_S)
        try:
            yield
        finally:
            self._meters.current = None

    def tick(self) -> None:
        """Called by compiled templates at the start of every block of statements.

        Raises:
            TooMuch: the time is up.
        """
        meter: _Meter | None = getattr(self._meters, "current", None)
        if meter is not None and time.monotonic() > meter.deadline:
            raise TooMuch(f"rendering took more than {MAX_RENDER_S:g} s")

    def bounded_concat(self, parts: Iterable[Any]) -> str:
        """The parts as one string, within the limits."""
        strings = [str(self._checked_output(part)) for part in parts]
        self._spend(sum(map(len, strings)))
        return "".join(strings)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.tick()
        match operator:
            case "*":
                self._check_product(left, right)
            case "%" if isinstance(left, str):
                self._check_format(left, right)
            case "**" if not (isinstance(left, int | float) and isinstance(right, int | float) and abs(right) <= 1000):
                raise TooMuch("a power with an exponent above 1000")
            case "+" if isinstance(left, str | list | tuple) and isinstance(right, type(left)):
                self._spend(_cost(left) + _cost(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > MAX_INTEGER_BITS:
            raise TooMuch("a number with thousands of digits")
        return result

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        self.tick()
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, int | float | bytes):
            raise SecurityError(f"methods of numbers and bytes are not available in a template ({name})")
        if isinstance(owner, str):
            self._check_string_method(owner, name, args)
        result = super().call(context, obj, *args, **kwargs)
        self._spend(_cost(result))
        return result

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r} object is unsafe.")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        template = str(value.__self__)

        def checked(*args: Any, **kwargs: Any) -> str:
            if _LONG_NUMBER.search(template) or _VARIABLE_WIDTH.search(template):
                raise TooMuch("a format with a width of six digits or more, or a variable one")
            self._weigh([*args, *kwargs.values()])
            return wrapped(*args, **kwargs)

        return checked

    def _spend(self, num_chars: int) -> None:
        if num_chars > MAX_RENDERED_CHARS:
            raise TooMuch(f"the text is longer than {MAX_RENDERED_CHARS} characters")
        self.tick()
        meter: _Meter | None = getattr(self._meters, "current", None)
        if meter is not None:
            meter.chars_left -= num_chars
            if meter.chars_left < 0:
                raise TooMuch(f"the template makes more than {MAX_TOTAL_CHARS} characters on the way")

    def _check_product(self, left: Any, right: Any) -> None:
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                self._spend(_cost(sequence) * max(0, count))

    def _check_format(self, template: str, values: Any) -> None:
        if _LONG_NUMBER.search(template) or "*" in template:
            raise TooMuch("a format with a width of six digits or more, or a variable one")
        self._weigh(values)

    def _check_string_method(self, owner: str, name: str, args: Sequence[Any]) -> None:
        if name in _PADDING_METHODS:
            _check_padding(args)
            self._spend(len(owner) * (MAX_PADDING if name == "expandtabs" and "\t" in owner else 1))
        elif name == "replace" and len(args) >= 2:
            self._check_replacement(owner, str(args[0]), str(args[1]))
        elif name == "join" and args:
            parts = list(args[0])
            self._spend(len(owner) * len(parts) + sum(len(part) for part in parts if isinstance(part, str)))
        elif name in ("translate", "encode"):
            raise SecurityError(f"str.{name} is not available in a template")

    def _check_replacement(self, text: str, old: str, new: str) -> None:
        growth = text.count(old) * max(0, len(new) - len(old))
        self._spend(len(text) + growth)

    def _replace(self, text: object, old: str, new: str, count: int | None = None) -> str:
        source = str(self._checked_output(text))
        self._check_replacement(source, str(old), str(new))
        return source.replace(str(old), str(new), -1 if count is None else count)

    def _checked_join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = [self.getattr(x, attribute) if isinstance(attribute, str) else x[attribute] for x in value]
        strings = [str(self._checked_output(part)) for part in value]
        self._spend(len(str(d)) * len(strings) + sum(map(len, strings)))
        return str(d).join(strings)

    def _checked_sum(self, iterable: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        total = start
        for item in iterable:
            value = item if attribute is None else self.getitem(item, attribute)
            total = self.call_binop(None, "+", total, value)
        return total

    def _checked_output(self, value: Any) -> Any:
        """`value`, once it is sure that writing it out stays within the limits."""
        if isinstance(value, Mapping | list | tuple):
            self._weigh(value)
        return value

    def _weigh(self, value: Any) -> None:
        """Refuses nested data that would be long when written out; shared parts count as often as they occur."""
        num_elements = num_chars = 0
        pending = [value]
        while pending:
            item = pending.pop()
            num_elements += 1
            if isinstance(item, str):
                num_chars += len(item)
            elif isinstance(item, Mapping):
                pending += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple):
                pending += item
            if num_elements + len(pending) > MAX_ELEMENTS or num_chars > MAX_RENDERED_CHARS:
                raise TooMuch("a nested value is too large to be written out")

    def _metered_filter(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        if name in _PLAIN_FILTERS:
            return filter_
        offset = 1 if hasattr(filter_, "jinja_pass_arg") else 0

        def metered(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if name in _PADDING_FILTERS:
                _check_padding([*args[offset + 1 :], *kwargs.values()])
            if name == "indent" and len(args) > offset:
                self._spend((str(args[offset]).count("\n") + 1) * _width([*args[offset + 1 :], *kwargs.values()]))
            if name == "format" and len(args) > offset:
                self._check_format(str(args[offset]), list(args[offset + 1 :]))
            if len(args) > offset and name in _WRITING_FILTERS:
                self._checked_output(args[offset])
            elif len(args) > offset and name in _ITERATING_FILTERS and isinstance(args[offset], str):
                self._spend(CHARS_PER_ELEMENT * len(args[offset]))
            result = filter_(*args, **kwargs)
            self._spend(_cost(result))
            return result

        if offset:
            metered.jinja_pass_arg = filter_.jinja_pass_arg  # type: ignore[attr-defined]
        return metered


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks the model's own words for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MeteredCodeGenerator(CodeGenerator):
    """Compiles templates so that they report to their environment as they run."""

    def blockvisit(self, nodes_: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(nodes_, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.bounded_concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


TemplateEnvironment.code_generator_class = _MeteredCodeGenerator


def _cost(value: Any) -> int:
    """What a new value counts for against the limits."""
    if isinstance(value, str):
        return len(value)
    return CHARS_PER_ELEMENT * len(value) if isinstance(value, list | tuple) else 0


def _width(values: Iterable[Any]) -> int:
    return max((len(v) if isinstance(v, str) else v for v in values if isinstance(v, int | str)), default=4)


def _check_padding(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_PADDING:
            raise TooMuch(f"a width above {MAX_PADDING}")


def _raise_exception(message: str) -> NoReturn:
    raise RaisedByTemplate(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`value` as JSON, nothing escaped for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

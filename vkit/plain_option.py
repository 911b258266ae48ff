"""An option that takes plain values by itself: what nobody gave, and texts, numbers and words written plainly.

Typer checks every value of every option through pydantic, also the defaults of those that were not given; for a command
of seventy flags that takes 0.1 s, most of it pydantic's own import. What is not plain, wrong values above all, goes to
typer, whose messages stay the only ones.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal, get_args, get_origin

import typer
from typer.core import TyperOption

_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?[0-9]{1,15}(\.[0-9]{1,15})?")
_NOT_PLAIN: Final = object()


def with_plain_values(option: TyperOption) -> TyperOption:
    """The same option, which from now on takes plain values by itself."""
    if type(option) is TyperOption:
        option.__class__ = PlainOption
    return option


class PlainOption(TyperOption):
    """An option whose plain values cost nothing."""

    def process_value(self, ctx: typer.Context, value: Any) -> Any:  # type: ignore[override]
        """The value as the command receives it."""
        plain = _NOT_PLAIN if self.required else self._plain(value)
        if plain is _NOT_PLAIN:
            return super().process_value(ctx, value)
        return plain if self.callback is None else self.callback(ctx, self, plain)

    def _plain(self, value: Any) -> Any:
        """What typer would make of `value`, where that is known without it."""
        asked = self.type_descriptor
        info, is_list = asked.parameter_info, self.multiple and asked.is_list
        if value is None:
            return () if self.multiple or self.nargs == -1 else None
        if info.parser is not None or info.clamp or asked.is_file or self.nargs != 1:
            return _NOT_PLAIN
        if not is_list:
            return _NOT_PLAIN if self.multiple else _one(asked.annotation, value, info.min, info.max)
        (item,) = get_args(asked.annotation)
        if not isinstance(value, list | tuple):
            return _NOT_PLAIN
        items = [_one(item, one, info.min, info.max) for one in value]
        return _NOT_PLAIN if any(one is _NOT_PLAIN for one in items) else items


def _one(annotation: Any, value: Any, least: float | None, most: float | None) -> Any:
    """One value of that type, or _NOT_PLAIN."""
    if annotation is str:
        return value if type(value) is str and _can_be_written(value) else _NOT_PLAIN
    if get_origin(annotation) is Literal:
        return value if type(value) is str and value in get_args(annotation) else _NOT_PLAIN
    if annotation is int:
        number: Any = int(value) if type(value) is str and _INTEGER.fullmatch(value) else value
    elif annotation is float:
        number = float(value) if type(value) is str and _DECIMAL.fullmatch(value) else value
    else:
        return _NOT_PLAIN
    if type(number) is not annotation:
        return _NOT_PLAIN
    is_within = (least is None or number >= least) and (most is None or number <= most)
    return number if is_within else _NOT_PLAIN


def _can_be_written(text: str) -> bool:
    """Whether it is text, and not bytes of a command line that were none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True

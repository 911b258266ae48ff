"""Tool-call and reasoning parsers by name: one door for ours and everyone's, and detection from the chat template.

Ours are the modules of `vkit.parsers.tools` and `vkit.parsers.reasoning`, each of which registers what it holds; other
distributions offer theirs through the entry-point groups `vkit.tool_parsers` and `vkit.reasoning_parsers`, whose values
are classes, or call the same functions themselves.
"""

from __future__ import annotations

import logging
import pkgutil
from importlib import import_module
from typing import Any, Generic, TypeVar, cast

from vkit import discovery
from vkit.errors import UsageError
from vkit.parsers.reasoning_reader import ReasoningParser
from vkit.parsers.tool_reader import ToolParser

logger = logging.getLogger("vkit.parsers")

AUTO, NONE = "auto", "none"
FALLBACK_TOOL_PARSER = "hermes"

C = TypeVar("C", bound=type[Any])
P = TypeVar("P")
LAST = 1000
"""Marker order of classes that state none."""
_NOWHERE = "\0"
_METHODS = ("push", "finish", "parse")


class Registry(Generic[P]):
    """Parser classes of one kind."""

    def __init__(self, kind: str, flag: str, package: str, group: str) -> None:
        self._kind = kind
        self._flag = flag
        self._package = package
        self._group = group
        self._classes: dict[str, type[P]] = {}
        self._has_own = False
        self._offers: dict[str, discovery.Offer] | None = None

    def register(self, parser: type[P], *names: str) -> None:
        """Make `parser` known as `names`, by default its own.

        Raises:
            UsageError: no class of this kind, no name, or a name that another has.
        """
        missing = [name for name in _METHODS if not callable(getattr(parser, name, None))]
        if not isinstance(parser, type) or missing:
            raise UsageError(f"{parser!r} is no {self._kind} parser: a class with {', '.join(_METHODS)} is expected")
        names = names or tuple(getattr(parser, "names", ()))
        if not names:
            raise UsageError(f"{parser.__name__}: a {self._kind} parser needs a name")
        for name in names:
            if name in (AUTO, NONE):
                raise UsageError(f"{parser.__name__}: the name {name!r} has a meaning of its own")
            known = self._classes.get(name)
            if known is not None and known is not parser:
                raise UsageError(f"{parser.__name__}: the {self._kind} parser {name!r} is {known.__name__} already")
        self._classes.update(dict.fromkeys(names, parser))

    def names(self) -> list[str]:
        """Every name there is, sorted. Imports nothing of other distributions."""
        self._load_own()
        return sorted({*self._classes, *self._found()})

    def get(self, name: str) -> type[P]:
        """The class called `name`.

        Raises:
            UsageError: there is none; the message lists those there are.
            PluginError: another distribution offers it and it cannot be loaded.
        """
        self._load_own_called(name)
        if name not in self._classes and name in self._found():
            self._load_offer(self._found()[name])
        if name not in self._classes:
            known = ", ".join([AUTO, NONE, *self.names()])
            raise UsageError(f"{self._flag}: {name!r} is no {self._kind} parser", remedy=f"choose one of {known}")
        return self._classes[name]

    def check(self, name: str) -> None:
        """Refuse a name that nothing has; `auto` and `none` are fine.

        Raises:
            UsageError: there is none; the message lists those there are.
        """
        if name not in (AUTO, NONE) and name not in self.names():
            self.get(name)

    def detected(self, chat_template: str) -> type[P] | None:
        """The class whose marker the template holds, the first in marker order."""
        self._load_own()
        for offer in self._found().values():
            try:
                self._load_offer(offer)
            except (discovery.PluginError, UsageError) as error:
                logger.warning("%s", error)
        found = [cls for cls in self._classes.values() if (getattr(cls, "marker", None) or _NOWHERE) in chat_template]
        return min(found, key=lambda cls: getattr(cls, "marker_order", LAST), default=None)

    def _load_own_called(self, name: str) -> None:
        """Import ours of that name: its module alone where that has the name too, else all."""
        package = import_module(self._package)
        if name not in self._classes and any(found.name == name for found in pkgutil.iter_modules(package.__path__)):
            import_module(f"{self._package}.{name}")
        if name not in self._classes:
            self._load_own()

    def _load_own(self) -> None:
        if self._has_own:
            return
        package = import_module(self._package)
        for module in pkgutil.iter_modules(package.__path__):
            import_module(f"{self._package}.{module.name}")
        self._has_own = True

    def _found(self) -> dict[str, discovery.Offer]:
        if self._offers is None:
            found = discovery.find(self._group)
            for line in found.problems:
                logger.warning("%s", line)
            self._offers = {}
            for name, offer in found.offers.items():
                if name in self._classes:
                    logger.warning("%s: %s parser %r is built in", offer.origin, self._kind, name)
                else:
                    self._offers[name] = offer
        return self._offers

    def _load_offer(self, offer: discovery.Offer) -> None:
        def build(parser: Any) -> None:
            self.register(parser, offer.name)

        if offer.name not in self._classes:
            discovery.load(offer, build)


TOOL_PARSERS: Registry[ToolParser] = Registry(
    "tool-call", "--tool-call-parser", "vkit.parsers.tools", "vkit.tool_parsers"
)
REASONING_PARSERS: Registry[ReasoningParser] = Registry(
    "reasoning", "--reasoning-parser", "vkit.parsers.reasoning", "vkit.reasoning_parsers"
)


def register_tool_parser(parser: C, *names: str) -> C:
    """`parser`, now known as `names`, by default its own `names`. Serves as a decorator.

    Raises:
        UsageError: no tool-call parser, or a name that another has.
    """
    TOOL_PARSERS.register(cast("type[ToolParser]", parser), *names)
    return parser


def register_reasoning_parser(parser: C, *names: str) -> C:
    """`parser`, now known as `names`, by default its own `names`. Serves as a decorator.

    Raises:
        UsageError: no reasoning parser, or a name that another has.
    """
    REASONING_PARSERS.register(cast("type[ReasoningParser]", parser), *names)
    return parser


def tool_parser_for(name: str, chat_template: str | None = None) -> type[ToolParser] | None:
    """The class that `--tool-call-parser NAME` stands for; None for `none`.

    Raises:
        UsageError: there is no such name.
    """
    if name == NONE:
        return None
    if name == AUTO:
        return TOOL_PARSERS.detected(chat_template or "") or TOOL_PARSERS.get(FALLBACK_TOOL_PARSER)
    return TOOL_PARSERS.get(name)


def reasoning_parser_for(name: str, chat_template: str | None = None) -> type[ReasoningParser] | None:
    """The class that `--reasoning-parser NAME` stands for; None for `none`, and for `auto` without a marker.

    Raises:
        UsageError: there is no such name.
    """
    if name == NONE:
        return None
    return REASONING_PARSERS.detected(chat_template or "") if name == AUTO else REASONING_PARSERS.get(name)

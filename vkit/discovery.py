"""Finds what distributions offer through entry points: lists, loads, and reports failures by distribution.

Built-in commands come through the same group as everyone's. Nothing is imported until `load`. The only place besides
`cli.main` that catches broadly: a plug-in may fail in any way, and the rest must go on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import Distribution, EntryPoint, distribution, distributions
from typing import Any, TypeVar

from vkit import env
from vkit.errors import VkitError

GROUP_PREFIX = "vkit."
COMMANDS = "vkit.commands"
OWN_DISTRIBUTION = "vkit"

T = TypeVar("T")


class PluginError(VkitError):
    """A plug-in that cannot be used. The message names its distribution."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Something a distribution registers under a name."""

    name: str
    distribution: str
    version: str
    entry_point: EntryPoint

    @property
    def is_builtin(self) -> bool:
        """Whether vkit itself ships it."""
        return self.distribution == OWN_DISTRIBUTION

    @property
    def origin(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True, slots=True)
class Found:
    """What a group offers: one winner per name, and a line for everything left out."""

    offers: dict[str, Offer]
    clashes: dict[str, str]
    """Name -> one line saying who claimed it and who got it."""
    missing: tuple[str, ...] = ()
    """One line for each distribution VKIT_PLUGINS names that offers nothing."""

    @property
    def problems(self) -> list[str]:
        """Every line worth a person's attention."""
        return [*self.missing, *self.clashes.values()]


def find(group: str) -> Found:
    """What installed distributions offer in `group`, limited by VKIT_PLUGINS. Imports nothing of theirs.

    A name claimed twice goes to the built-in, else to the distribution first in alphabet; the clash is told.
    """
    allowed = env.PLUGINS.read()
    every = sorted(map(_offer, _points(group)), key=lambda o: (not o.is_builtin, o.distribution, o.name))
    offers: dict[str, Offer] = {}
    clashes: dict[str, str] = {}
    for offer in every:
        if not offer.is_builtin and allowed is not None and offer.distribution not in allowed:
            continue
        winner = offers.setdefault(offer.name, offer)
        if winner is not offer:
            clashes[offer.name] = _clash_line(group, winner, offer)
    return Found(offers, clashes, _missing_lines(allowed))


def _points(group: str) -> list[EntryPoint]:
    """The entry points of a group. All groups are read at once, and again when something was installed."""
    return [point for point in _every_point(_state_of_path()) if point.group == group]


@lru_cache(maxsize=1)
def _every_point(state: tuple[tuple[str, int], ...]) -> tuple[EntryPoint, ...]:
    """Every entry point of ours and of plug-ins, while the folders of the path are in this state."""
    found: dict[str, Distribution] = {}
    for candidate in distributions():
        text = candidate.read_text("entry_points.txt") or ""
        if f"[{GROUP_PREFIX}" not in text or candidate.name in found:  # names are read of few: each is a file to parse
            continue
        if distribution(candidate.name).read_text("entry_points.txt") == text:  # else one earlier on the path hides it
            found[candidate.name] = candidate
    points = (point for one in found.values() for point in one.entry_points)
    return tuple(point for point in points if point.group.startswith(GROUP_PREFIX))


def _state_of_path() -> tuple[tuple[str, int], ...]:
    """The folders modules come from, and when something was last put into each."""
    return tuple((folder, os.stat(folder or ".").st_mtime_ns) for folder in sys.path if os.path.isdir(folder or "."))


def load(offer: Offer, build: Callable[[Any], T]) -> T:
    """What `build` makes of the object behind an offer.

    Raises:
        PluginError: whatever went wrong in the distribution's code or with its object, on one line; says which
            distribution it is and how to be rid of it.
    """
    try:
        return build(offer.entry_point.load())
    except (Exception, SystemExit) as error:
        raise _broken(offer, error) from error


def _broken(offer: Offer, error: BaseException) -> PluginError:
    reason = " ".join(str(error).split())
    return PluginError(
        f"{offer.origin}: {offer.name!r} cannot be loaded: {type(error).__name__}: {reason}",
        remedy=None if offer.is_builtin else f"pip uninstall {offer.distribution} removes it",
    )


def _offer(entry_point: EntryPoint) -> Offer:
    owner = entry_point.dist
    if owner is None:  # an entry point made by hand
        return Offer(entry_point.name, "unknown", "", entry_point)
    return Offer(entry_point.name, env.normalised(owner.name), owner.version, entry_point)


def _clash_line(group: str, winner: Offer, loser: Offer) -> str:
    what = "command" if group == COMMANDS else group
    if winner.is_builtin:
        return f"{loser.origin}: {what} {loser.name!r} is built in, so the plug-in's is not used"
    return (
        f"{loser.origin}: {what} {loser.name!r} is taken by {winner.origin}, which is used;"
        f" {env.PLUGINS.name} chooses which distributions load"
    )


def _missing_lines(allowed: tuple[str, ...] | None) -> tuple[str, ...]:
    if not allowed:
        return ()
    known = {
        env.normalised(one.name)
        for one in distributions()
        if any(point.group.startswith(GROUP_PREFIX) for point in one.entry_points)
    }
    return tuple(
        f"{env.PLUGINS.name}: no installed distribution {name!r} offers anything to vkit"
        for name in allowed
        if name not in known
    )

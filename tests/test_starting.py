"""While a program starts: no cycle is looked for, and classes are the same although their methods come late."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import pickle
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from vkit.starting import starting

OPTIONS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"frozen": True, "slots": True},
    {"slots": True, "order": True},
    {"eq": False},
    {"unsafe_hash": True},
    {"repr": False, "kw_only": True},
]


def classes(options: dict[str, bool]) -> tuple[type[Any], type[Any]]:
    """A class and one that inherits from it."""

    @dataclass(**options)
    class Point:
        x: int
        y: list[int] = field(default_factory=list, compare=False)

    @dataclass(**options)
    class Named(Point):
        name: str = "n"

    return Point, Named


def outcome(act: Any) -> str:
    try:
        return repr(act())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def behaviour(kinds: tuple[type[Any], type[Any]]) -> list[str]:
    """What can be seen of the classes, in words."""
    seen = []
    for kind in kinds:
        one, same, other = kind(x=1), kind(x=1), kind(x=2)
        one_of_kind, rest = repr(kind), [one, same, other]
        seen += [str(inspect.signature(kind)), str(kind.__doc__), one_of_kind.rpartition(".")[2]]
        for _ in range(2):  # the first call makes the method, the second is the method
            seen += [outcome(lambda a=a: repr(a).partition("object at")[0]) for a in rest]
            seen += [outcome(lambda a=a, b=b: a == b) for a in rest for b in rest]
            seen += [outcome(lambda a=a, b=b: a < b) for a in rest for b in rest]
            seen += [outcome(lambda a=a, b=b: hash(a) == hash(b) and a != b) for a in rest for b in rest]
            seen += [outcome(lambda a=a: setattr(a, "x", 5)) for a in (copy.copy(one),)]
            seen += [outcome(lambda a=a: setattr(a, "more", 5)) for a in (copy.copy(one),)]
            seen += [outcome(lambda a=a: delattr(a, "x")) for a in (copy.copy(one),)]
        seen += [outcome(lambda a=one: dataclasses.asdict(dataclasses.replace(a, x=7)))]
        seen += [
            f"{name} {getattr(getattr(kind, name), '__qualname__', '')}" for name in ("__eq__", "__repr__", "__init__")
        ]
    return seen


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_classes_are_what_they_would_be(options: dict[str, bool]) -> None:
    with starting():
        made_while_starting = classes(options)
    assert behaviour(made_while_starting) == behaviour(classes(options))


def test_a_method_takes_its_place_when_it_is_called() -> None:
    with starting():
        (kind, _) = classes({"frozen": True})
    waiting = kind.__dict__["__eq__"]
    assert kind(1) == kind(1)
    assert hash(kind(1)) == hash(kind(1))
    if sys.version_info < (3, 13):
        assert kind.__dict__["__eq__"] is not waiting, "nothing came late"
    assert pickle.dumps(waiting.__name__)


def test_all_is_as_before_afterwards() -> None:
    before = getattr(dataclasses, "_create_fn", None)
    assert gc.isenabled()
    with starting():
        assert not gc.isenabled()
        with pytest.raises(ZeroDivisionError), starting():
            1 / 0  # noqa: B018
        assert not gc.isenabled()
    assert gc.isenabled()
    assert getattr(dataclasses, "_create_fn", None) is before
    gc.unfreeze()


def test_overlapping_starts_leave_nothing_behind() -> None:
    before = getattr(dataclasses, "_create_fn", None)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with starting():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with starting():
        thread.start()
        assert inside.wait(10)
    leave.set()
    thread.join(120)
    assert getattr(dataclasses, "_create_fn", None) is before
    gc.enable()
    gc.unfreeze()

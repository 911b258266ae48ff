"""What a program need not do while it starts: look for cycles, and write methods that nobody calls.

For programs, not for libraries: it changes how this process makes its classes, and what is alive at the end is never
looked at again by the collector.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

_RARELY_CALLED = frozenset({"__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"})
_counting = Lock()
_num_starting = 0


@contextmanager
def starting() -> Iterator[None]:
    """Modules are imported and a model is loaded inside.

    The cycle collector rests: hundreds of thousands of objects come and none goes, and each of its walks over the
    modules of torch takes some 0.1 s. And of dataclasses only __init__ is compiled at once, which saves another 0.1 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    _count(1)
    try:
        yield
    finally:
        _count(-1)
        gc.freeze()
        if was_enabled:
            gc.enable()


def _count(change: int) -> None:
    """Let methods be made late as long as anything is starting, in whatever thread."""
    global _num_starting
    with _counting:
        _num_starting += change
        if _make_now is not None:
            dataclasses._create_fn = _make_on_first_call if _num_starting else _make_now  # type: ignore[attr-defined]


_make_now: Callable[..., Any] | None = getattr(dataclasses, "_create_fn", None)
"""How dataclasses makes a method, in Python 3.11 and 3.12: each is compiled by itself. Later ones do all at once."""


def _make_on_first_call(name: str, *args: Any, **options: Any) -> Any:
    """The method, or for some names one that becomes it when it is called for the first time."""
    assert _make_now is not None
    make = _make_now
    if name not in _RARELY_CALLED:
        return make(name, *args, **options)
    made: Callable[..., Any] | None = None

    def method(self: Any, *values: Any) -> Any:
        nonlocal made
        if made is None:
            made = make(name, *args, **options)
            made.__qualname__ = method.__qualname__
            for owner in type(self).__mro__:
                if owner.__dict__.get(name) is method:  # not where it is wrapped, as __repr__ is
                    setattr(owner, name, made)
        return made(self, *values)

    method.__name__ = name
    return method

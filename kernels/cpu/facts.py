"""Questions about tensors that a recording need not hear."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def reads_facts(function: Callable[P, T]) -> Callable[P, T]:
    """A function that computes nothing and only asks tensors for shape, strides and place; nobody hears each question.

    There are twenty for every operation, and being heard makes them ten times as slow.
    """

    @wraps(function)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> T:
        with torch._C.DisableTorchFunction():
            return function(*args, **kwargs)

    return unseen

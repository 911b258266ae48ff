"""What every test gets back as it was."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples in every run, so that a failure is of the change at hand. `make test-search` looks for new ones.
settings.register_profile("same", derandomize=True)
settings.register_profile("search", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background of a script: the programs that tests interrupt would inherit that they ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_LOGGERS = [logging.getLogger(name) for name in ("vkit", "uvicorn")]


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    """The commands, run in this process, point the program's loggers at the stderr of their test."""
    before = [(logger, list(logger.handlers), logger.level, logger.propagate) for logger in _LOGGERS]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)

"""What every test gets back as it was."""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator

import pytest

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

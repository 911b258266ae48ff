"""Says once why plain torch runs an op that has a Triton kernel."""

from __future__ import annotations

import logging

logger = logging.getLogger("vkit.kernels")
_said: set[tuple[str, str]] = set()


def leave_to_torch(op: str, what: str) -> None:
    """Log that there is no kernel of `op` for `what`, unless that was said before."""
    say_once(op, f"no triton kernel for {what}; plain torch runs it")


def say_once(op: str, line: str) -> None:
    """Log `line` about `op`, unless that was said before."""
    if (op, line) not in _said:
        _said.add((op, line))
        logger.warning("%s: %s", op, line)


def forget() -> None:
    """Say everything once more."""
    _said.clear()

"""Batch-level logits processors of other packages: those that are installed, and those that were named."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from vkit import discovery
from vkit.errors import UsageError
from vkit.inputs import RequestCheck
from vkit.logits import BatchLogitsProcessor, BatchLogitsProcessorFactory

logger = logging.getLogger("vkit")

PROCESSOR_GROUP = "vkit.logits_processors"
_PROCESSOR_METHODS = ("is_argmax_invariant", "update_state", "apply")


@dataclass(frozen=True, slots=True)
class PluggedProcessor:
    """A batch-level logits processor that can be built."""

    name: str
    factory: BatchLogitsProcessorFactory

    @property
    def check(self) -> RequestCheck | None:
        """Its say on each request."""
        found: RequestCheck | None = getattr(self.factory, "validate_params", None)
        return found

    def build(self, vocab_size: int) -> BatchLogitsProcessor:
        """A processor for one engine.

        Raises:
            UsageError: it cannot be built.
        """
        try:
            return self.factory(vocab_size)
        except Exception as error:  # somebody else's code
            raise UsageError(f"logits processor {self.name}: cannot be built: {error!r}") from None


def find_processors(named: Sequence[str]) -> tuple[PluggedProcessor, ...]:
    """The batch-level logits processors that are installed, then those that were named.

    Raises:
        UsageError: a name that leads to no class.
    """
    found = discovery.find(PROCESSOR_GROUP)
    for problem in found.problems:
        logger.warning("%s", problem)
    installed = [
        PluggedProcessor(offer.name, discovery.load(offer, lambda factory: factory)) for offer in found.offers.values()
    ]
    return (*installed, *(PluggedProcessor(path, _class_at(path)) for path in named))


def _class_at(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = import_module(module)
    except Exception as error:  # somebody else's code, and a sentence is due whatever it does
        raise UsageError(f"--logits-processors: {module} cannot be imported: {error!r}") from None
    for part in name.split("."):
        found = getattr(found, part, None)
    missing = [name for name in _PROCESSOR_METHODS if not callable(getattr(found, name, None))]
    if not isinstance(found, type) or missing:
        raise UsageError(
            f"--logits-processors: {path} is no class with {', '.join(_PROCESSOR_METHODS)}",
            remedy="docs/python.md says what a logits processor is",
        )
    return found

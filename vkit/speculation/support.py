"""What goes together with drafting and what is refused; the proposer that settings ask for. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vkit.errors import InvalidRequest, UsageError
from vkit.speculation.ngram import NgramProposer
from vkit.speculation.proposer import Proposer
from vkit.speculation.suffix import SuffixProposer
from vkit.speculative_config import FLAG, METHODS_OF_TOKENS, SpeculativeSettings
from vkit.types import SamplingParams

DECLARATION = "supports_speculation"
"""Attribute by which a logits processor says that it can be asked about rows after drafts that may not stand."""


def check_plugins(plugins: Iterable[Any]) -> None:
    """Refuse batch-level logits processors that do not say that they can see drafts.

    Raises:
        UsageError: naming the processor.
    """
    for plugin in plugins:
        if not getattr(plugin, DECLARATION, False):
            raise UsageError(
                f"{FLAG}: the installed logits processor {type(plugin).__name__} cannot be used with drafts",
                remedy=f"uninstall it, or have it set {DECLARATION} = True if its edits depend on the output alone",
            )


def check_processors(params: SamplingParams) -> None:
    """Refuse a request's own logits processors that do not say that they can see drafts.

    Raises:
        InvalidRequest: naming the processor.
    """
    for processor in params.logits_processors:
        if not getattr(processor, DECLARATION, False):
            name = getattr(processor, "__name__", type(processor).__name__)
            raise InvalidRequest(
                f"logits_processors: {name} cannot be used while tokens are drafted ({FLAG})",
                param="logits_processors",
                remedy=f"set {DECLARATION} = True on it if its edits depend on the output alone",
            )


def make_proposer(settings: SpeculativeSettings) -> Proposer:
    """What drafts from tokens alone, as the settings ask."""
    assert settings.method in METHODS_OF_TOKENS, "other methods draft with a model"
    assert settings.num_speculative_tokens is not None, "checked with the settings"
    if settings.method == "suffix":
        return SuffixProposer(settings.num_speculative_tokens, settings.suffix)
    shortest, longest = settings.lookup_range
    return NgramProposer(settings.num_speculative_tokens, shortest, longest)

"""What `--speculative-config` says, every key checked by name. No torch; checkpoints are looked at later."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vkit.errors import UsageError

FLAG = "--speculative-config"
MAX_DRAFTS = 32
DEFAULT_LOOKUP = 5

MAX_TREE_DEPTH = 256

METHODS = ("ngram", "suffix", "draft_model", "mtp", "dflash", "dspark")
"""Ways to draft that exist here."""
REFUSED_METHODS = ("eagle", "eagle3", "medusa")
"""Ways that people will ask for and nobody built."""
METHODS_OF_TOKENS = ("ngram", "suffix")
"""Those that look at tokens alone: nothing runs beside the target."""
METHODS_WITH_MODEL = ("draft_model", "dflash", "dspark")
"""Those that read a checkpoint of their own."""
METHODS_WITH_TEMPERATURE = ("draft_model", "mtp")
"""Those whose drafts can be drawn at random."""

KEYS = (
    *("method", "num_speculative_tokens", "model", "prompt_lookup_min", "prompt_lookup_max"),
    *("suffix_decoding_max_tree_depth", "suffix_decoding_max_cached_requests"),
    *("suffix_decoding_max_spec_factor", "suffix_decoding_min_token_prob"),
    *("draft_sample_method", "rejection_sample_method"),
)
FOREIGN_KEYS = frozenset(
    {
        *("quantization", "max_model_len", "draft_tensor_parallel_size", "disable_by_batch_size", "revision"),
        *(
            "code_revision",
            "disable_padded_drafter_batch",
            "enforce_eager",
            "speculative_token_tree",
            "draft_load_config",
        ),
        *("disable_log_stats", "disable_logprobs", "disable_mqa_scorer", "attention_backend", "parallel_drafting"),
        *("typical_acceptance_sampler_posterior_threshold", "typical_acceptance_sampler_posterior_alpha"),
        *("acceptance_method", "posterior_threshold", "posterior_alpha", "target_model_config", "draft_model_config"),
        *("target_parallel_config", "draft_parallel_config"),
        *("use_local_argmax_reduction", "moe_backend", "synthetic_acceptance_rate", "tensor_parallel_size"),
    }
)
"""Keys that vLLM knows and nothing here does."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuffixSettings:
    """How suffix decoding drafts."""

    max_tree_depth: int = 24
    """Most tokens of a match and its drafts together."""
    max_cached_requests: int = 10_000
    """Outputs kept of requests that ended; 0: each request looks at its own tokens only."""
    max_spec_factor: float = 1.0
    """Drafts per token of the match, at most."""
    min_token_prob: float = 0.1
    """Share of the occurrences that a draft and those before it need."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeSettings:
    """How tokens are drafted. Checked on construction.

    Raises:
        UsageError: a value out of range, or one that the method has no use for; names the key.
    """

    method: str
    num_speculative_tokens: int | None = None
    """Most drafts per step; None: as many as the checkpoint's head was made for (mtp only)."""
    model: str | None = None
    """Draft checkpoint."""
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
    draft_sample_method: str = "greedy"
    rejection_sample_method: str = "standard"

    def __post_init__(self) -> None:
        if not isinstance(self.method, str):
            raise _bad("method", f"expected one of {', '.join(METHODS)}, got {self.method!r}")
        if self.method in REFUSED_METHODS:
            raise _bad("method", f"{self.method!r} is known but not implemented (accepted: {', '.join(METHODS)})")
        if self.method not in METHODS:
            near = _nearest(self.method, METHODS)
            raise _bad("method", f"expected one of {', '.join(METHODS)}{near}, got {self.method!r}")
        self._check_count()
        self._check_model()
        self._check_lookup()
        self._check_suffix()
        _check_choice("draft_sample_method", self.draft_sample_method, ("greedy", "probabilistic"), ())
        _check_choice(
            "rejection_sample_method", self.rejection_sample_method, ("standard",), ("block", "synthetic", "strict")
        )
        if self.draft_sample_method != "greedy" and self.method not in METHODS_WITH_TEMPERATURE:
            raise _bad("draft_sample_method", f"{self.method} drafts are never drawn at random; only greedy applies")

    def _check_count(self) -> None:
        count = self.num_speculative_tokens
        if count is None:
            if self.method != "mtp":
                raise _bad("num_speculative_tokens", f"is required for {self.method} (1..{MAX_DRAFTS})")
        elif isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MAX_DRAFTS:
            raise _bad("num_speculative_tokens", f"expected an integer in 1..{MAX_DRAFTS}, got {count!r}")

    def _check_model(self) -> None:
        if self.method in METHODS_WITH_MODEL:
            if not isinstance(self.model, str) or not self.model:
                got = "" if self.model is None else f", got {self.model!r}"
                raise _bad("model", f"{self.method} needs the path of a draft checkpoint{got}")
        elif self.model is not None:
            raise _bad("model", f"{self.method} reads no draft checkpoint")

    def _check_lookup(self) -> None:
        given = {name: getattr(self, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
        for name, value in given.items():
            if value is None:
                continue
            if self.method != "ngram":
                raise _bad(name, f"applies to ngram, not to {self.method}")
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise _bad(name, f"expected an integer of at least 1, got {value!r}")
        low, high = self.lookup_range
        if low > high:
            raise _bad("prompt_lookup_min", f"{low} is above prompt_lookup_max {high}")

    def _check_suffix(self) -> None:
        for name, (value, is_whole, low, high) in {
            "suffix_decoding_max_tree_depth": (self.suffix_decoding_max_tree_depth, True, 2, MAX_TREE_DEPTH),
            "suffix_decoding_max_cached_requests": (self.suffix_decoding_max_cached_requests, True, 0, None),
            "suffix_decoding_max_spec_factor": (self.suffix_decoding_max_spec_factor, False, 0.1, None),
            "suffix_decoding_min_token_prob": (self.suffix_decoding_min_token_prob, False, 0, 1),
        }.items():
            if value is None:
                continue
            if self.method != "suffix":
                raise _bad(name, f"applies to suffix, not to {self.method}")
            kind = "an integer" if is_whole else "a number"
            is_number = isinstance(value, int if is_whole else (int, float)) and not isinstance(value, bool)
            if not is_number or not low <= value <= (math.inf if high is None else high):
                limits = f"of at least {low}" if high is None else f"in {low}..{high}"
                raise _bad(name, f"expected {kind} {limits}, got {value!r}")

    @property
    def suffix(self) -> SuffixSettings:
        """What the `suffix_decoding_` keys say, with the defaults of those that are not given."""
        default = SuffixSettings()
        depth, count = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_cached_requests
        factor, prob = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        return SuffixSettings(
            max_tree_depth=default.max_tree_depth if depth is None else depth,
            max_cached_requests=default.max_cached_requests if count is None else count,
            # Above what a tree holds it limits nothing, and its products would no longer be whole numbers.
            max_spec_factor=default.max_spec_factor if factor is None else min(factor, MAX_TREE_DEPTH),
            min_token_prob=default.min_token_prob if prob is None else prob,
        )

    @property
    def lookup_range(self) -> tuple[int, int]:
        """Shortest and longest n-gram looked for; one that is not given is as the other."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return DEFAULT_LOOKUP, DEFAULT_LOOKUP
        return (low if low is not None else high or 1), (high if high is not None else low or 1)

    @property
    def is_probabilistic(self) -> bool:
        """Whether drafts are drawn at random at the request's temperature."""
        return self.draft_sample_method == "probabilistic"


def parse_speculative_config(value: SpeculativeSettings | Mapping[str, Any] | str) -> SpeculativeSettings:
    """Settings from a mapping or its JSON text.

    Raises:
        UsageError: no JSON object, an unknown key (with the closest match), or a value that cannot be; names the key.
    """
    if isinstance(value, SpeculativeSettings):
        return value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{FLAG}: not a JSON object: {error}") from None
    if not isinstance(value, Mapping):
        raise UsageError(f"{FLAG}: expected a JSON object, got {value!r}")
    for key in value:
        _check_key(key)
    return SpeculativeSettings(**{"method": _implied_method(value), **value})


def _check_key(key: object) -> None:
    if key in KEYS:
        return
    accepted = f"accepted keys: {', '.join(KEYS)}"
    if key in FOREIGN_KEYS:
        raise UsageError(f"{FLAG}: {key}: known but not implemented", remedy=accepted)
    raise UsageError(f"{FLAG}: unknown key {key!r}{_nearest(str(key), KEYS)}", remedy=accepted)


def _implied_method(value: Mapping[str, Any]) -> str:
    if "method" in value:
        return str(value["method"])
    if "prompt_lookup_min" in value or "prompt_lookup_max" in value:
        return "ngram"
    if any(str(key).startswith("suffix_decoding_") for key in value):
        return "suffix"
    if "model" in value:
        return "draft_model"
    raise _bad("method", f"is required (one of {', '.join(METHODS)})")


def _check_choice(key: str, value: object, accepted: tuple[str, ...], refused: tuple[str, ...]) -> None:
    if value in accepted:
        return
    known = "known but not implemented" if value in refused else "unknown"
    raise _bad(key, f"{value!r} is {known} (accepted: {', '.join(accepted)})")


def _nearest(name: str, names: tuple[str, ...]) -> str:
    found = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def _bad(key: str, message: str) -> UsageError:
    return UsageError(f"{FLAG}: {key}: {message}")

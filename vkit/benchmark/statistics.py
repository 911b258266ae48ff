"""What happened to each request, and the figures made of it. No clock, no network: pure arithmetic.

Times are seconds on one clock that starts at the run's start, except where a name says `_ms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vkit.errors import UsageError
from vkit.types import NO_DRAFTS, DraftCounts

LATENCIES = ("ttft", "tpot", "itl", "e2e")
SLO_LATENCIES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that became visible together: `num_tokens` of them at `time_s`."""

    time_s: float
    num_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """One request of a run. `error` is None for a completed one; only then are the counts and arrivals meaningful."""

    index: int
    scheduled_s: float
    """When it should have been sent; differs from `sent_s` only where an open loop could not keep up."""
    sent_s: float
    end_s: float = 0.0
    """When its stream was over."""
    input_tokens: int = 0
    output_tokens: int = 0
    arrivals: list[Arrival] = field(default_factory=list)
    is_split_exact: bool = True
    """Whether the server told how many tokens each event carried, so that the gaps are exact."""
    token_ids: list[int] | None = None
    num_preemptions: int = 0
    """How often the engine took its cache away and computed it again; 0 where the target does not tell."""
    drafts: DraftCounts = NO_DRAFTS
    """How speculation fared; nothing where the target does not tell."""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first token; None without a token."""
        return self.arrivals[0].time_s - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last token (to the end of the stream if there was none)."""
        return (self.arrivals[-1].time_s if self.arrivals else self.end_s) - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, (latency - TTFT) / (output tokens - 1); None below two tokens."""
        if self.output_tokens < 2 or self.ttft_s is None:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def itl_s(self) -> list[float]:
        """The gaps between tokens: one fewer than there are tokens.

        Tokens of one event became visible together after one wait, so each carries an equal share of that wait. Those
        that came with the first token waited for nothing after it: their gaps are 0. The gaps sum to latency - TTFT.
        """
        if not self.arrivals:
            return []
        gaps = [0.0] * (self.arrivals[0].num_tokens - 1)
        for before, after in pairwise(self.arrivals):
            gaps += [(after.time_s - before.time_s) / after.num_tokens] * after.num_tokens
        return gaps


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` split in whole numbers about in proportion to `weights`: likely tokens of events of these text lengths.

    Every part is at least 1 where `total` suffices, and the first part always: an event with text carries a token.
    """
    if total <= 0 or not weights:
        return [0] * len(weights)
    scale = sum(weights)
    shares = [total * weight / scale for weight in weights] if scale else [total / len(weights)] * len(weights)
    if total >= len(weights):
        extra = _largest_remainders(total - len(weights), [max(0.0, share - 1) for share in shares])
        return [1 + part for part in extra]
    return [1, *_largest_remainders(total - 1, shares[1:])]


def _largest_remainders(total: int, weights: Sequence[float]) -> list[int]:
    scale = math.fsum(weights)
    exact = [total * weight / scale for weight in weights] if scale else [0.0] * len(weights)
    parts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


def percentile(sorted_values: Sequence[float], percent: float) -> float:
    """The `percent`-th percentile of rising values, by linear interpolation between the two nearest ranks.

    Source: Hyndman and Fan 1996, definition 7.
    """
    position = (len(sorted_values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Four figures of a sample."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """The figures of `values`; None of nothing."""
        ordered = sorted(values)
        if not ordered:
            return None
        middle, high, top = (percentile(ordered, percent) for percent in (50, 90, 99))
        return cls(math.fsum(ordered) / len(ordered), middle, high, top)


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in milliseconds that a good request keeps, by latency name."""

    limits_ms: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> Slo:
        """The limits written as `ttft:200,tpot:50`.

        Raises:
            UsageError: another form, an unknown or repeated name, a limit that is not a positive number.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, number = (piece.strip() for piece in part.partition(":"))
            if name not in SLO_LATENCIES:
                raise UsageError(
                    f"--slo: {name!r} is not one of {', '.join(SLO_LATENCIES)}",
                    remedy="as in ttft:200,tpot:50 (ms)",
                )
            if name in limits:
                raise UsageError(f"--slo: {name} is given twice")
            limits[name] = _positive_ms(name, number)
        return cls(limits)

    def is_met(self, record: RequestRecord) -> bool:
        """Whether a request completed within every limit. A latency it does not have (TPOT of one token) is within."""
        if record.error is not None:
            return False
        values = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2e": record.e2e_s}
        return all((values[name] or 0.0) * 1e3 <= limit for name, limit in self.limits_ms.items())


def _positive_ms(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise UsageError(f"--slo: {name}: expected milliseconds above 0, got {text!r}")
    return value


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests that kept every limit of the SLO: per second, and as a share of all sent."""

    requests_per_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run. Failed requests count in `failed` alone. A latency nobody has is None."""

    completed: int
    failed: int
    duration_s: float
    total_input_tokens: int
    total_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    input_tokens_per_s: float
    total_tokens_per_s: float
    stream_output_tokens_per_s: float | None
    """Mean over requests of the decode rate one stream saw, 1 / TPOT."""
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    goodput: Goodput | None = None
    estimated_splits: int = 0
    """Completed requests whose server stated only the sum of tokens: their gaps are estimated from text lengths."""
    preemptions: int = 0
    """Times that completed requests lost their cache to others; known for an engine in this process only."""
    mean_acceptance_length: float | None = None
    """Tokens per verification of drafts, the sampled one included; known for an engine in this process that drafts."""
    draft_acceptance_rate: float | None = None
    """Share of the drafts that turned out right."""


def summarize(records: Sequence[RequestRecord], slo: Slo | None = None) -> Summary:
    """The figures of all requests of one run. Rates are over the time from the first sending to the last end."""
    done = [record for record in records if record.error is None]
    duration = max(r.end_s for r in records) - min(r.sent_s for r in records) if records else 0.0
    num_input = sum(record.input_tokens for record in done)
    num_output = sum(record.output_tokens for record in done)
    tpots = [record.tpot_s for record in done if record.tpot_s is not None]
    stream_rates = [1 / tpot for tpot in tpots if tpot > 0]
    drafts = sum((record.drafts for record in done), NO_DRAFTS)
    num_good = sum(slo.is_met(record) for record in records) if slo else 0

    def rate(count: int) -> float:
        return count / duration if duration > 0 else 0.0

    return Summary(
        completed=len(done),
        failed=len(records) - len(done),
        duration_s=duration,
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        requests_per_s=rate(len(done)),
        output_tokens_per_s=rate(num_output),
        input_tokens_per_s=rate(num_input),
        total_tokens_per_s=rate(num_input + num_output),
        stream_output_tokens_per_s=math.fsum(stream_rates) / len(stream_rates) if stream_rates else None,
        ttft_ms=_ms(record.ttft_s for record in done if record.ttft_s is not None),
        tpot_ms=_ms(tpots),
        itl_ms=_ms(gap for record in done for gap in record.itl_s),
        e2e_ms=_ms(record.e2e_s for record in done),
        goodput=Goodput(rate(num_good), num_good / len(records)) if slo and records else None,
        estimated_splits=sum(not record.is_split_exact for record in done),
        preemptions=sum(record.num_preemptions for record in done),
        mean_acceptance_length=drafts.mean_acceptance_length,
        draft_acceptance_rate=drafts.acceptance_rate,
    )


def _ms(seconds: Iterable[float]) -> Distribution | None:
    return Distribution.of(value * 1e3 for value in seconds)

"""What the engine counts and measures, as plain numbers: no exporter, no dependency.

Names, labels and buckets are a contract with dashboards. The engine's own thread writes; anyone may read a snapshot.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vkit.types import FinishReason

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
TOKEN_TIME_BUCKETS = (*(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),)
REQUEST_TIME_BUCKETS = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680),
)
BLOCK_TIME_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 180, 300, 600, 1200, 1800),
)
STEP_TOKEN_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICE_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHED_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")

MetricKind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One value. `suffix` completes the family's name ("_total", "_bucket", "_sum", "_count" or "")."""

    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All samples of one name, ready to be written in any exposition format."""

    name: str
    kind: MetricKind
    help: str
    samples: list[Sample]


@dataclass(slots=True)
class Counter:
    """A sum that only grows, optionally split by one label whose values are known beforehand."""

    name: str
    help: str
    label: str | None = None
    label_values: tuple[str, ...] = ()
    value: float = 0
    by_label: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_label = dict.fromkeys(self.label_values, 0)

    def add(self, amount: float = 1, label: str | None = None) -> None:
        """Add a non-negative amount."""
        if amount < 0:
            raise ValueError(f"{self.name}: a counter cannot fall, got {amount}")
        if label is None:
            self.value += amount
        else:
            self.by_label[label] += amount

    def family(self) -> MetricFamily:
        """The counter's samples."""
        if self.label is None:
            return MetricFamily(self.name, "counter", self.help, [Sample("_total", {}, self.value)])
        samples = [Sample("_total", {self.label: key}, value) for key, value in self.by_label.items()]
        return MetricFamily(self.name, "counter", self.help, samples)


class Histogram:
    """Counts of observed values by upper bound."""

    __slots__ = ("bounds", "counts", "help", "name", "sum")

    def __init__(self, name: str, help: str, bounds: Iterable[float]) -> None:
        self.name = name
        self.help = help
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """Number of observations."""
        return sum(self.counts)

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def family(self) -> MetricFamily:
        """Cumulative buckets, sum and count."""
        samples: list[Sample] = []
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            total += count
            samples.append(Sample("_bucket", {"le": "+Inf" if bound == float("inf") else f"{bound:g}"}, total))
        samples.append(Sample("_sum", {}, self.sum))
        samples.append(Sample("_count", {}, total))
        return MetricFamily(self.name, "histogram", self.help, samples)


def gauge(name: str, help: str, value: float, labels: Mapping[str, str] | None = None) -> MetricFamily:
    """A family of one gauge sample."""
    return MetricFamily(name, "gauge", help, [Sample("", labels or {}, value)])


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to and including the largest not above `limit`."""
    bounds: list[int] = []
    power = 1
    while power <= limit:
        bounds.extend(power * step for step in (1, 2, 5) if power * step <= limit)
        power *= 10
    return bounds


class DraftCounters(NamedTuple):
    """How drafts fared."""

    drafts: Counter
    draft_tokens: Counter
    accepted_tokens: Counter
    accepted_per_position: Counter


class EngineMetrics:
    """Every counter and histogram of one engine. Histograms per request are observed once per finished sequence."""

    def __init__(self, max_model_len: int, *, measures_blocks: bool = False, max_drafts: int = 0) -> None:
        """`max_drafts`: most drafts of a sequence per step; 0 where nothing is drafted, and then nothing is shown."""
        lengths = one_two_five(max_model_len)

        def tokens(name: str, help: str) -> Histogram:
            return Histogram(f"vllm:{name}", help, lengths)

        def seconds(name: str, help: str, bounds: tuple[float, ...] = REQUEST_TIME_BUCKETS) -> Histogram:
            return Histogram(f"vllm:{name}_seconds", help, bounds)

        def counter(name: str, help: str, label: str | None = None, values: tuple[str, ...] = ()) -> Counter:
            return Counter(f"vllm:{name}", help, label, values)

        reasons = tuple(reason.value for reason in FinishReason)
        self.prefix_cache_queries = counter("prefix_cache_queries", "Tokens looked up in the prefix cache")
        self.prefix_cache_hits = counter("prefix_cache_hits", "Tokens found in the prefix cache")
        self.external_queries = counter("external_prefix_cache_queries", "Tokens looked up through a cache connector")
        self.external_hits = counter("external_prefix_cache_hits", "Tokens found through a cache connector")
        self.mm_queries = counter("mm_cache_queries", "Media items looked up in the media cache")
        self.mm_hits = counter("mm_cache_hits", "Media items found in the media cache")
        self.preemptions = counter("num_preemptions", "Sequences that gave up their blocks")
        self.corrupted = counter("corrupted_requests", "Sequences ended because their logits were not finite")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of prefilled requests, cached ones included")
        self.prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "Prompt tokens by where their cache entries came from", "source", PROMPT_SOURCES
        )
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens not computed because cached")
        self.prompt_tokens_cached_by_source = counter(
            "prompt_tokens_cached_by_source", "Cached prompt tokens by tier", "source", CACHED_SOURCES
        )
        self.generation_tokens = counter("generation_tokens", "Sampled tokens")
        self.forced_tokens = Counter(
            "vkit:jump_forward_tokens", "Tokens a grammar left no choice about, each a step saved for its sequence"
        )
        self.success = counter("request_success", "Finished sequences", "finished_reason", reasons)
        self.rejections = counter(
            "admission_rejections",
            "Requests turned away at a queue limit",
            "reason",
            ("max_num_queued_reqs", "max_num_queued_tokens"),
        )
        self.request_prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens per request")
        self.request_generation_tokens = tokens("request_generation_tokens", "Output tokens per sequence")
        self.request_max_tokens = tokens("request_max_num_generation_tokens", "Longest output of each request")
        self.params_max_tokens = tokens("request_params_max_tokens", "max_tokens as asked for")
        self.computed_tokens = tokens("request_prefill_kv_computed_tokens", "Prompt tokens computed, not cached")
        self.step_tokens = Histogram("vllm:iteration_tokens_total", "Tokens per step", STEP_TOKEN_BUCKETS)
        self.params_n = Histogram("vllm:request_params_n", "n as asked for", CHOICE_BUCKETS)
        self.request_preemptions = Histogram(
            "vllm:request_num_preemptions", "Preemptions per sequence", PREEMPTION_BUCKETS
        )
        self.first_token = seconds("time_to_first_token", "Arrival to first token", FIRST_TOKEN_BUCKETS)
        self.inter_token = seconds("inter_token_latency", "Time between output tokens", TOKEN_TIME_BUCKETS)
        self.per_output_token = seconds(
            "request_time_per_output_token", "Mean time per output token after the first", TOKEN_TIME_BUCKETS
        )
        self.e2e = seconds("e2e_request_latency", "Arrival to end")
        self.queue = seconds("request_queue_time", "Arrival to first scheduling")
        self.inference = seconds("request_inference_time", "First scheduling to last token")
        self.prefill = seconds("request_prefill_time", "First scheduling to first token")
        self.decode = seconds("request_decode_time", "First token to last token")
        self.drafts: DraftCounters | None = None
        if max_drafts:
            positions = tuple(map(str, range(max_drafts)))
            self.drafts = DraftCounters(
                counter("spec_decode_num_drafts", "Verifications: a sequence with drafts in a step counts once"),
                counter("spec_decode_num_draft_tokens", "Drafts verified"),
                counter("spec_decode_num_accepted_tokens", "Drafts that turned out right"),
                counter(
                    "spec_decode_num_accepted_tokens_per_pos",
                    "Drafts that turned out right, by their place after the sequence's last token",
                    "position",
                    positions,
                ),
            )
        self.blocks: tuple[Histogram, Histogram, Histogram] | None = None
        if measures_blocks:
            self.blocks = (
                seconds("kv_block_lifetime", "Allocation to eviction of cached blocks", BLOCK_TIME_BUCKETS),
                seconds("kv_block_idle_before_evict", "Last use to eviction of cached blocks", BLOCK_TIME_BUCKETS),
                seconds("kv_block_reuse_gap", "Time between uses of cached blocks", BLOCK_TIME_BUCKETS),
            )

    def observe_finished(self, times: SequenceTimes) -> None:
        """Book the end of one sequence."""
        self.success.add(label=times.reason.value)
        self.request_generation_tokens.observe(times.num_output_tokens)
        self.request_preemptions.observe(times.num_preemptions)
        self.e2e.observe(times.finished - times.arrival)
        if times.first_scheduled is None:
            return
        self.queue.observe(times.first_scheduled - times.arrival)
        if times.first_token is None or times.last_token is None:
            return
        self.prefill.observe(times.first_token - times.first_scheduled)
        self.decode.observe(times.last_token - times.first_token)
        self.inference.observe(times.last_token - times.first_scheduled)
        if times.num_output_tokens > 1:
            self.per_output_token.observe((times.last_token - times.first_token) / (times.num_output_tokens - 1))

    def families(self) -> list[MetricFamily]:
        """A snapshot of all counters and histograms."""
        return [value.family() for value in self.__dict__.values() if isinstance(value, Counter | Histogram)] + [
            entry.family() for entry in (*(self.blocks or ()), *(self.drafts or ()))
        ]


@dataclass(frozen=True, slots=True)
class SequenceTimes:
    """When one finished sequence passed its milestones, on the monotonic clock, in seconds."""

    reason: FinishReason
    arrival: float
    first_scheduled: float | None
    first_token: float | None
    last_token: float | None
    finished: float
    num_output_tokens: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and counters in short. Counters only ever grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_deferred: int = 0
    """Of the waiting, those held back for something else than room (a grammar, a pause)."""
    kv_cache_usage: float = 0.0
    """Share of the blocks in use, 0..1."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_corrupted: int = 0
    iteration_tokens: Sequence[int] = ()
    """Tokens of each step since the last read (the latest 65,536 of them)."""
    cache_settings: Mapping[str, str] = field(default_factory=dict)

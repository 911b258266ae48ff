"""Prometheus metrics: what the routes observe, and what the engine reports when it is scraped.

Names, labels and buckets are those of vLLM, so that its dashboards work. A failure in here never fails a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.registry import Collector

from vkit.server.engine_protocol import EngineStats
from vkit.types import FinishReason, RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

TTFT_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
TOKEN_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LATENCY_BUCKETS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
N_BUCKETS = (1, 2, 5, 10, 20)
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)
HTTP_BUCKETS = (0.1, 0.5, 1.0)
HTTP_HIGHR_BUCKETS = (
    *(
        0.01,
        0.025,
        0.05,
        0.075,
        0.1,
        0.25,
        0.5,
        0.75,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        3.5,
        4.0,
        4.5,
        5.0,
        7.5,
        10.0,
        30.0,
        60.0,
    ),
)
REJECTION_REASONS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")

_LABELS = ("model_name", "engine")


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to and including the first value not below `limit`'s last step."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return buckets or [1]
            buckets.append(step * scale)
        scale *= 10


class ServerMetrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, model_name: str, max_model_len: int | None = None) -> None:
        self.registry = CollectorRegistry()
        self._names = {"model_name": model_name, "engine": "0"}
        self._engine_collector = _EngineCollector(model_name)
        self.registry.register(self._engine_collector)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        self._make_counters(model_name)
        self._make_http_metrics()
        self._make_histograms(max_model_len or 2**17)

    def watch_engine(self, read: Callable[[], EngineStats], max_model_len: int) -> None:
        """Report this engine from now on."""
        self._engine_collector.read = read

    def scrape(self) -> bytes:
        """All metrics in text format 0.0.4."""
        return generate_latest(self.registry)

    def _make_counters(self, model_name: str) -> None:
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests whose prefill was done.")
        self.prompt_tokens_cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found in a cache.")
        by_source = self._counter_family(
            "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.", "source"
        )
        self.prompt_tokens_by_source = {name: by_source.labels(**self._names, source=name) for name in PROMPT_SOURCES}
        cached = self._counter_family(
            "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by where they were kept.", "source"
        )
        self.prompt_tokens_cached_by_source = {
            name: cached.labels(**self._names, source=name) for name in CACHE_SOURCES
        }
        self.generation_tokens = self._counter("vllm:generation_tokens", "Sampled tokens.")
        self.mm_cache_queries = self._counter("vllm:mm_cache_queries", "Media items looked up.")
        self.mm_cache_hits = self._counter("vllm:mm_cache_hits", "Media items found.")
        finished = self._counter_family("vllm:request_success", "Finished sequences.", "finished_reason")
        self.finished = {reason: finished.labels(**self._names, finished_reason=str(reason)) for reason in FinishReason}
        rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused before they entered the queue.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self.rejections = {reason: rejections.labels(model_name, reason) for reason in REJECTION_REASONS}

    def _make_histograms(self, max_model_len: int) -> None:
        lengths = one_two_five(max_model_len)
        histogram = self._histogram
        self.request_prompt_tokens = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_generation_tokens = histogram(
            "vllm:request_generation_tokens", "Tokens generated for a sequence.", lengths
        )
        self.request_max_generation_tokens = histogram(
            "vllm:request_max_num_generation_tokens", "Most tokens generated for a sequence of a request.", lengths
        )
        self.request_params_max_tokens = histogram("vllm:request_params_max_tokens", "Token limit asked for.", lengths)
        self.request_prefill_computed = histogram(
            "vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed, not found in a cache.", lengths
        )
        self.request_params_n = histogram("vllm:request_params_n", "Choices asked for.", N_BUCKETS)
        self.request_preemptions = histogram(
            "vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS
        )
        self.time_to_first_token = histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "vllm:inter_token_latency_seconds", "Time between two tokens of a sequence.", TOKEN_BUCKETS
        )
        self.time_per_output_token = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens of a sequence.", TOKEN_BUCKETS
        )
        self.e2e_latency = histogram("vllm:e2e_request_latency_seconds", "Arrival to finish.", LATENCY_BUCKETS)
        self.queue_time = histogram("vllm:request_queue_time_seconds", "Arrival to first scheduling.", LATENCY_BUCKETS)
        self.inference_time = histogram(
            "vllm:request_inference_time_seconds", "First scheduling to last token.", LATENCY_BUCKETS
        )
        self.prefill_time = histogram(
            "vllm:request_prefill_time_seconds", "First scheduling to first token.", LATENCY_BUCKETS
        )
        self.decode_time = histogram("vllm:request_decode_time_seconds", "First to last token.", LATENCY_BUCKETS)
        self._engine_collector.iteration_tokens = histogram(
            "vllm:iteration_tokens_total", "Tokens of one step.", ITERATION_BUCKETS
        )

    def _make_http_metrics(self) -> None:
        registry = self.registry
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Time to answer, by route.",
            ("method", "handler"),
            buckets=HTTP_BUCKETS,
            registry=registry,
        )
        self._http_duration_highr = Histogram(
            "http_request_duration_highr_seconds",
            "Time to answer, all routes, in fine steps.",
            buckets=HTTP_HIGHR_BUCKETS,
            registry=registry,
        )
        self._http_request_size = Summary(
            "http_request_size_bytes", "Bytes of request bodies.", ("method", "handler"), registry=registry
        )
        self._http_response_size = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ("method", "handler"), registry=registry
        )

    def _counter_family(self, name: str, text: str, label: str) -> Counter:
        return Counter(name, text, (*_LABELS, label), registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(**self._names)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(**self._names)

    def observe_http(
        self, method: str, handler: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """One HTTP request was answered."""
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_duration.labels(method, handler).observe(seconds)
        self._http_duration_highr.observe(seconds)
        self._http_request_size.labels(method, handler).observe(request_bytes)
        self._http_response_size.labels(method, handler).observe(response_bytes)

    def observe_prompt(self, num_tokens: int, num_cached: int) -> None:
        """A request's prefill is done."""
        cached = min(max(num_cached, 0), num_tokens)
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_by_source["local_compute"].inc(num_tokens - cached)
        self.prompt_tokens_by_source["local_cache_hit"].inc(cached)
        self.prompt_tokens_cached.inc(cached)
        self.prompt_tokens_cached_by_source["device"].inc(cached)
        self.request_prompt_tokens.observe(num_tokens)
        self.request_prefill_computed.observe(num_tokens - cached)

    def observe_sequence(self, clock: SequenceClock, reason: FinishReason, times: RequestMetrics | None) -> None:
        """A sequence ended."""
        now = time.monotonic()
        self.finished[reason].inc()
        self.request_generation_tokens.observe(clock.num_tokens)
        self.e2e_latency.observe(now - clock.arrival)
        if clock.num_tokens > 1:
            self.time_per_output_token.observe((clock.last - clock.first) / (clock.num_tokens - 1))
        if times is None or times.first_scheduled_time is None:
            return
        self.queue_time.observe(max(0.0, times.first_scheduled_time - times.arrival_time))
        self.request_preemptions.observe(times.num_preemptions)
        if times.first_token_time is None:
            return
        last = times.last_token_time if times.last_token_time is not None else times.first_token_time
        self.prefill_time.observe(max(0.0, times.first_token_time - times.first_scheduled_time))
        self.decode_time.observe(max(0.0, last - times.first_token_time))
        self.inference_time.observe(max(0.0, last - times.first_scheduled_time))


class SequenceClock:
    """Token times of one sequence, as the server sees them."""

    __slots__ = ("arrival", "first", "last", "num_tokens")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.first = 0.0
        self.last = 0.0
        self.num_tokens = 0

    def tick(self, num_new: int, metrics: ServerMetrics) -> None:
        """`num_new` tokens arrived now."""
        if num_new <= 0:
            return
        now = time.monotonic()
        if self.num_tokens == 0:
            self.first = now
            metrics.time_to_first_token.observe(now - self.arrival)
            num_gaps = num_new - 1
        else:
            num_gaps = num_new
        # Tokens that came together share the wait for them, so that the count of gaps stays right.
        gap = (now - self.last) / num_new if self.num_tokens else 0.0
        for _ in range(num_gaps):
            metrics.inter_token_latency.observe(gap)
        self.last = now
        self.num_tokens += num_new
        metrics.generation_tokens.inc(num_new)


class _EngineCollector(Collector):
    """Reads the engine at every scrape. Counters are clamped so that they never fall."""

    def __init__(self, model_name: str) -> None:
        self.read: Callable[[], EngineStats] | None = None
        self.iteration_tokens: Histogram | None = None
        self._values = [model_name, "0"]
        self._highest: dict[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = EngineStats() if self.read is None else self.read()
        if self.iteration_tokens is not None:
            for num_tokens in stats.iteration_tokens:
                self.iteration_tokens.observe(num_tokens)
        yield self._gauge("vllm:num_requests_running", "Sequences in the running batch.", stats.num_running)
        yield self._gauge("vllm:num_requests_waiting", "Queued sequences.", stats.num_waiting)
        yield self._labelled(
            "vllm:num_requests_waiting_by_reason",
            "Queued sequences by what they wait for.",
            "reason",
            {
                "capacity": stats.num_waiting - stats.num_waiting_deferred,
                "deferred": stats.num_waiting_deferred,
            },
        )
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the cache blocks in use, 0..1.", stats.kv_cache_usage)
        yield self._labelled(
            "vllm:engine_sleep_state",
            "Which sleep state the engine is in.",
            "sleep_state",
            {"awake": 1, "weights_offloaded": 0, "discard_all": 0},
        )
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Settings of the cache, as labels.",
            labels=[*_LABELS, *stats.cache_settings],
        )
        info.add_metric([*self._values, *(str(value) for value in stats.cache_settings.values())], 1)
        yield info
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("vllm:external_prefix_cache_queries", "Prompt tokens looked up through a KV connector.", 0),
            ("vllm:external_prefix_cache_hits", "Prompt tokens found through a KV connector.", 0),
            ("vllm:num_preemptions", "Sequences put back into the queue.", stats.num_preemptions),
            ("vllm:corrupted_requests", "Sequences ended by NaN or infinite logits.", stats.num_corrupted),
        ):
            yield self._counter(name, text, value)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _labelled(self, name: str, text: str, label: str, values: dict[str, float]) -> Metric:
        family = GaugeMetricFamily(name, text, labels=(*_LABELS, label))
        for key, value in values.items():
            family.add_metric([*self._values, key], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        highest = max(value, self._highest.get(name, 0))
        self._highest[name] = highest
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, highest)
        return family

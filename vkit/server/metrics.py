"""Prometheus text: what the engine measures, what the HTTP side measures, and the process itself.

Names, labels and buckets are those of vLLM, so that its dashboards work. The engine counts its own work; here are only
requests it never saw. A failure in here never fails a request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    Summary,
    generate_latest,
)
from prometheus_client.gc_collector import GCCollector

from vkit.metrics import EngineMetrics, MetricFamily, Sample, gauge

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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
_REJECTIONS = "vllm:admission_rejections"


class ServerMetrics:
    """All metrics of one server."""

    def __init__(self, model_name: str, max_model_len: int | None = None) -> None:
        self.read_engine: Callable[[], list[MetricFamily]] | None = None
        """The engine's metrics; None before there is one."""
        self._labels = {"model_name": model_name, "engine": "0"}
        self._blank = EngineMetrics(max_model_len or 2**17)
        self.registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)
        rejections = Counter(
            _REJECTIONS,
            "Requests refused before they entered the queue.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self.rejections = {reason: rejections.labels(model_name, reason) for reason in REJECTION_REASONS}
        self._http_requests = Counter(
            "http_requests", "HTTP requests.", ("method", "status", "handler"), registry=self.registry
        )
        self._http_duration = Histogram(
            "http_request_duration_seconds",
            "Time to answer, by route.",
            ("method", "handler"),
            buckets=HTTP_BUCKETS,
            registry=self.registry,
        )
        self._http_duration_highr = Histogram(
            "http_request_duration_highr_seconds",
            "Time to answer, all routes, in fine steps.",
            buckets=HTTP_HIGHR_BUCKETS,
            registry=self.registry,
        )
        self._http_request_size = Summary(
            "http_request_size_bytes", "Bytes of request bodies.", ("method", "handler"), registry=self.registry
        )
        self._http_response_size = Summary(
            "http_response_size_bytes", "Bytes of response bodies.", ("method", "handler"), registry=self.registry
        )

    def scrape(self) -> bytes:
        """All metrics in text format 0.0.4."""
        own = generate_latest(self.registry)
        return exposition(self.engine_families(), self._labels).encode() + own

    def engine_families(self) -> list[MetricFamily]:
        """The engine's metrics; before it is loaded the same names, all zero."""
        if self.read_engine is None:
            families = [
                gauge("vllm:num_requests_running", "Sequences in the running batch", 0),
                gauge("vllm:num_requests_waiting", "Sequences waiting", 0),
                gauge("vllm:kv_cache_usage_perc", "Share of the cache blocks in use, 0..1", 0),
                *self._blank.families(),
            ]
        else:
            families = self.read_engine()
        return [family for family in families if family.name != _REJECTIONS]

    def engine_value(self, name: str) -> float:
        """One unlabelled value of the engine's, such as a gauge; 0 when it has none of this name."""
        for family in self.engine_families():
            if family.name == name and family.samples:
                return family.samples[0].value
        return 0.0

    def observe_http(
        self, method: str, handler: str, status: int, seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """One HTTP request was answered."""
        self._http_requests.labels(method, f"{status // 100}xx", handler).inc()
        self._http_duration.labels(method, handler).observe(seconds)
        self._http_duration_highr.observe(seconds)
        self._http_request_size.labels(method, handler).observe(request_bytes)
        self._http_response_size.labels(method, handler).observe(response_bytes)


def exposition(families: Iterable[MetricFamily], labels: Mapping[str, str]) -> str:
    """The families in text format 0.0.4, every sample with `labels` in front of its own.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/
    """
    lines: list[str] = []
    for family in families:
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines.append(f"# HELP {name} {_escaped(family.help)}")
        lines.append(f"# TYPE {name} {family.kind}")
        lines.extend(_line(family.name, sample, labels) for sample in family.samples)
    return "".join(line + "\n" for line in lines)


def _line(name: str, sample: Sample, labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{key}="{_escaped(value, quotes=True)}"' for key, value in {**labels, **sample.labels}.items())
    return f"{name}{sample.suffix}{{{shown}}} {_number(sample.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quotes else text

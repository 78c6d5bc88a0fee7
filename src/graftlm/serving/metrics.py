"""The metrics of a server for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graftlm.serving.protocol import Engine

_FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST_BUCKETS = (*_FIRST_TOKEN_BUCKETS, 300, 600)


class EngineCollector(Collector):
    """The state of an engine, read at each scrape.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine with their current values."""
        stats = self.engine.stats()
        yield GaugeMetricFamily("graftlm_running", "Continuations being generated.", stats.running)
        yield GaugeMetricFamily("graftlm_waiting", "Waiting continuations.", stats.waiting)
        yield CounterMetricFamily("graftlm_generated_tokens", "Tokens generated since the start.", stats.tokens)
        finished = CounterMetricFamily("graftlm_continuations", "Continuations by finish reason.", labels=["reason"])
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished


class ServerMetrics:
    """The metrics of one server, in a registry that GET /metrics reports.

    Args:
        engine: the engine whose state is reported.

    Attributes:
        registry: all metrics, with those of the engine and of the Python process.
        requests: number of HTTP requests by path and status.
        request_seconds: durations of HTTP requests by path.
        first_token_seconds: times from the submission to the first token by model.
        prompt_tokens: number of prompt tokens by model.
        completion_tokens: number of new tokens by model.
        loads: number of loaded graft files by graft and outcome.
    """

    def __init__(self, engine: Engine) -> None:
        registry = CollectorRegistry()
        registry.register(EngineCollector(engine))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self.registry = registry
        self.requests = Counter(
            "graftlm_requests",
            "Requests by path and status; 499 if the client disconnected.",
            ["path", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "graftlm_request_seconds",
            "Time from a request to the end of its response.",
            ["path"],
            buckets=_REQUEST_BUCKETS,
            registry=registry,
        )
        self.first_token_seconds = Histogram(
            "graftlm_first_token_seconds",
            "Time from a request to its first token.",
            ["model"],
            buckets=_FIRST_TOKEN_BUCKETS,
            registry=registry,
        )
        self.prompt_tokens = Counter("graftlm_prompt_tokens", "Prompt tokens.", ["model"], registry=registry)
        self.completion_tokens = Counter("graftlm_completion_tokens", "New tokens.", ["model"], registry=registry)
        self.loads = Counter("graftlm_graft_loads", "Loaded graft files.", ["graft", "outcome"], registry=registry)

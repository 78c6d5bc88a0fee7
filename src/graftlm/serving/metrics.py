"""What Prometheus reads at /metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftlm.serving.protocol import Engine

CONTENT_TYPE = CONTENT_TYPE_LATEST
MIXTURE = "mixture"
_FIRST_TOKEN = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_REQUEST = (*_FIRST_TOKEN, 300, 600)


class _EngineCollector(Collector):
    """What an engine says of itself, when it is asked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        stats = self.engine.stats()
        yield GaugeMetricFamily("graftlm_running", "Continuations being written.", stats.running)
        yield GaugeMetricFamily("graftlm_waiting", "Continuations that wait for their turn.", stats.waiting)
        yield CounterMetricFamily("graftlm_generated_tokens", "Tokens written since the start.", stats.tokens)
        ends = CounterMetricFamily("graftlm_continuations", "Continuations by how they ended.", labels=["reason"])
        for reason, count in sorted(stats.finished.items()):
            ends.add_metric([reason], count)
        yield ends


class Metrics:
    """Counts of one server.

    Args:
        engine: what answers.
    """

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        for collector in (_EngineCollector(engine), ProcessCollector(registry=None)):
            self.registry.register(collector)
        GCCollector(registry=self.registry)
        here = self.registry
        self.requests = Counter(
            "graftlm_requests", "Requests by path and status; 499: the client left.", ["path", "status"], registry=here
        )
        self.seconds = Histogram(
            "graftlm_request_seconds",
            "From a request to the end of its answer.",
            ["path"],
            buckets=_REQUEST,
            registry=here,
        )
        self.first = Histogram(
            "graftlm_first_token_seconds",
            "From a request to its first token.",
            ["model"],
            buckets=_FIRST_TOKEN,
            registry=here,
        )
        self.prompt_tokens = Counter("graftlm_prompt_tokens", "Tokens that were read.", ["model"], registry=here)
        self.completion_tokens = Counter(
            "graftlm_completion_tokens", "Tokens that were written.", ["model"], registry=here
        )
        self.loads = Counter(
            "graftlm_graft_loads", "Grafts taken into service, or not.", ["graft", "outcome"], registry=here
        )

    def page(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def loaded(self, graft: str, outcome: str) -> None:
        """Count a graft's new files: loaded, refused or withdrawn."""
        self.loads.labels(graft, outcome).inc()

    def used(self, model: str, prompt: int, completion: int) -> None:
        """Count the tokens of an answer."""
        self.prompt_tokens.labels(kind_of(model)).inc(prompt)
        self.completion_tokens.labels(kind_of(model)).inc(completion)


def kind_of(model: str) -> str:
    """A model's name, or one word for all mixtures: clients can't make up new labels."""
    return MIXTURE if "+" in model else model


class Measure:
    """Counts every request of an app by the route that answered, and times it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status, start = 499, time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            path = getattr(scope.get("route"), "path", None) or "other"
            self.metrics.requests.labels(path, str(status)).inc()
            self.metrics.seconds.labels(path).observe(time.perf_counter() - start)
        return None

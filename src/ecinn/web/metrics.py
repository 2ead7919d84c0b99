"""Prometheus metrics of the service, and one log line per request."""

import logging
import time
from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ecinn.web")


class Metrics:
    """Metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "ecinn_requests", "Answered requests.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "ecinn_request_seconds",
            "Seconds from request to answer.",
            ["route"],
            registry=self.registry,
        )
        self.joined = Histogram(
            "ecinn_joined_requests",
            "Requests per network pass; the count is the number of passes.",
            ["queue"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        self.pass_seconds = Counter(
            "ecinn_pass_seconds",
            "Seconds spent in network passes.",
            ["queue"],
            registry=self.registry,
        )
        self.in_flight = Gauge(
            "ecinn_in_flight", "Requests being answered.", registry=self.registry
        )
        self.queue = Gauge("ecinn_queue", "Waiting requests.", ["queue"], registry=self.registry)

    def observe_pass(self, queue: str) -> Callable[[int, float], None]:
        """Return an observer of the passes of one queue."""

        def observe(joined: int, seconds: float) -> None:
            self.joined.labels(queue).observe(joined)
            self.pass_seconds.labels(queue).inc(seconds)

        return observe

    def watch_queue(self, queue: str, length: Callable[[], int]) -> None:
        """Read the length of a queue whenever the metrics are read."""
        self.queue.labels(queue).set_function(length)

    def text(self) -> bytes:
        """Format all metrics for Prometheus."""
        return generate_latest(self.registry)


class Observed:
    """ASGI layer that counts every request and logs its size, status and duration."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, seen = time.perf_counter(), {"size": 0, "status": 499}

        async def counted() -> Message:
            message = await receive()
            seen["size"] += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, counted, noted)
        finally:
            self._metrics.in_flight.dec()
            seconds = time.perf_counter() - started
            route = _route(scope)
            self._metrics.requests.labels(route, str(seen["status"])).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            log.info("%d bytes, %d, %.3f s", seen["size"], seen["status"], seconds)


def _route(scope: Scope) -> str:
    """Return the declared route, so that no part of a URL is recorded."""
    return getattr(scope.get("route"), "path", "other")

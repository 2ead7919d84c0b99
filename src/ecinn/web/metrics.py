"""Prometheus metrics of the service, and one log line per request."""

import logging
import secrets
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
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ecinn.web")
METHODS = ("GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE")


class Metrics:
    """Metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.requests = Counter(
            "ecinn_requests", "Answered requests.", ["route", "status"], registry=registry
        )
        self.seconds = Histogram(
            "ecinn_request_seconds", "Seconds to answer.", ["route"], registry=registry
        )
        self.joined = Histogram(
            "ecinn_joined_requests",
            "Requests per network pass; the count is the number of passes.",
            ["queue"],
            buckets=[2**power for power in range(9)],
            registry=registry,
        )
        self.pass_seconds = Counter(
            "ecinn_pass_seconds", "Seconds in network passes.", ["queue"], registry=registry
        )
        self.in_flight = Gauge("ecinn_in_flight", "Requests being answered.", registry=registry)
        self.refused = Counter(
            "ecinn_refused", "Refused requests and connections.", ["reason"], registry=registry
        )
        self.queue = Gauge("ecinn_queue", "Waiting requests.", ["queue"], registry=registry)

    def name_worker(self, number: int, count: int) -> None:
        """Add a metric that names the worker process: each worker counts for itself."""
        told = "Worker process of these metrics; each worker counts its own requests."
        names = ["worker", "workers"]
        Gauge("ecinn_worker", told, names, registry=self.registry).labels(number, count).set(1)

    def watch(self, queue: str, length: Callable[[], int]) -> Callable[[int, float], None]:
        """Record the length of a queue; return an observer of its passes."""
        self.queue.labels(queue).set_function(length)

        def observe(joined: int, seconds: float) -> None:
            self.joined.labels(queue).observe(joined)
            self.pass_seconds.labels(queue).inc(seconds)

        return observe

    def text(self) -> bytes:
        """Format all metrics for Prometheus."""
        return generate_latest(self.registry)


class Observed:
    """ASGI layer that counts, numbers and logs every request, without any of its content."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Measure one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started, seen = time.perf_counter(), {"size": 0, "status": 499}
        number = secrets.token_hex(8)

        async def counted() -> Message:
            message = await receive()
            seen["size"] += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                seen["status"] = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = number
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, counted, noted)
        finally:
            self._metrics.in_flight.dec()
            seconds = time.perf_counter() - started
            # The declared route, so that no part of a URL is recorded.
            route = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(route, str(seen["status"])).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            method = scope["method"] if scope["method"] in METHODS else "other"
            log.info(
                "%s %s %d %.3f s %d bytes %s",
                *(method, route, seen["status"], seconds, seen["size"], number),
            )

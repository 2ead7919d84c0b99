"""What the service counts, for Prometheus, and the one line it logs of a request."""

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
    """Counters of one service; nothing global."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "ecinn_requests", "Answered requests.", ["route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "ecinn_request_seconds", "From request to answer.", ["route"], registry=self.registry
        )
        self.joined = Histogram(
            "ecinn_joined_requests",
            "Requests joined into one network pass; their count is that of the passes.",
            ["queue"],
            buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
            registry=self.registry,
        )
        self.pass_seconds = Counter(
            "ecinn_pass_seconds", "Spent in network passes.", ["queue"], registry=self.registry
        )
        self.in_flight = Gauge(
            "ecinn_in_flight", "Requests being answered.", registry=self.registry
        )
        self.queue = Gauge("ecinn_queue", "Requests that wait.", ["queue"], registry=self.registry)

    def observe_pass(self, queue: str) -> Callable[[int, float], None]:
        """What a queue tells after each pass."""

        def observe(joined: int, seconds: float) -> None:
            self.joined.labels(queue).observe(joined)
            self.pass_seconds.labels(queue).inc(seconds)

        return observe

    def watch_queue(self, queue: str, length: Callable[[], int]) -> None:
        """Ask for the length whenever it is wanted."""
        self.queue.labels(queue).set_function(length)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self.registry)


class Observed:
    """ASGI: counts every request and logs its size, its status and how long it took."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, and look on."""
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
    """The route as it is declared: what people write into an address is nobody's business."""
    return getattr(scope.get("route"), "path", "other")

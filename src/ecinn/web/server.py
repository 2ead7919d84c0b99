"""Run the service with uvicorn: socket, timeouts, log and graceful shutdown."""

import asyncio
import signal
import socket

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from ecinn.errors import InputError
from ecinn.web.security import Hardened, error_answer
from ecinn.web.settings import Settings

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_FULL = Hardened(
    error_answer(
        503,
        "too many connections are open: try again in 5 s",
        {"Connection": "close", "Retry-After": "5"},
    )
)
_STDERR = {"handlers": ["stderr"], "level": "WARNING", "propagate": False}
_LOG = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "loggers": {"uvicorn": _STDERR, "ecinn.web": _STDERR | {"level": "INFO"}},
}


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"cannot listen on {host}:{port} ({reason}): choose another --host or --port"
        ) from error
    # Connections inherit this; otherwise a body waits 40 ms for the acknowledgement of its head.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach the host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def run(app: ASGIApp, listening: socket.socket, settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in progress."""
    server = uvicorn.Server(configuration(app, settings))
    # Uvicorn raises the signal again after shutdown: ignore it, so that a stop is no failure.
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.signal(kind, lambda *_: None) for kind in kinds}
    try:
        server.run([listening])
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def configuration(app: ASGIApp, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=_protocol(settings),
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.answer_seconds + settings.body_seconds) + 1,
        log_config=_LOG,
    )


def _protocol(settings: Settings) -> type[asyncio.Protocol]:
    class TimedProtocol(H11Protocol):
        """HTTP/1.1 that closes connections whose headers arrive or answers are read too slowly."""

        _header_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > settings.connections:
                self.app = _FULL
            self._expect_headers(waiting=True)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._expect_headers(waiting=self.conn.their_state is h11.IDLE or self._answered_early)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._expect_reading()
            if self._answered_early:
                self._expect_headers(waiting=True)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._expect_reading()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._expect_reading()

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_headers(waiting=False)
            if self._read_timer is not None:
                self._read_timer.cancel()
            super().connection_lost(exc)

        @property
        def _answered_early(self) -> bool:
            return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

        def _expect_headers(self, *, waiting: bool) -> None:
            """Start the timer of a request that has not arrived, or stop it."""
            if waiting and self._header_timer is None:
                self._header_timer = self.loop.call_later(
                    settings.head_seconds, self.transport.abort
                )
            elif not waiting and self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _expect_reading(self) -> None:
            """Restart the timer of an answer that is being read."""
            if self._read_timer is not None:
                self._read_timer.cancel()
            self._read_timer = self.loop.call_later(settings.body_seconds, self._give_up)

        def _give_up(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()

    return TimedProtocol

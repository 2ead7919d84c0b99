"""Run the service with uvicorn: socket, timeouts, log and graceful shutdown."""

import asyncio
import contextlib
import ctypes
import gc
import ipaddress
import logging
import os
import signal
import socket
import sys
import time
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ecinn.errors import InputError
from ecinn.web.clients import Shares, client_of
from ecinn.web.metrics import Metrics, Observed
from ecinn.web.security import Hardened, error_answer
from ecinn.web.settings import Settings

log = logging.getLogger("ecinn.web")

BACKLOG = 1024
"""Connections that wait to be accepted."""

_RETRY = {"Connection": "close", "Retry-After": "5"}
_TOO_MANY = {
    "connections": error_answer(503, "too many connections are open: try again in 5 s", _RETRY),
    "client_connections": error_answer(
        429, "too many of your connections are open: try again in 5 s", _RETRY
    ),
}
"""Answers to requests on connections that are too many, by the label of the metric."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of shells for a process that was stopped by Ctrl-C."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
REFUSED_SECONDS = 1.0
"""Time for a request to arrive on such a connection."""
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
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
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


def run(app: FastAPI, listening: socket.socket, settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests in progress."""
    _allow_files(2 * settings.connections + 256)
    _share_arenas()
    # Exclude what is loaded now from garbage collection: it stays until the end.
    gc.collect()
    gc.freeze()
    server = _Server(configuration(app, settings))
    # Uvicorn raises the signal again after shutdown: ignore it, so that a stop is no failure.
    before = {kind: signal.signal(kind, lambda *_: None) for kind in _STOPS}
    try:
        server.run([listening])
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept one connection at a time, so that several workers get their share of them."""
        self.config.backlog = 1
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio has set it to the number accepted at a time

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Finish the requests in progress; a second Ctrl-C ends at once and quietly."""
        if self.should_exit and sig == signal.SIGINT:
            os._exit(INTERRUPTED)
        super().handle_exit(sig, frame)


def _share_arenas() -> None:
    """Let threads share the C library's pools of memory: each pool keeps some after a peak."""
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).mallopt(-8, 2)  # M_ARENA_MAX of glibc


def _allow_files(count: int) -> None:
    """Raise the limit of open files as far as the system allows: connections are files."""
    try:
        import resource
    except ImportError:  # on Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def fork_workers(count: int) -> int:
    """Start processes that share all open sockets; return the number of this one, from 0.

    The calling process stays here, where it replaces workers that were killed, stops all on SIGINT
    or SIGTERM, or when one of them fails, and exits.
    """
    if not hasattr(os, "fork"):
        raise InputError("several workers need Linux or macOS: leave out --workers")
    gc.freeze()  # the collector would touch, and so copy, the shared memory
    workers: dict[int, int] = {}
    stopped: list[int] = []

    def stop(kind: int, _: object = None) -> None:
        stopped.append(kind)
        for process in workers:
            # The second Ctrl-C is passed on, so that it ends them at once.
            os.kill(process, signal.SIGINT if len(stopped) > 1 else signal.SIGTERM)

    before = {kind: signal.signal(kind, stop) for kind in _STOPS}
    numbers, code = list(range(count)), 0
    while True:
        while numbers and not stopped:
            if (process := os.fork()) == 0:
                for kind, handler in before.items():
                    signal.signal(kind, handler)
                _end_with_parent()
                return numbers[-1]
            workers[process] = numbers.pop()
            if stopped:  # between the two lines above
                os.kill(process, signal.SIGTERM)
        if not workers:
            raise SystemExit(code)
        process, status = os.wait()
        number = workers.pop(process, None)
        if number is None or stopped:
            code = code or max(os.waitstatus_to_exitcode(status), 0)
        elif os.WIFSIGNALED(status):
            log.warning("worker %d was killed: starting another", number)
            numbers.append(number)
            time.sleep(1)
        else:
            code = os.waitstatus_to_exitcode(status)
            stop(signal.SIGTERM)


def _end_with_parent() -> None:
    """Let Linux stop this process when its parent was killed."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def configuration(app: FastAPI, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=_protocol(settings, app.state.metrics),
        ws="none",
        lifespan="on",
        access_log=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=settings.idle_seconds,
        server_header=False,
        timeout_graceful_shutdown=int(settings.answer_seconds + settings.body_seconds) + 1,
        log_config=_LOG,
    )


class _Admission:
    """Decides which connections are served; counts and logs those that are not."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._proxies = [ipaddress.ip_network(proxy) for proxy in settings.trusted_proxies]
        self._clients = Shares(settings.client_connections)
        self._served: dict[object, str] = {}
        self._refused: set[object] = set()
        self._logged = -1.0

    def admit(self, connection: object, address: str) -> str | None:
        """Return None if it is served, and otherwise the reason why it is not."""
        # Connections of all clients behind a proxy are the proxy's.
        client = "" if self._is_proxy(address) else client_of(address)
        reason = None
        if client and not self._clients.take(client):
            reason = "client_connections"
        elif len(self._served) >= self._settings.connections:
            reason = "connections"
        if reason is None:
            self._served[connection] = client
            return None
        self._clients.give(client, int(bool(client)))
        self._metrics.refused.labels(reason).inc()
        if time.monotonic() - self._logged > 1:  # a line for each would fill the disk
            self._logged = time.monotonic()
            log.warning("refusing connections: %s", reason)
        return reason

    def keep(self, connection: object) -> bool:
        """Return whether a refused connection may wait for its request, to be answered."""
        kept = len(self._refused) < self._settings.connections
        if kept:
            self._refused.add(connection)
        return kept

    def leave(self, connection: object) -> None:
        """Forget a closed connection."""
        self._refused.discard(connection)
        if client := self._served.pop(connection, ""):
            self._clients.give(client)

    def _is_proxy(self, address: str) -> bool:
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            return False
        return any(parsed in network for network in self._proxies)


def _protocol(settings: Settings, metrics: Metrics) -> type[asyncio.Protocol]:
    admission = _Admission(settings, metrics)
    answers = {reason: Observed(Hardened(answer), metrics) for reason, answer in _TOO_MANY.items()}

    class TimedProtocol(H11Protocol):
        """HTTP/1.1 that closes connections whose headers arrive or answers are read too slowly."""

        _header_timer: asyncio.TimerHandle | None = None
        _read_timer: asyncio.TimerHandle | None = None
        _head_seconds = settings.head_seconds

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            reason = admission.admit(self, self.client[0] if self.client else "")
            if reason is not None:
                self.app, self._head_seconds = answers[reason], REFUSED_SECONDS
                if not admission.keep(self):
                    return transport.abort()
            return self._expect_headers(waiting=True)

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
            admission.leave(self)
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
                self._header_timer = self.loop.call_later(self._head_seconds, self.transport.abort)
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

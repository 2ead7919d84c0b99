"""ASGI layers that protect the service: headers, hosts, tokens, and limits on bodies."""

import asyncio
import hmac
import logging
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ecinn.web.clients import CLIENT, Shares, client_of
from ecinn.web.metrics import Metrics
from ecinn.web.settings import Settings

log = logging.getLogger("ecinn.web")

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Embedder-Policy": "require-corp",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=(), payment=(), usb=()",
    "Cache-Control": "no-store",
}
GUARDED = ("/api/", "/metrics")
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_READING = ("GET", "HEAD", "OPTIONS")
_PORTS = {"http": ":80", "https": ":443"}
CHUNK = 2**16
"""Bytes of an answer that are sent at once; the next ones wait until these were read."""
_OTHER_SITES = ("cross-site", "same-site")
"""Origins of forms on other sites' pages, which browsers send without asking the service."""
_CLOSE = {"Connection": "close"}
"""Headers of answers sent before the body was read."""


def error_answer(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error as one line of JSON."""
    return JSONResponse({"error": " ".join(line.split())}, status, headers)


class Hardened:
    """Adds headers to every answer, and turns every exception into an error without details."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 500 if an exception was raised before the answer started."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            await self._app(scope, receive, with_headers)
        except Exception as error:
            # Its message may contain parts of the request; its place does not.
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.error("%s at %s:%s", type(error).__name__, place.name, place.lineno)
            if started:
                return None  # closes the connection, so that the answer is seen to be incomplete
            answer = error_answer(500, "the service failed; this is not your fault")
            await answer(scope, receive, with_headers)


class Guarded:
    """Refuses unknown host names, posts from other sites, and requests without the token."""

    def __init__(
        self, app: ASGIApp, token: str | None, metrics: Metrics, hosts: Sequence[str] = ()
    ) -> None:
        self._app, self._refused = app, metrics.refused
        self._hosts = {*LOOPBACK, *(name.lower() for name in hosts)}
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse before the body is read."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = None
        if not self._known(headers.get("host", ""), scope.get("server")):
            line = "this service has another host name: start it with --allow-host for this one"
            refusal = "host", error_answer(400, line, _CLOSE)
        elif scope["method"] not in _READING and _from_elsewhere(headers):
            line = "requests from other sites' pages are refused: use this service's page"
            refusal = "origin", error_answer(403, line, _CLOSE)
        elif scope["path"].startswith(GUARDED) and not self._authorised(headers):
            line = "a bearer token is required: send the service's token"
            answer = error_answer(401, line, _CLOSE | {"WWW-Authenticate": "Bearer"})
            refusal = "token", answer
        if refusal is None:
            return await self._app(scope, receive, send)
        self._refused.labels(refusal[0]).inc()
        await refusal[1](scope, receive, send)
        return None

    def _known(self, host: str, server: Sequence[object] | None) -> bool:
        """Return whether it is a name of this service, or the address of this connection."""
        address = str(server[0]) if server else ""
        own = f"[{address}]" if ":" in address else address
        name = _host_name(host)
        return name in self._hosts or (bool(name) and name == own)

    def _authorised(self, headers: Headers) -> bool:
        if self._token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._token)
        return same and scheme.lower() == "bearer"


class RefusedError(Exception):
    """A body is not read any further; the connection is closed after the answer."""

    def __init__(self, status: int, line: str, reason: str) -> None:
        """Args: reason: the label of the metric."""
        super().__init__(line)
        self.reason, self._status = reason, status

    @property
    def answer(self) -> Response:
        """Response, built only when needed, because every request prepares refusals."""
        headers = _CLOSE | ({"Retry-After": "1"} if self._status == 429 else {})
        return error_answer(self._status, str(self), headers)


class DisconnectedError(Exception):
    """The client has disconnected."""


class Bounded:
    """Reads bodies within limits of size and time; cancels work whose client has left."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._refused = app, settings, metrics.refused
        self._held_bytes = 0
        self._in_flight = 0
        self._requests = Shares(settings.client_in_flight)
        self._bytes = Shares(settings.client_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body before the request is handled."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        client = client_of((scope.get("client") or ("",))[0])
        CLIENT.set(client)
        parts: deque[bytes] = deque()
        try:
            if self._in_flight >= self._settings.in_flight:
                line = "too many requests at once: try again in 1 s"
                raise RefusedError(429, line, "in_flight")
            line = "too many of your requests at once: try again in 1 s"
            with self._requests.one(client, RefusedError(429, line, "client_in_flight")):
                self._in_flight += 1
                try:
                    await self._read(Headers(scope=scope), receive, parts)
                    await self._answer(scope, receive, send, parts)
                finally:
                    self._in_flight -= 1
                    self._release(client, sum(map(len, parts)))
        except RefusedError as refused:
            self._refused.labels(refused.reason).inc()
            await refused.answer(scope, receive, send)
        except DisconnectedError:
            pass

    def _hold(self, client: str, size: int) -> bool:
        """Count bytes as held; return whether they are within the limits."""
        self._held_bytes += size
        within = self._bytes.take(client, size)
        return within and self._held_bytes <= self._settings.bodies_bytes

    def _release(self, client: str, size: int) -> None:
        self._held_bytes -= size
        self._bytes.give(client, size)

    async def _read(self, headers: Headers, receive: Receive, parts: deque[bytes]) -> None:
        limits = self._settings
        too_large = f"a request may have {limits.body_bytes // 2**20} MiB: send less at once"
        announced = headers.get("content-length", "0")
        if not announced.isdigit() or int(announced[:20]) > limits.body_bytes:
            raise RefusedError(413, too_large, "too_large")
        form = headers.get("content-type", "").lower().startswith("multipart/")
        size = commas = lists = 0
        try:
            async with asyncio.timeout(limits.body_seconds):
                more = True
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise DisconnectedError
                    part, more = message.get("body", b""), message.get("more_body", False)
                    if not part:
                        continue
                    parts.append(part)
                    size += len(part)
                    if not form:
                        commas += part.count(b",")
                        lists += part.count(b"[") + part.count(b"{")
                    within = self._hold(CLIENT.get(), len(part))
                    if size > limits.body_bytes:
                        raise RefusedError(413, too_large, "too_large")
                    if commas > limits.body_values or lists > limits.body_lists:
                        line = "the body lists too many values: send fewer"
                        raise RefusedError(413, line, "too_large")
                    if not within:
                        line = "too much is being sent at once: try again in 1 s"
                        raise RefusedError(429, line, "bytes")
        except TimeoutError:
            line = f"the request did not arrive within {limits.body_seconds:g} s: send it faster"
            raise RefusedError(408, line, "slow") from None

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, parts: deque[bytes]
    ) -> None:
        """Handle the request; cancel it on a timeout or when the client disconnects."""
        body = b"".join(parts)
        parts.clear()
        parts.append(body)
        messages: deque[Message] = deque([{"type": "http.request", "body": body}])
        started = False

        async def disconnection() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        disconnected = asyncio.create_task(disconnection())

        async def replay() -> Message:
            if messages:
                return messages.popleft()
            await asyncio.shield(disconnected)
            return {"type": "http.disconnect"}

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await self._send(send, message)

        work = asyncio.ensure_future(self._app(scope, replay, send_noted))
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                await asyncio.wait({work, disconnected}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise DisconnectedError
                await work
        except TimeoutError:
            if started:
                raise
            line = f"no answer within {self._settings.answer_seconds:g} s: ask for less at once"
            raise RefusedError(503, line, "no_answer_in_time") from None
        finally:
            for task in (work, disconnected):
                task.cancel()
            await asyncio.gather(work, disconnected, return_exceptions=True)

    async def _send(self, send: Send, message: Message) -> None:
        """Send in chunks, so that what a slow client has not read counts as held."""
        body = message.get("body", b"")
        self._hold(CLIENT.get(), len(body))
        try:
            if len(body) <= CHUNK:
                return await send(message)
            more = message.get("more_body", False)
            for end in range(CHUNK, len(body) + CHUNK, CHUNK):
                chunk = {"body": body[end - CHUNK : end], "more_body": more or end < len(body)}
                await send({**message, **chunk})
        finally:
            self._release(CLIENT.get(), len(body))


def _from_elsewhere(headers: Headers) -> bool:
    """Return whether a page of another site sent the request.

    Browsers tell the site only over HTTPS and on loopback; the origin they always tell.
    """
    if headers.get("sec-fetch-site") in _OTHER_SITES:
        return True
    origin = headers.get("origin")
    if origin is None:
        return False
    parts = urlsplit(origin.lower())
    port, host = _PORTS.get(parts.scheme, ""), headers.get("host", "").lower()
    return not parts.netloc or parts.netloc.removesuffix(port) != host.removesuffix(port)


def _host_name(host: str) -> str:
    """Remove the port.

    >>> _host_name("127.0.0.1:8000"), _host_name("[::1]:8000"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()

"""ASGI layers that protect the service: headers, hosts, tokens, and limits on bodies."""

import asyncio
import hmac
import logging
import traceback
from collections import deque
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
CHUNK = 2**16
"""Bytes of an answer that are sent at once; the next ones wait until these were read."""
_OTHER_SITES = ("cross-site", "same-site")
"""Origins of forms on other sites' pages, which browsers send without asking the service."""
_CLOSE = {"Connection": "close"}
"""For answers that leave the rest of a body unread."""


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

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(hosts)
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse before the body is read."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        refusal = None
        if self._hosts and _host_name(headers.get("host", "")) not in self._hosts:
            refusal = error_answer(400, "this service has another host name", _CLOSE)
        elif scope["method"] == "POST" and headers.get("sec-fetch-site") in _OTHER_SITES:
            line = "requests from other sites' pages are refused: use this service's page"
            refusal = error_answer(403, line, _CLOSE)
        elif scope["path"].startswith(GUARDED) and not self._authorised(headers):
            line = "a bearer token is required: send the service's token"
            refusal = error_answer(401, line, _CLOSE | {"WWW-Authenticate": "Bearer"})
        await (refusal or self._app)(scope, receive, send)
        return None

    def _authorised(self, headers: Headers) -> bool:
        if self._token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._token)
        return same and scheme.lower() == "bearer"


class RefusedError(Exception):
    """A body is not read any further; the connection is closed after the answer."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        headers = _CLOSE | ({"Retry-After": "1"} if status == 429 else {})
        self.answer = error_answer(status, line, headers)


class DisconnectedError(Exception):
    """The client has disconnected."""


class Bounded:
    """Reads bodies within limits of size and time; cancels work whose client has left."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._held_bytes = 0
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body before the request is handled."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        if self._in_flight >= self._settings.in_flight:
            refused = RefusedError(429, "too many requests at once: try again in 1 s")
            return await refused.answer(scope, receive, send)
        parts: deque[bytes] = deque()
        self._in_flight += 1
        try:
            await self._read(Headers(scope=scope), receive, parts)
            await self._answer(scope, receive, send, parts)
        except RefusedError as refused:
            await refused.answer(scope, receive, send)
        except DisconnectedError:
            pass
        finally:
            self._in_flight -= 1
            self._held_bytes -= sum(map(len, parts))

    async def _read(self, headers: Headers, receive: Receive, parts: deque[bytes]) -> None:
        limits = self._settings
        too_large = f"a request may have {limits.body_bytes // 2**20} MiB: send less at once"
        announced = headers.get("content-length", "0")
        if not announced.isdigit() or int(announced[:20]) > limits.body_bytes:
            raise RefusedError(413, too_large)
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
                    self._held_bytes += len(part)
                    if size > limits.body_bytes:
                        raise RefusedError(413, too_large)
                    if commas > limits.body_values or lists > limits.body_lists:
                        raise RefusedError(413, "the body lists too many values: send fewer")
                    if self._held_bytes > limits.bodies_bytes:
                        raise RefusedError(429, "too much is being sent at once: try again in 1 s")
        except TimeoutError:
            line = f"the request did not arrive within {limits.body_seconds:g} s: send it faster"
            raise RefusedError(408, line) from None

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
            raise RefusedError(503, line) from None
        finally:
            for task in (work, disconnected):
                task.cancel()
            await asyncio.gather(work, disconnected, return_exceptions=True)

    async def _send(self, send: Send, message: Message) -> None:
        """Send in chunks, so that what a slow client has not read counts as held."""
        body = message.get("body", b"")
        self._held_bytes += len(body)
        try:
            if len(body) <= CHUNK:
                return await send(message)
            more = message.get("more_body", False)
            for end in range(CHUNK, len(body) + CHUNK, CHUNK):
                chunk = {"body": body[end - CHUNK : end], "more_body": more or end < len(body)}
                await send({**message, **chunk})
        finally:
            self._held_bytes -= len(body)


def _host_name(host: str) -> str:
    """Remove the port.

    >>> _host_name("127.0.0.1:8000"), _host_name("[::1]:8000"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()

"""Bodies of requests: bounded in size, time and number; work ends with its client."""

import asyncio
from collections import deque

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ecinn.web.security import error_answer
from ecinn.web.settings import Settings

PIECE = 2**16
"""Bytes of an answer that are handed over at once; the next ones wait until they were taken."""


class RefusedError(Exception):
    """The body is not read any further."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        # What is left of the body is never read, so that the connection cannot be kept.
        headers = {"Connection": "close"} | ({"Retry-After": "1"} if status == 429 else {})
        self.answer: Response = error_answer(status, line, headers)


class DisconnectedError(Exception):
    """The client is gone."""


class Bounded:
    """ASGI: reads bodies with limits, and ends the work with its time or its client."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._held = 0
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, then pass it on."""
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
            self._held -= sum(map(len, parts))

    async def _read(self, headers: Headers, receive: Receive, parts: deque[bytes]) -> None:
        s = self._settings
        said = headers.get("content-length", "0")
        size = commas = lists = 0
        form = headers.get("content-type", "").lower().startswith("multipart/")
        if not said.isdigit() or int(said[:20]) > s.body_bytes:
            raise _too_large(s.body_bytes)
        try:
            async with asyncio.timeout(s.body_seconds):
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
                    self._held += len(part)
                    if size > s.body_bytes:
                        raise _too_large(s.body_bytes)
                    if commas > s.body_values or lists > s.body_lists:
                        raise RefusedError(413, "the body lists too many values: send fewer")
                    if self._held > s.bodies_bytes:
                        raise RefusedError(429, "too much is being sent at once: try again in 1 s")
        except TimeoutError:
            line = f"the request did not arrive within {s.body_seconds:g} s: send it faster"
            raise RefusedError(408, line) from None

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, parts: deque[bytes]
    ) -> None:
        """The app with the body that was read; cancelled where its time or its client is gone."""
        body = b"".join(parts)
        parts.clear()
        parts.append(body)
        given, started = False, False
        gone = asyncio.create_task(_disconnection(receive))

        async def replay() -> Message:
            nonlocal given
            if not given:
                given = True
                return {"type": "http.request", "body": body, "more_body": False}
            await asyncio.shield(gone)
            return {"type": "http.disconnect"}

        async def noted(message: Message) -> None:
            nonlocal started
            started = True
            await self._send(send, message)

        work = asyncio.ensure_future(self._app(scope, replay, noted))
        try:
            async with asyncio.timeout(self._settings.answer_seconds):
                await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    raise DisconnectedError
                await work
        except TimeoutError:
            if started:
                raise
            line = f"no answer within {self._settings.answer_seconds:g} s: ask for less at once"
            raise RefusedError(503, line) from None
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _send(self, send: Send, message: Message) -> None:
        """In pieces, so that what a slow client has not taken counts as held, and as in flight."""
        body = message.get("body", b"")
        self._held += len(body)
        try:
            if len(body) <= PIECE:
                return await send(message)
            more = message.get("more_body", False)
            for end in range(PIECE, len(body) + PIECE, PIECE):
                piece = {"body": body[end - PIECE : end], "more_body": more or end < len(body)}
                await send({**message, **piece})
        finally:
            self._held -= len(body)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large(most: int) -> RefusedError:
    return RefusedError(413, f"a request has {most // 2**20} MiB at most: send less at once")

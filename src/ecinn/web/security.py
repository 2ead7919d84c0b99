"""Who may ask, and what browsers may do with the answers."""

import hmac
import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger("ecinn.web")

CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
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
)
GUARDED = ("/api/", "/metrics")
_OTHER_SITES = ("cross-site", "same-site")
"""As browsers say it: a form of another site needs no leave of ours to be sent here."""
_CLOSE: Mapping[str, str] = MappingProxyType({"Connection": "close"})
"""Of answers before the body was read: nobody waits for the rest of it."""


def error_answer(status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    """An error as the service always says it: one line."""
    return JSONResponse({"error": " ".join(line.split())}, status, headers)


class Hardened:
    """ASGI: headers on every answer, and an error in one line whatever happens inside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on; what is raised and not answered becomes a 500 without details."""
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
            # Its words may hold something of the request; where it was raised does not.
            log.error("%s at %s", type(error).__name__, _place(error))
            if started:
                return None  # so that the connection is closed: what broke off must look so
            answer = error_answer(500, "something failed inside: this is not your fault")
            await answer(scope, receive, with_headers)


class Guarded:
    """ASGI: only known host names, no other site's posts, a bearer token where one is set."""

    def __init__(self, app: ASGIApp, token: str | None, hosts: Sequence[str] = ()) -> None:
        self._app, self._hosts = app, frozenset(hosts)
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on what may pass, before anything of its body is read."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        if self._hosts and _host_name(headers.get("host", "")) not in self._hosts:
            answer = error_answer(400, "this service is not known under that host name", _CLOSE)
            return await answer(scope, receive, send)
        if scope["method"] == "POST" and headers.get("sec-fetch-site") in _OTHER_SITES:
            answer = error_answer(403, "other sites' pages may not ask: open this one's", _CLOSE)
            return await answer(scope, receive, send)
        guarded = scope["path"].startswith(GUARDED)
        if guarded and not self._allowed(headers.get("authorization", "")):
            answer = error_answer(
                401,
                "give the service's token as a bearer token",
                {**_CLOSE, "WWW-Authenticate": "Bearer"},
            )
            return await answer(scope, receive, send)
        return await self._app(scope, receive, send)

    def _allowed(self, authorization: str) -> bool:
        if self._token is None:
            return True
        scheme, _, given = authorization.partition(" ")
        same = hmac.compare_digest(given.strip().encode(), self._token)
        return same and scheme.lower() == "bearer"


def _host_name(host: str) -> str:
    """Without its port.

    >>> _host_name("127.0.0.1:8000"), _host_name("[::1]:8000"), _host_name("localhost")
    ('127.0.0.1', '[::1]', 'localhost')
    """
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return "nowhere"
    return f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}"

"""What a request has to pass before it is read: the host it names, the key, room, and the size of its body."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeoffload.config import is_loopback
from moeoffload.refusals import Refusals
from moeoffload.serve.api_errors import ApiError, bad_request, busy, unavailable

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset(("/", "/health", "/ready", "/dashboard"))
"""What needs no key: it tells nothing of requests. The page of the dashboard holds no figures, it asks for /stats."""
_MOST_BODY_BYTES: Final = 8 << 20
_BODY_TIMEOUT_S: Final = 60.0
_DISCARDED_BYTES: Final = 64 << 20
"""So much of a body that is too large is read and thrown away, so that its sender comes to read the answer."""


class Guard:
    """ASGI middleware. Passes on requests with their whole body read; ``stopping`` makes it take no new ones."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, loopback_only: bool, max_open: int, on_busy: Callable[[], None]
    ) -> None:
        """Clients have to show ``api_key``, if there is one; ``max_open`` bodies are read or answered at a time,
        ``on_busy`` hears of others.
        ``loopback_only`` is for loopback without a key: pages of other sites in browsers here are kept out."""
        self._app = app
        self._key = api_key.encode() if api_key is not None else None
        self._loopback_only = loopback_only
        self._max_open = max_open
        self._n_open = 0
        self._on_busy = on_busy
        self._refusals = Refusals()
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = _told(scope, send)
        try:
            self._check_who(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            with self._place():
                body = await self._body(Request(scope, receive))
                await self._app(scope, _replay(body, receive), send)
        except ApiError as error:  # of this module: the app answers its own
            error.headers["Connection"] = "close"  # part of the body may not have been read
            await error.response()(scope, receive, send)

    def _check_who(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        peer = ":".join(str(part) for part in scope.get("client") or ("unknown",))
        if self._loopback_only:
            # A name that an attacker's DNS turned into 127.0.0.1, or a page of another site: not this machine's user.
            if not _names_loopback(f"//{headers.get('host', '')}"):
                self._refusals.add(peer, "its Host header is no loopback name")
                raise ApiError(403, "The Host header must be localhost or a loopback address.", code="invalid_host")
            if "origin" in headers and not _names_loopback(headers["origin"]):
                self._refusals.add(peer, "a web page of another site")
                raise ApiError(403, "Web pages of other sites may not use this server.", code="invalid_origin")
        if self._key is None or scope["path"] in OPEN_PATHS:
            return
        scheme, _, shown = headers.get("authorization", "").partition(" ")
        if "x-api-key" in headers:  # Anthropic's clients
            scheme, shown = "bearer", headers["x-api-key"]
        if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._key):
            self._refusals.add(peer, "no API key, or not the right one")
            raise ApiError(
                401,
                "Incorrect API key provided." if shown else "You didn't provide an API key (Authorization: Bearer).",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One of the bodies that are in memory at a time."""
        if self.stopping:
            raise unavailable("The server is stopping and takes no new requests.", 5.0)
        if self._n_open >= self._max_open:
            self._on_busy()
            raise busy("Too many requests are open.", 1.0)
        self._n_open += 1
        try:
            yield
        finally:
            self._n_open -= 1

    async def _body(self, request: Request) -> bytes:
        limit = _MOST_BODY_BYTES
        too_large = ApiError(413, f"The body of the request is larger than {limit} bytes.", code="request_too_large")
        length = request.headers.get("content-length", "0")
        if not length.isdigit() or int(length) > _DISCARDED_BYTES:
            raise too_large
        body, n_bytes = bytearray(), 0
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                async for part in request.stream():
                    n_bytes += len(part)
                    if n_bytes <= limit:
                        body += part
                    if n_bytes > _DISCARDED_BYTES:
                        break
        except ClientDisconnect:
            raise bad_request("The connection was closed within the request.") from None
        except TimeoutError:
            raise ApiError(408, "The body of the request took too long.", code="request_timeout") from None
        if n_bytes > limit:
            raise too_large
        return bytes(body)


def _told(scope: Scope, send: Send) -> Send:
    """``send`` that logs how a request is answered; not its query, which may hold a key."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            log.info("%s %s %d", scope["method"], scope["path"], message["status"])
        await send(message)

    return sending


def _names_loopback(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


def _replay(body: bytes, receive: Receive) -> Receive:
    """What an app receives: the body, then what comes after it, which is that the client leaves."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed

"""Checks before a request is processed: its Host header, the key, free capacity, and the size of its body."""

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
from moeoffload.logs import Refusals
from moeoffload.serve.api_errors import ApiError, bad_request, busy, unavailable

log = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset(("/", "/health", "/ready", "/dashboard"))
"""Paths without a key, which say nothing about requests. The dashboard page holds no figures; it polls /stats."""
_MOST_BODY_BYTES: Final = 8 << 20
_BODY_TIMEOUT_S: Final = 60.0
_DISCARDED_BYTES: Final = 64 << 20
"""Up to this much of an oversized body is read and discarded, so that the client gets to read the answer."""


class Guard:
    """ASGI middleware that passes on requests with their whole body read; with ``stopping`` it refuses new ones."""

    def __init__(
        self, app: ASGIApp, *, api_key: str | None, loopback_only: bool, max_open: int, on_busy: Callable[[], None]
    ) -> None:
        """Clients must present ``api_key``, if there is one. At most ``max_open`` requests with a body are open at a
        time; ``on_busy`` is called for each further one.
        ``loopback_only`` is for loopback without a key: it refuses web pages of other sites in local browsers."""
        self._app = app
        self._key = api_key.encode() if api_key is not None else None
        self._loopback_only = loopback_only
        self._max_open = max_open
        self._n_open = 0
        self._on_busy = on_busy
        self._refusals = Refusals()
        self.stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI; the server has HTTP alone, no websockets."""
        send = _told(scope, send)
        try:
            self._check_who(scope)
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
                return
            with self._place():
                body = await self._body(Request(scope, receive))
                await self._app(scope, _replay(body, receive), send)
        except ApiError as error:  # raised in this module; the app handles its own
            error.headers["Connection"] = "close"  # part of the body may not have been read
            await error.response(scope["path"])(scope, receive, send)

    def _check_who(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        peer = ":".join(str(part) for part in scope.get("client") or ("unknown",))
        if self._loopback_only:
            # Reject names that an attacker's DNS resolves to 127.0.0.1, and pages of other sites.
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
        """Reserves one of the ``max_open`` places while open."""
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
    """Wraps ``send`` to log the status of each response, without the query, which may contain a key."""

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
    """A receive function for the app: the body first, then further messages (the client's disconnect)."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed

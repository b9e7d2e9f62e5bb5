"""HTTP/1.1 connections with a time limit for the head of a request."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S: float = 20.0
"""A connection is closed if no request begins within this time; between two requests within up to twice as long."""


class IdleConnections:
    """Closes idle connections. ASGI middleware that tracks which connections have a request.

    uvicorn closes a connection that is idle after an answer, but not one that sends nothing at all or sends a head
    byte by byte: such connections would use up the connection limit.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._begun: Counter[Any] = Counter()
        """Requests that have begun on a connection, by the client's address and port."""
        self._running: Counter[Any] = Counter()
        begun, running = self._begun, self._running

        class Connection(H11Protocol):
            def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
                super().connection_made(transport)
                # A client that has disconnected already has no address.
                peer = tuple((transport.get_extra_info("peername") or ("gone", id(transport)))[:2])
                begun[peer] = running[peer] = 0
                self._peer, self._wire = peer, transport
                self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._look, 0)

            def connection_lost(self, exc: Exception | None) -> None:
                self._timer.cancel()
                del begun[self._peer], running[self._peer]
                super().connection_lost(exc)

            def _look(self, n_seen: int) -> None:
                """Closes the connection if no request is running and none has begun since the previous check."""
                if not running[self._peer] and begun[self._peer] == n_seen:
                    self._wire.close()
                    return
                seen = -1 if running[self._peer] else begun[self._peer]
                self._timer = asyncio.get_running_loop().call_later(HEAD_TIMEOUT_S, self._look, seen)

        self.protocol: type[asyncio.Protocol] = Connection  # for `uvicorn.Config(http=...)`

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        peer = tuple(scope.get("client") or ())
        if peer not in self._begun:
            await self._app(scope, receive, send)
            return
        self._begun[peer] += 1
        self._running[peer] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            if peer in self._running:
                self._running[peer] -= 1

"""HTTP/1.1 connections with a time limit for the head of a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

HEAD_TIMEOUT_S: float = 20.0
"""A connection is closed if no request begins within this time; between two requests within up to twice as long."""


class ImpatientProtocol(H11Protocol):
    """Closes idle connections, for `uvicorn.Config(http=...)`.

    uvicorn closes a connection that is idle after an answer, but not one that sends nothing at all or sends a head
    byte by byte: such connections would use up the connection limit.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_idle, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self, seen: RequestResponseCycle | None) -> None:
        """Closes the connection if no request is running and none has begun since the previous check, which saw
        ``seen``; else checks again later."""
        is_running = self.cycle is not None and not self.cycle.response_complete
        if not is_running and self.cycle is seen:
            self.transport.close()
            return
        latest = None if is_running else self.cycle
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._close_if_idle, latest)

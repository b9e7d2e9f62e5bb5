"""HTTP/1.1 connections that do not wait for ever for the head of a request."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S: float = 20.0
"""A connection on which no request has begun for so long, and for up to twice as long between two, is closed."""

_BUSY: Final = object()


class Connection(H11Protocol):
    """uvicorn's, which closes one that falls silent after an answer, but not one that says nothing, or sends a head
    letter by letter: such connections would take the places of others."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(transport)
        self._last_seen: Any = None
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        """Closes the connection if it waits for the same request as at the look before."""
        is_waiting = self.cycle is None or self.cycle.response_complete
        now_seen = self.cycle if is_waiting else _BUSY
        if is_waiting and now_seen is self._last_seen:
            self.transport.close()
            return
        self._last_seen = now_seen
        self._timer = self.loop.call_later(HEAD_TIMEOUT_S, self._look)

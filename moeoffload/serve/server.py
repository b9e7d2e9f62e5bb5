"""Runs the app with uvicorn: a time limit for the head of a request, and a stop that lets running requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from time import monotonic
from types import FrameType
from typing import Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from moeoffload.config import ServeSettings
from moeoffload.serve.access import tls_context
from moeoffload.serve.answering import Answering
from moeoffload.serve.engine import ServingEngine
from moeoffload.serve.guard import Guard

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 512  # more get a 503, because expert servers need descriptors, too
_TELL_S: Final = 1.0  # how often `HttpServer` says that it waits for running requests
_LAST_BYTES_S: Final = 5  # time for responses to be sent after all requests have ended
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


class HttpServer(uvicorn.Server):
    """Serves until a signal: the first one lets running requests finish, the second one ends them."""

    def __init__(
        self,
        app: Guard,
        answering: Answering,
        engine: ServingEngine,
        settings: ServeSettings,
        on_ready: Callable[[], None],
        on_stopping: Callable[[float], None] = lambda left_s: None,
    ) -> None:
        """``on_ready`` is called when requests are accepted, ``on_stopping`` at the first signal and every second from
        then on, from another thread, with the seconds that running requests have left."""
        self._app = app
        self._answering = answering
        self._engine = engine
        self._drain_s = settings.drain_seconds
        self._on_ready = on_ready
        self._on_stopping = on_stopping
        self._draining: threading.Thread | None = None
        self.finished_all = True  # whether all accepted requests were answered
        tls = tls_context(settings)
        super().__init__(
            uvicorn.Config(
                app,
                http=ImpatientProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,  # it would log queries; the guard logs requests
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=_LAST_BYTES_S,
                ssl_context_factory=(lambda config, default: tls) if tls is not None else None,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See uvicorn."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal. uvicorn would refuse connections at once, but clients should get a Retry-After."""
        if self.started:
            self._loop.call_soon_threadsafe(self.stop)
        else:
            self.should_exit = True

    def stop(self) -> None:
        """Stops: the first call lets running requests finish, the second ends them. Called in the event loop."""
        if self._draining is None:
            log.warning("stopping; running requests have %g s to finish, a second signal ends them", self._drain_s)
            self._on_stopping(self._drain_s)
            self._app.stopping = True
            # Not in the event loop, which must keep running, nor in its executor, which a second signal would wait for.
            self._draining = threading.Thread(target=self._drain, name="drain", daemon=True)
            self._draining.start()
        else:
            self._end(False)

    def _drain(self) -> None:
        deadline = monotonic() + self._drain_s
        left_s = self._drain_s
        while not (done := self._engine.drain(min(left_s, _TELL_S))) and left_s > _TELL_S:
            left_s = max(0.0, deadline - monotonic())
            self._on_stopping(left_s)
        with contextlib.suppress(RuntimeError):  # the event loop has already ended after a second signal
            self._loop.call_soon_threadsafe(self._end, done)

    def _end(self, done: bool) -> None:
        if self.should_exit:
            return
        self.finished_all = done
        if not done:
            log.warning("requests that still run are given up")
            self._answering.give_up_all()
        self.should_exit = True

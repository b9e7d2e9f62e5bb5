"""Calls of gRPC's threads on an event loop: one call is one coroutine, whatever its thread waits for.

gRPC's own asyncio server stops accepting calls for good at the first path that is not UTF-8 (grpcio 1.85).
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Final, NoReturn

import grpc

_END: Final = object()


class CallAborted(Exception):
    """Raised by `CallContext.abort`."""


class CallContext:
    """What a coroutine may ask of its call."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.status: tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]] | None = None

    def peer(self) -> str:
        """Address of the caller, as gRPC writes it."""
        return str(self._context.peer())

    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, str], ...] = ()
    ) -> NoReturn:
        """Ends the call with a status."""
        self.status = (code, details, trailing_metadata)
        raise CallAborted(details)


def on_loop(
    loop: asyncio.AbstractEventLoop, replies_of: Callable[[AsyncIterator[bytes], Any], AsyncIterator[Any]]
) -> Callable[[Iterator[bytes], Any], Iterator[Any]]:
    """A handler for gRPC's threads that runs ``replies_of(requests, context)`` on ``loop``.

    When the call ends, for whatever reason, the coroutine is cancelled.
    """

    def handle(requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        outgoing: queue.SimpleQueue[Any] = queue.SimpleQueue()
        taken, ended = threading.Semaphore(0), threading.Event()
        call = CallContext(context)

        def put(item: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(incoming.put_nowait, item)

        def read() -> None:
            try:
                for request in requests:
                    put(request)
                    taken.acquire()  # what is not taken yet holds the sender back
                    if ended.is_set():
                        return
            except Exception:  # gRPC raises an empty one when the call ends
                pass
            put(_END)

        async def arriving() -> AsyncIterator[bytes]:
            while (item := await incoming.get()) is not _END:
                taken.release()
                yield item

        async def run() -> None:
            try:
                async with contextlib.aclosing(replies_of(arriving(), call)) as replies:  # type: ignore[type-var]
                    async for reply in replies:
                        outgoing.put(reply)
            except CallAborted:
                pass

        running = asyncio.run_coroutine_threadsafe(run(), loop)
        running.add_done_callback(lambda _: outgoing.put(_END))
        if not context.add_callback(running.cancel):
            running.cancel()
        try:
            threading.Thread(target=read, name="call-reader", daemon=True).start()
        except RuntimeError:
            running.cancel()
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no further thread can be started on the server")
        try:
            while (reply := outgoing.get()) is not _END:
                yield reply
        finally:
            ended.set()
            taken.release()
        if call.status is not None:
            code, details, metadata = call.status
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        if running.cancelled() or running.exception() is not None:
            context.abort(grpc.StatusCode.CANCELLED, "the call was cancelled")

    return handle

"""Responses that end when their client leaves: plain JSON, or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moeoffload.serve.api_errors import of_exception

SEND_TIMEOUT_S: Final = 60.0
"""A client that takes nothing for so long has left."""

_Result = TypeVar("_Result")


class ClientLeft(Exception):
    """The client has closed its connection."""


class ClientGone(Response):
    """The answer that nobody reads."""

    def __init__(self) -> None:
        super().__init__(status_code=499)


async def unless_client_leaves(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """The result of ``work``, which is cancelled when the client closes its connection.

    Raises:
        ClientLeft: it has.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait((task, watch))


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends each chunk as one event, then ``[DONE]``; an error in between is the last event, in OpenAI's form."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncGenerator[dict[str, Any], None], on_end: Callable[[], None]) -> None:
        self.status_code = 200
        self.background = None
        self._chunks = chunks
        self._on_end = on_end
        # Proxies must neither keep nor collect events.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI: the connection is this response's until its last event."""
        try:
            await unless_client_leaves(receive, self._send(_in_time(send)))
        except ClientLeft:
            pass
        finally:
            self._on_end()
            await self._chunks.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await send({"type": "http.response.body", "body": _event(chunk), "more_body": True})
            last = b"data: [DONE]\n\n"
        except ClientLeft:
            raise
        except Exception as error:  # the status is sent already; of_exception logs what was not made on purpose
            last = _event(of_exception(error).body())
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _in_time(send: Send) -> Send:
    async def sending(message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)
        except TimeoutError:
            raise ClientLeft from None

    return sending


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()

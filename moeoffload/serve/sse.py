"""Responses that end when their client disconnects: plain JSON, or server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Final

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moeoffload.serve.api_errors import ApiError, of_exception

SEND_TIMEOUT_S: float = 60.0  # a client that reads nothing for this long is gone
PING_S: float = 15.0
"""Seconds between comments on an idle stream, because proxies close idle connections."""
_CLIENT_CLOSED: Final = 499

# At shutdown streams end on their own: with their answers, or with an error from `Choices.give_up`.
AppStatus.disable_automatic_graceful_drain()


async def unless_client_leaves(receive: Receive, work: Awaitable[dict[str, Any]]) -> Response:
    """The JSON result of ``work``, which is cancelled when the client disconnects."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        return JSONResponse(task.result()) if task.done() else Response(status_code=_CLIENT_CLOSED)
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.wait((task, watch))


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(EventSourceResponse):
    """Sends each chunk as one event, then ``[DONE]``; an error is the last event, as ``told``.
    With ``named``, events are named after their type, and there is no ``[DONE]``."""

    def __init__(
        self,
        chunks: AsyncGenerator[dict[str, Any], None],
        on_end: Callable[[], None],
        told: Callable[[ApiError], dict[str, Any]],
        named: bool = False,
    ) -> None:
        super().__init__(_events(chunks, told, named), ping=PING_S, sep="\n", send_timeout=SEND_TIMEOUT_S)
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI. ``on_end`` is called when the stream has ended."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            pass  # the client is gone
        finally:
            self._on_end()


async def _events(
    chunks: AsyncGenerator[dict[str, Any], None], told: Callable[[ApiError], dict[str, Any]], named: bool
) -> AsyncGenerator[str | dict[str, str], None]:
    try:
        async for chunk in chunks:
            yield {"event": chunk["type"], "data": _json(chunk)} if named else _json(chunk)
        if not named:
            yield "[DONE]"
    except Exception as error:  # the status was sent already; of_exception logs unexpected errors
        body = _json(told(of_exception(error)))
        yield {"event": "error", "data": body} if named else body
    finally:
        await chunks.aclose()


def _json(chunk: dict[str, Any]) -> str:
    return json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))

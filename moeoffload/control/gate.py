"""Stands before every call of the control plane: refuses it, reads its first request in time, reports its errors."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health

from moeoffload.control.bridge import CallAborted, CallContext, on_loop
from moeoffload.control.credentials import TOKEN_KEY, ServerCredentials
from moeoffload.control.status import abort
from moeoffload.errors import DeadlineError, ProtocolError
from moeoffload.refusals import Refusals

FIRST_S: Final = 10.0
"""Seconds within which a call says what it wants."""
MOST_TOKENS: Final = 3
"""Tokens that one call may show: its user's, and what servers of that user have left in two folders."""
_REFLECTION: Final = "/grpc.reflection."
_OPEN_SERVICE: Final = f"/{health.SERVICE_NAME}/"
"""Says no more than whether the server serves, to anybody who watches over it."""

_Handler: TypeAlias = grpc.RpcMethodHandler  # type: ignore[type-arg]


class Gate(grpc.ServerInterceptor):  # type: ignore[misc, type-arg]
    """Calls without the token are refused before anything of them is read; refusals are counted and logged.

    Each call is a coroutine: one that says nothing, or does not take its answer, holds no thread.
    """

    def __init__(self, credentials: ServerCredentials, refusals: Refusals, first_s: float = FIRST_S) -> None:
        self._token = credentials.token.encode() if credentials.token is not None else None
        self._refusals = refusals
        self._first_s = first_s
        self.loop: asyncio.AbstractEventLoop
        """Where calls run."""
        self.whose_token = "the one of its --token-file"
        """For messages: which token a server wants that wants one."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The handler of the call, behind this gate."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        objection = self._objection(handler_call_details) if not method.startswith(_OPEN_SERVICE) else None
        if objection is not None:
            return self._refusing(objection)
        if method.startswith(_REFLECTION):
            return handler  # gRPC's own, in its threads
        return _guarded(handler, method.rpartition("/")[2], self._first_s, self.loop)

    def _objection(self, details: grpc.HandlerCallDetails) -> str | None:
        """Why this call is refused; None if it may go on."""
        if self._token is None:
            return None
        shown = [value for key, value in details.invocation_metadata or () if key == TOKEN_KEY]
        if not shown:
            return f"it showed no token; this server wants {self.whose_token}"
        if not any(secrets.compare_digest(_as_bytes(token), self._token) for token in shown[:MOST_TOKENS]):
            return f"it showed another token; this server wants {self.whose_token}"
        return None

    def _refusing(self, objection: str) -> _Handler:
        def refuse(requests: object, context: Any) -> None:
            self._refusals.add(str(context.peer()), objection)
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"this host was refused: {objection}")

        return grpc.stream_stream_rpc_method_handler(refuse)


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def _guarded(handler: Any, method: str, first_s: float, loop: asyncio.AbstractEventLoop) -> _Handler:
    """``handler`` with the reading of its requests and with answers to its errors.

    On the wire a call with one request and one with many are the same. gRPC would wait for the only request without
    end, and write a traceback for bytes that are none.
    """

    def parse(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except Exception:  # protobuf's errors have no common base across its implementations
            raise ProtocolError(f"{method}: {len(data)} bytes that are no message of this method") from None

    async def only(raw: AsyncIterator[bytes]) -> Any:
        try:
            async with asyncio.timeout(first_s):
                async for data in raw:
                    return parse(data)
        except TimeoutError:
            raise DeadlineError(f"{method}: no request within {first_s:g} s") from None
        raise ProtocolError(f"{method}: the call has no request")

    async def one_reply(raw: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[Any]:
        try:
            yield await handler.unary_unary(await only(raw), context)
        except CallAborted:
            raise
        except Exception as error:
            await abort(context, error)

    async def many_replies(raw: AsyncIterator[bytes], context: CallContext) -> AsyncIterator[Any]:
        try:
            if handler.request_streaming:
                replies = handler.stream_stream((parse(data) async for data in raw), context)
            else:
                replies = handler.unary_stream(await only(raw), context)
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply
        except CallAborted:
            raise
        except Exception as error:
            await abort(context, error)

    # On the wire one reply and a stream of one are the same.
    replies_of = many_replies if handler.response_streaming else one_reply
    return grpc.stream_stream_rpc_method_handler(on_loop(loop, replies_of), None, handler.response_serializer)

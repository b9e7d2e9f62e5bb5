"""Guards every call of the control plane: checks its token, limits the wait for its request, reports its errors."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import grpc
from grpc_health.v1 import health

from moeoffload.control.credentials import TOKEN_KEY, ServerCredentials
from moeoffload.control.status import abort
from moeoffload.errors import DeadlineError, ProtocolError
from moeoffload.last_resort import answer_within
from moeoffload.logs import Refusals

FIRST_S: Final = 10.0
"""Seconds within which a call must send its request."""
MOST_TOKENS: Final = 3
"""Most tokens of a call that are compared: the configured one, and those that servers have left in two folders."""
_OPEN_SERVICE: Final = f"/{health.SERVICE_NAME}/"
"""The service that needs no token, for monitoring: it only reveals whether the server is serving."""

_Handler: TypeAlias = grpc.RpcMethodHandler  # type: ignore[type-arg]


class Gate(grpc.ServerInterceptor):  # type: ignore[misc, type-arg]
    """Refuses calls without the token before any of their requests is read; counts and logs refusals."""

    def __init__(self, credentials: ServerCredentials, refusals: Refusals, first_s: float = FIRST_S) -> None:
        self._token = credentials.token.encode() if credentials.token is not None else None
        self._refusals = refusals
        self._first_s = first_s
        self.whose_token = "the one of its --token-file"
        """For messages: which token the server demands."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """Returns the handler of the call, guarded by this gate."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return handler
        method = handler_call_details.method
        objection = self._objection(handler_call_details) if not method.startswith(_OPEN_SERVICE) else None
        if objection is not None:
            return self._refusing(objection)
        return _guarded(handler, method.rpartition("/")[2], self._first_s)

    def _objection(self, details: grpc.HandlerCallDetails) -> str | None:
        """Returns why this call is refused; None if it may proceed."""
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


def _guarded(handler: Any, method: str, first_s: float) -> _Handler:
    """Wraps ``handler`` so that its requests are read here, and its errors become gRPC statuses.

    On the wire, calls with one request or reply and with many look the same. gRPC itself would wait forever for the
    only request, and write a traceback for bytes that cannot be parsed.
    """

    def parse(data: bytes) -> Any:
        try:
            return handler.request_deserializer(data)
        except Exception:  # protobuf's errors have no common base across its implementations
            raise ProtocolError(f"{method}: {len(data)} bytes that are no message of this method") from None

    def following(requests: Iterator[bytes]) -> bytes | None:
        def take() -> bytes | None:
            with contextlib.suppress(Exception):  # gRPC raises an empty exception when the call ends
                return next(requests, None)
            return None

        try:
            return answer_within(first_s, "call-reader", take)
        except TimeoutError:
            raise DeadlineError(f"{method}: no request within {first_s:g} s") from None

    def only(requests: Iterator[bytes]) -> Any:
        if (data := following(requests)) is None:
            raise ProtocolError(f"{method}: the call has no request")
        return parse(data)

    def replies(requests: Iterator[bytes], context: Any) -> Iterator[Any]:
        try:
            if handler.request_streaming:  # the expert service itself limits the waits of an Attach
                each = requests if method == "Attach" else iter(lambda: following(requests), None)
                yield from handler.stream_stream(map(parse, each), context)
            elif handler.response_streaming:
                yield from handler.unary_stream(only(requests), context)
            else:
                yield handler.unary_unary(only(requests), context)
        except Exception as error:
            abort(context, error)

    return grpc.stream_stream_rpc_method_handler(replies, None, handler.response_serializer)

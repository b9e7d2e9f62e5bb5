"""Stands before every call of the control plane and lets in whom the server's credentials allow."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any, Final

import grpc
from grpc_health.v1 import health

from moeoffload.control.credentials import TOKEN_KEY, ServerCredentials
from moeoffload.control.same_user import is_own_user, split_peer, uid_of_peer
from moeoffload.refusals import Refusals

_OPEN_SERVICE: Final = f"/{health.SERVICE_NAME}/"
"""Says no more than whether the server serves, to whoever watches over it."""

PeerOf = Callable[[int], str | None]
"""Who is behind this port of the TLS front; None: nobody who came through it."""


class Gate(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls, counts and logs them. ``host``, ``port`` and ``peer_of`` are set before it serves."""

    def __init__(self, credentials: ServerCredentials, refusals: Refusals) -> None:
        self._credentials = credentials
        self._refusals = refusals
        self.host = ""
        self.port = 0
        """Where the server listens."""
        self.peer_of: PeerOf | None = None
        """Set if connections come through a TLS front."""

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],  # type: ignore[type-arg]
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]
        """The handler of the call, behind this gate."""
        handler = continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_OPEN_SERVICE):
            return handler
        return _guarded(handler, self._admit)

    def peer(self, context: grpc.ServicerContext) -> str | None:
        """Who calls, as gRPC writes peers; None if the call did not come through the TLS front that there is."""
        peer = str(context.peer())
        if self.peer_of is None:
            return peer
        place = split_peer(peer)
        return self.peer_of(place[1]) if place is not None else None

    def _admit(self, context: grpc.ServicerContext) -> None:
        """Returns if the caller may go on; otherwise ends the call."""
        peer = self.peer(context)
        if peer is None:
            self._refuse(context, context.peer(), "it went around TLS", grpc.StatusCode.UNAUTHENTICATED)
            raise AssertionError("abort raises")
        place = split_peer(peer)
        if self._credentials.token is not None:
            self._check_token(context, peer, self._credentials.token)
        if self._credentials.same_user:
            uid = uid_of_peer(*place, self.host, self.port) if place is not None else None
            if uid is None or not is_own_user(uid):
                who = "an unknown user" if uid is None else f"user id {uid}"
                reason = f"it runs as {who}; without --token-file or --client-ca this server is for its own user only"
                self._refuse(context, peer, reason, grpc.StatusCode.PERMISSION_DENIED)

    def _check_token(self, context: grpc.ServicerContext, peer: str, token: bytes) -> None:
        shown = [value for key, value in context.invocation_metadata() if key == TOKEN_KEY]
        if not shown:
            reason = "it showed no token; this server wants the one of its --token-file"
        elif len(shown) > 1 or not secrets.compare_digest(_as_bytes(shown[0]), token):
            reason = "it showed another token than the one of this server's --token-file"
        else:
            return
        self._refuse(context, peer, reason, grpc.StatusCode.UNAUTHENTICATED)

    def _refuse(self, context: grpc.ServicerContext, peer: str, reason: str, code: grpc.StatusCode) -> None:
        self._refusals.add(peer, reason)
        context.abort(code, f"this host was refused: {reason}")


def _as_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")


def _guarded(handler: Any, admit: Callable[[grpc.ServicerContext], None]) -> Any:
    """The same handler, called only after ``admit`` has returned."""
    streams = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = streams[bool(handler.request_streaming), bool(handler.response_streaming)]
    inner = getattr(handler, name)

    def behave(request: Any, context: grpc.ServicerContext) -> Any:
        admit(context)
        return inner(request, context)

    return make(behave, handler.request_deserializer, handler.response_serializer)

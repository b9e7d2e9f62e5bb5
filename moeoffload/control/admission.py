"""Who may hold one of the control plane's threads, and for how long.

gRPC gives a call a thread before its request has arrived, and that until the peer has taken the answer: peers that say
nothing or do not listen would soon have all of them. Therefore every call reads its requests here: the first must come
within `FIRST_S`, and but for those in `LONG` the whole call must end within `CALL_S`. When there are too many of a kind
the oldest goes: an honest peer sends its request with the call, and takes the answer.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

import grpc

from moeoffload.errors import ProtocolError

FIRST_S: Final = 10.0
"""Seconds within which a call says what it wants."""
CALL_S: Final = 30.0
"""Seconds that a call may last which is not in `LONG`."""
MAX_UNSAID: Final = 8
"""Calls that may wait for their first request."""
MAX_SHORT: Final = 24
"""Calls at a time, beside those in `LONG`."""
LONG: Final = frozenset({"Attach", "LoadExperts", "Calibrate"})
"""Methods whose service limits them itself: by lease."""


class Patience:
    """Cancels calls that take too long. Its one thread lives only while there are calls."""

    def __init__(self, first_s: float = FIRST_S, call_s: float = CALL_S) -> None:
        self.n_given_up = 0
        """Calls that were cancelled here."""
        self._first_s = first_s
        self._call_s = call_s
        self._changed = threading.Condition()
        # Until when, in the order of the deadlines: all of a kind have the same patience.
        self._unsaid: OrderedDict[grpc.ServicerContext, float] = OrderedDict()
        self._short: OrderedDict[grpc.ServicerContext, float] = OrderedDict()
        self._watches = False

    def begins(self, context: grpc.ServicerContext) -> None:
        """A call that has said nothing yet."""
        self._add(self._unsaid, context, self._first_s, MAX_UNSAID)

    def has_said(self, context: grpc.ServicerContext, *, long: bool) -> None:
        """Its first request has come."""
        with self._changed:
            self._unsaid.pop(context, None)
        if not long:
            self._add(self._short, context, self._call_s, MAX_SHORT)

    def ends(self, context: grpc.ServicerContext) -> None:
        """The call is over."""
        with self._changed:
            self._unsaid.pop(context, None)
            self._short.pop(context, None)

    def _add(
        self, to: OrderedDict[grpc.ServicerContext, float], context: grpc.ServicerContext, patience_s: float, most: int
    ) -> None:
        with self._changed:
            to[context] = monotonic() + patience_s
            oldest = to.popitem(last=False)[0] if len(to) > most else None
            self.n_given_up += oldest is not None
            if not self._watches:
                self._watches = True
                threading.Thread(target=self._watch, name="control-patience", daemon=True).start()
            self._changed.notify()
        if oldest is not None:
            oldest.cancel()
        if not context.add_callback(functools.partial(self.ends, context)):
            self.ends(context)

    def _watch(self) -> None:
        while True:
            with self._changed:
                late = None
                nexts = [next(iter(calls.items())) for calls in (self._unsaid, self._short) if calls]
                if not nexts:
                    self._watches = False
                    return
                context, until = min(nexts, key=lambda item: item[1])
                left_s = until - monotonic()
                if left_s <= 0:
                    late = context
                    self._unsaid.pop(late, None)
                    self._short.pop(late, None)
                    self.n_given_up += 1
                else:
                    self._changed.wait(left_s)
            if late is not None:
                late.cancel()


class Admission(grpc.ServerInterceptor):
    """Reads the requests of every call with `Patience` and takes them apart itself; the outermost interceptor."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """See `grpc.ServerInterceptor`."""
        handler: Any = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method.rpartition("/")[2]
        read = functools.partial(self._requests, handler.request_deserializer or bytes, method)
        if handler.request_streaming:
            inner = handler.stream_stream  # there is no other kind here

            def behavior(raw: Iterator[bytes], context: grpc.ServicerContext) -> Any:
                try:
                    yield from inner(read(raw, context), context)
                except ProtocolError as error:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            inner = handler.unary_stream if handler.response_streaming else handler.unary_unary

            def behavior(raw: Iterator[bytes], context: grpc.ServicerContext) -> Any:
                try:
                    request = next(read(raw, context))
                except StopIteration:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{method}: the call has no request")
                    raise
                except ProtocolError as error:
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                    raise
                return inner(request, context)

        # On the wire there is no difference; for gRPC a call with one request would wait for it without end.
        wrap = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(behavior, None, handler.response_serializer)

    def _requests(
        self, parse: Callable[[bytes], Any], method: str, raw: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        """The requests of one call.

        Raises:
            ProtocolError: bytes that are no message of this method.
            grpc.RpcError: the call was cancelled, by its peer or since nothing came.
        """
        self.patience.begins(context)
        for n_read, data in enumerate(raw):
            if n_read == 0:
                self.patience.has_said(context, long=method in LONG)
            try:
                request = parse(data)
            except Exception:  # protobuf's errors have no common base across its implementations
                raise ProtocolError(f"{method}: {len(data)} bytes that are no message of this method") from None
            yield request

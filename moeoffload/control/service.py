"""The expert service: translates gRPC calls into calls of an `ExpertBackend`. Each call has a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Final, Protocol, TypeAlias

import grpc

from moeoffload.control.protocol import PROTOCOL_VERSION
from moeoffload.control.status import refusal_of
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.control.validate import clean_texts
from moeoffload.errors import DeadlineError, MoeOffloadError, ProtocolError, ServerError
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

STEP_S: Final = 60.0
"""Seconds that a host may take between two steps of an attach, not counting its running calls."""
MAX_UNREAD: Final = 4
"""Most steps of an attach that may wait while one is handled; a host sends one at a time."""
REASON_LENGTH: Final = 200
_GONE: Final = "the host is gone"
_Event: TypeAlias = pb.AttachRequest | pb.AttachReply | Exception | str


class BackendLease(Protocol):
    """One host on the server. Closing it frees everything that belongs to it."""

    lease_id: str

    def calibrate(self, request: pb.CalibrateRequest) -> pb.CalibrateReply:
        """Times a few experts of a model."""

    def load(self, request: pb.LoadExpertsRequest) -> Iterator[pb.LoadProgress]:
        """Makes experts resident, step by step."""

    def activate(self, request: pb.Activate) -> pb.Offer:
        """Checks the host's request against the loaded experts and opens the server's ends of the channels."""

    def accept(self, request: pb.Accept) -> pb.Ready:
        """Keeps the channel that the host has chosen, closes the others."""

    def close(self, reason: str) -> None:
        """Frees everything. Idempotent."""


class ExpertBackend(Protocol):
    """The interface of the expert server behind the service."""

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """Returns what the server is and offers."""

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> BackendLease:
        """Opens a lease for a host at the address ``peer``; ``say`` sends it a message, from any thread.

        The lease ends after a ``closing`` message.
        """

    def find_lease(self, lease_id: str) -> BackendLease:
        """Returns the open lease with this id."""

    def stats(self) -> pb.StatsReply:
        """Returns the counters since start."""

    def drain(self) -> int:
        """Refuses new leases from now on; returns how many are open."""


class ExpertServicer(pb_grpc.ExpertServiceServicer):
    """Translates between gRPC and the backend; refuses other protocol versions; ties leases to their streams."""

    def __init__(self, backend: ExpertBackend, first_s: float, step_s: float = STEP_S) -> None:
        self._backend = backend
        self._first_s = first_s
        self._step_s = step_s
        self._lock = threading.Lock()
        self._working: dict[str, grpc.ServicerContext] = {}
        """By lease, the call that runs besides its stream: one at a time."""
        self._worked_until: weakref.WeakKeyDictionary[BackendLease, float] = weakref.WeakKeyDictionary()
        """When the last such call of a lease ended, monotonic seconds."""

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        """See the proto file."""
        return self._backend.describe(request)

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:
        """See the proto file."""
        return self._backend.stats()

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        """See the proto file."""
        return pb.DrainReply(leases=self._backend.drain())

    def Calibrate(self, request: pb.CalibrateRequest, context: grpc.ServicerContext) -> pb.CalibrateReply:
        """See the proto file."""
        with self._only_call(request.lease_id, "calibration", context) as lease:
            return lease.calibrate(request)

    def LoadExperts(self, request: pb.LoadExpertsRequest, context: grpc.ServicerContext) -> Iterator[pb.LoadProgress]:
        """See the proto file."""
        with self._only_call(request.lease_id, "loading", context) as lease:
            yield from lease.load(request)

    @contextlib.contextmanager
    def _only_call(self, lease_id: str, what: str, context: grpc.ServicerContext) -> Iterator[BackendLease]:
        """Yields the lease and registers a call as its only one, so that the end of its stream cancels the call."""
        lease = self._backend.find_lease(lease_id)
        with self._lock:
            if lease_id in self._working:
                raise ServerError("this lease has a call that is not finished; one at a time")
            self._working[lease_id] = context
        try:
            yield lease
        except MoeOffloadError as error:
            logger.error("%s failed: %s", what, one_line(str(error)))
            raise
        finally:
            with self._lock:
                del self._working[lease_id]
                self._worked_until[lease] = monotonic()

    def Attach(self, requests: Iterator[pb.AttachRequest], context: grpc.ServicerContext) -> Iterator[pb.AttachReply]:
        """See the proto file."""
        # One queue to wait on: requests of the host, messages of the server, or why there are no more requests.
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(requests, events), name="attach-reader", daemon=True).start()
        lease: BackendLease | None = None
        ready = False
        reason = _GONE
        try:
            while not isinstance(event := self._next_event(events, lease, ready=ready), str):
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, pb.AttachReply):
                    yield event
                    if event.WhichOneof("step") == "closing":
                        reason = event.closing.reason
                        return
                    continue
                step = event.WhichOneof("step")
                if lease is None:
                    hello = _checked_hello(event)
                    # Without the port, which differs for each connection.
                    peer = str(context.peer()).rpartition(":")[0]
                    lease = self._backend.open_lease(hello, peer, events.put)
                    yield pb.AttachReply(welcome=pb.Welcome(lease_id=lease.lease_id))
                elif step == "activate":
                    yield pb.AttachReply(offer=lease.activate(event.activate))
                elif step == "accept":
                    clean_texts(event.accept, REASON_LENGTH)
                    yield pb.AttachReply(ready=lease.accept(event.accept))
                    ready = True
                else:
                    raise ServerError(f"attach step {step} is not expected here")
            reason = event
        except Exception as error:
            refusal = refusal_of(error)
            reason = one_line(str(refusal))
            raise refusal from error
        finally:
            if lease is not None:
                self._close(lease, reason)

    def _next_event(self, events: queue.SimpleQueue[_Event], lease: BackendLease | None, *, ready: bool) -> _Event:
        """Waits for the next event on the stream of an attach.
        Raises DeadlineError: the host does not send hello in time, or holds a lease without going on to use it."""
        patience_s = None if ready else self._first_s if lease is None else self._step_s
        left_s = patience_s
        while True:
            try:
                return events.get(timeout=left_s)
            except queue.Empty:
                left_s = 0.0
                if lease is not None:
                    with self._lock:
                        works = lease.lease_id in self._working
                        worked_until = self._worked_until.get(lease, float("-inf"))
                    # A call may have ended just now: the host's time for its next step begins there.
                    left_s = self._step_s if works else worked_until + self._step_s - monotonic()
                if left_s <= 0:
                    raise DeadlineError(f"the host took more than {patience_s:g} s for a step of attaching") from None

    def _close(self, lease: BackendLease, reason: str) -> None:
        with self._lock:
            call = self._working.get(lease.lease_id)
        if call is not None:
            call.cancel()  # it may be blocked by a peer that does not read its replies
        lease.close(reason)


def _checked_hello(event: pb.AttachRequest) -> pb.Hello:
    step = event.WhichOneof("step")
    if step != "hello":
        raise ServerError(f"attach begins with {step}, expected hello")
    if event.hello.protocol_version != PROTOCOL_VERSION:
        raise ServerError(
            f"protocol version is {event.hello.protocol_version} (host), this server speaks {PROTOCOL_VERSION}"
        )
    clean_texts(event.hello)
    return event.hello


def _collect(requests: Iterator[pb.AttachRequest], events: queue.SimpleQueue[_Event]) -> None:
    """Puts the requests of one stream into ``events``, and finally why there are no more."""
    try:
        for request in requests:
            if events.qsize() >= MAX_UNREAD:
                raise ProtocolError(f"more than {MAX_UNREAD} steps of an attach at a time")
            events.put(request)
    except MoeOffloadError as error:
        events.put(error)
    except Exception:  # gRPC raises an empty exception when the call ends
        events.put(_GONE)
    else:
        events.put("the host ended the lease")

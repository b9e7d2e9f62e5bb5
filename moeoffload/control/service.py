"""The server's side of the control plane: gRPC calls in, calls on an `ExpertBackend` out."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeoffload.control.admission import Admission, Patience
from moeoffload.control.credentials import ServerCredentials
from moeoffload.control.gate import Gate
from moeoffload.control.outside import tidy
from moeoffload.control.protocol import PROTOCOL_VERSION, RETRY_AFTER, SERVER_OPTIONS
from moeoffload.control.tls_front import TlsFront
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import (
    BusyError,
    CapacityError,
    DeadlineError,
    MoeOffloadError,
    ProtocolError,
    ServerError,
    SystemLimitError,
)
from moeoffload.refusals import Refusals
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
MAX_CALLS = 128
"""Threads, and calls at a time: attached hosts, one call of each beside it, those that have not said yet what they
want, and enough for the short ones. One more is refused at once."""
STEP_S = 60.0
"""Seconds that a host may take between the steps of an attach, beside its calls that run."""
MAX_UNREAD = 4
"""Steps of an attach that may wait while one is done; a host sends one at a time."""
REASON_LENGTH = 200
_Event: TypeAlias = pb.AttachRequest | pb.AttachReply | MoeOffloadError | str


class BackendLease(Protocol):
    """One host on the server. Closing it frees everything that belongs to it."""

    lease_id: str

    def calibrate(self, request: pb.CalibrateRequest) -> pb.CalibrateReply:
        """Times a few experts of a model."""

    def load(self, request: pb.LoadExpertsRequest) -> Iterator[pb.LoadProgress]:
        """Makes experts resident, step by step."""

    def activate(self, request: pb.Activate) -> pb.Offer:
        """Checks what the host wants against what is loaded and opens the server's ends of the channels."""

    def accept(self, request: pb.Accept) -> pb.Ready:
        """Keeps the channel the host has chosen, closes the others."""

    def close(self, reason: str) -> None:
        """Frees everything. Idempotent."""


class ExpertBackend(Protocol):
    """What the service needs of the expert server behind it."""

    def describe(self, request: pb.DescribeRequest) -> pb.DescribeReply:
        """What the server is and offers."""

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> BackendLease:
        """A new lease of a host at the address ``peer``; ``say``, from any thread, sends it a message.

        The lease ends after a ``closing``.
        """

    def find_lease(self, lease_id: str) -> BackendLease:
        """The open lease with this id."""

    def stats(self) -> pb.StatsReply:
        """Counters since start."""

    def drain(self) -> int:
        """No new leases from now on; returns how many there still are."""


def _status(error: MoeOffloadError) -> grpc.StatusCode:
    if isinstance(error, CapacityError):
        return grpc.StatusCode.RESOURCE_EXHAUSTED
    return grpc.StatusCode.FAILED_PRECONDITION


def _abort(context: grpc.ServicerContext, error: MoeOffloadError) -> None:
    """Ends the call with the error's status and one line of text, and says when to try again if that can help."""
    if isinstance(error, BusyError):
        context.set_trailing_metadata(((RETRY_AFTER, str(int(error.retry_after_s * 1000))),))
    context.abort(_status(error), one_line(str(error)))


class ExpertServicer(pb_grpc.ExpertServiceServicer):
    """Translates between gRPC and the backend; refuses other protocol versions; ties leases to their streams."""

    def __init__(
        self,
        backend: ExpertBackend,
        step_s: float = STEP_S,
        peer: Callable[[grpc.ServicerContext], str | None] = lambda context: context.peer(),
    ) -> None:
        self._backend = backend
        self._step_s = step_s
        self._peer = peer
        self._working: dict[str, grpc.ServicerContext] = {}
        """By lease the call that runs beside its stream: one at a time."""
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def _works(self, lease_id: str, context: grpc.ServicerContext) -> Iterator[BackendLease]:
        lease = self._backend.find_lease(lease_id)
        with self._lock:
            if lease_id in self._working:
                raise ServerError("this lease has a call that is not finished; one at a time")
            self._working[lease_id] = context
        try:
            yield lease
        finally:
            with self._lock:
                del self._working[lease_id]

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
        try:
            with self._works(request.lease_id, context) as lease:
                return lease.calibrate(request)
        except MoeOffloadError as error:
            logger.error("calibration failed: %s", one_line(str(error)))
            _abort(context, error)
            raise
        except OSError as error:
            _abort(context, SystemLimitError.of(error))
            raise

    def LoadExperts(self, request: pb.LoadExpertsRequest, context: grpc.ServicerContext) -> Iterator[pb.LoadProgress]:
        """See the proto file."""
        try:
            with self._works(request.lease_id, context) as lease:
                yield from lease.load(request)
        except MoeOffloadError as error:
            logger.error("loading failed: %s", one_line(str(error)))
            _abort(context, error)
        except OSError as error:
            _abort(context, SystemLimitError.of(error))

    def Attach(
        self, request_iterator: Iterator[pb.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachReply]:
        """See the proto file."""
        # Requests of the host, messages of the server, or why there will be no more requests: one place to wait.
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(request_iterator, events), name="lease-requests", daemon=True).start()
        lease: BackendLease | None = None
        ready = False
        reason = "the host is gone"
        try:
            while not isinstance(event := self._next_event(events, lease, ready=ready), str):
                if isinstance(event, MoeOffloadError):
                    raise event
                if isinstance(event, pb.AttachReply):
                    yield event
                    if event.WhichOneof("step") == "closing":
                        reason = event.closing.reason
                        return
                    continue
                step = event.WhichOneof("step")
                if lease is None:
                    if step != "hello":
                        raise ServerError(f"attach begins with {step}, expected hello")
                    if event.hello.protocol_version != PROTOCOL_VERSION:
                        raise ServerError(
                            f"protocol version is {event.hello.protocol_version} (host), "
                            f"this server speaks {PROTOCOL_VERSION}"
                        )
                    tidy(event.hello)
                    peer = (self._peer(context) or "").rpartition(":")[
                        0
                    ]  # without the port, which each connection has of its own
                    lease = self._backend.open_lease(event.hello, peer, events.put)
                    yield pb.AttachReply(welcome=pb.Welcome(lease_id=lease.lease_id))
                elif step == "activate":
                    yield pb.AttachReply(offer=lease.activate(event.activate))
                elif step == "accept":
                    tidy(event.accept, REASON_LENGTH)
                    yield pb.AttachReply(ready=lease.accept(event.accept))
                    ready = True
                else:
                    raise ServerError(f"attach step {step} is not expected here")
            reason = event
        except MoeOffloadError as error:
            reason = one_line(str(error))
            _abort(context, error)
        except OSError as error:
            reason = str(SystemLimitError.of(error))
            logger.error("a host could not be attached: %s", reason)
            _abort(context, SystemLimitError.of(error))
        finally:
            if lease is not None:
                lease.close(reason)
                with self._lock:
                    call = self._working.get(lease.lease_id)
                if call is not None:
                    call.cancel()  # it may wait for a peer that does not take its answers

    def _next_event(self, events: queue.SimpleQueue[_Event], lease: BackendLease | None, *, ready: bool) -> _Event:
        """What happens next on the stream of an attach.

        Raises:
            DeadlineError: the host has a lease, but does not come to use it.
        """
        while True:
            try:
                return events.get(timeout=self._step_s if lease is not None and not ready else None)
            except queue.Empty:
                with self._lock:
                    works = lease is not None and lease.lease_id in self._working
                if not works:
                    raise DeadlineError(f"the host took more than {self._step_s:g} s for a step of attaching") from None


def _collect(requests: Iterator[pb.AttachRequest], events: queue.SimpleQueue[_Event]) -> None:
    """Puts the requests of one stream into ``events``, and at last why there are no more."""
    try:
        for request in requests:
            if events.qsize() >= MAX_UNREAD:
                events.put(ProtocolError(f"more than {MAX_UNREAD} steps of an attach at a time"))
                return
            events.put(request)
    except grpc.RpcError:
        events.put("the host is gone")
    except MoeOffloadError as error:
        events.put(error)
    else:
        events.put("the host ended the lease")


class _Health(health.HealthServicer):
    """Without Watch: each one would take a thread for as long as its client likes. Clients then ask with Check."""

    def Watch(self, request: object, context: grpc.ServicerContext, send_response_callback: object = None) -> None:
        """Is not there."""
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "Watch is not offered; use Check")


@dataclass
class ControlServer:
    """A listening control plane. ``port`` is the real one, also when 0 was asked for."""

    host: str
    port: int
    _server: grpc.Server
    _health: health.HealthServicer
    _front: TlsFront | None

    @classmethod
    def start(
        cls, host: str, port: int, backend: ExpertBackend, credentials: ServerCredentials, refusals: Refusals
    ) -> ControlServer:
        """Listens on ``host``:``port`` and serves ``backend``, the standard health service and reflection.

        Calls that ``credentials`` do not allow are refused and added to ``refusals``; health checks are open to all.

        Raises:
            ServerError: the address cannot be bound.
        """
        gate = Gate(credentials, refusals)
        gate.host = host
        server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="control"),
            # Who is not let in takes no place from those who are.
            interceptors=[gate, Admission(Patience())],
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        servicer = ExpertServicer(backend, peer=gate.peer)
        pb_grpc.add_ExpertServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
        # It writes a traceback for every text in the head of a call that is not UTF-8, and goes on.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        health_servicer = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        front = None
        if credentials.context is None:
            bound = gate.port = _bind(server, host, port)
        else:
            front = TlsFront(host, port, credentials.context, refusals)
            bound, gate.port, gate.peer_of = front.port, front.port, front.peer_of
            front.start(_bind(server, "127.0.0.1", 0))
        server.start()
        control = cls(host, bound, server, health_servicer, front)
        control.set_serving(True)
        return control

    def set_serving(self, serving: bool) -> None:
        """Tells the health service, for the whole server and for the expert service."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        self._health.set("", status)
        self._health.set(SERVICE_NAME, status)

    def stop(self, grace_s: float) -> None:
        """Stops listening; calls still running after ``grace_s`` seconds are cancelled."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace_s).wait(grace_s + 2.0)
        if self._front is not None:
            self._front.stop()


def _bind(server: grpc.Server, host: str, port: int) -> int:
    """The port that the server got.

    Raises:
        ServerError: it is taken, or the address is not of this machine.
    """
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if bound == 0:
        raise ServerError(f"cannot listen on {host}:{port}; is another server running there?")
    return bound

"""The server's side of the control plane: gRPC calls in, calls on an `ExpertBackend` out."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from moeoffload.control.protocol import PROTOCOL_VERSION, RETRY_AFTER, SERVER_OPTIONS
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.errors import BusyError, CapacityError, MoeOffloadError, ServerError, SystemLimitError

logger = logging.getLogger(__name__)

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["ExpertService"].full_name
MAX_CALLS = 128
"""At a time, each on a thread of its own; a lease is a call. One more is refused at once."""


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

    def open_lease(self, hello: pb.Hello, peer: str, end: Callable[[str], None]) -> BackendLease:
        """A new lease of a host at the address ``peer``.

        The server calls ``end(reason)``, from any thread, when it wants it to end.
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
    context.abort(_status(error), str(error))


class ExpertServicer(pb_grpc.ExpertServiceServicer):
    """Translates between gRPC and the backend; refuses other protocol versions; ties leases to their streams."""

    def __init__(self, backend: ExpertBackend) -> None:
        self._backend = backend

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
            return self._backend.find_lease(request.lease_id).calibrate(request)
        except MoeOffloadError as error:
            logger.error("calibration failed: %s", error)
            _abort(context, error)
            raise
        except OSError as error:
            _abort(context, SystemLimitError.of(error))
            raise

    def LoadExperts(self, request: pb.LoadExpertsRequest, context: grpc.ServicerContext) -> Iterator[pb.LoadProgress]:
        """See the proto file."""
        try:
            yield from self._backend.find_lease(request.lease_id).load(request)
        except MoeOffloadError as error:
            logger.error("loading failed: %s", error)
            _abort(context, error)
        except OSError as error:
            _abort(context, SystemLimitError.of(error))

    def Attach(
        self, request_iterator: Iterator[pb.AttachRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.AttachReply]:
        """See the proto file."""
        # Requests of the host, a wish of the server to close, or why there will be no more requests: one place to wait.
        events: queue.SimpleQueue[pb.AttachRequest | pb.Closing | str] = queue.SimpleQueue()
        threading.Thread(target=_collect, args=(request_iterator, events), name="lease-requests", daemon=True).start()
        lease: BackendLease | None = None
        reason = "the host is gone"
        try:
            while not isinstance(event := events.get(), str):
                if isinstance(event, pb.Closing):
                    reason = event.reason
                    yield pb.AttachReply(closing=event)
                    return
                step = event.WhichOneof("step")
                if lease is None:
                    if step != "hello":
                        raise ServerError(f"attach begins with {step}, expected hello")
                    if event.hello.protocol_version != PROTOCOL_VERSION:
                        raise ServerError(
                            f"protocol version is {event.hello.protocol_version} (host), "
                            f"this server speaks {PROTOCOL_VERSION}"
                        )
                    peer = context.peer().rpartition(":")[0]  # without the port, which each connection has of its own
                    lease = self._backend.open_lease(event.hello, peer, lambda why: events.put(pb.Closing(reason=why)))
                    yield pb.AttachReply(welcome=pb.Welcome(lease_id=lease.lease_id))
                elif step == "activate":
                    yield pb.AttachReply(offer=lease.activate(event.activate))
                elif step == "accept":
                    yield pb.AttachReply(ready=lease.accept(event.accept))
                else:
                    raise ServerError(f"attach step {step} is not expected here")
            reason = event
        except MoeOffloadError as error:
            reason = str(error)
            _abort(context, error)
        except OSError as error:
            reason = str(SystemLimitError.of(error))
            logger.error("a host could not be attached: %s", reason)
            _abort(context, SystemLimitError.of(error))
        finally:
            if lease is not None:
                lease.close(reason)


def _collect(
    requests: Iterator[pb.AttachRequest], events: queue.SimpleQueue[pb.AttachRequest | pb.Closing | str]
) -> None:
    """Puts the requests of one stream into ``events``, and at last why there are no more."""
    try:
        for request in requests:
            events.put(request)
    except grpc.RpcError:
        events.put("the host is gone")
    else:
        events.put("the host ended the lease")


@dataclass
class ControlServer:
    """A listening control plane. ``port`` is the real one, also when 0 was asked for."""

    host: str
    port: int
    _server: grpc.Server
    _health: health.HealthServicer

    @classmethod
    def start(cls, host: str, port: int, backend: ExpertBackend) -> ControlServer:
        """Listens on ``host``:``port`` and serves ``backend``, the standard health service and reflection.

        Raises:
            ServerError: the address cannot be bound.
        """
        server = grpc.server(
            ThreadPoolExecutor(MAX_CALLS, thread_name_prefix="control"),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        pb_grpc.add_ExpertServiceServicer_to_server(ExpertServicer(backend), server)  # type: ignore[no-untyped-call]
        health_servicer = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
        reflection.enable_server_reflection((SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        try:
            bound = server.add_insecure_port(f"{host}:{port}")
        except RuntimeError:
            bound = 0
        if bound == 0:
            raise ServerError(f"cannot listen on {host}:{port}; is another server running there?")
        server.start()
        control = cls(host, bound, server, health_servicer)
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

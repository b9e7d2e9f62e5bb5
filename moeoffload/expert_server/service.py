"""The expert service: hosts' gRPC calls, and the leases that they open. Each call has a thread of its own."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from time import monotonic
from typing import Final, TypeAlias

import grpc

from moeoffload import __version__
from moeoffload.control.gate import FIRST_S
from moeoffload.control.protocol import MAX_UNREAD, PROTOCOL_VERSION
from moeoffload.control.server import ControlServer
from moeoffload.control.status import refusal_of
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.control.validate import clean_texts
from moeoffload.devices import device_memory, device_name
from moeoffload.errors import BusyError, DeadlineError, MoeOffloadError, ProtocolError, ServerError
from moeoffload.expert_server.lease import HostLease
from moeoffload.expert_server.server_parts import ServerParts
from moeoffload.last_resort import start
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

MAX_LEASES: Final = 32
MAX_LEASES_OF_ONE: Final = 16
"""Of one host, or one machine on the network: it cannot take all of them. One host may need several: one per shard."""
STEP_S: Final = 60.0
"""Seconds that a host may take between two steps of an attach, not counting its running calls."""
REASON_LENGTH: Final = 200
_GONE: Final = "the host is gone"
_Event: TypeAlias = pb.AttachRequest | pb.AttachReply | Exception | str


class ExpertService(pb_grpc.ExpertServiceServicer):
    """Answers calls, keeps the leases, ties each to its stream, and refuses other protocol versions."""

    def __init__(
        self,
        server: ServerParts,
        on_drained: Callable[[], object],
        first_s: float = FIRST_S,
        step_s: float = STEP_S,
    ) -> None:
        """``on_drained`` is called when the server is draining and its last host has left. A host must say hello within
        ``first_s`` seconds, and take each further step of an attach within ``step_s``."""
        self.control: ControlServer | None = None
        """The server that offers this service; set once it listens."""
        self.failure = ""
        self._server = server
        self._on_drained = on_drained
        self._first_s = first_s
        self._step_s = step_s
        self._draining = False
        self._leases: dict[str, HostLease] = {}
        self._epochs = itertools.count(1)
        self._lock = threading.Lock()

    def Describe(self, request: pb.DescribeRequest, context: grpc.ServicerContext) -> pb.DescribeReply:
        """See the proto file."""
        server = self._server
        return pb.DescribeReply(
            protocol_version=PROTOCOL_VERSION,
            server_version=__version__,
            device=", ".join(map(str, server.devices)),
            device_name=" + ".join(map(device_name, server.devices)),
            offered_bytes=max(0, server.store.offered_bytes(request.model_digest, request.compute_dtype)),
            resident_bytes=server.store.resident_bytes,
            batch_capacity=server.most_rows,
            transports=list(server.factories),
            max_slots=server.settings.slots,
            draining=self._draining,
            model=server.settings.model or "",
        )

    def Stats(self, request: pb.StatsRequest, context: grpc.ServicerContext) -> pb.StatsReply:
        """See the proto file."""
        server, counters = self._server, self._server.engine.counters
        with self._lock:
            leases = list(self._leases.values())
        created: Counter[str] = Counter()
        for lease in leases:
            created.update(lease.pool_creations)
        return pb.StatsReply(
            requests=counters.requests,
            rows=counters.rows,
            errors=counters.errors,
            queue_seconds=counters.queue_s,
            compute_seconds=counters.compute_s,
            resident_bytes=server.store.resident_bytes,
            warm_bytes=server.store.warm_bytes,
            read_bytes=server.store.read_bytes,
            tiers=server.tiers.stats() if server.tiers is not None else None,
            memory=pb.DeviceMemory(**asdict(device_memory(*server.devices))),
            leases=len(leases),
            pool_creations=created,
            dropped=server.listener.n_unknown if server.listener is not None else 0,
            refused=server.refusals.count,
            batches=pb.BatchStats(
                batches=sum(counters.members),
                by_members=counters.members,
                wait_seconds=counters.batch_wait_s,
            ),
        )

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> pb.DrainReply:
        """See the proto file."""
        return pb.DrainReply(leases=self.drain())

    def drain(self) -> int:
        """Refuses new hosts from now on and asks the others to leave; returns how many leases are open."""
        leases = self.refuse_hosts()
        if not leases:
            self._on_drained()
        if self.control is not None:
            self.control.set_serving(False)
        for lease in leases:
            lease.say(pb.AttachReply(draining=pb.Draining()))
        return len(leases)

    def refuse_hosts(self) -> list[HostLease]:
        """Refuses new hosts from now on; returns the open leases."""
        with self._lock:
            self._draining = True
            return list(self._leases.values())

    def fail(self, why: str) -> None:
        """One of the threads that every host needs has ended: says so (health, the leases) and takes no new hosts."""
        with self._lock:
            self.failure = self.failure or why
            leases = list(self._leases.values())
        if self.control is not None:
            self.control.set_serving(False)
        for lease in leases:
            lease.end(f"this server has failed: {why}")

    def open_lease(self, hello: pb.Hello, peer: str, say: Callable[[pb.AttachReply], None]) -> HostLease:
        """Opens a lease for a host at the address ``peer``; ``say`` sends it a message, from any thread. The lease ends
        after a ``closing`` message. Raises BusyError: there are too many; ServerError: the server takes no new hosts.
        """
        with self._lock:
            if self.failure:
                raise ServerError(f"this server has failed: {self.failure}")
            if self._draining:
                raise ServerError("this server is draining and takes no new hosts")
            # Processes of this machine are told apart by their names: they are the same user's.
            is_here = peer.startswith(("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:"))
            who = f"{peer} {hello.host}" if is_here else peer
            of_one = sum(lease.limited_as == who for lease in self._leases.values())
            if len(self._leases) >= MAX_LEASES or of_one >= MAX_LEASES_OF_ONE:
                raise BusyError(
                    f"this server has {len(self._leases)} leases, {of_one} of this host; "
                    f"its limits are {MAX_LEASES} and {MAX_LEASES_OF_ONE}"
                )
            lease = HostLease(self._server, hello.host, peer, who, next(self._epochs), say)
            self._leases[lease.lease_id] = lease
        logger.info("%s (moeoffload %s): lease opened", hello.host, hello.host_version)
        return lease

    def find_lease(self, lease_id: str) -> HostLease:
        """Returns the open lease with this id. Raises ServerError: there is none."""
        with self._lock:
            lease = self._leases.get(lease_id)
        if lease is None:
            raise ServerError("there is no such lease; attach first")
        return lease

    def Calibrate(self, request: pb.CalibrateRequest, context: grpc.ServicerContext) -> pb.CalibrateReply:
        """See the proto file."""
        with self._only_call(request.lease_id, "calibration", context) as lease:
            return lease.calibrate(request)

    def LoadExperts(self, request: pb.LoadExpertsRequest, context: grpc.ServicerContext) -> Iterator[pb.LoadProgress]:
        """See the proto file."""
        with self._only_call(request.lease_id, "loading", context) as lease:
            yield from lease.load(request)

    @contextlib.contextmanager
    def _only_call(self, lease_id: str, what: str, context: grpc.ServicerContext) -> Iterator[HostLease]:
        """Yields the lease and registers a call as its only one, so that the end of its stream cancels the call."""
        lease = self.find_lease(lease_id)
        with self._lock:
            if lease.call is not None:
                raise ServerError("this lease has a call that is not finished; one at a time")
            lease.call = context
        try:
            yield lease
        except MoeOffloadError as error:
            logger.error("%s failed: %s", what, one_line(str(error)))
            raise
        finally:
            with self._lock:
                lease.call, lease.called_until = None, monotonic()

    def Attach(self, requests: Iterator[pb.AttachRequest], context: grpc.ServicerContext) -> Iterator[pb.AttachReply]:
        """See the proto file."""
        # One queue to wait on: requests of the host, messages of the server, or why there are no more requests.
        events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        start(threading.Thread(target=_collect, args=(requests, events), name="attach-reader", daemon=True))
        lease: HostLease | None = None
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
                    lease = self.open_lease(hello, peer, events.put)
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
                self.close_lease(lease, reason)

    def _next_event(self, events: queue.SimpleQueue[_Event], lease: HostLease | None, *, ready: bool) -> _Event:
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
                    # A call may have ended just now: the host's time for its next step begins there.
                    with self._lock:
                        began_at = lease.called_until if lease.call is None else monotonic()
                    left_s = began_at + self._step_s - monotonic()
                if left_s <= 0:
                    raise DeadlineError(f"the host took more than {patience_s:g} s for a step of attaching") from None

    def close_lease(self, lease: HostLease, reason: str) -> None:
        """Frees what belongs to a lease whose stream has ended."""
        with self._lock:
            call = lease.call
        if call is not None:
            call.cancel()  # it may be blocked by a peer that does not read its replies
        lease.close(reason)
        with self._lock:
            self._leases.pop(lease.lease_id, None)
            drained = self._draining and not self._leases
        if drained:
            self._on_drained()


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

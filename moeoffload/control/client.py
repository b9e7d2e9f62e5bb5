"""The host's side of the control plane: one `ControlClient` per expert server and the `Lease` it holds there."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import socket
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final

import grpc
from google.protobuf.message import Message

from moeoffload import __version__
from moeoffload.control.credentials import HostCredentials
from moeoffload.control.probe import why_not
from moeoffload.control.protocol import CLIENT_OPTIONS, MAX_UNREAD, PROTOCOL_VERSION
from moeoffload.control.status import error_of
from moeoffload.control.v1 import expert_service_pb2 as pb
from moeoffload.control.v1 import expert_service_pb2_grpc as pb_grpc
from moeoffload.control.validate import MAX_NAME, checked_items, checked_timings, clean_texts
from moeoffload.errors import DeadlineError, ProtocolError, ServerError
from moeoffload.placement import ExpertTable
from moeoffload.text import one_line

logger = logging.getLogger(__name__)

_END = None
LOOK_S: Final = 0.25
"""How long a connection may take until the host probes for the reason; doubled each time, unless it is refused."""
CLOSE_S: Final = 10.0
"""How long to wait for gRPC to close a channel, which takes milliseconds."""


class ControlClient:
    """Talks to one expert server at ``address`` (HOST:PORT). Close it when done; that ends its leases."""

    def __init__(self, address: str, credentials: HostCredentials | None = None) -> None:
        self.address = address
        self._credentials = credentials or HostCredentials()
        self._channel = self._credentials.channel(address, CLIENT_OPTIONS)
        self._stub = pb_grpc.ExpertServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._closed = False
        self._closing = threading.Lock()
        """Held while a call is started: starting one on a closed channel crashes gRPC."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the control plane is TLS."""
        return self._credentials.ca is not None

    def connect(self, timeout_s: float, refused_s: float | None = None) -> None:
        """Waits up to ``timeout_s`` seconds until the server accepts a connection. If connections are refused, logs a
        warning and waits for at most ``refused_s`` seconds (None: no warning, no shorter limit).
        Raises ServerError: nothing listens there within these times, or one side rejects the other."""
        deadline = monotonic() + timeout_s
        ready = self._begin(lambda stub, metadata: grpc.channel_ready_future(self._channel))
        try:
            look_s, refused_since = LOOK_S, None
            while (left_s := deadline - monotonic()) > 0:
                if self._closed:
                    raise ServerError(f"expert server {self.address}: the connection to it is closed")
                with contextlib.suppress(grpc.FutureTimeoutError):
                    ready.result(timeout=min(look_s, left_s))
                    return
                # gRPC keeps trying whatever the reason, even one that waiting cannot cure.
                try:
                    reason = why_not(self.address, self._credentials, max(0.1, deadline - monotonic()))
                except ConnectionRefusedError:
                    look_s = LOOK_S
                    if refused_s is None:
                        continue
                    if refused_since is None:
                        refused_since = monotonic()
                        waits_s = min(refused_s, timeout_s)
                        logger.warning(
                            "expert server %s refuses connections; waiting %g s for it", self.address, waits_s
                        )
                    elif monotonic() - refused_since > refused_s:
                        raise ServerError(
                            f"expert server {self.address}: has refused connections for {refused_s:g} s; is "
                            "moeoffload-expert running there? --connect-timeout-s waits longer"
                        ) from None
                    continue
                if reason:
                    raise ServerError(f"expert server {self.address}: {reason}")
                look_s, refused_since = 2 * look_s, None
        finally:
            ready.cancel()
        raise ServerError(
            f"expert server {self.address}: no connection within {timeout_s:g} s; is moeoffload-expert running there?"
        )

    def describe(self, timeout_s: float, *, model_digest: str = "", compute_dtype: str = "") -> pb.DescribeReply:
        """Returns what the server is and offers.
        Raises ServerError: it is not an expert server, speaks another protocol version, or is draining."""
        request = pb.DescribeRequest(model_digest=model_digest, compute_dtype=compute_dtype)
        reply: pb.DescribeReply = self._call("Describe", request, timeout_s)
        clean_texts(reply)
        checked_items("transports", len(reply.transports))
        if reply.protocol_version != PROTOCOL_VERSION:
            raise ServerError(
                f"expert server {self.address}: protocol version is {reply.protocol_version} (moeoffload "
                f"{reply.server_version}), this host speaks {PROTOCOL_VERSION} (moeoffload {__version__})"
            )
        if reply.draining:
            raise ServerError(f"expert server {self.address}: it is draining and takes no new hosts")
        return reply

    def attach(self, timeout_s: float) -> Lease:
        """Opens the lease: everything this host has on the server lives as long as the lease.
        Raises BusyError: the server has no room now; ServerError: it refuses, or does not answer within ``timeout_s``.
        """
        return Lease(self, timeout_s)

    def stats(self, timeout_s: float) -> pb.StatsReply:
        """Returns the server's counters since its start. Raises ServerError: it does not answer."""
        reply: pb.StatsReply = self._call("Stats", pb.StatsRequest(), timeout_s)
        return reply

    def drain(self, timeout_s: float) -> int:
        """Asks the server to accept no new hosts and to stop after the last one; returns how many leases it still has.
        Raises ServerError: it does not answer."""
        return int(self._call("Drain", pb.DrainRequest(), timeout_s).leases)

    def _call(self, method: str, request: Message, timeout_s: float) -> Any:
        """Runs a call with one reply and returns it."""
        call = self._begin(
            lambda stub, metadata: getattr(stub, method).future(request, timeout=timeout_s, metadata=metadata)
        )
        try:
            return call.result()
        except grpc.RpcError as error:
            raise error_of(error, self.address, method) from None
        except grpc.FutureCancelledError:
            raise ServerError(f"expert server {self.address}: the connection to it was closed") from None

    def _begin(self, begin: Callable[[Any, Any], Any]) -> Any:
        """Starts a call and returns it, the result of ``begin(stub, metadata)``. Every call starts here."""
        metadata = self._credentials.metadata(self.address)
        with self._closing:
            if self._closed:
                raise ServerError(f"expert server {self.address}: the connection to it is closed")
            return begin(self._stub, metadata)

    def close(self) -> None:
        """Closes the connection and with it every lease. Idempotent, even if a signal handler raised during it."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # Signal handlers run in the main thread: one that raised inside gRPC's close would leave a channel for
            # which the interpreter waits forever at exit.
            closing = threading.Thread(target=self._channel.close, name=f"close-{self.address}", daemon=True)
            try:
                closing.start()
            except RuntimeError:  # no more threads, or the interpreter is shutting down
                self._channel.close()
            else:
                atexit.register(closing.join, CLOSE_S)  # if a signal ends the wait
                closing.join(CLOSE_S)
                atexit.unregister(closing.join)


class Lease:
    """An open Attach stream; the server keeps what it loaded for this host while the stream is open."""

    def __init__(self, client: ControlClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._outgoing: queue.SimpleQueue[pb.AttachRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.AttachReply | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._listeners: list[tuple[Callable[[str], None], Callable[[], None]]] = []
        """Callbacks for the end of the lease, and for the server's draining."""
        self._draining = False
        self._closed = False
        self._ended = threading.Event()
        self.end_reason: str | None = None
        """Why the lease ended, or None while it holds."""
        self._failure: ServerError | None = None
        self._call = client._begin(
            lambda stub, metadata: stub.Attach(iter(self._outgoing.get, _END), metadata=metadata)
        )
        self._reader = threading.Thread(target=self._read, name=f"lease-{client.address}", daemon=True)
        self._reader.start()
        hello = pb.Hello(
            protocol_version=PROTOCOL_VERSION, host_version=__version__, host=f"{socket.gethostname()}:{os.getpid()}"
        )
        try:
            welcome = self._exchange(pb.AttachRequest(hello=hello), "welcome").welcome
            self.lease_id = one_line(welcome.lease_id, MAX_NAME)
        except BaseException:
            self.close()
            raise

    def calibrate(self, model: pb.ModelReference, timeout_s: float) -> list[tuple[int, float]]:
        """Has the server time calls of several sizes with a few experts of ``model``; returns (rows, seconds) of each.
        Raises ServerError: the server cannot do it."""
        request = pb.CalibrateRequest(lease_id=self.lease_id, model=model)
        timings = checked_timings(self._client._call("Calibrate", request, timeout_s).timings)
        if not timings:
            raise ProtocolError(f"expert server {self._client.address}: answered Calibrate without timings")
        return timings

    def load(
        self,
        model: pb.ModelReference,
        table: ExpertTable,
        *,
        progress: Callable[[int, int], None],
        timeout_s: float,
    ) -> list[float] | None:
        """Makes the experts of ``table`` resident; calls ``progress(loaded bytes, total bytes)`` meanwhile.

        Returns how far the packed weights of each layer are from the stored ones, None if they are not packed; see
        `LoadProgress`.
        Raises ServerError: the server cannot load them, or holds another model or table than requested.
        """
        layers = [pb.LayerExperts(layer=i, experts=experts) for i, experts in enumerate(table.layers)]
        request = pb.LoadExpertsRequest(lease_id=self.lease_id, model=model, layers=layers)
        table_digest = ""
        errors: list[float] = []
        try:
            steps = self._client._begin(
                lambda stub, metadata: stub.LoadExperts(request, timeout=timeout_s, metadata=metadata)
            )
            for step in steps:
                progress(step.loaded_bytes, step.total_bytes)
                table_digest = step.table_digest or table_digest
                if step.HasField("weight_error") and len(errors) < len(layers):
                    if not 0 <= step.weight_error < math.inf:
                        raise ProtocolError(f"weight_error is {step.weight_error}, expected a finite number from 0 on")
                    errors.append(step.weight_error)
        except grpc.RpcError as error:
            raise error_of(error, self._client.address, "LoadExperts") from None
        if table_digest != table.digest:
            raise ServerError(f"expert server {self._client.address}: its expert table differs from what was asked for")
        return errors or None

    def activate(self, request: pb.Activate) -> pb.Offer:
        """Agrees on everything that does not change from call to call.
        Raises ServerError: the server refuses, naming the field that differs."""
        offer: pb.Offer = self._exchange(pb.AttachRequest(activate=request), "offer").offer
        return offer

    def accept(self, transport: str, nonce: bytes, reason: str) -> int:
        """Tells the server which channel this host has opened; returns the epoch that its frames must carry.
        Raises ServerError: the server refuses, for instance because the nonce is not the one in its segment."""
        accept = pb.Accept(transport=transport, nonce=nonce, reason=reason)
        return int(self._exchange(pb.AttachRequest(accept=accept), "ready").ready.epoch)

    def listen(self, on_end: Callable[[str], None], on_drain: Callable[[], None] = lambda: None) -> None:
        """Registers callbacks: ``on_end(reason)``, once, when the lease ends, ``on_drain()`` when the server drains.

        They are called from another thread, or at once from this one if the event has already happened.
        """
        with self._lock:
            if self.end_reason is None:
                self._listeners.append((on_end, on_drain))
            ended, draining = self.end_reason, self._draining
        if draining:
            on_drain()
        if ended is not None:
            on_end(ended)

    def why_ended(self, timeout_s: float) -> str | None:
        """Returns why the lease ended; None if it still holds after ``timeout_s`` seconds."""
        self._ended.wait(timeout_s)
        return self.end_reason

    def close(self, grace_s: float = 2.0) -> None:
        """Ends the lease and waits up to ``grace_s`` seconds for the server to confirm. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._outgoing.put(_END)
        self._reader.join(grace_s)
        self._call.cancel()
        self._reader.join(timeout=2.0)

    def _exchange(self, request: pb.AttachRequest, expected: str) -> pb.AttachReply:
        self._outgoing.put(request)
        try:
            reply = self._replies.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DeadlineError(
                f"expert server {self._client.address}: no {expected} within {self._timeout_s:g} s of attaching"
            ) from None
        if reply is None:
            if self._failure is not None:
                raise self._failure
            raise ServerError(self.end_reason or f"expert server {self._client.address}: the lease ended")
        step = reply.WhichOneof("step")
        if step != expected:
            raise ServerError(f"expert server {self._client.address}: answered {step}, expected {expected}")
        return reply

    def _read(self) -> None:
        reason = f"expert server {self._client.address}: it ended the lease"
        try:
            for reply in self._call:
                step = reply.WhichOneof("step")
                if step == "draining":
                    with self._lock:
                        self._draining = True
                        to_tell = list(self._listeners)
                    for _, on_drain in to_tell:
                        on_drain()
                elif step == "closing":
                    reason = f"expert server {self._client.address}: {one_line(reply.closing.reason)}"
                elif self._replies.qsize() < MAX_UNREAD:
                    self._replies.put(reply)
                else:
                    self._call.cancel()
                    reason = f"expert server {self._client.address}: it sent answers that were not asked for"
                    break
        except grpc.RpcError as error:
            self._failure = error_of(error, self._client.address, "Attach")
            reason = str(self._failure)
            error.__traceback__ = None  # the error is the call itself; its traceback would keep this frame alive
        with self._lock:
            self.end_reason = "the lease was closed" if self._closed else reason
            listeners, self._listeners = self._listeners, []  # they hold references to the lease's owner
        self._ended.set()
        self._replies.put(None)
        for on_end, _ in listeners:
            on_end(self.end_reason)

"""The host's end of the stream transport: a ZeroMQ DEALER over TCP, for servers on other machines.

Any number of threads may wait, each for its own slot. One of them leads: it waits for the socket and receives for all,
so a single waiting thread needs no hop to another one. The others sleep until a reply arrives or one has to lead.
"""

from __future__ import annotations

import mmap
import threading
import time
from contextlib import suppress
from time import perf_counter
from typing import Final

import zmq

from moeoffload.config import bracketed
from moeoffload.errors import DeadlineError, ProtocolError, ServerError
from moeoffload.transport.base import ChannelOffer, ChannelSizes, HostSlot
from moeoffload.transport.slots import HostChannel, SlotState
from moeoffload.transport.stream_keys import StreamKeys, check_key, encrypt_host_end
from moeoffload.transport.zmq_socket import (
    CLOSED_ID,
    PIECE_BYTES,
    ROUTING_ID_BYTES,
    UNEXPECTED,
    FrameSocket,
    IncomingFrame,
)
from moeoffload.wire import HEADER_BYTES, FrameHeader, Kind

SEND_TIMEOUT_S: Final = 2.0
"""How long a send waits for room when the connection is lost and its send queue is full."""
RETRY_S: Final = 0.002
PROBE_S: Final = 0.25
"""Interval of probes: cancellations that ask the server about an abandoned slot or a new channel."""


class StreamHostEnd(HostChannel):
    """The host's end; made by `open_stream`."""

    name = "stream"

    def __init__(
        self, sizes: ChannelSizes, endpoint: str, routing_id: bytes, keys: tuple[StreamKeys, bytes] | None
    ) -> None:
        super().__init__(sizes, memoryview(mmap.mmap(-1, sizes.buffer_bytes)))
        self._endpoint = endpoint
        n_pieces = sizes.request_bytes // PIECE_BYTES + 1
        n_queued = 2 * sizes.n_slots * n_pieces + 64
        self._wire = FrameSocket(zmq.DEALER, n_queued_out=n_queued, encrypted=keys is not None)
        self._incoming = [IncomingFrame(slot.reply) for slot in self.slots]
        self._using = threading.Condition(threading.Lock())
        """Guards the socket and everything below; never held while the socket is waited for."""
        self._awaited = [0] * sizes.n_slots
        """Per slot, the id of the request whose reply is expected, or 0."""
        self._arrived = [0] * sizes.n_slots
        """Per slot, the bytes of a reply that has arrived and was not taken yet, or 0."""
        self._is_led = False
        """Whether a thread is waiting for the socket; it is woken when another thread has received something."""
        self._control = memoryview(bytearray(HEADER_BYTES))
        self._probed_at = [0.0] * sizes.n_slots
        self._probed_ids = [0] * sizes.n_slots
        try:
            self._wire.socket.setsockopt(zmq.ROUTING_ID, routing_id)
            if keys is not None:
                encrypt_host_end(self._wire.socket, *keys)
            self._wire.socket.connect(endpoint)
        except zmq.ZMQError as error:
            self._wire.close()
            raise ServerError(f"{endpoint} is not an address that can be connected to: {error}") from error

    def greet(self, timeout_s: float) -> None:
        """Checks that the channel works: cancels a request that was never sent and waits for the answer.
        Raises DeadlineError: no answer within ``timeout_s`` seconds."""
        deadline = perf_counter() + timeout_s
        request_id = self._awaited[0] = self._ids[0] = self.next_id(self.slots[0])
        while (left_s := deadline - perf_counter()) > 0:
            with self._using:
                self._ask(0, request_id)
            with suppress(DeadlineError):  # the connection may have broken meanwhile; a second answer is dropped
                self._await_reply(self.slots[0], perf_counter() + min(PROBE_S, left_s))
                return
        raise DeadlineError(f"no answer from {self._endpoint} within {timeout_s:g} s")

    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        with self._using:
            self._check_open()
            self._awaited[slot.index] = request_id
            self._arrived[slot.index] = 0
            self._probed_at[slot.index] = perf_counter()  # no question before the reply had its time
            self._mark_sent(slot)
        at = 0
        deadline = perf_counter() + SEND_TIMEOUT_S
        while True:
            with self._using:
                self._check_open()
                at = self._wire.send(request_id, slot.request, n_bytes, None, at)
                if at == n_bytes:
                    if self._is_led:
                        self._receive_all()  # sending may have used up the signal that the leader waits for
                    return
            if perf_counter() >= deadline:
                raise ServerError(f"{self._endpoint} has taken nothing for {SEND_TIMEOUT_S:g} s")
            time.sleep(RETRY_S)

    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        index = slot.index
        with self._using:
            try:
                while True:
                    if not self._is_led:
                        self._receive_all(index)
                    if n_bytes := self._arrived[index]:
                        self._arrived[index] = 0
                        return n_bytes
                    self._check_open()
                    left_s = deadline - perf_counter()
                    if left_s <= 0:
                        raise DeadlineError
                    self._lead(left_s)
            finally:
                self._using.notify_all()  # another thread has to lead now

    def _lead(self, timeout_s: float) -> None:
        """Waits for the socket, or, if another thread leads, to be notified by it. Called with ``_using`` held."""
        if self._is_led:
            self._using.wait(timeout_s)
            return
        self._is_led = True
        self._using.release()
        try:
            self._wire.wait(timeout_s)
        finally:
            self._using.acquire()
            self._is_led = False

    def _receive_all(self, own: int = -1) -> None:
        """Receives what has arrived, up to the reply for slot ``own``, and notifies waiting threads.
        Called with ``_using`` held."""
        wire = self._wire
        news = False
        while wire.readable():
            tag = wire.receive_tag()
            if tag is None:
                self.n_stale += 1
            elif tag[0] == CLOSED_ID:
                wire.skip()
                self._closed = self._closed or "the server closed it"
                news = True
            elif self._receive_piece(*tag):
                news = True
                if tag[0] % len(self.slots) == own:
                    break  # the next leader receives the rest
        if news:
            self._using.notify_all()
            if self._is_led:
                self._wire.wake()

    def _receive_piece(self, request_id: int, at: int, frame_bytes: int) -> bool:
        """Receives one piece; returns whether the reply it belongs to is complete."""
        index = request_id % len(self.slots)
        if request_id != self._awaited[index]:
            self._wire.skip()
            # Not stale: the answer to a probe that crossed the reply, or to a repeated probe.
            self.n_stale += at == 0 and request_id != self._probed_ids[index]
            return False
        n_bytes = self._incoming[index].receive(self._wire, request_id, at, frame_bytes)
        if n_bytes is None or n_bytes == UNEXPECTED:
            return False
        self._awaited[index] = 0
        self._arrived[index] = n_bytes or 1  # 0 means no reply; a broken one counts as 1 byte, which `wait` refuses
        return True

    def _collect_late(self) -> None:
        self._enter()
        try:
            with self._using:
                self._ask_for_lost()
                self._receive_all()
        finally:
            self._leave()
        super()._collect_late()

    def _ask_for_lost(self) -> None:
        """Probes abandoned slots whose replies may have been lost with a connection.

        The server sends a cancellation back only if it does not have the request (any more), so the slot is free then.
        """
        now = perf_counter()
        for index, request_id in enumerate(self._awaited):
            if request_id and self._states[index] == SlotState.ABANDONED and now - self._probed_at[index] >= PROBE_S:
                self._ask(index, request_id)

    def _ask(self, index: int, request_id: int) -> None:
        """Sends a cancellation, if there is room. Called with ``_using`` held."""
        self._probed_at[index], self._probed_ids[index] = perf_counter(), request_id
        FrameHeader(Kind.CANCEL, request_id=request_id).pack_into(self._control)
        self._wire.send(request_id, self._control, HEADER_BYTES, None)

    def _cancel(self, slot: HostSlot, request_id: int) -> None:
        with self._using:
            if self._awaited[slot.index] == request_id:  # else its reply has arrived
                self._ask(slot.index, request_id)
                if self._is_led:
                    self._receive_all()  # as in `_send`

    def _take_late(self, slot: HostSlot) -> bool:
        return not self._awaited[slot.index]  # not what has arrived: a wait that Ctrl-C ended may have taken it

    def _wake(self) -> None:
        self._wire.wake()
        with self._using:
            self._using.notify_all()

    def _dispose(self) -> None:
        self._wire.close()


def open_stream(
    offer: ChannelOffer, host: str, *, timeout_s: float, keys: StreamKeys | None = None, encrypted: bool = False
) -> StreamHostEnd:
    """See `open_channel`; ``keys`` are used if the offer holds the server's key.
    Raises DeadlineError: no answer in time: nothing listens there, or the server does not know this channel;
    ServerError: the offer or the address is not valid."""
    server_key = offer.parameters.get("server_key", "")
    if not server_key and encrypted:
        raise ProtocolError("the server offers a stream channel without encryption, which this host refuses")
    if server_key and keys is None:
        raise ProtocolError("the server offers an encrypted stream channel, and this host has no key for it")
    pair = (keys, check_key(server_key, "server")) if server_key and keys is not None else None
    try:
        port = int(offer.parameters["port"])
        routing_id = bytes.fromhex(offer.parameters["routing_id"])
    except (KeyError, ValueError) as error:
        raise ProtocolError(f"the offer of a stream channel has no valid {error}") from error
    if not 0 < port < 65_536 or len(routing_id) != ROUTING_ID_BYTES:
        raise ProtocolError(f"the offer of a stream channel has port {port} and {len(routing_id)} bytes of routing id")
    channel = StreamHostEnd(offer.sizes, f"tcp://{bracketed(host)}:{port}", routing_id, pair)
    try:
        channel.greet(timeout_s)
    except BaseException:
        channel.close()
        raise
    return channel

"""The server's end of the stream transport: one ZeroMQ ROUTER over TCP for all hosts, one thread that reads it.

Every attach gets an unguessable routing id; what comes under another one is dropped. The server's slot is the one with
the number of the host's slot (request id modulo slots): a host uses a slot again only when it has the whole reply, so a
reply can be sent from where it was written, without a copy.
"""

from __future__ import annotations

import logging
import secrets
import threading
from typing import Final

import zmq

from moeoffload.errors import CapacityError, ProtocolError, ServerError
from moeoffload.transport.base import MAX_CHANNEL_SLOTS, ChannelOffer, ChannelSizes, Deliver, ServerSlot
from moeoffload.transport.pool import PooledServerChannel, write_error_frame
from moeoffload.transport.zmq_socket import CLOSED_TAG, ROUTING_ID_BYTES, FrameSocket, OutgoingFrame, slot_buffers
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind, peek_request_id

READ_POLL_S: Final = 0.5
FAREWELL_MS: Final = 200
"""How long a closing listener tries to tell its hosts so."""
_ERROR_BYTES: Final = 256

log = logging.getLogger(__name__)


class StreamServerEnd(PooledServerChannel):
    """The server's end of one attach; made by `StreamListener.open_channel`."""

    name = "stream"

    def __init__(self, listener: StreamListener, sizes: ChannelSizes, deliver: Deliver) -> None:
        buffers = slot_buffers(sizes)
        super().__init__(tuple(ServerSlot(i, *pair) for i, pair in enumerate(buffers)), deliver)
        # ZeroMQ keeps ids that start with a zero byte to itself.
        self.routing_id = b"m" + secrets.token_bytes(ROUTING_ID_BYTES - 1)
        self.offer = ChannelOffer(self.name, sizes, {"port": str(listener.port), "routing_id": self.routing_id.hex()})
        self._listener = listener
        self._outgoing = [OutgoingFrame(reply) for _, reply in buffers]
        self._request_ids = [0] * sizes.n_slots

    def receives(self, request_id: int) -> ServerSlot | None:
        """The slot that takes this request now; None if it still has another one."""
        slot = self.slots[request_id % len(self.slots)]
        return None if self._busy[slot.index] else slot

    def received(self, slot: ServerSlot, request_id: int, n_bytes: int) -> None:
        """Hands a request on, if it is one: ``n_bytes`` may be more than the slot took."""
        self._request_ids[slot.index] = request_id
        if n_bytes > len(slot.request):
            text = f"a frame of {n_bytes} bytes does not fit into a slot of {len(slot.request)} bytes"
            self._refuse(slot, request_id, ErrorCode.CAPACITY, text)
        elif n_bytes < HEADER_BYTES or peek_request_id(slot.request) != request_id:
            self._refuse(slot, request_id, ErrorCode.BAD_FRAME, f"{n_bytes} bytes that are not the announced frame")
        elif n_bytes == HEADER_BYTES and self._is_ping(slot):
            slot.reply[:HEADER_BYTES] = slot.request[:HEADER_BYTES]
            self._busy[slot.index] = True
            self.reply(slot, HEADER_BYTES)
        else:
            self._deliver(slot, n_bytes)

    def _is_ping(self, slot: ServerSlot) -> bool:
        try:
            self._header.unpack_from(slot.request)
        except ProtocolError:
            return False  # whoever takes frames apart says what is wrong with it
        return self._header.kind == Kind.PING

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        frame = self._outgoing[slot.index].first(n_bytes)
        if not self._listener.send(self.routing_id, self._request_ids[slot.index], frame):
            self.n_dropped += 1

    def _close(self) -> None:
        self._listener.forget(self)


class StreamListener:
    """Where the hosts of a server connect to.

    Attributes:
        port: the TCP port, also when a free one was asked for.
        n_unknown: messages that were dropped since no channel has their routing id.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0, *, max_request_bytes: int) -> None:
        """Binds and starts to read.

        Args:
            host: address of the interface to listen at, or ``*`` for all.
            port: TCP port; 0 takes a free one.
            max_request_bytes: the largest request frame of any channel; what is larger never gets into memory.

        Raises:
            ServerError: the address cannot be bound.
        """
        self.n_unknown = 0
        self._max_request_bytes = max_request_bytes
        self._channels: dict[bytes, StreamServerEnd] = {}
        self._using = threading.Lock()
        """Guards the socket and the table of channels; never held across a wait."""
        self._closing = False
        self._reader_waits = False
        self._wire = FrameSocket(zmq.ROUTER, largest_bytes=max_request_bytes, n_queued=4 * MAX_CHANNEL_SLOTS)
        self._routing_id = memoryview(bytearray(ROUTING_ID_BYTES))
        self._scratch = memoryview(bytearray(HEADER_BYTES))
        self._error = memoryview(bytearray(_ERROR_BYTES))
        self._header = FrameHeader()
        address = f"[{host}]" if ":" in host and not host.startswith("[") else host
        try:
            # A send to nobody is an error, not silence; a host that comes back takes over from its dead connection.
            self._wire.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._wire.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            # Encryption belongs here: the listener's CURVE secret key, and a handler that knows the hosts' keys.
            self._wire.socket.bind(f"tcp://{address}:{port or '*'}")
        except zmq.ZMQError as error:
            self._wire.close()
            raise ServerError(f"cannot listen at {host}:{port}: {error}") from error
        endpoint = self._wire.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._reader = threading.Thread(target=self._read, name="stream-reader", daemon=True)
        self._reader.start()

    def open_channel(self, sizes: ChannelSizes, deliver: Deliver) -> StreamServerEnd:
        """The server's end for one more host; its ``offer`` goes over the control plane.

        Raises:
            CapacityError: its requests may be larger than this listener lets in.
            ServerError: the listener is closed.
        """
        if sizes.request_bytes > self._max_request_bytes:
            raise CapacityError(f"requests of {sizes.request_bytes} bytes; at most {self._max_request_bytes} are taken")
        channel = StreamServerEnd(self, sizes, deliver)
        with self._using:
            if self._closing:
                raise ServerError("the stream listener is closed")
            self._channels[channel.routing_id] = channel
        return channel

    def close(self) -> None:
        """Closes every channel, then the socket. Idempotent. Not from a `Deliver` call."""
        for channel in list(self._channels.values()):
            channel.close()
        with self._using:
            first, self._closing = not self._closing, True
        if first:
            for channel in list(self._channels.values()):
                channel.close()  # opened meanwhile
            self._wire.wake()
            self._reader.join()
            self._wire.close(FAREWELL_MS)

    # -- for the channels

    def send(self, routing_id: bytes, tag: int, frame: memoryview | zmq.Frame) -> bool:
        """Sends one message to one host, from any thread; False if it is not connected."""
        with self._using:
            if self._closing:
                return False
            sent = self._wire.send(tag, frame, routing_id)
            self._wake_reader()
            return sent

    def forget(self, channel: StreamServerEnd) -> None:
        """Tells the host of a closed channel so, and drops from now on what it sends."""
        with self._using:
            self._channels.pop(channel.routing_id, None)
            if self._closing:
                return
            n_bytes = write_error_frame(self._header, self._error, CLOSED_TAG, ErrorCode.DRAINING, "closed")
            self._wire.send(CLOSED_TAG, self._error[:n_bytes], channel.routing_id)
            self._wake_reader()

    def _wake_reader(self) -> None:
        """Sending may have used up the signal that the reader waits for. ``_using`` is held."""
        if self._reader_waits and self._wire.readable():
            self._wire.wake()

    # -- the reader thread

    def _read(self) -> None:
        likely = False
        while True:
            with self._using:
                if self._closing:
                    return
                try:
                    readable = likely or self._wire.readable()
                    received = self._receive() if readable else None
                except zmq.Again:
                    readable, received = False, None
                self._reader_waits = not readable
            likely = False
            if received is not None:
                channel, slot, request_id, n_bytes = received
                channel.received(slot, request_id, n_bytes)
            elif not readable:
                likely = self._wire.wait(READ_POLL_S)

    def _receive(self) -> tuple[StreamServerEnd, ServerSlot, int, int] | None:
        """Takes one message in; None if it was dropped or answered here.

        Raises:
            zmq.Again: there is none.
        """
        wire = self._wire
        n_bytes = wire.begin(self._routing_id)
        routing_id = bytes(self._routing_id[:n_bytes])
        channel = self._channels.get(routing_id) if n_bytes == ROUTING_ID_BYTES else None
        if channel is None:
            wire.skip()
            self.n_unknown += 1
            return None
        request_id = wire.receive_tag()
        if request_id is None or request_id == CLOSED_TAG:
            wire.skip()
            channel.n_dropped += 1
            return None
        slot = channel.receives(request_id)
        if slot is not None:
            return channel, slot, request_id, wire.receive_frame(slot.request)
        n_bytes = wire.receive_frame(self._scratch)
        if not self._is_ping(n_bytes):  # a ping about a request that is being worked on: its reply will do
            channel.n_dropped += 1
            n_bytes = write_error_frame(
                self._header, self._error, request_id, ErrorCode.BUSY, "the slot still has a request"
            )
            wire.send(request_id, self._error[:n_bytes], routing_id)
        return None

    def _is_ping(self, n_bytes: int) -> bool:
        if n_bytes != HEADER_BYTES:
            return False
        try:
            self._header.unpack_from(self._scratch)
        except ProtocolError:
            return False
        return self._header.kind == Kind.PING

"""The server's end of the stream transport: one ZeroMQ ROUTER over TCP for all hosts, one thread that reads it.

Every attach gets an unguessable routing id; messages with an unknown one are dropped. With encryption every attach also
has a key, and messages with its routing id but another key are dropped.

A request is received into the slot with the number of the host's slot (request id modulo slots): a host reuses a slot
only after it has received the whole reply.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from typing import Final

import zmq

from moeoffload.config import bracketed
from moeoffload.errors import ServerError, SettingError
from moeoffload.last_resort import start_thread
from moeoffload.transport.base import ChannelOffer, ChannelSizes, Deliver, OnFailure, ServerChannel, ServerSlot, Work
from moeoffload.transport.stream_keys import Door, OnRefused, check_key
from moeoffload.transport.zmq_socket import CLOSED_ID, ROUTING_ID_BYTES, UNEXPECTED, FrameSocket, IncomingFrame
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, is_cancel, peek_request_id, write_error_frame

READ_POLL_S: Final = 0.5
READ_AHEAD: Final = 16
"""Messages read before pending work is done even if there is more to read: a host may send junk without end."""
FAREWELL_MS: Final = 200
"""How long a closing listener tries to notify its hosts."""
QUEUED_OUT: Final = 1 << 15
"""Pieces queued for one host: replies never reach this limit, but errors that a host provokes and does not read may."""
_ERROR_BYTES: Final = 256


class StreamServerEnd(ServerChannel):
    """The server's end of one attach; made by `StreamListener.open_channel`."""

    name = "stream"

    def __init__(self, listener: StreamListener, sizes: ChannelSizes, deliver: Deliver, key: str) -> None:
        super().__init__(sizes, memoryview(mmap.mmap(-1, sizes.buffer_bytes)), deliver)
        self.key = key
        """The host's public CURVE key; empty without encryption."""
        self.routing_id = b"m" + secrets.token_bytes(ROUTING_ID_BYTES - 1)
        """Cannot be guessed. ZeroMQ reserves ids that start with a zero byte."""
        self.is_stolen = False
        """Whether a peer with another key has used the routing id; nothing is sent until the host sends again."""
        parameters = {"port": str(listener.port), "routing_id": self.routing_id.hex()}
        self.offer = ChannelOffer(self.name, sizes, parameters | ({"server_key": listener.public_key} if key else {}))
        self._listener = listener
        self._scratch = memoryview(bytearray(HEADER_BYTES))
        """For frames that are not received into a slot, and for a cancellation that is sent back."""
        self._incoming = [IncomingFrame(slot.request) for slot in self.slots]
        self._cancelled = [0] * sizes.n_slots
        """Per slot, the id of the last request that the host has cancelled."""

    def receive(self, wire: FrameSocket, request_id: int, at: int, frame_bytes: int) -> tuple[ServerSlot, int] | None:
        """Receives one piece; returns the slot and the frame's bytes if the frame is now complete or invalid, else
        None."""
        slot = self.slots[request_id % len(self.slots)]
        if self._busy[slot.index]:
            self._receive_early(wire, slot, request_id, at)
            return None
        n_bytes = self._incoming[slot.index].receive(wire, request_id, at, frame_bytes)
        if n_bytes == UNEXPECTED:
            self.n_dropped += 1
            return None
        return None if n_bytes is None else (slot, n_bytes)

    def _receive_early(self, wire: FrameSocket, slot: ServerSlot, request_id: int, at: int) -> None:
        """Receives a piece for a slot with a request that was not answered: a cancellation of that, or too early."""
        cancels = wire.receive_piece(self._scratch) == HEADER_BYTES and is_cancel(self._scratch)
        if request_id == self._incoming[slot.index].request_id:
            if cancels:  # else the same request again; one reply answers both
                self._cancelled[slot.index] = request_id
        elif at == 0 and not cancels:
            self.n_dropped += 1
            self._listener.send_error(self, request_id, ErrorCode.BUSY, "the slot still has a request")

    def is_cancelled(self, slot: ServerSlot) -> bool:
        """See `ServerChannel.is_cancelled`."""
        return self._cancelled[slot.index] == self._incoming[slot.index].request_id

    def received(self, slot: ServerSlot, n_bytes: int) -> Work | None:
        """Delivers a request, refuses an invalid frame or sends a cancellation back; ``n_bytes`` may not fit the slot.
        Returns what `Deliver` returns."""
        request_id = self._incoming[slot.index].request_id
        if n_bytes > len(slot.request):
            text = f"a frame of {n_bytes} bytes does not fit into a slot of {len(slot.request)} bytes"
            self._refuse(slot, request_id, ErrorCode.CAPACITY, text)
        elif n_bytes < HEADER_BYTES or peek_request_id(slot.request) != request_id:
            self._refuse(slot, request_id, ErrorCode.BAD_FRAME, "what arrived is not the announced frame")
        elif n_bytes > HEADER_BYTES or not is_cancel(slot.request):
            return self._deliver(slot, n_bytes)
        else:
            with self._lock:  # copied, since the slot's last reply may still be being sent
                if not self._closed:
                    self._scratch[:] = slot.request[:HEADER_BYTES]
                    self._listener.send(self, request_id, self._scratch, HEADER_BYTES)
        return None

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        self._listener.send(self, self._incoming[slot.index].request_id, slot.reply, n_bytes)

    def _close(self) -> None:
        self._listener.forget(self)


class StreamListener:
    """The socket that all hosts of a server connect to.

    Attributes:
        port: the actual TCP port, even if port 0 was given.
        public_key: the CURVE key by which hosts recognise this listener; empty without encryption.
        n_unknown: messages that were dropped because no channel has their routing id or key.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        encrypted: bool = False,
        on_refused: OnRefused = lambda peer, reason: None,
        on_failure: OnFailure = lambda text: None,
    ) -> None:
        """Binds to the interface with the address ``host`` (``*``: all) and starts to read. Port 0 picks a free one.

        ``encrypted`` accepts only CURVE with the keys of open channels. ``on_refused`` is called for refused peers,
        from any thread; ``on_failure`` when the listener has failed and serves no host any more.
        Raises SettingError: the address cannot be bound.
        """
        self.n_unknown = 0
        self._channels: dict[bytes, StreamServerEnd] = {}
        """By routing id."""
        self._on_refused = on_refused
        self._using = threading.Lock()
        """Guards the socket and the table of channels; never held across a wait."""
        self._closing = False
        self._reader_waits = False
        self._wire = FrameSocket(zmq.ROUTER, n_queued_out=QUEUED_OUT, encrypted=encrypted)
        self._routing_id = memoryview(bytearray(ROUTING_ID_BYTES))
        self._error = memoryview(bytearray(_ERROR_BYTES))
        self._header = FrameHeader()
        self._door = Door(self._wire.socket, on_refused, on_failure) if encrypted else None
        self.public_key = self._door.public_key if self._door is not None else ""
        try:
            # A send to a host that is not connected fails instead of being dropped silently; a host that reconnects
            # replaces its dead connection.
            self._wire.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._wire.socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            self._wire.socket.bind(f"tcp://{bracketed(host)}:{port or '*'}")
        except zmq.ZMQError as error:
            if self._door is not None:
                self._door.stop()
            self._wire.close()
            where, why = f"{host}, port {port}" if port else host, os.strerror(error.errno or 0)
            raise SettingError(f"--stream-port: cannot listen at {where}: {why}") from error
        endpoint = self._wire.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rpartition(":")[2])
        self._on_failure = on_failure
        self._reader = start_thread("stream-reader", self._read, self._failed)

    def open_channel(self, sizes: ChannelSizes, deliver: Deliver, key: str = "") -> StreamServerEnd:
        """Opens the server's end for one more host; its ``offer`` goes over the control plane. ``key`` is the host's
        public CURVE key, ignored without encryption.
        Raises ProtocolError: this listener encrypts and the key is not valid; ServerError: the listener is closed, or
        another open channel has this key."""
        if self._door is not None:
            check_key(key, "host")
        channel = StreamServerEnd(self, sizes, deliver, key if self._door is not None else "")
        with self._using:
            if self._closing:
                raise ServerError("the stream listener is closed")
            if self._door is not None:
                if any(other.key == key for other in self._channels.values()):
                    self._on_refused("a host", "its stream key is that of another open lease")
                    raise ServerError("the stream key of the host is in use by another lease")
                self._door.admitted.add(key)
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
            if self._door is not None:
                self._door.stop()
            self._wire.close(FAREWELL_MS)

    # -- for the channels

    def send(self, channel: StreamServerEnd, request_id: int, frame: memoryview, n_bytes: int) -> bool:
        """Sends one frame to one host, from any thread; returns False, and counts it, if the host is not connected."""
        with self._using:
            sent = 0
            if not self._closing and not channel.is_stolen:
                sent = self._wire.send(request_id, frame, n_bytes, channel.routing_id)
                self._wake_reader()
            channel.n_dropped += sent != n_bytes
            return sent == n_bytes

    def forget(self, channel: StreamServerEnd) -> None:
        """Notifies the host of a closed channel and drops what it sends from now on."""
        with self._using:
            self._channels.pop(channel.routing_id, None)
            if self._door is not None:
                self._door.admitted.discard(channel.key)
            if self._closing or channel.is_stolen:
                return
            self.send_error(channel, CLOSED_ID, ErrorCode.DRAINING, "closed")
            self._wake_reader()

    def send_error(self, channel: StreamServerEnd, request_id: int, code: ErrorCode, text: str) -> None:
        """Sends an error frame that answers no request in a slot. Called with ``_using`` held."""
        n_bytes = write_error_frame(self._header, self._error, request_id, code, text)
        self._wire.send(request_id, self._error, n_bytes, channel.routing_id)

    def _wake_reader(self) -> None:
        """Wakes the reader: sending may have consumed the signal that it waits for. Called with ``_using`` held."""
        if self._reader_waits and self._wire.readable():
            self._wire.wake()

    def _failed(self, text: str) -> None:
        """Closes all channels, which notifies their hosts: the reader has ended with an error."""
        for channel in list(self._channels.values()):
            channel.close()
        self._on_failure(text)

    # -- the reader thread

    def _read(self) -> None:
        work: Work | None = None
        n_read = 0
        while True:
            with self._using:
                if self._closing:
                    return
                readable = self._wire.readable()
                received = self._receive() if readable else None
                self._reader_waits = not readable and work is None
            if received is not None:
                channel, slot, n_bytes = received
                work = channel.received(slot, n_bytes) or work
            if work is None:
                if not readable:
                    self._wire.wait(READ_POLL_S)
            elif readable and n_read < READ_AHEAD:
                n_read += 1
            else:
                work()
                work, n_read = None, 0

    def _receive(self) -> tuple[StreamServerEnd, ServerSlot, int] | None:
        """Receives one message; returns None if it completes no frame, or was dropped or answered here."""
        wire = self._wire
        n_bytes = wire.begin(self._routing_id)
        channel = self._channels.get(bytes(self._routing_id)) if n_bytes == ROUTING_ID_BYTES else None
        if self._door is None:
            tag = wire.receive_tag() if channel is not None else None
        else:
            tag, key = wire.receive_owned_tag()
            if channel is not None:
                if channel.key != key and not channel.is_stolen:
                    self._on_refused("a host", "it used the routing id of another lease")
                channel.is_stolen = channel.key != key
                channel = None if channel.is_stolen else channel
        if channel is None:
            wire.skip()
            self.n_unknown += 1
            return None
        if tag is None or tag[0] == CLOSED_ID:
            wire.skip()
            channel.n_dropped += 1
            return None
        whole = channel.receive(wire, *tag)
        return whole and (channel, *whole)

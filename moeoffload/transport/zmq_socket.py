"""The ZeroMQ socket at either end of the stream transport: its options, pieces of frames, waiting, waking.

A frame travels in pieces of 1 MiB, each a message of its own: the routing id of the host, a tag (request id, offset and
bytes of the whole frame) and the piece. Since the tag comes first, the piece is received straight into its slot's
buffer. A 16 MiB frame sent as one message takes five times as long, since nothing overlaps and every buffer on the way
is new memory; with pieces no peer can make ZeroMQ allocate more than one. Request id 0: the channel is closed.

A ZeroMQ socket is not thread-safe, so its owner guards it with a lock held only for steps that do not block. A thread
waits, without the lock, on the socket's file descriptor, which signals only *changes*: a thread that used the socket
checks ``readable`` before it waits, and wakes the waiting thread if there is something for that one to read.
"""

from __future__ import annotations

import os
import struct
import weakref
from typing import Final

import zmq

from moeoffload.transport.spin import AdaptiveSpin, Readable
from moeoffload.wire import HEADER_BYTES

TAG: Final = struct.Struct("<QII")
CLOSED_ID: Final = 0
ROUTING_ID_BYTES: Final = 32
PIECE_BYTES: Final = 1024 * 1024
UNEXPECTED: Final = -1
"""See `IncomingFrame.receive`."""
_SEAL_BYTES: Final = 33
"""Bytes that CURVE adds to a message: command name, nonce, flags and authenticator."""
_QUEUED_IN: Final = 16
"""Most pieces of one peer that wait to be read; beyond that TCP applies backpressure."""
_HEARTBEAT_MS: Final = 5_000
_DEAD_AFTER_MS: Final = 20_000
_HANDSHAKE_MS: Final = 5_000
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1_000
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_DESCRIPTORS: Final = 24
"""File descriptors that an encrypted socket may need to bind or connect and to talk to a peer, with some to spare."""


class FrameSocket:
    """A DEALER or ROUTER with its own context; another thread can interrupt a wait for it.

    Nothing here blocks except ``wait``. The owner holds its lock for everything but ``wait`` and ``wake``.
    """

    def __init__(self, kind: int, *, n_queued_out: int, encrypted: bool) -> None:
        """Creates the socket; it queues up to ``n_queued_out`` pieces for one peer. ``encrypted``: it will use CURVE.
        Raises OSError: there are too few file descriptors."""
        _check_descriptors()
        context = zmq.Context(io_threads=1)
        self.socket = context.socket(kind)
        # Not IMMEDIATE: it would drop messages that have arrived but were not read when the connection breaks.
        for option, value in (
            (zmq.LINGER, 0),
            # A peer that sends more is disconnected before anything is allocated.
            (zmq.MAXMSGSIZE, PIECE_BYTES + _SEAL_BYTES * encrypted),
            (zmq.SNDHWM, n_queued_out),
            (zmq.RCVHWM, _QUEUED_IN),
            (zmq.IPV6, 1),
            (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, _DEAD_AFTER_MS),
            (zmq.HEARTBEAT_TTL, _DEAD_AFTER_MS),
            (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS),
        ):
            self.socket.setsockopt(option, value)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._news = Readable(self.socket.fileno(), self._wake_fd)
        self._spin = AdaptiveSpin()
        # In case the owner forgets to close: a context that is collected before its socket waits for it forever.
        self._close = weakref.finalize(self, _close, self.socket, context, self._wake_fd)
        self._close.atexit = False
        self._tag_in = memoryview(bytearray(TAG.size))
        self._tag_out = bytearray(TAG.size)
        self._nothing = bytearray()

    def readable(self) -> bool:
        """Returns whether a whole message can be received now."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    def begin(self, buffer: memoryview) -> int:
        """Receives the first part of the next message, truncated to fit; returns its full length."""
        return self.socket.recv_into(buffer, flags=_NOBLOCK)

    def receive_tag(self) -> tuple[int, int, int] | None:
        """Returns request id, offset and frame bytes of the current message; skips it and returns None if it has no
        tag."""
        n_bytes = self.socket.recv_into(self._tag_in, flags=_NOBLOCK)
        if n_bytes == TAG.size and self.socket.getsockopt(zmq.RCVMORE):
            return TAG.unpack(self._tag_in)  # type: ignore[return-value]
        self.skip()
        return None

    def receive_owned_tag(self) -> tuple[tuple[int, int, int] | None, str]:
        """As `receive_tag`, and also returns the CURVE key of the connection that the message came on."""
        frame = self.socket.recv(_NOBLOCK, copy=False)
        key = str(frame.get("User-Id"))
        if len(frame) == TAG.size and self.socket.getsockopt(zmq.RCVMORE):
            return TAG.unpack(frame.buffer), key  # type: ignore[return-value]
        self.skip()
        return None, key

    def receive_piece(self, buffer: memoryview) -> int:
        """Receives the piece of the current message, truncated to fit; returns its full length. Skips further parts."""
        n_bytes = self.socket.recv_into(buffer, flags=_NOBLOCK)
        self.skip()
        return n_bytes

    def skip(self) -> None:
        """Drops the rest of the current message."""
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv_into(self._nothing, flags=_NOBLOCK)

    def send(self, request_id: int, frame: memoryview, n_bytes: int, routing_id: bytes | None, at: int = 0) -> int:
        """Sends the first ``n_bytes`` of a frame, from byte ``at`` on; returns up to which byte ZeroMQ took copies."""
        while at < n_bytes:
            TAG.pack_into(self._tag_out, 0, request_id, at, n_bytes)
            try:  # only the first part of a message can be refused
                if routing_id is not None:
                    self.socket.send(routing_id, _MORE)
                self.socket.send(self._tag_out, _MORE)
            except zmq.ZMQError:  # EAGAIN, or EHOSTUNREACH for a routing id that is not connected
                return at
            self.socket.send(frame[at : min(at + PIECE_BYTES, n_bytes)], _NOBLOCK)
            at += PIECE_BYTES
        return n_bytes

    def wait(self, timeout_s: float) -> None:
        """Waits until something happens on the socket, ``wake`` is called or the time is up. One thread at a time."""
        if any(fd == self._wake_fd for fd, _ in self._spin.poll(self._news, timeout_s)):
            os.eventfd_read(self._wake_fd)

    def wake(self) -> None:
        """Ends the current ``wait`` at once, or else the next one."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self, linger_ms: int = 0) -> None:
        """Closes socket, threads and descriptors; messages not yet sent have ``linger_ms`` to leave."""
        if self._close.alive:
            self.socket.setsockopt(zmq.LINGER, linger_ms)
            self._close()


def _check_descriptors() -> None:
    """Raises OSError: there are too few file descriptors for a socket; ZeroMQ would abort the process, or hang."""
    spare: list[int] = []
    try:
        for _ in range(_DESCRIPTORS):
            spare.append(os.eventfd(0, os.EFD_CLOEXEC))
    finally:
        for fd in spare:
            os.close(fd)


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], wake_fd: int) -> None:
    socket.close()
    context.term()
    os.close(wake_fd)


class IncomingFrame:
    """A slot's buffer that receives a frame piece by piece, in order.

    Attributes:
        request_id: request id of the frame that is being received, or was received last.
    """

    __slots__ = ("_at", "_frame_bytes", "_most_bytes", "_pieces", "request_id")

    def __init__(self, buffer: memoryview) -> None:
        self._most_bytes = len(buffer)
        self._pieces = [buffer[at : at + PIECE_BYTES] for at in range(0, len(buffer), PIECE_BYTES)]
        self.request_id = self._frame_bytes = 0
        self._at = 0
        """The place of the next piece; 0 if a frame has to begin."""

    def receive(self, wire: FrameSocket, request_id: int, at: int, frame_bytes: int) -> int | None:
        """Receives the piece of the current message, whose tag has been read.

        Returns the frame's bytes if it is complete now, None if more pieces follow, `UNEXPECTED` if this one is not the
        next: it is dropped. If the frame is invalid, returns a number of bytes that no frame of this slot has: the
        announced one, or 0 for a piece of the wrong length.
        """
        if at == 0:
            self.request_id, self._frame_bytes, self._at = request_id, frame_bytes, 0
        elif (request_id, at, frame_bytes) != (self.request_id, self._at, self._frame_bytes):
            wire.skip()
            return UNEXPECTED
        if not HEADER_BYTES <= frame_bytes <= self._most_bytes:
            wire.skip()
            return frame_bytes
        end = min(at + PIECE_BYTES, frame_bytes)
        is_whole = wire.receive_piece(self._pieces[at // PIECE_BYTES]) == end - at
        if is_whole and end < frame_bytes:
            self._at = end
            return None
        self._at = 0
        return frame_bytes if is_whole else 0

"""What both ends of the stream transport do with a ZeroMQ socket: options, message parts, waiting, waking.

A message is, after the routing id of the host, a tag (the request id, 8 bytes little-endian) and one frame. The tag
goes first so that the frame can be received straight into the buffer of its slot; 0 says that the channel is closed.

A ZeroMQ socket is not thread-safe, so its owner guards it with a lock held only for steps that do not block. A thread
that waits does so without the lock on the socket's file descriptor, which signals only *changes*: whoever used the
socket looks at ``readable`` before waiting, and wakes the thread that waits if there is something to read for it.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import weakref
from typing import Final

import zmq

from moeoffload.transport.base import ChannelSizes

TAG: Final = struct.Struct("<Q")
CLOSED_TAG: Final = 0
ROUTING_ID_BYTES: Final = 32
ZERO_COPY_BYTES: Final = 256 * 1024
"""From here on a copy costs more than handing the buffer itself to ZeroMQ."""

_SMALLEST_LIMIT_BYTES: Final = 4096
"""The limit also holds for ZeroMQ's own handshake."""
_HEARTBEAT_MS: Final = 5_000
_DEAD_AFTER_MS: Final = 20_000
_HANDSHAKE_MS: Final = 5_000
_RECONNECT_MS: Final = 50
_RECONNECT_MAX_MS: Final = 1_000
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.SNDMORE | zmq.NOBLOCK)
_PAGE: Final = 4096


class FrameSocket:
    """A DEALER or ROUTER with a context of its own, and a way to wait for it that another thread can interrupt.

    Nothing here blocks except ``wait``. The owner's lock is held for everything but ``wait`` and ``wake``.
    """

    def __init__(self, kind: int, *, largest_bytes: int, n_queued: int) -> None:
        """Makes the socket; larger messages than ``largest_bytes`` are refused by ZeroMQ before it allocates them."""
        context = zmq.Context(io_threads=1)
        self.socket = context.socket(kind)
        # Not IMMEDIATE: it would drop messages that have arrived but were not read when the connection broke.
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, max(largest_bytes, _SMALLEST_LIMIT_BYTES)),
            (zmq.SNDHWM, n_queued),
            (zmq.RCVHWM, n_queued),
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
        self._poll = select.poll()
        self._poll.register(self.socket.getsockopt(zmq.FD), select.POLLIN)  # type: ignore[arg-type]
        self._poll.register(self._wake_fd, select.POLLIN)
        # Should the owner forget to close: a context that is collected before its socket waits for it, forever.
        self._close = weakref.finalize(self, _close, self.socket, context, self._wake_fd)
        self._close.atexit = False
        self._tag_in = memoryview(bytearray(TAG.size))
        self._tag_out = bytearray(TAG.size)
        self._nothing = bytearray()

    def readable(self) -> bool:
        """Whether a whole message can be received now."""
        return bool(self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN)  # type: ignore[operator, arg-type]

    def begin(self, buffer: memoryview) -> int:
        """Receives the first part of the next message, cut to what fits; returns its true length.

        Raises:
            zmq.Again: there is no message.
        """
        return self.socket.recv_into(buffer, flags=_NOBLOCK)

    def receive_tag(self) -> int | None:
        """The tag of the message at hand; None if it has none, the message is then skipped.

        Raises:
            zmq.Again: there is no message.
        """
        n_bytes = self.socket.recv_into(self._tag_in, flags=_NOBLOCK)
        if n_bytes == TAG.size and self.socket.getsockopt(zmq.RCVMORE):
            return int(TAG.unpack(self._tag_in)[0])
        self.skip()
        return None

    def receive_frame(self, buffer: memoryview) -> int:
        """The frame of the message at hand, cut to what fits; returns its true length. Further parts are skipped."""
        n_bytes = self.socket.recv_into(buffer, flags=_NOBLOCK)
        self.skip()
        return n_bytes

    def skip(self) -> None:
        """Drops what is left of the message at hand."""
        while self.socket.getsockopt(zmq.RCVMORE):
            self.socket.recv_into(self._nothing, flags=_NOBLOCK)

    def send(self, tag: int, frame: memoryview | zmq.Frame, routing_id: bytes | None = None) -> bool:
        """Sends a message; False if there is nobody to take it now. Only its first part can be refused."""
        TAG.pack_into(self._tag_out, 0, tag)
        try:
            if routing_id is not None:
                self.socket.send(routing_id, _MORE)
            self.socket.send(self._tag_out, _MORE)
        except zmq.ZMQError:  # EAGAIN, or EHOSTUNREACH for a routing id that is not connected
            return False
        self.socket.send(frame, _NOBLOCK, copy=not isinstance(frame, zmq.Frame))
        return True

    def wait(self, timeout_s: float) -> bool:
        """Waits until something happens on the socket, ``wake`` is called or the time is over. One thread at a time.

        Returns whether something happened on the socket: then it is cheaper to try to receive than to ask ``readable``.
        """
        happened = False
        for fd, _ in self._poll.poll(timeout_s * 1000):
            if fd == self._wake_fd:
                os.eventfd_read(fd)
            else:
                happened = True
        return happened

    def wake(self) -> None:
        """Ends a ``wait`` at once, or the next one."""
        os.eventfd_write(self._wake_fd, 1)

    def close(self, linger_ms: int = 0) -> None:
        """Closes socket, threads and descriptors; messages not yet sent get ``linger_ms`` to go."""
        if self._close.alive:
            self.socket.setsockopt(zmq.LINGER, linger_ms)
            self._close()


def _close(socket: zmq.Socket[bytes], context: zmq.Context[zmq.Socket[bytes]], wake_fd: int) -> None:
    socket.close()
    context.term()
    os.close(wake_fd)


class OutgoingFrame:
    """One send buffer. Long frames are handed to ZeroMQ as they lie; the object for that is kept for the next time.

    The buffer must stay as it is until the other side has answered: then ZeroMQ has long finished with it.
    """

    __slots__ = ("_buffer", "_frame", "_frame_bytes")

    def __init__(self, buffer: memoryview) -> None:
        self._buffer = buffer
        self._frame: zmq.Frame | None = None
        self._frame_bytes = 0

    def first(self, n_bytes: int) -> memoryview | zmq.Frame:
        """The first ``n_bytes`` of the buffer, to be sent."""
        if n_bytes < ZERO_COPY_BYTES:
            return self._buffer[:n_bytes]
        if self._frame is None or self._frame_bytes != n_bytes:
            self._frame, self._frame_bytes = zmq.Frame(self._buffer[:n_bytes], copy=False), n_bytes
        return self._frame


def slot_buffers(sizes: ChannelSizes) -> list[tuple[memoryview, memoryview]]:
    """Request and reply buffer of every slot, page-aligned as in shared memory; freed with the last view."""
    request_step, reply_step = (-(-n // _PAGE) * _PAGE for n in (sizes.request_bytes, sizes.reply_bytes))
    memory = memoryview(mmap.mmap(-1, sizes.n_slots * (request_step + reply_step)))
    buffers = []
    for at in range(0, len(memory), request_step + reply_step):
        reply_at = at + request_step
        buffers.append((memory[at : at + sizes.request_bytes], memory[reply_at : reply_at + sizes.reply_bytes]))
    return buffers

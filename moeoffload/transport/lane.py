"""Lanes: a TCP connection beside a stream channel, for its small frames, which its own threads read and write.

A frame through ZeroMQ changes threads twice on either side, which costs a decode step more than the way over the wire.
A lane has no threads: who has a frame writes it, who waits for one looks for it, both of them in compiled code. It is
for one request at a time: the host sends the next one when it has the reply, so at most one frame is on its way in each
direction, and bytes need no other mark than the header of the frame. Where ZeroMQ encrypts, frames are sealed with the
key pairs that it uses for that. Everything else, and all that goes wrong on the lane, goes through ZeroMQ.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import select
import socket
import threading
from time import perf_counter
from typing import Final

from moeoffload.kernels import lane_words as lw
from moeoffload.kernels.lane_program import BOX_BYTES, lane_programs
from moeoffload.kernels.program import c_function
from moeoffload.transport.lane_key import LaneKey
from moeoffload.transport.waiting import AdaptiveSpin

LANE_BYTES: Final = 1 << 16
"""Larger requests do not go over a lane."""
TOKEN_BYTES: Final = 32
"""What a host says first: the secret of its attach."""
_BUFFER_BYTES: Final = 8 * LANE_BYTES
"""Of what was sent and not read yet, as far as the system allows: a frame is taken at once, or the lane is given up."""
_KEEPALIVE: Final = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 20_000))
"""As with ZeroMQ's heartbeats: a peer that is silent for 20 s is gone."""


class LaneEndedError(Exception):
    """Nothing more can come over a lane."""


class Lane:
    """One end. ``receive`` and ``wait`` are for one thread at a time, ``send`` for another one, ``end`` for any.

    Attributes:
        address: of the block of `lane_words`.
        looked_since: set by who has looked for a frame in compiled code: since when (perf_counter seconds).
    """

    def __init__(self, connection: socket.socket, *, room: int, most_bytes: int, key: LaneKey | None) -> None:
        """Owns the connection from now on.

        Args:
            connection: to the other side.
            room: bytes of the longest frame that this side takes.
            most_bytes: of the longest one that the other side takes.
            key: frames are sealed with it; None for a lane in the clear.
        """
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.spin = AdaptiveSpin()
        self.looked_since: float | None = None
        self._connection = connection
        self._ending = threading.Lock()
        """Who ends it must not meet the descriptor of somebody else's new socket."""
        self._block = block = (ctypes.c_int64 * lw.LANE_WORDS)()
        self.address = ctypes.addressof(block)
        self._kept, self._receive, self._send = lane_programs()
        block[lw.DESCRIPTOR], block[lw.MOST] = connection.fileno(), most_bytes
        block[lw.SEND], block[lw.RECV] = c_function("send"), c_function("recv")
        if key is not None:
            self._key = key
            self._boxes = [memoryview(mmap.mmap(-1, n_bytes + BOX_BYTES)) for n_bytes in (room, most_bytes)]
            block[lw.KEY], block[lw.SIDE] = key.address, key.side
            block[lw.BOX_IN], block[lw.BOX_OUT] = map(address_of, self._boxes)
            block[lw.SEAL], block[lw.OPEN] = key.functions
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        # As C's poll() takes it: descriptor, then the 16 bits to ask for and those of the answer.
        self._pollfd = (ctypes.c_int32 * 2)(connection.fileno(), select.POLLIN)

    def aim(self, address: int, room: int) -> None:
        """The next frame goes to this address, where there is room for so many bytes, a header's at least."""
        block = self._block
        block[lw.BUFFER], block[lw.ROOM], block[lw.HAVE], block[lw.FRAME] = address, room, 0, 0

    def send(self, frame: memoryview) -> bool:
        """Sends a frame; False if it was not taken whole at once, and then the lane is of no use any more."""
        return self._send(self.address, address_of(frame), len(frame)) == len(frame)

    def receive(self) -> int:
        """Reads what has come: the bytes of the frame if that is whole, else 0. It stays until it was ``taken``.

        Raises:
            LaneEndedError: the other side has closed the lane, or does not keep to the rules.
        """
        n_bytes = self._receive(self.address)
        if n_bytes < 0:
            raise LaneEndedError
        return n_bytes

    def taken(self) -> None:
        """The frame was read; its place is free for the next one."""
        self._block[lw.HAVE] = self._block[lw.FRAME] = 0

    def wait(self, timeout_s: float) -> None:
        """Waits until there is something to read, or the lane has ended, or the time is over."""
        begun = perf_counter()
        looked_since, self.looked_since = self.looked_since, None
        seen = looked_since is None and self.spin.descriptors(ctypes.addressof(self._pollfd), 1, timeout_s)
        self._poll.poll(0 if seen else timeout_s * 1000)
        self.spin.learn(perf_counter() - (begun if looked_since is None else looked_since))

    def end(self) -> None:
        """Ends it for both sides, and wakes who waits. Idempotent, from any thread."""
        with self._ending, contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends it and frees the descriptor; nobody reads or writes it any more."""
        self.end()
        self._block[lw.ENDED] = 1
        self._block[lw.DESCRIPTOR] = -1
        with self._ending:
            self._connection.close()


def address_of(buffer: memoryview) -> int:
    """Where writable memory lies, as long as somebody keeps it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))

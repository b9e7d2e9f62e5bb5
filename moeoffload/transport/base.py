"""The parts that all transports share: the life cycle of a request, the channel's sizes and slots, the server's end.

A host has one `HostChannel` (in `slots`) per expert server; the server has one `ServerChannel` per attached host.
A channel has a fixed number of slots, so several requests can be in flight; replies carry the request id and may arrive
in any order. All slots and their buffers are created once, when the channel is opened.

The life cycle of a request::

    host                                    server
    acquire a slot, fill slot.request
    send                              ->    Deliver(channel, slot), once
                                            compute, fill slot.reply
    wait, read slot.reply             <-    reply
    release the slot

Every ``acquire`` is followed by exactly one ``release``, whatever was raised in between. A release before the reply has
arrived is signalled to the server (`ServerChannel.is_cancelled`); the slot becomes free once the late reply has arrived
and was dropped.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Final

from moeoffload.errors import CapacityError, ProtocolError
from moeoffload.wire import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    ErrorCode,
    FrameHeader,
    peek_request_id,
    write_error_frame,
)

MAX_CHANNEL_SLOTS: Final = 64
_PAGE_BYTES: Final = 4096

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class HostSlot:
    """The host's side of one request in flight. ``owner`` is free for the user of the channel (cached views)."""

    index: int
    request: memoryview
    """Writable; as long as the largest request frame."""
    reply: memoryview
    """As long as the largest reply frame; its first ``wait()`` bytes are valid between ``wait`` and ``release``."""
    owner: Any = None


@dataclass(slots=True, eq=False)
class ServerSlot:
    """The server's side of one request. ``owner`` is free for the user of the channel (cached views)."""

    index: int
    request: memoryview
    reply: memoryview
    n_bytes: int = 0
    """Bytes of the request frame that was received."""
    received_at: float = 0.0
    """time.perf_counter() in seconds when the frame was received."""
    owner: Any = None


def page_aligned(n_bytes: int) -> int:
    """Rounds up to whole pages."""
    return -(-n_bytes // _PAGE_BYTES) * _PAGE_BYTES


@dataclass(frozen=True, slots=True)
class ChannelSizes:
    """The sizes of a channel: agreed at attach and checked there against the limits of both sides.
    Raises ProtocolError: a value is out of range; names it. Each side builds this from the other side's numbers."""

    n_slots: int
    request_bytes: int
    """Largest request frame, header included."""
    reply_bytes: int
    """Largest reply frame, header included."""
    shared_bytes: int = 0
    """Least size of a shared-memory segment; used by the server only, which may reserve more than the frames need."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("n_slots", self.n_slots, 1, MAX_CHANNEL_SLOTS),
            ("request_bytes", self.request_bytes, HEADER_BYTES, MAX_FRAME_BYTES),
            ("reply_bytes", self.reply_bytes, HEADER_BYTES, MAX_FRAME_BYTES),
        ):
            if not least <= value <= most:
                raise ProtocolError(f"channel {name} is {value}, allowed are {least} to {most}")

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the memory that `buffers` cuts."""
        return self.n_slots * (page_aligned(self.request_bytes) + page_aligned(self.reply_bytes))

    def buffers(self, memory: memoryview) -> list[tuple[memoryview, memoryview]]:
        """Cuts ``memory`` into the request and the reply buffer of each slot: first all requests, then all replies, all
        aligned to pages."""
        request_step, reply_step = page_aligned(self.request_bytes), page_aligned(self.reply_bytes)
        replies_at = self.n_slots * request_step
        requests = [memory[at : at + self.request_bytes] for at in range(0, replies_at, request_step)]
        replies = [memory[at : at + self.reply_bytes] for at in range(replies_at, self.buffer_bytes, reply_step)]
        return list(zip(requests, replies, strict=True))


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """The data with which the host opens its end; the server sends it over the control plane.

    ``parameters`` are transport-specific strings (name of the segment, port, secrets of this attach); they are kept out
    of ``repr`` so that no secret reaches a log.
    """

    transport: str
    sizes: ChannelSizes
    parameters: dict[str, str] = field(default_factory=dict, repr=False)


Work = Callable[[], None]
"""Work for a reader thread, to be done after it has delivered the requests that have arrived. The newest work is done;
it does what was to be done for earlier requests, too."""

Deliver = Callable[["ServerChannel", ServerSlot], Work | None]
"""Called from a thread of the transport, once per received request. Must return quickly (it enqueues) and not raise.

If it returns work, the same thread soon does it, without holding a lock: a small request is then computed without a hop
to another thread.
"""

OnFailure = Callable[[str], None]
"""Called with the text of an unforeseen error that has ended a thread of the transport; the error is logged anyway."""


class ServerChannel(ABC):
    """The server's end of the data plane to one attached host.

    Attributes:
        offer: the data with which the host opens its end; for the control plane.
        nonce: as `HostChannel.nonce`; equal on both ends exactly if they share memory.
        n_dropped: requests that the transport refused or dropped, and replies whose host was gone.
    """

    name: str
    offer: ChannelOffer
    nonce: bytes = b""

    def __init__(self, sizes: ChannelSizes, memory: memoryview, deliver: Deliver) -> None:
        """``memory`` holds the buffers, see `ChannelSizes.buffers`."""
        self.slots = tuple(ServerSlot(i, *pair) for i, pair in enumerate(sizes.buffers(memory)))
        self.n_dropped = 0
        self._deliver_to = deliver
        self._busy = [False] * sizes.n_slots
        self._lock = threading.Lock()
        """Held for the few non-blocking steps of a reply, so that close() cannot free the buffers meanwhile."""
        self._delivering = threading.RLock()
        """Held while `Deliver` runs; reentrant, since it may close the channel."""
        self._closed = False
        self._header = FrameHeader()

    @abstractmethod
    def is_cancelled(self, slot: ServerSlot) -> bool:
        """Returns whether the host has signalled that it no longer waits for the reply to the request in ``slot``."""

    @abstractmethod
    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """Sends without blocking for long; called with ``_lock`` held. Does not raise if the host is gone."""

    @abstractmethod
    def _close(self) -> None:
        """Wakes the host and frees everything; called once, when no delivery is running."""

    def reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """Sends a frame, the first ``n_bytes`` of ``slot.reply``; the slot can then receive the next request.

        From any thread. Never blocks for long and never raises if the host is gone. The buffer must not change until
        the slot is delivered again.
        """
        if not HEADER_BYTES <= n_bytes <= len(slot.reply):
            raise CapacityError(f"reply of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.reply)}")
        with self._lock:
            if self._closed:
                return
            if not self._busy[slot.index]:
                raise RuntimeError(f"slot {slot.index} has no request to answer")
            self._busy[slot.index] = False
            self._send_reply(slot, n_bytes)

    def close(self) -> None:
        """Stops delivery, frees everything, wakes the host. Idempotent. No `Deliver` call starts after it returns.

        Waits for a running `Deliver` call: do not call it while holding a lock that `Deliver` takes.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        with self._delivering:
            pass  # a running delivery has ended, and the next one sees that the channel is closed
        if first:
            self._close()

    def _deliver(self, slot: ServerSlot, n_bytes: int) -> Work | None:
        """Delivers a received request whose length was checked; returns what `Deliver` returns."""
        with self._delivering:
            if self._closed:
                return None
            slot.n_bytes = n_bytes
            slot.received_at = perf_counter()
            self._busy[slot.index] = True
            try:
                return self._deliver_to(self, slot)
            except Exception:
                log.exception("%s: a request could not be delivered", self.name)
                if self._busy[slot.index]:
                    text = "the server could not take the request"
                    self._refuse(slot, peek_request_id(slot.request), ErrorCode.INTERNAL, text)
                return None

    def _refuse(self, slot: ServerSlot, request_id: int, code: ErrorCode, text: str) -> None:
        """Answers the request in ``slot`` with an error frame."""
        self.n_dropped += 1
        n_bytes = write_error_frame(self._header, slot.reply, request_id, code, text)
        self._busy[slot.index] = True
        self.reply(slot, n_bytes)

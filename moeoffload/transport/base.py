"""What every transport offers: slots that hold one request and its reply, sent and awaited without looking inside.

A host has one `HostChannel` per expert server; the server has one `ServerChannel` per attached host. A channel has a
fixed number of slots, so that several requests are in flight; replies carry the request id and may come in any order.
All slots and their buffers are made once, when the channel is opened.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from moeoffload.errors import ProtocolError
from moeoffload.transport.waiting import AdaptiveSpin
from moeoffload.wire.header import HEADER_BYTES

MAX_CHANNEL_SLOTS: Final = 64
MAX_FRAME_BYTES: Final = 2**31 - 1
"""No frame, header included, is larger than this."""


@dataclass(slots=True, eq=False)
class HostSlot:
    """The host's side of one request in flight. ``owner`` is free for whoever uses the channel (cached views)."""

    index: int
    request: memoryview
    """Writable; as long as the largest request frame."""
    reply: memoryview
    """As long as the largest reply frame; its first ``wait()`` bytes are valid between ``wait`` and ``release``."""
    owner: Any = None


@dataclass(slots=True, eq=False)
class ServerSlot:
    """The server's side of one request. ``owner`` is free for whoever uses the channel (cached views)."""

    index: int
    request: memoryview
    reply: memoryview
    n_bytes: int = 0
    """Bytes of the request frame that was received."""
    received_at: float = 0.0
    """time.perf_counter() in seconds when the frame was received."""
    owner: Any = None


@dataclass(frozen=True, slots=True)
class ChannelSizes:
    """How large a channel is: agreed at attach, checked there against the limits of both sides.

    Raises:
        ProtocolError: a value is out of range; names it. Both sides build this from numbers of the other one.
    """

    n_slots: int
    request_bytes: int
    """Largest request frame, header included."""
    reply_bytes: int
    """Largest reply frame, header included."""
    shared_bytes: int = 0
    """Least size of a shared memory segment; the server's alone, which may reserve more than the frames need."""

    def __post_init__(self) -> None:
        for name, value, least, most in (
            ("n_slots", self.n_slots, 1, MAX_CHANNEL_SLOTS),
            ("request_bytes", self.request_bytes, HEADER_BYTES, MAX_FRAME_BYTES),
            ("reply_bytes", self.reply_bytes, HEADER_BYTES, MAX_FRAME_BYTES),
        ):
            if not least <= value <= most:
                raise ProtocolError(f"channel {name} is {value}, allowed are {least} to {most}")


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """What the server tells the host over the control plane so that it can open its end.

    ``parameters`` are transport-specific strings (names of the segment, an endpoint, secrets of this attach); they are
    kept out of ``repr`` so that no secret reaches a log.
    """

    transport: str
    sizes: ChannelSizes
    parameters: dict[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, eq=False)
class CompiledSlot:
    """What sends and collects the frames of one slot in compiled code; see `moeoffload.kernels.exchange_program`."""

    post: Callable[..., int]
    """``post(block, n_sent, *values)`` writes the frame that is the n-th of the channel, counted from 0, and sends it,
    where it can; returns its bytes, and nothing was sent if they are not positive."""
    collect: Callable[..., int]
    """``collect(block, *values, limit_ns)`` looks for the reply; returns a `Seen`."""
    block: int
    """Address of what they work on."""
    sent: ctypes.c_int64
    """In there: bytes that are on their way as soon as they are. An exception, of Ctrl-C, may come before ``post``
    returns."""
    taken: ctypes.c_int64
    """Not 0 as soon as the reply is had."""
    lane: ctypes.c_int64
    """Address of the block of the lane that is to be used, or 0."""


class HostChannel(ABC):
    """The host's end of the data plane to one server. Safe to use from several threads, each with its own slots.

    The life of a slot: ``acquire``, fill ``slot.request``, ``send``, ``wait``, read ``slot.reply``, ``release``. Every
    ``acquire`` is followed by exactly one ``release``, whatever was raised in between (``try``/``finally``).
    """

    name: str
    """shared, stream or loopback."""
    sizes: ChannelSizes
    slots: tuple[HostSlot, ...]
    nonce: bytes = b""
    """Random bytes that only a process which shares the server's memory can know; empty on other transports."""
    n_stale: int = 0
    """Late, duplicate or unknown replies that were dropped."""
    remark: str = ""
    """Why it works less well than it could; empty if it does not."""

    @abstractmethod
    def acquire(self, timeout_s: float) -> HostSlot:
        """A free slot; waits up to ``timeout_s`` seconds for one to be released.

        Raises:
            DeadlineError: none came free within ``timeout_s``.
            ServerError: the channel is closed, by either side.
        """

    @abstractmethod
    def next_id(self, slot: HostSlot) -> int:
        """The request id that the next frame sent from ``slot`` must carry.

        Never 0, equal to ``slot.index`` modulo the number of slots; the same until that frame is sent, then a new one.
        """

    @abstractmethod
    def send(self, slot: HostSlot, n_bytes: int) -> None:
        """Sends the first ``n_bytes`` of ``slot.request``, a whole frame; its request id must be ``next_id(slot)``.

        The buffer must stay as it is until ``wait`` returns.

        Raises:
            CapacityError: the frame is longer than the slot or shorter than a header.
            ProtocolError: the frame carries another request id.
            ServerError: the channel is closed, or the frame could not be handed over.
        """

    @abstractmethod
    def wait(self, slot: HostSlot, timeout_s: float, *, keep: bool = False) -> int:
        """Waits for the reply to what was sent from ``slot``; returns its length in bytes, in ``slot.reply``.

        Raises:
            DeadlineError: no reply within ``timeout_s`` seconds. With ``keep`` it can be waited for again. Without, the
                slot is abandoned: after its ``release`` it comes free only when the late reply has arrived (which is
                dropped and counted in ``n_stale``), so nothing is overwritten.
            ProtocolError: the reply has an impossible length.
            ServerError: the channel was closed, by either side.
        """

    @abstractmethod
    def send_by(self, slot: HostSlot, code: CompiledSlot, *values: int) -> int:
        """As `send`, of a frame that compiled code writes; it has the id ``next_id(slot)``.

        Args:
            slot: acquired.
            code: of this slot.
            values: see there.

        Returns:
            the bytes of the frame; nothing was sent if that is not positive.

        Raises:
            ServerError: the channel is closed, or the frame could not be handed over.
        """

    @abstractmethod
    def look_by(self, slot: HostSlot, code: CompiledSlot, *values: int, timeout_s: float) -> bool:
        """Looks for a reply in compiled code as long as that pays, ``timeout_s`` seconds at most.

        Returns:
            whether it came and was as it should be, as if `wait` had returned; else it can still be waited for.

        Raises:
            ServerError: the channel is closed.
        """

    @abstractmethod
    def release(self, slot: HostSlot) -> None:
        """Gives a slot back; once after each ``acquire``, whether or not something was sent or received."""

    @property
    @abstractmethod
    def is_idle(self) -> bool:
        """Whether every slot is free."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; wakes waiting threads with a ServerError. Idempotent, from any thread."""


Work = Callable[[], None]
"""What a thread that has handed over all that has arrived does before it waits again. Must not raise."""

Deliver = Callable[["ServerChannel", ServerSlot], Work | None]
"""Called from a thread of the transport, once per received request. Must return quickly (it enqueues) and not raise.

If it returns work, the same thread does it soon, without any lock: a small request is then computed with no hop to
another thread.
"""


@dataclass(frozen=True, slots=True)
class SlotPlaces:
    """Where a slot lies: addresses of its buffers, of the line that announces its reply, and of its semaphore."""

    request: int
    reply: int
    line: int
    semaphore: int


@dataclass(frozen=True, slots=True)
class ChannelPlaces:
    """Where a channel in shared memory lies, for compiled code: addresses that are good while its reader runs."""

    ring: int
    """Of the lines that announce requests."""
    semaphore: int
    """That counts them."""
    slots: tuple[SlotPlaces, ...]


class Express(ABC):
    """Answers the small requests of a channel by itself. For the thread that reads its ring or its lane."""

    n_read: int
    """Requests that were taken off the ring; set before `serve`, which counts on."""
    n_unsent: int
    """Replies whose host has filled its semaphore; whoever reads it sets it back to 0."""
    looked_since: float
    """When its last look began, perf_counter seconds."""
    unsent: memoryview | None = None
    """A reply that the lane has not taken whole; the lane is of no use any more."""

    @abstractmethod
    def serve(self, spin: AdaptiveSpin) -> int | None:
        """Looks for requests and answers them, as long as that is all that there is to do.

        Returns:
            why it ended, a `Seen`; None if it is not possible now, and nothing was done.
        """

    @abstractmethod
    def call_back(self) -> None:
        """Makes `serve` return, and never do anything again. From any thread."""


class ServerChannel(ABC):
    """The server's end of the data plane to one attached host."""

    name: str
    slots: tuple[ServerSlot, ...]
    offer: ChannelOffer
    """What the host needs to open its end; for the control plane."""
    express: Express | None = None
    """Set by whoever computes, if there are ``places`` or a ``lane``."""
    nonce: bytes = b""
    """As `HostChannel.nonce`: equal on both ends exactly if they share memory."""
    n_dropped: int = 0
    """Requests refused or dropped by the transport, and replies whose host was gone."""

    @abstractmethod
    def reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """Sends a frame, the first ``n_bytes`` of ``slot.reply``; the slot then takes the next request.

        From any thread. Never blocks for long and never raises because the host is gone. The buffer must stay as it is
        until the slot is delivered again.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops delivery, frees everything, wakes the host. Idempotent. No `Deliver` call starts after it returned.

        Waits for a `Deliver` call that is running: do not call it under a lock that `Deliver` takes.
        """

    @property
    def places(self) -> ChannelPlaces | None:
        """Where frames and what announces them lie, if that is shared memory."""
        return None

    @property
    def lane(self) -> int:
        """Address of the block of its lane, see `moeoffload.kernels.lane_words`; 0 if it has none."""
        return 0

    def opened(self) -> None:  # noqa: B027 (most transports have nothing to do)
        """The control plane says that the host opened its end; names and other means to open it are given up."""

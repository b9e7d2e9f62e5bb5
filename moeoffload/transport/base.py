"""What every transport offers: slots that hold one request and its reply, sent and awaited without looking inside.

A host has one `HostChannel` per expert server; the server has one `ServerChannel` per attached host. A channel has a
fixed number of slots, so that several requests are in flight; replies carry the request id and may come in any order.
All slots and their buffers are made once, when the channel is opened.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


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


class HostChannel(ABC):
    """The host's end of the data plane to one server. Safe to use from several threads, each with its own slots."""

    name: str
    """shared, stream or loopback."""
    slots: tuple[HostSlot, ...]

    @abstractmethod
    def acquire(self, timeout_s: float) -> HostSlot:
        """A free slot; waits for one to be released.

        Raises:
            DeadlineError: none came free within ``timeout_s``.
            ServerError: the channel is closed, by either side.
        """

    @abstractmethod
    def send(self, slot: HostSlot, n_bytes: int) -> None:
        """Sends the first ``n_bytes`` of ``slot.request``, a whole frame; its request id must be ``next_id(slot)``.

        The buffer must stay as it is until ``wait`` returns.
        """

    @abstractmethod
    def next_id(self, slot: HostSlot) -> int:
        """The request id the next frame sent from ``slot`` must carry: new each time, ``slot.index`` modulo slots."""

    @abstractmethod
    def wait(self, slot: HostSlot, timeout_s: float) -> int:
        """Waits for the reply to what was sent from ``slot``; returns its length in bytes, in ``slot.reply``.

        Raises:
            DeadlineError: no reply within ``timeout_s``; the slot is then abandoned: it comes free again only when the
                late reply has arrived (which is dropped and counted in ``n_stale``), so nothing is overwritten.
            ServerError: the channel was closed, by either side.
        """

    @abstractmethod
    def release(self, slot: HostSlot) -> None:
        """Gives a slot back after ``wait`` returned (or after ``acquire``, when nothing was sent). No-op if abandoned."""

    @abstractmethod
    def close(self) -> None:
        """Frees everything; wakes waiting threads with a ServerError. Idempotent."""

    n_stale: int = 0
    """Late, duplicate or unknown replies that were dropped."""


Deliver = Callable[["ServerChannel", ServerSlot], None]
"""Called from a thread of the transport, once per received request. Must return quickly (it enqueues)."""


class ServerChannel(ABC):
    """The server's end of the data plane to one attached host."""

    name: str
    slots: tuple[ServerSlot, ...]

    @abstractmethod
    def reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """Sends the first ``n_bytes`` of ``slot.reply``, from any thread; the slot then takes the next request.

        Never blocks for long and never raises because the host is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Stops delivery, frees everything, wakes the host. Idempotent. No `Deliver` call starts after it returned."""


@dataclass(frozen=True, slots=True)
class ChannelSizes:
    """How large a channel is: agreed at attach, checked there against the limits of both sides."""

    n_slots: int
    request_bytes: int
    reply_bytes: int


@dataclass(frozen=True, slots=True)
class ChannelOffer:
    """What the server tells the host over the control plane so that it can open its end.

    ``parameters`` are transport-specific strings (names of the segment, an endpoint, secrets of this attach).
    """

    transport: str
    sizes: ChannelSizes
    parameters: dict[str, str] = field(default_factory=dict)

"""The host's end of a channel: which slot is free, sent or abandoned, whose turn it is, who closed.

The transports add how bytes move and how a thread waits for them. No method here holds a lock across a wait.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from enum import IntEnum
from time import perf_counter
from typing import Final

from moeoffload.errors import CapacityError, DeadlineError, ProtocolError, ServerError
from moeoffload.transport.base import ChannelSizes, HostSlot
from moeoffload.wire import HEADER_BYTES, peek_request_id

LATE_POLL_S: Final = 0.005
"""How often a thread that finds all slots taken, some of them abandoned, looks for late replies."""
CLOSE_POLL_S: Final = 0.25
"""How often a thread that finds all slots taken looks whether the server closed the channel."""


class SlotState(IntEnum):
    """Where a host slot is in its life."""

    FREE = 0
    HELD = 1
    """Acquired; nothing in flight."""
    SENT = 2
    ABANDONED = 3
    """Released before its reply was here: free as soon as the late reply has come."""


class HostChannel(ABC):
    """The host's end of the data plane to one server. Safe to use from several threads, each with its own slots.

    Attributes:
        name: shared or stream.
        nonce: random bytes that only a process which shares the server's memory can know; empty on other transports.
        n_stale: late, duplicate or unknown replies that were dropped.
    """

    name: str
    nonce: bytes = b""

    def __init__(self, sizes: ChannelSizes, slots: tuple[HostSlot, ...]) -> None:
        self.sizes = sizes
        self.slots = slots
        self.n_stale = 0
        self._states: list[int] = [SlotState.FREE] * len(slots)
        self._ids = [len(slots) + slot.index for slot in slots]
        self._free_slots = list(reversed(slots))
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._line: list[object] = []
        """One ticket per thread that waits for a slot: first come, first served, or one thread could wait forever."""
        self._n_abandoned = 0
        self._n_inside = 0
        """Threads inside ``send`` or ``wait``, which use what the transport frees on close."""
        self._closing = False
        self._closed = ""
        """Why the channel is closed; empty while it is open."""

    # -- what a transport provides

    @abstractmethod
    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        """Hands a checked frame over."""

    @abstractmethod
    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        """Waits until ``deadline`` (perf_counter seconds); returns the length of the reply, not checked yet.
        Raises DeadlineError: there was none; the text does not matter; ServerError: see `_check_open`."""

    @abstractmethod
    def _cancel(self, slot: HostSlot, request_id: int) -> None:
        """Tells the server that the reply to this request is not waited for; neither blocks nor raises."""

    @abstractmethod
    def _take_late(self, slot: HostSlot) -> bool:
        """Without blocking: whether the reply of this abandoned slot has arrived; if so, it is consumed."""

    @abstractmethod
    def _wake(self) -> None:
        """Makes every thread in ``_await_reply`` look at `_check_open` again."""

    @abstractmethod
    def _dispose(self) -> None:
        """Frees everything; called once, when no thread is inside."""

    def _closed_by_peer(self) -> bool:
        """Whether the server has closed the channel, where that can be seen without waiting."""
        return False

    # -- the channel

    def acquire(self, timeout_s: float) -> HostSlot:
        """A free slot; waits up to ``timeout_s`` seconds for one to be released.
        Raises DeadlineError: none came free in time; ServerError: the channel is closed, by either side."""
        deadline = perf_counter() + timeout_s
        ticket: object | None = None
        try:
            while True:
                if self._n_abandoned:
                    self._collect_late()
                with self._lock:
                    self._check_open()
                    if self._free_slots and (not self._line or self._line[0] is ticket):
                        slot = self._free_slots.pop()  # the last one released: its buffers are still in the cache
                        self._states[slot.index] = SlotState.HELD
                        return slot
                    left_s = deadline - perf_counter()
                    if left_s <= 0:
                        raise DeadlineError(
                            f"{self.name}: none of {len(self.slots)} slots came free within {timeout_s:g} s "
                            f"({self._n_abandoned} wait for a late reply)"
                        )
                    if ticket is None:
                        ticket = object()
                        self._line.append(ticket)
                    self._released.wait(min(left_s, LATE_POLL_S if self._n_abandoned else CLOSE_POLL_S))
        finally:
            if ticket is not None:
                with self._lock:
                    self._line.remove(ticket)
                    self._released.notify_all()

    def next_id(self, slot: HostSlot) -> int:
        """The request id that the next frame sent from ``slot`` must carry.

        Never 0, equal to ``slot.index`` modulo the number of slots; the same until that frame is sent, then a new one.
        """
        return self._ids[slot.index]

    def send(self, slot: HostSlot, n_bytes: int) -> None:
        """Sends the first ``n_bytes`` of ``slot.request``, a whole frame; its request id must be ``next_id(slot)``.

        The buffer must stay as it is until ``wait`` returns.
        Raises CapacityError: the frame is longer than the slot or shorter than a header; ProtocolError: the frame
        carries another request id; ServerError: the channel is closed, or the frame could not be handed over.
        """
        index = slot.index
        if self._states[index] != SlotState.HELD:
            raise RuntimeError(f"slot {index} is {SlotState(self._states[index]).name}; send needs it acquired")
        if not HEADER_BYTES <= n_bytes <= len(slot.request):
            raise CapacityError(f"frame of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.request)}")
        request_id = peek_request_id(slot.request)
        if request_id != self._ids[index]:
            raise ProtocolError(f"frame in slot {index} has request id {request_id}, expected {self._ids[index]}")
        self._enter()
        try:
            self._send(slot, n_bytes, request_id)
        finally:
            self._leave()

    def wait(self, slot: HostSlot, timeout_s: float) -> int:
        """Waits for the reply to what was sent from ``slot``; returns its length in bytes, in ``slot.reply``.
        Raises DeadlineError: no reply within ``timeout_s`` seconds, and it can be waited for again; ProtocolError: the
        reply has an impossible length; ServerError: the channel was closed, by either side."""
        index = slot.index
        if self._states[index] != SlotState.SENT:
            raise RuntimeError(f"slot {index} is {SlotState(self._states[index]).name}; wait needs it sent")
        deadline = perf_counter() + timeout_s
        self._enter()
        try:
            n_bytes = self._await_reply(slot, deadline)
        except DeadlineError:
            raise DeadlineError(f"{self.name}: no reply in slot {index} within {timeout_s:g} s") from None
        finally:
            self._leave()
        self._states[index] = SlotState.HELD
        if not HEADER_BYTES <= n_bytes <= len(slot.reply):
            raise ProtocolError(f"reply of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.reply)}")
        return n_bytes

    def release(self, slot: HostSlot) -> None:
        """Gives a slot back; once after each ``acquire``, whether or not something was sent or received.

        If a reply is still to come, the server is told that it is not waited for, and the slot comes free only when the
        late reply has arrived (which is dropped and counted in ``n_stale``), so nothing is overwritten.
        """
        with self._lock:
            state = self._states[slot.index]
            if state == SlotState.HELD:
                self._set_free(slot)
                return
            if state != SlotState.SENT:
                raise RuntimeError(f"slot {slot.index} was released twice")
            self._n_abandoned += 1
            self._states[slot.index] = SlotState.ABANDONED
            if self._closed:
                return
            self._n_inside += 1
        try:
            self._cancel(slot, self._ids[slot.index] - len(self.slots))
        finally:
            self._leave()

    def close(self) -> None:
        """Frees everything; wakes waiting threads with a ServerError. Idempotent, from any thread."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._closed = self._closed or "it was closed"
            self._released.notify_all()
            if self._n_inside:
                self._wake()  # the last thread to leave frees
                return
        self._dispose()

    @property
    def is_idle(self) -> bool:
        """Whether every slot is free."""
        return len(self._free_slots) == len(self.slots)

    # -- for the transports

    def _mark_sent(self, slot: HostSlot) -> None:
        """For ``_send``: from here on a reply may come.

        Done before the bytes go: the reply can be quick, and after Ctrl-C, at any time, an id must not be used twice.
        """
        self._ids[slot.index] += len(self.slots)
        self._states[slot.index] = SlotState.SENT

    def _check_open(self) -> None:
        """Raises ServerError if either side closed the channel."""
        if not self._closed and self._closed_by_peer():
            self._closed = "the server closed it"
        if self._closed:
            raise ServerError(f"{self.name} channel: {self._closed}")

    def _enter(self) -> None:
        with self._lock:
            if self._closed:
                self._check_open()
            self._n_inside += 1

    def _leave(self) -> None:
        with self._lock:
            self._n_inside -= 1
            last = self._closing and not self._n_inside
        if last:
            self._dispose()

    def _set_free(self, slot: HostSlot) -> None:
        self._states[slot.index] = SlotState.FREE
        self._free_slots.append(slot)
        if self._line:
            self._released.notify_all()

    def _collect_late(self) -> None:
        """Takes abandoned slots back whose reply has arrived meanwhile; never blocks."""
        with self._lock:
            for slot in () if self._closing else self.slots:
                if self._states[slot.index] == SlotState.ABANDONED and self._take_late(slot):
                    self.n_stale += 1
                    self._n_abandoned -= 1
                    self._set_free(slot)

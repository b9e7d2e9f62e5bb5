"""The host's end of a channel: the state of each slot, the queue of waiting threads, and closing by either side.

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
"""How often a thread that waits for a slot looks for late replies, while some slots are abandoned."""
CLOSE_POLL_S: Final = 0.25
"""How often a thread that waits for a slot checks whether the server closed the channel."""


class SlotState(IntEnum):
    """States of a host slot."""

    FREE = 0
    HELD = 1
    """Acquired; nothing in flight."""
    SENT = 2
    ABANDONED = 3
    """Released before its reply arrived: becomes free when the late reply has arrived."""


class HostChannel(ABC):
    """The host's end of the data plane to one server. Safe to use from several threads, each with its own slots.

    Attributes:
        name: shared or stream.
        nonce: random bytes known only to processes that share the server's memory; empty on other transports.
        n_stale: late, duplicate or unknown replies that were dropped.
    """

    name: str
    nonce: bytes = b""

    def __init__(self, sizes: ChannelSizes, memory: memoryview) -> None:
        """``memory`` holds the buffers, see `ChannelSizes.buffers`."""
        self.sizes = sizes
        self.slots = tuple(HostSlot(i, *pair) for i, pair in enumerate(sizes.buffers(memory)))
        self.n_stale = 0
        self._states: list[int] = [SlotState.FREE] * sizes.n_slots
        self._ids = [slot.index for slot in self.slots]
        """Per slot, the id of the request that was sent last."""
        self._free_slots = list(reversed(self.slots))
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._line: list[object] = []
        """One ticket per thread that waits for a slot: first come, first served, so that no thread starves."""
        self._n_abandoned = 0
        self._n_inside = 0
        """Threads inside ``send``, ``wait`` or a cancellation, which use what the transport frees on close."""
        self._closing = False
        self._closed = ""
        """Why the channel is closed; empty while it is open."""

    # -- implemented by each transport

    @abstractmethod
    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        """Sends a checked frame; calls `_mark_sent`."""

    @abstractmethod
    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        """Waits until ``deadline`` (perf_counter seconds); returns the length of the reply, not checked yet.
        Raises DeadlineError: there was no reply (its text is not used); ServerError: see `_check_open`."""

    @abstractmethod
    def _cancel(self, slot: HostSlot, request_id: int) -> None:
        """Tells the server that the host no longer waits for the reply to this request; neither blocks nor raises."""

    @abstractmethod
    def _take_late(self, slot: HostSlot) -> bool:
        """Consumes the reply of this abandoned slot if it has arrived; returns whether it has. Does not block."""

    @abstractmethod
    def _wake(self) -> None:
        """Makes every thread in ``_await_reply`` call `_check_open` again."""

    @abstractmethod
    def _dispose(self) -> None:
        """Frees everything; called once, when no thread is inside."""

    def _closed_by_peer(self) -> bool:
        """Returns whether the server has closed the channel, if the transport can see that without waiting."""
        return False

    # -- the channel

    def acquire(self, timeout_s: float) -> HostSlot:
        """Returns a free slot; waits up to ``timeout_s`` seconds for one to be released.
        Raises DeadlineError: none became free in time; ServerError: the channel is closed, by either side."""
        deadline = perf_counter() + timeout_s
        ticket: object | None = None
        try:
            while True:
                if self._n_abandoned:
                    self._collect_late()
                with self._lock:
                    self._check_open()
                    if self._free_slots and (not self._line or self._line[0] is ticket):
                        slot = self._free_slots.pop()  # the one released last: its buffers are still in the CPU's cache
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
        """Returns the request id that the next frame sent from ``slot`` must carry.

        Never 0, and equal to ``slot.index`` modulo the number of slots; it stays the same until that frame is sent.
        """
        return self._ids[slot.index] + len(self.slots)

    def send(self, slot: HostSlot, n_bytes: int) -> None:
        """Sends the first ``n_bytes`` of ``slot.request``, a whole frame; its request id must be ``next_id(slot)``.

        The buffer must not be changed until ``wait`` returns.
        Raises CapacityError: the frame is longer than the slot or shorter than a header; ProtocolError: the frame
        carries another request id; ServerError: the channel is closed, or the frame could not be sent.
        """
        index = slot.index
        if self._states[index] != SlotState.HELD:
            raise RuntimeError(f"slot {index} is {SlotState(self._states[index]).name}; send needs it acquired")
        if not HEADER_BYTES <= n_bytes <= len(slot.request):
            raise CapacityError(f"frame of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.request)}")
        request_id, expected = peek_request_id(slot.request), self._ids[index] + len(self.slots)
        if request_id != expected:
            raise ProtocolError(f"frame in slot {index} has request id {request_id}, expected {expected}")
        self._enter()
        try:
            self._send(slot, n_bytes, request_id)
        finally:
            self._leave()

    def wait(self, slot: HostSlot, timeout_s: float) -> int:
        """Waits for the reply to the request sent from ``slot``; returns its length in bytes, in ``slot.reply``.
        Raises DeadlineError: no reply within ``timeout_s`` seconds; ``wait`` may be called again; ProtocolError: the
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
        """Releases a slot; call it once after each ``acquire``, whether or not something was sent or received.

        If a reply is still expected, the server is told that the host no longer waits for it, and the slot becomes free
        only when the late reply has arrived (it is dropped and counted in ``n_stale``), so nothing is overwritten.
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
            self._cancel(slot, self._ids[slot.index])
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
                self._wake()  # the last thread to leave frees everything
                return
        self._dispose()

    @property
    def is_idle(self) -> bool:
        """Whether every slot is free."""
        return len(self._free_slots) == len(self.slots)

    # -- for the transports

    def _mark_sent(self, slot: HostSlot) -> None:
        """Marks a slot as sent; for ``_send``, before it hands anything over.

        A reply can be quick; and Ctrl-C can interrupt sending at any point, after which an id must not be used again:
        the server would take the next request for a repetition, and the host the old reply for the new one.
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
        """Frees abandoned slots whose late reply has arrived; never blocks."""
        with self._lock:
            for slot in () if self._closing else self.slots:
                if self._states[slot.index] == SlotState.ABANDONED and self._take_late(slot):
                    self.n_stale += 1
                    self._n_abandoned -= 1
                    self._set_free(slot)

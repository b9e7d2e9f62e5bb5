"""The book-keeping that all transports share: which slot is free, sent or abandoned, whose turn it is, who closed.

The transports add how bytes move and how a thread waits for them. No method here holds a lock across a wait.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from enum import IntEnum
from time import perf_counter
from typing import Final

from moeoffload.errors import CapacityError, DeadlineError, ProtocolError, ServerError
from moeoffload.transport.base import (
    ChannelSizes,
    CompiledSlot,
    Deliver,
    HostChannel,
    HostSlot,
    ServerChannel,
    ServerSlot,
    Work,
)
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind, peek_request_id, write_error_text

LATE_POLL_S: Final = 0.005
"""How often a thread that finds all slots taken, some of them abandoned, looks for late replies."""
CLOSE_POLL_S: Final = 0.25
"""How often a thread that finds all slots taken looks whether the server closed the channel."""

log = logging.getLogger(__name__)


class SlotState(IntEnum):
    """Where a host slot is in its life."""

    FREE = 0
    HELD = 1
    """Acquired; nothing in flight."""
    SENT = 2
    ABANDONED = 3
    """Nobody waits for its reply any more, and it was not released yet."""
    ORPHANED = 4
    """Abandoned and released: free as soon as the late reply is here."""


class PooledHostChannel(HostChannel):
    """Slots, ids, deadlines and closing of a host channel; a transport adds ``_send``, ``_await_reply`` and so on."""

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

        Raises:
            DeadlineError: see `_too_late`.
            ServerError: see `_check_open`.
        """

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
        """See `HostChannel.acquire`."""
        if not self._n_abandoned:
            with self._lock:
                if self._free_slots and not self._line and not self._closed:
                    slot = self._free_slots.pop()  # the last one released: its buffers are still in the cache
                    self._states[slot.index] = SlotState.HELD
                    return slot
        return self._acquire_in_line(timeout_s)

    def _acquire_in_line(self, timeout_s: float) -> HostSlot:
        deadline = perf_counter() + timeout_s
        ticket: object | None = None
        try:
            while True:
                if self._n_abandoned:
                    self._collect_late()
                with self._lock:
                    self._check_open()
                    if self._free_slots and (not self._line or self._line[0] is ticket):
                        slot = self._free_slots.pop()
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
        """See `HostChannel.next_id`."""
        return self._ids[slot.index]

    def send(self, slot: HostSlot, n_bytes: int) -> None:
        """See `HostChannel.send`."""
        index = slot.index
        self._check_held(slot)
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

    def send_by(self, slot: HostSlot, code: CompiledSlot, *values: int) -> int:
        """See `HostChannel.send_by`."""
        n_bytes = code.post(code.block, 0, *values)
        if n_bytes > 0:
            self.send(slot, n_bytes)
        return n_bytes

    def look_by(self, slot: HostSlot, code: CompiledSlot, *values: int, timeout_s: float) -> bool:
        """See `HostChannel.look_by`."""
        del slot, code, values, timeout_s
        return False

    def _check_held(self, slot: HostSlot) -> None:
        state = self._states[slot.index]
        if state != SlotState.HELD:
            raise RuntimeError(f"slot {slot.index} is {SlotState(state).name}; send needs it acquired")

    def _mark_sent(self, slot: HostSlot) -> None:
        """For ``_send``: from here on a reply may come. Done before the bytes go, since the reply can be quick."""
        self._ids[slot.index] += len(self.slots)
        self._states[slot.index] = SlotState.SENT

    def _unmark_sent(self, slot: HostSlot) -> None:
        """After all, the frame did not go."""
        self._ids[slot.index] -= len(self.slots)
        self._states[slot.index] = SlotState.HELD

    def wait(self, slot: HostSlot, timeout_s: float, *, keep: bool = False) -> int:
        """See `HostChannel.wait`."""
        index = slot.index
        if self._states[index] != SlotState.SENT:
            raise RuntimeError(f"slot {index} is {SlotState(self._states[index]).name}; wait needs it sent")
        deadline = perf_counter() + timeout_s
        try:
            self._enter()
            try:
                n_bytes = self._await_reply(slot, deadline)
            finally:
                self._leave()
        except DeadlineError:
            if not keep:
                self._abandon(slot)
            raise DeadlineError(f"{self.name}: no reply in slot {index} within {timeout_s:g} s") from None
        except BaseException:
            self._abandon(slot)
            raise
        self._states[index] = SlotState.HELD
        if not HEADER_BYTES <= n_bytes <= len(slot.reply):
            raise ProtocolError(f"reply of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.reply)}")
        return n_bytes

    def release(self, slot: HostSlot) -> None:
        """See `HostChannel.release`."""
        with self._lock:
            state = self._states[slot.index]
            if state == SlotState.HELD:
                self._set_free(slot)
            elif state == SlotState.SENT:
                self._states[slot.index] = SlotState.ORPHANED
                self._n_abandoned += 1
            elif state == SlotState.ABANDONED:
                self._states[slot.index] = SlotState.ORPHANED
            else:
                raise RuntimeError(f"slot {slot.index} was released twice")

    def close(self) -> None:
        """See `HostChannel.close`."""
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
        """See `HostChannel.is_idle`."""
        return len(self._free_slots) == len(self.slots)

    # -- for the transports

    @property
    def n_abandoned(self) -> int:
        """Slots whose reply nobody waits for any more and which has not come yet."""
        return self._n_abandoned

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

    def _abandon(self, slot: HostSlot) -> None:
        with self._lock:
            self._states[slot.index] = SlotState.ABANDONED
            self._n_abandoned += 1

    def _collect_late(self) -> None:
        """Takes abandoned slots back whose reply has arrived meanwhile; never blocks."""
        with self._lock:
            for slot in () if self._closing else self.slots:
                if self._states[slot.index] >= SlotState.ABANDONED and self._take_late(slot):
                    self._late(slot)

    def _late(self, slot: HostSlot) -> None:
        """The reply of an abandoned slot is dropped; the slot can be used again. Called with ``_lock`` held."""
        self.n_stale += 1
        self._n_abandoned -= 1
        if self._states[slot.index] == SlotState.ORPHANED:
            self._set_free(slot)
        else:
            self._states[slot.index] = SlotState.HELD


class PooledServerChannel(ServerChannel):
    """Delivery, replies and closing of a server channel; a transport adds ``_send_reply`` and ``_close``."""

    def __init__(self, slots: tuple[ServerSlot, ...], deliver: Deliver) -> None:
        self.slots = slots
        self.n_dropped = 0
        self._deliver_to = deliver
        self._busy = [False] * len(slots)
        self._lock = threading.Lock()
        """Held for the few non-blocking steps of a reply, so that close() cannot take the buffers away meanwhile."""
        self._delivering = threading.RLock()
        """Held while `Deliver` runs; reentrant, since it may close the channel."""
        self._closed = False
        self._work: Work | None = None
        self._header = FrameHeader()

    @abstractmethod
    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """Sends without blocking for long; called with ``_lock`` held. Does not raise because the host is gone."""

    @abstractmethod
    def _close(self) -> None:
        """Wakes the host, frees everything; called once, when no delivery runs."""

    def reply(self, slot: ServerSlot, n_bytes: int) -> None:
        """See `ServerChannel.reply`."""
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
        """See `ServerChannel.close`."""
        with self._lock:
            first, self._closed = not self._closed, True
        with self._delivering:
            pass  # a delivery that was running has ended, and the next one sees that the channel is closed
        if first:
            self._close()

    def _deliver(self, slot: ServerSlot, n_bytes: int) -> None:
        """Hands a received request of a checked length on."""
        with self._delivering:
            if self._closed:
                return
            slot.n_bytes = n_bytes
            slot.received_at = perf_counter()
            self._busy[slot.index] = True
            try:
                self._work = self._deliver_to(self, slot) or self._work
            except Exception:
                log.exception("%s: a request could not be delivered", self.name)
                if self._busy[slot.index]:
                    text = "the server could not take the request"
                    self._refuse(slot, peek_request_id(slot.request), ErrorCode.INTERNAL, text)

    def do_work(self) -> None:
        """Does what the deliveries so far have asked for; called by the thread that delivered, without any lock."""
        work, self._work = self._work, None
        if work is not None:
            work()

    def _refuse(self, slot: ServerSlot, request_id: int, code: ErrorCode, text: str) -> None:
        """Answers the request in ``slot`` with an error frame."""
        self.n_dropped += 1
        n_bytes = write_error_frame(self._header, slot.reply, request_id, code, text)
        self._busy[slot.index] = True
        self.reply(slot, n_bytes)


def write_error_frame(header: FrameHeader, frame: memoryview, request_id: int, code: ErrorCode, text: str) -> int:
    """Writes an error frame into ``frame``, the text cut to what fits; returns its length in bytes."""
    room = len(frame) - HEADER_BYTES
    header.kind, header.request_id, header.code = Kind.ERROR, request_id, code
    header.body_bytes = write_error_text(frame, text.encode(errors="replace")[:room].decode(errors="ignore"))
    header.pack_into(frame)
    return HEADER_BYTES + header.body_bytes

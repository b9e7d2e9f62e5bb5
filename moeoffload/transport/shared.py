"""Both ends of the shared-memory transport: frames stay where they were written, in memory that both processes map.

A request or reply costs its sender one ring entry or line and one semaphore post, and its receiver one token. See
`segment` for the layout and `spin` for how a thread waits.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from time import perf_counter
from typing import Final

from moeoffload.errors import DeadlineError, ProtocolError
from moeoffload.last_resort import start_thread
from moeoffload.transport.base import (
    ChannelOffer,
    ChannelSizes,
    Deliver,
    HostSlot,
    OnFailure,
    ServerChannel,
    ServerSlot,
    Work,
)
from moeoffload.transport.segment import HOST_CLOSED, SERVER_CLOSED, Segment
from moeoffload.transport.slots import HostChannel
from moeoffload.transport.spin import AdaptiveSpin
from moeoffload.wire import HEADER_BYTES, ErrorCode

READ_POLL_S: Final = 0.5
"""How often a sleeping thread checks whether the other side closed, in case the wake-up was lost with its process."""


class SharedHostEnd(HostChannel):
    """The host's end; made by `open_shared`."""

    name = "shared"

    def __init__(self, segment: Segment, sizes: ChannelSizes) -> None:
        super().__init__(sizes, segment.buffers)
        self.nonce = segment.nonce
        self._segment = segment
        self._words = segment.words
        self._ring = threading.Lock()
        self._ring_at, self._reply_at = segment.ring_at, segment.reply_at
        self._bells = [segment.address_of(at + 2) for at in self._reply_at]
        self._n_sent = 0
        self._spin = AdaptiveSpin()

    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        words, index = self._words, slot.index
        self._mark_sent(slot)
        with self._ring:  # the n-th post must come after the n-th entry
            at = self._ring_at[self._n_sent % len(self._ring_at)]
            self._n_sent += 1
            words[at], words[at + 1], words[at + 2] = index, n_bytes, request_id
            self._segment.request_semaphore.release()
            words[at + 3] = self._n_sent

    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        index = slot.index
        semaphore = self._segment.reply_semaphores[index]
        at, bell, awaited = self._reply_at[index], self._bells[index], self._ids[index]
        while True:
            if self._closed or self._words[SERVER_CLOSED]:
                self._check_open()
            left_s = deadline - perf_counter()
            if left_s <= 0:
                raise DeadlineError
            # A token without the awaited reply comes from a close(), or from a reply that was sent twice: look again.
            if self._spin.acquire(semaphore, bell, awaited, left_s if left_s < READ_POLL_S else READ_POLL_S):
                if self._words[at + 1] == awaited:
                    return self._words[at]
                self.n_stale += not (self._closed or self._words[SERVER_CLOSED])

    def _cancel(self, slot: HostSlot, request_id: int) -> None:
        self._words[self._reply_at[slot.index] + 3] = request_id

    def _take_late(self, slot: HostSlot) -> bool:
        semaphore = self._segment.reply_semaphores[slot.index]
        if semaphore.value:
            semaphore.acquire(0)
        # Not the token: a wait that Ctrl-C ended may have taken it. The bell is written after it.
        return self._words[self._reply_at[slot.index] + 2] == self._ids[slot.index]

    def _closed_by_peer(self) -> bool:
        return self._words[SERVER_CLOSED] != 0

    def _wake(self) -> None:
        for semaphore in self._segment.reply_semaphores:
            semaphore.release()

    def _dispose(self) -> None:
        self._words[HOST_CLOSED] = 1
        self._segment.request_semaphore.release()
        self._segment.close()


class SharedServerEnd(ServerChannel):
    """The server's end: creates the segment. One thread delivers the requests."""

    name = "shared"

    def __init__(self, sizes: ChannelSizes, deliver: Deliver, *, on_failure: OnFailure = lambda text: None) -> None:
        """Creates the segment and starts the reader thread; if that ends with an error, the channel is closed.
        Raises ServerError: /dev/shm has too little room for it."""
        segment = Segment.create(sizes)
        super().__init__(sizes, segment.buffers, deliver)
        self.offer = ChannelOffer(self.name, sizes, {"segment": segment.name})
        self.nonce = segment.nonce
        self._segment = segment
        self._words = segment.words
        self._reply_at = segment.reply_at
        self._taken = [0] * sizes.n_slots
        """Per slot, the id of the request that is being worked on."""
        self._spin = AdaptiveSpin()
        self._on_failure = on_failure
        self._reader = start_thread("shared-reader", self._read, self._failed)

    def is_cancelled(self, slot: ServerSlot) -> bool:
        """See `ServerChannel.is_cancelled`."""
        return self._words[self._reply_at[slot.index] + 3] == self._taken[slot.index]

    def _read(self) -> None:
        segment, n_read = self._segment, 0
        work: Work | None = None
        ring = segment.ring_at
        bells = [segment.address_of(at + 3) for at in ring]
        while not self._closed:
            place = n_read % len(ring)
            if not self._spin.acquire(segment.request_semaphore, bells[place], n_read + 1, READ_POLL_S):
                continue
            if self._words[HOST_CLOSED]:
                self.close()
            elif not self._closed:
                work = self._take(ring[place]) or work
                n_read += 1
                if work is not None and not segment.request_semaphore.value:
                    work()
                    work = None
        segment.close()

    def _failed(self, text: str) -> None:
        self.close()
        self._segment.close()
        self._on_failure(text)

    def _take(self, at: int) -> Work | None:
        index, n_bytes, request_id = self._words[at], self._words[at + 1], self._words[at + 2]
        if index >= len(self.slots) or self._busy[index]:
            self.n_dropped += 1  # the host breaks the protocol; there is no slot to answer in
            return None
        slot = self.slots[index]
        self._taken[index] = request_id
        if HEADER_BYTES <= n_bytes <= len(slot.request):
            return self._deliver(slot, n_bytes)
        text = f"a frame of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.request)}"
        self._refuse(slot, request_id, ErrorCode.BAD_FRAME, text)
        return None

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        at = self._reply_at[slot.index]
        request_id = self._taken[slot.index]
        self._words[at], self._words[at + 1] = n_bytes, request_id
        try:
            self._segment.reply_semaphores[slot.index].release()
        except OSError:
            self.n_dropped += 1  # the host has filled its semaphore to the limit; it does not lack tokens
        self._words[at + 2] = request_id

    def _close(self) -> None:
        self._words[SERVER_CLOSED] = 1
        for semaphore in (self._segment.request_semaphore, *self._segment.reply_semaphores):
            with suppress(OSError):  # full: no thread is asleep on it
                semaphore.release()
        if self._reader is not threading.current_thread():
            self._reader.join()  # it frees the segment


def open_shared(offer: ChannelOffer) -> SharedHostEnd:
    """Opens the host's end of the channel that a `SharedServerEnd` offers and removes the names of its memory.
    Raises ServerError: the memory is not on this host, or was not created by a server of this user."""
    name = offer.parameters.get("segment")
    if name is None:
        raise ProtocolError("the offer of a shared-memory channel does not name its segment")
    return SharedHostEnd(Segment.open(name, offer.sizes), offer.sizes)

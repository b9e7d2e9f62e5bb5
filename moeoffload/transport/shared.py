"""Both ends on one machine: frames stay where they were written, in memory that both processes map.

A request or reply costs its sender one ring entry or line and one semaphore post, the other side one token. See
`segment` for the layout and `waiting` for how a thread waits.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from time import perf_counter
from typing import Final

from moeoffload.errors import DeadlineError, ProtocolError
from moeoffload.kernels.watch import Seen
from moeoffload.transport.base import (
    ChannelOffer,
    ChannelPlaces,
    ChannelSizes,
    CompiledSlot,
    Deliver,
    HostSlot,
    ServerSlot,
)
from moeoffload.transport.pool import PooledHostChannel, PooledServerChannel, SlotState
from moeoffload.transport.segment import HOST_CLOSED, SERVER_CLOSED, Segment
from moeoffload.transport.waiting import SPIN_LIMIT_S, AdaptiveSpin
from moeoffload.wire import HEADER_BYTES, ErrorCode

MOST_SPARE: Final = 8
READ_POLL_S: Final = 0.5
"""A sleeping reader looks this often whether it was closed, should the wake-up have been lost with its process."""


class SharedHostEnd(PooledHostChannel):
    """The host's end; made by `open_shared`."""

    name = "shared"

    def __init__(self, segment: Segment, sizes: ChannelSizes, spin_limit_s: float) -> None:
        areas = zip(segment.requests, segment.replies, strict=True)
        super().__init__(sizes, tuple(HostSlot(i, request, reply) for i, (request, reply) in enumerate(areas)))
        self.nonce = segment.nonce
        self._segment = segment
        self._words = segment.words
        self._ring = threading.Lock()
        self._ring_at = [segment.ring_at(n) for n in range(sizes.n_slots)]
        self._reply_at = [segment.reply_at(index) for index in range(sizes.n_slots)]
        self._bells = [segment.address_of(at + 2) for at in self._reply_at]
        self._n_sent = 0
        self._awaited = [0] * sizes.n_slots
        """Per slot the request id whose reply is to come."""
        self._looked_since: list[float | None] = [None] * sizes.n_slots
        """Per slot since when `look_by` has looked, if it has found nothing."""
        self._spin = AdaptiveSpin(spin_limit_s)

    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        words, index = self._words, slot.index
        if self._segment.reply_semaphores[index].value:
            self._drop_spare_replies(index)
        self._expect(slot, request_id)
        with self._ring:  # the n-th post must come after the n-th entry
            at = self._ring_at[self._n_sent % len(self._ring_at)]
            self._n_sent += 1
            words[at], words[at + 1], words[at + 2] = index, n_bytes, request_id
            self._segment.request_semaphore.release()
            words[at + 3] = self._n_sent

    def _expect(self, slot: HostSlot, request_id: int) -> None:
        self._awaited[slot.index] = request_id
        self._looked_since[slot.index] = None
        self._mark_sent(slot)

    @property
    def places(self) -> ChannelPlaces:
        """Where its frames lie, for compiled code."""
        return self._segment.places

    def send_by(self, slot: HostSlot, code: CompiledSlot, *values: int) -> int:
        """See `HostChannel.send_by`."""
        self._check_held(slot)
        self._enter()
        try:
            with self._ring:
                code.sent.value = 0
                # First: Ctrl-C may come at any time, and an id must not be used twice.
                self._expect(slot, self._ids[slot.index])
                try:
                    return code.post(code.block, self._n_sent, *values)
                finally:
                    if code.sent.value:
                        self._n_sent += 1
                    else:
                        self._unmark_sent(slot)
        finally:
            self._leave()

    def look_by(self, slot: HostSlot, code: CompiledSlot, *values: int, timeout_s: float) -> bool:
        """See `HostChannel.look_by`."""
        spin, index = self._spin, slot.index
        budget_s = min(spin.budget_s, timeout_s)
        if budget_s <= 0 or self._states[index] != SlotState.SENT:
            return False
        if self._words[SERVER_CLOSED]:
            self._check_open()
        self._enter()
        started = perf_counter()
        code.taken.value = 0
        try:
            seen = code.collect(code.block, *values, int(budget_s * 1e9))
        finally:
            if code.taken.value:
                self._states[index] = SlotState.HELD
            self._leave()
        if seen == Seen.CALLED:
            return False
        spin.met(seen)
        if seen == Seen.NEWS:
            spin.learn(perf_counter() - started)
            return True
        self._looked_since[index] = started
        return False

    def _drop_spare_replies(self, index: int) -> None:
        """Drops the reply before, should it come once more: nobody has asked for anything since."""
        semaphore = self._segment.reply_semaphores[index]
        for _ in range(MOST_SPARE):  # a server may have posted any number
            if not semaphore.value:
                return
            semaphore.acquire(0)
            self.n_stale += 1

    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        index = slot.index
        semaphore = self._segment.reply_semaphores[index]
        at, bell, awaited = self._reply_at[index], self._bells[index], self._awaited[index]
        while True:
            if self._closed or self._words[SERVER_CLOSED]:
                self._check_open()
            left_s = deadline - perf_counter()
            if left_s <= 0:
                raise DeadlineError
            # A token without its reply is the wake-up of a close(), or of a reply that came twice: look again.
            looked_since, self._looked_since[index] = self._looked_since[index], None
            poll_s = left_s if left_s < READ_POLL_S else READ_POLL_S
            took = self._spin.acquire(semaphore, bell, awaited, poll_s, looked_since)
            if took:
                if self._words[at + 1] == awaited:
                    return self._words[at]
                self.n_stale += not (self._closed or self._words[SERVER_CLOSED])

    def _take_late(self, slot: HostSlot) -> bool:
        semaphore = self._segment.reply_semaphores[slot.index]
        if not semaphore.value:
            return False
        semaphore.acquire(0)
        return self._words[self._reply_at[slot.index] + 1] == self._awaited[slot.index]

    def _closed_by_peer(self) -> bool:
        return self._words[SERVER_CLOSED] != 0

    def _wake(self) -> None:
        for semaphore in self._segment.reply_semaphores:
            semaphore.release()

    def _dispose(self) -> None:
        self._words[HOST_CLOSED] = 1
        self._segment.request_semaphore.release()
        self._segment.close()


class SharedServerEnd(PooledServerChannel):
    """The server's end: creates the segment. One thread delivers the requests."""

    name = "shared"

    def __init__(self, sizes: ChannelSizes, deliver: Deliver, *, spin_limit_s: float = SPIN_LIMIT_S) -> None:
        """Creates the segment and starts to deliver.

        Args:
            sizes: of the channel.
            deliver: is called once per request.
            spin_limit_s: longest look for the next request without sleeping, in seconds; 0 never spins.

        Raises:
            ServerError: /dev/shm has too little room for it.
        """
        segment = Segment.create(sizes)
        areas = zip(segment.requests, segment.replies, strict=True)
        super().__init__(tuple(ServerSlot(i, request, reply) for i, (request, reply) in enumerate(areas)), deliver)
        self.offer = ChannelOffer(self.name, sizes, {"segment": segment.name})
        self.nonce = segment.nonce
        self._segment = segment
        self._words = segment.words
        self._reply_at = [segment.reply_at(index) for index in range(sizes.n_slots)]
        self._taken = [0] * sizes.n_slots
        """Per slot the request id that is being worked on."""
        self._spin = AdaptiveSpin(spin_limit_s)
        self._reader = threading.Thread(target=self._read, name="shared-reader", daemon=True)
        self._reader.start()

    @property
    def places(self) -> ChannelPlaces:
        """See `ServerChannel.places`."""
        return self._segment.places

    def opened(self) -> None:
        """The host has opened its end: the names are given up (the host has tried that, too)."""
        self._segment.unlink()

    def _read(self) -> None:
        segment, n_read = self._segment, 0
        ring = [segment.ring_at(n) for n in range(len(self.slots))]
        bells = [segment.address_of(at + 3) for at in ring]
        while not self._closed:
            looked_since = None
            if (express := self.express) is not None:
                express.n_read = n_read
                seen = express.serve(self._spin)
                n_read = express.n_read
                self.n_dropped += express.n_unsent
                express.n_unsent = 0
                if seen == Seen.CALLED:
                    continue
                if seen is not None:
                    looked_since = express.looked_since
            place = n_read % len(ring)
            at = ring[place]
            bell = bells[place]
            if not self._spin.acquire(segment.request_semaphore, bell, n_read + 1, READ_POLL_S, looked_since):
                continue
            if self._words[HOST_CLOSED]:
                self.close()
            elif not self._closed:
                self._take(at)
                n_read += 1
                if not segment.request_semaphore.value:
                    self.do_work()
        segment.close()

    def _take(self, at: int) -> None:
        index, n_bytes, request_id = self._words[at], self._words[at + 1], self._words[at + 2]
        if index >= len(self.slots) or self._busy[index]:
            self.n_dropped += 1  # not a host that keeps to the rules; there is no slot to answer in
            return
        slot = self.slots[index]
        self._taken[index] = request_id
        if HEADER_BYTES <= n_bytes <= len(slot.request):
            self._deliver(slot, n_bytes)
        else:
            text = f"a frame of {n_bytes} bytes; a slot takes {HEADER_BYTES} to {len(slot.request)}"
            self._refuse(slot, request_id, ErrorCode.BAD_FRAME, text)

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        at = self._reply_at[slot.index]
        request_id = self._taken[slot.index]
        self._words[at], self._words[at + 1] = n_bytes, request_id
        try:
            self._segment.reply_semaphores[slot.index].release()
        except OSError:
            self.n_dropped += 1  # the host has filled its semaphore up to the brim; it has tokens enough
        self._words[at + 2] = request_id

    def _close(self) -> None:
        self._words[SERVER_CLOSED] = 1
        if self.express is not None:
            self.express.call_back()
        for semaphore in (self._segment.request_semaphore, *self._segment.reply_semaphores):
            with suppress(OSError):  # full: whoever waits for it is awake anyway
                semaphore.release()
        if self._reader is not threading.current_thread():
            self._reader.join()  # it frees the segment


def open_shared(offer: ChannelOffer, *, spin_limit_s: float = SPIN_LIMIT_S) -> SharedHostEnd:
    """Opens the host's end of a shared-memory channel and takes the names of its memory away.

    Args:
        offer: of a `SharedServerEnd`.
        spin_limit_s: longest look for a reply without sleeping, in seconds; 0 never spins.

    Raises:
        ServerError: the memory is not on this host, or not one that a server of this user made.
    """
    name = offer.parameters.get("segment")
    if name is None:
        raise ProtocolError("the offer of a shared-memory channel does not name its segment")
    return SharedHostEnd(Segment.open(name, offer.sizes), offer.sizes, spin_limit_s)

"""Both ends in one process, for tests: plain byte arrays, a queue and a condition; the semantics of the real ones."""

from __future__ import annotations

import queue
import threading
from time import perf_counter

from moeoffload.errors import DeadlineError
from moeoffload.transport import ChannelOffer, ChannelSizes, Deliver, HostChannel, HostSlot, ServerChannel, ServerSlot
from moeoffload.wire import peek_request_id


class _Wire:
    """What the two ends share: requests on their way, and the lengths of the replies that arrived."""

    def __init__(self, sizes: ChannelSizes) -> None:
        self.requests: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self.arrived = threading.Condition()
        self.reply_bytes = [0] * sizes.n_slots
        self.cancelled: set[int] = set()
        self.server_closed = False
        self.buffers = [
            (memoryview(bytearray(sizes.request_bytes)), memoryview(bytearray(sizes.reply_bytes)))
            for _ in range(sizes.n_slots)
        ]


class LoopbackHost(HostChannel):
    """The host's end; made by `loopback_pair`."""

    name = "loopback"

    def __init__(self, sizes: ChannelSizes, wire: _Wire) -> None:
        super().__init__(sizes, tuple(HostSlot(i, *buffers) for i, buffers in enumerate(wire.buffers)))
        self._wire = wire

    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        self._mark_sent(slot)
        self._wire.requests.put((slot.index, n_bytes))

    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        wire = self._wire
        with wire.arrived:
            while not wire.reply_bytes[slot.index]:
                self._check_open()
                left_s = deadline - perf_counter()
                if left_s <= 0:
                    raise DeadlineError
                wire.arrived.wait(left_s)
            n_bytes, wire.reply_bytes[slot.index] = wire.reply_bytes[slot.index], 0
            return n_bytes

    def _cancel(self, slot: HostSlot, request_id: int) -> None:
        self._wire.cancelled.add(request_id)

    def _take_late(self, slot: HostSlot) -> bool:
        with self._wire.arrived:
            n_bytes, self._wire.reply_bytes[slot.index] = self._wire.reply_bytes[slot.index], 0
        return n_bytes > 0

    def _closed_by_peer(self) -> bool:
        return self._wire.server_closed

    def _wake(self) -> None:
        with self._wire.arrived:
            self._wire.arrived.notify_all()

    def _dispose(self) -> None:
        pass


class LoopbackServer(ServerChannel):
    """The server's end; made by `loopback_pair`. One thread delivers the requests."""

    name = "loopback"

    def __init__(self, sizes: ChannelSizes, wire: _Wire, deliver: Deliver) -> None:
        super().__init__(tuple(ServerSlot(i, *buffers) for i, buffers in enumerate(wire.buffers)), deliver)
        self.offer = ChannelOffer(self.name, sizes)
        self._wire = wire
        self._reader = threading.Thread(target=self._read, name="loopback-reader", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while (request := self._wire.requests.get()) is not None:
            index, n_bytes = request
            self._deliver(self.slots[index], n_bytes)
            self.do_work()

    def is_cancelled(self, slot: ServerSlot) -> bool:
        return peek_request_id(slot.request) in self._wire.cancelled

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        with self._wire.arrived:
            self._wire.reply_bytes[slot.index] = n_bytes
            self._wire.arrived.notify_all()

    def _close(self) -> None:
        self._wire.requests.put(None)
        with self._wire.arrived:
            self._wire.server_closed = True
            self._wire.arrived.notify_all()
        if self._reader is not threading.current_thread():
            self._reader.join()


def loopback_pair(sizes: ChannelSizes, deliver: Deliver) -> tuple[LoopbackHost, LoopbackServer]:
    """The two ends of an in-process channel; ``deliver`` is called from a thread that ends with the server's end."""
    wire = _Wire(sizes)
    return LoopbackHost(sizes, wire), LoopbackServer(sizes, wire, deliver)

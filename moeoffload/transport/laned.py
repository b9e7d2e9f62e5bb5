"""A host's end with a lane: small frames go over it while it is free, everything else another way."""

from __future__ import annotations

import logging
import socket
import threading
from abc import abstractmethod
from contextlib import ExitStack, suppress
from time import perf_counter
from typing import Final

from moeoffload.errors import DeadlineError
from moeoffload.kernels.lane_program import lane_programs
from moeoffload.kernels.watch import Seen
from moeoffload.transport.base import ChannelSizes, CompiledSlot, HostSlot
from moeoffload.transport.lane import LANE_BYTES, Lane, LaneEndedError, address_of
from moeoffload.transport.lane_key import LaneKey
from moeoffload.transport.pool import PooledHostChannel, SlotState
from moeoffload.wire import HEADER_BYTES, FrameHeader, Kind, is_ping, peek_frame_bytes, peek_request_id

OPEN_TIMEOUT_S: Final = 2.0
"""How long opening the lane may take: where a firewall keeps it out, nobody wants to wait for that."""
_NOBODY: Final = -1

log = logging.getLogger(__name__)


class LanedHostChannel(PooledHostChannel):
    """A transport adds the other way: ``_send_otherwise`` and so on."""

    def __init__(self, sizes: ChannelSizes, slots: tuple[HostSlot, ...]) -> None:
        super().__init__(sizes, slots)
        self._lane: Lane | None = None
        self._lane_slot = _NOBODY
        """Whose request is on the lane, until its reply is here. Who has that slot uses the lane without a lock."""
        self._awaited_id = 0
        """Of that request."""
        self._asked_for = _NOBODY
        """Whose request may have been lost when the lane was."""
        self._taking = threading.Lock()
        """Guards who has the lane."""
        self._reply_places = [(address_of(slot.reply), len(slot.reply)) for slot in slots]

    # -- what a transport provides

    @abstractmethod
    def _send_otherwise(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        """See ``_send``."""

    @abstractmethod
    def _await_otherwise(self, slot: HostSlot, deadline: float) -> int:
        """See ``_await_reply``."""

    @abstractmethod
    def _take_otherwise(self, slot: HostSlot) -> bool:
        """See ``_take_late``."""

    @abstractmethod
    def _expect_otherwise(self, slot: HostSlot, request_id: int) -> None:
        """A request goes over the lane; its reply will come the other way, should the lane end."""

    @abstractmethod
    def _had(self, index: int) -> None:
        """The reply has come over the lane, or nothing was sent."""

    @abstractmethod
    def _ask_otherwise(self, slot: HostSlot, request_id: int) -> None:
        """Asks, by a ping of this id, whether the server has the request; it answers only if it has not."""

    @abstractmethod
    def _send_again(self, slot: HostSlot, request_id: int) -> None:
        """Sends the frame in ``slot.request``, which was lost on the lane."""

    @abstractmethod
    def _has_arrived(self, index: int) -> bool:
        """Whether the reply has come the other way."""

    # -- the lane

    def open_lane(self, host: str, port: int, token: bytes, key: LaneKey | None, timeout_s: float) -> None:
        """Tries to open the lane, in the clear without a key; without a lane this channel is slower, and works."""
        lane_programs()  # compiles, if need be, before the server waits
        timeout_s = min(timeout_s, OPEN_TIMEOUT_S)
        deadline = perf_counter() + timeout_s
        try:
            with ExitStack() as stack:
                connection = stack.enter_context(socket.create_connection((host, port), timeout_s))
                connection.sendall(token)
                lane = Lane(connection, room=len(self.slots[0].reply), most_bytes=LANE_BYTES, key=key)
                stack.pop_all()
        except OSError as error:
            self.remark = f"without a lane: port {port}: {error.strerror or error}"
            return
        slot, request_id = self.slots[0], self._ids[0]
        self._ids[0] += len(self.slots)
        FrameHeader(Kind.PING, request_id=request_id).pack_into(slot.request)
        lane.aim(*self._reply_places[0])
        try:
            if lane.send(slot.request[:HEADER_BYTES]):
                while not lane.receive() and perf_counter() < deadline:
                    lane.wait(max(0.0, deadline - perf_counter()))
                if lane.receive() == HEADER_BYTES and peek_request_id(slot.reply) == request_id:
                    lane.taken()
                    self._lane = lane
                    return
            self.remark = f"without a lane: port {port} does not answer"
        except LaneEndedError:
            self.remark = f"without a lane: port {port} was closed"
        lane.close()

    def _take_lane(self, slot: HostSlot) -> Lane | None:
        """The lane for a request of this slot, if it is free; `_free_lane` or `_lose_lane` gives it back."""
        if self._lane_slot == slot.index:
            self._lose_lane()  # Ctrl-C came when it had just been taken
        with self._taking:
            lane = self._lane
            if lane is None or self._lane_slot != _NOBODY:
                return None
            self._lane_slot = slot.index
        lane.aim(*self._reply_places[slot.index])
        return lane

    def _free_lane(self, index: int) -> None:
        """The reply is here, or nothing was sent."""
        self._had(index)
        self._lane_slot = _NOBODY

    def _lose_lane(self) -> None:
        """From now on everything goes through ZeroMQ, the reply that was expected here too. By who has the lane."""
        with self._taking:
            lane, self._lane, self._lane_slot = self._lane, None, _NOBODY
        if lane is not None:
            lane.close()
            self.remark = "without a lane: it broke"
            log.info("%s channel: the lane broke; small frames take another way from now on", self.name)

    def _expect(self, slot: HostSlot, request_id: int) -> None:
        """A request goes over the lane; its reply comes there, or through ZeroMQ should the lane end."""
        self._expect_otherwise(slot, request_id)
        self._awaited_id = request_id
        self._mark_sent(slot)

    def send_by(self, slot: HostSlot, code: CompiledSlot, *values: int) -> int:
        """See `HostChannel.send_by`."""
        index, request_id = slot.index, self._ids[slot.index]
        self._check_held(slot)
        code.lane.value = code.sent.value = 0
        lane = self._take_lane(slot)
        if lane is None:
            return super().send_by(slot, code, *values)
        self._enter()
        try:
            # First: Ctrl-C may come at any time, and an id must not be used twice.
            self._expect(slot, request_id)
            try:
                code.lane.value = lane.address
                n_bytes = code.post(code.block, 0, *values)
            finally:
                if code.sent.value <= 0:
                    self._unmark_sent(slot)
                    if code.sent.value < 0:
                        self._lose_lane()
                    else:
                        self._free_lane(index)
            if n_bytes > 0 and code.sent.value <= 0:
                self._send_otherwise(slot, n_bytes, request_id)
            return n_bytes
        finally:
            self._leave()

    def look_by(self, slot: HostSlot, code: CompiledSlot, *values: int, timeout_s: float) -> bool:
        """See `HostChannel.look_by`."""
        lane, index = self._lane, slot.index
        if lane is None or self._lane_slot != index or self._states[index] != SlotState.SENT:
            return False
        spin = lane.spin
        budget_s = min(spin.budget_s, timeout_s)
        if budget_s <= 0:
            return False
        self._enter()
        started = perf_counter()
        code.taken.value, code.lane.value = 0, lane.address  # the request may have been sent in another way
        try:
            seen = code.collect(code.block, *values, int(budget_s * 1e9))
        finally:
            if code.taken.value:
                self._states[index] = SlotState.HELD
                self._free_lane(index)
            self._leave()
        if seen == Seen.CALLED:
            return False
        spin.met(seen)
        if seen == Seen.NEWS:
            spin.learn(perf_counter() - started)
            return True
        lane.looked_since = started
        return False

    def _send(self, slot: HostSlot, n_bytes: int, request_id: int) -> None:
        lane = self._take_lane(slot)
        small = n_bytes <= LANE_BYTES and n_bytes == peek_frame_bytes(slot.request)
        if lane is not None and not small:
            self._free_lane(slot.index)
        elif lane is not None:
            self._expect(slot, request_id)
            if lane.send(slot.request[:n_bytes]):
                return
            self._lose_lane()
            self._unmark_sent(slot)
        self._send_otherwise(slot, n_bytes, request_id)

    def _await_reply(self, slot: HostSlot, deadline: float) -> int:
        index, lane = slot.index, self._lane
        if lane is not None and self._lane_slot == index:
            n_bytes = self._await_lane(slot, lane, deadline)
            if n_bytes:
                return n_bytes
            # The reply comes the other way, if the request has not been lost with the lane, or the reply itself.
            self._asked_for = index
            self._ask_otherwise(slot, self._awaited_id)
        n_bytes = self._await_otherwise(slot, deadline)
        if index == self._asked_for:
            self._asked_for = _NOBODY
            if n_bytes == HEADER_BYTES and is_ping(slot.reply):
                self._send_again(slot, self._awaited_id)
                n_bytes = self._await_otherwise(slot, deadline)
        return n_bytes

    def _await_lane(self, slot: HostSlot, lane: Lane, deadline: float) -> int:
        """As `_await_reply`; 0 if the reply has to be waited for at the socket."""
        while True:
            try:
                n_bytes = lane.receive()
            except LaneEndedError:
                self._check_open()
                self._lose_lane()
                return 0
            if n_bytes:
                if peek_request_id(slot.reply) != self._awaited_id:
                    self.n_stale += 1
                    self._lose_lane()
                    return 0
                lane.taken()
                self._free_lane(slot.index)
                return n_bytes
            self._check_open()
            left_s = deadline - perf_counter()
            if left_s <= 0:
                raise DeadlineError
            lane.wait(left_s)

    def _take_late(self, slot: HostSlot) -> bool:
        lane = self._lane
        if lane is not None and self._lane_slot == slot.index:
            with suppress(LaneEndedError):
                if lane.receive():
                    lane.taken()
                    self._free_lane(slot.index)
                    return True
                if not self._has_arrived(slot.index):
                    return False
            self._lose_lane()  # it has ended; or the reply was lost there, and must not come any more
        return self._take_otherwise(slot)

    def _wake(self) -> None:
        if (lane := self._lane) is not None:
            lane.end()

    def _dispose(self) -> None:
        if self._lane is not None:
            self._lane.close()

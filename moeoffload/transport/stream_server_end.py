"""The server's end of one attach over the stream: what is its own, beside the listener that all of them share.

The server's slot is the one with the number of the host's slot (request id modulo slots): a host uses a slot again only
when it has the whole reply, so a reply can be sent from where it was written, without a copy.
"""

from __future__ import annotations

import socket
from typing import Protocol

from moeoffload.transport.base import ChannelOffer, ChannelSizes, Deliver, ServerSlot
from moeoffload.transport.lane_door import LaneDoor
from moeoffload.transport.lane_key import LaneKey
from moeoffload.transport.lane_reader import LaneReader
from moeoffload.transport.pool import PooledServerChannel
from moeoffload.transport.zmq_socket import FrameSocket, IncomingFrame, OutgoingFrame, new_routing_id, slot_buffers
from moeoffload.wire import HEADER_BYTES, ErrorCode, is_ping, peek_frame_bytes, peek_request_id


class Listener(Protocol):
    """What reads and writes the socket for all channels."""

    port: int
    lane_door: LaneDoor | None

    @property
    def public_key(self) -> str:
        """The CURVE key by which hosts know it; empty without encryption."""

    def agree(self, key: str) -> LaneKey | None:
        """What seals the lane of the host with this public key; None where that is not possible."""

    def send(self, routing_id: bytes, request_id: int, frame: OutgoingFrame, n_bytes: int) -> bool:
        """Sends one frame to one host, from any thread; False if it is not connected."""

    def forget(self, channel: StreamServerEnd) -> None:
        """Tells the host of a closed channel so, and drops from now on what it sends."""


class StreamServerEnd(PooledServerChannel):
    """The server's end of one attach; made by `StreamListener.open_channel`."""

    name = "stream"

    def __init__(self, listener: Listener, sizes: ChannelSizes, deliver: Deliver, key: str) -> None:
        buffers = slot_buffers(sizes)
        super().__init__(tuple(ServerSlot(i, *pair) for i, pair in enumerate(buffers)), deliver)
        self.key = key
        """The host's public CURVE key; empty without encryption."""
        self.routing_id = b"" if key else new_routing_id()
        """Where replies go; with encryption it is known once the host has sent something."""
        parameters = {"port": str(listener.port)}
        parameters |= {"server_key": listener.public_key} if key else {"routing_id": self.routing_id.hex()}
        self._listener = listener
        self._lane: LaneReader | None = None
        self.most_reply_bytes = sizes.reply_bytes
        self._by_lane = [False] * sizes.n_slots
        """Per slot whether its request came over the lane."""
        self._disowned = [0] * sizes.n_slots
        """Per slot the id of the last ping: the host was told that no request of this id is here."""
        self._pong = memoryview(bytearray(HEADER_BYTES))
        self._pong_out = OutgoingFrame(self._pong)
        self._short = memoryview(bytearray(HEADER_BYTES))
        """A frame from the socket without a body: a ping must not touch the request that the lane brings meanwhile."""
        self._lane_door, self._lane_token = listener.lane_door, ""
        self._lane_key = listener.agree(key) if key else None
        if self._lane_door is not None and (self._lane_key is not None or not key):
            self._lane_token = self._lane_door.expect(self._enter_lane)
            parameters |= {"lane_port": str(self._lane_door.port), "lane_token": self._lane_token}
        self.offer = ChannelOffer(self.name, sizes, parameters)
        self._outgoing = [OutgoingFrame(reply) for _, reply in buffers]
        self._incoming = [IncomingFrame(request) for request, _ in buffers]

    def receive(self, wire: FrameSocket, request_id: int, at: int, frame_bytes: int) -> tuple[ServerSlot, int] | None:
        """Takes one piece in; the slot and the frame's bytes if the frame is now complete or wrong, else None."""
        slot = self.slots[request_id % len(self.slots)]
        incoming = self._incoming[slot.index]
        if not HEADER_BYTES <= frame_bytes <= len(slot.request):
            wire.skip()
            incoming.request_id = request_id
            return (slot, frame_bytes) if at == 0 else None
        piece = incoming.expects(request_id, at, frame_bytes)
        if piece is None:
            wire.skip()
            self.n_dropped += 1
            return None
        whole = incoming.took(wire.receive_piece(self._short if frame_bytes == HEADER_BYTES else piece))
        if whole is None:
            return slot, 0
        return (slot, frame_bytes) if whole else None

    def is_busy(self, request_id: int) -> bool:
        """Whether the slot of this request still has another one."""
        return self._busy[request_id % len(self.slots)]

    def is_working_on(self, request_id: int) -> bool:
        """Whether the slot of this request has that very one."""
        index = request_id % len(self.slots)
        return self._busy[index] and self._incoming[index].request_id == request_id

    def received(self, slot: ServerSlot, n_bytes: int, *, by_lane: bool = False) -> None:
        """Hands a request on, if it is one: ``n_bytes`` may be more or less than a slot takes."""
        with self._delivering:  # two threads may deliver: the reader of the socket, and that of the lane
            if self._busy[slot.index]:
                self.n_dropped += 1  # not a host that keeps to the rules: it has sent both ways
                return
            self._by_lane[slot.index] = by_lane
            if n_bytes == HEADER_BYTES and not by_lane:
                slot.request[:HEADER_BYTES] = self._short
            self._received(slot, n_bytes)

    def _received(self, slot: ServerSlot, n_bytes: int) -> None:
        request_id = self._incoming[slot.index].request_id
        if n_bytes > len(slot.request):
            text = f"a frame of {n_bytes} bytes does not fit into a slot of {len(slot.request)} bytes"
            self._refuse(slot, request_id, ErrorCode.CAPACITY, text)
        elif n_bytes < HEADER_BYTES or peek_request_id(slot.request) != request_id:
            self._refuse(slot, request_id, ErrorCode.BAD_FRAME, "what arrived is not the announced frame")
        elif n_bytes == HEADER_BYTES and is_ping(slot.request):
            self._answer_ping(slot, request_id)
        else:
            self._deliver(slot, n_bytes)

    def _answer_ping(self, slot: ServerSlot, request_id: int) -> None:
        with self._lock:  # not from the slot's buffer: its last reply may be on its way
            if self._closed:
                return
            self._pong[:] = slot.request[:HEADER_BYTES]
            lane = self._lane if self._by_lane[slot.index] else None
            if lane is not None:
                lane.send(self._pong)
            else:
                self._disowned[slot.index] = request_id
                if not self._listener.send(self.routing_id, request_id, self._pong_out, HEADER_BYTES):
                    self.n_dropped += 1

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None:
        lane = self._lane if self._by_lane[slot.index] else None
        if lane is not None:
            # What is not as long as its header says would put the lane out of step.
            if n_bytes == peek_frame_bytes(slot.reply) and lane.send(slot.reply[:n_bytes]):
                return
            lane.end()  # so that the host looks elsewhere
        request_id = self._incoming[slot.index].request_id
        if not self._listener.send(self.routing_id, request_id, self._outgoing[slot.index], n_bytes):
            self.n_dropped += 1

    def _close(self) -> None:
        if self._lane_door is not None:
            self._lane_door.forget(self._lane_token)
        if self.express is not None:
            self.express.call_back()
        if (lane := self._lane) is not None:
            lane.close()
        self._listener.forget(self)

    # -- the lane

    @property
    def lane(self) -> int:
        """See `ServerChannel.lane`."""
        return 0 if self._lane is None else self._lane.lane.address

    def _enter_lane(self, connection: socket.socket) -> bool:
        with self._lock:
            if not self._closed:
                self._lane = LaneReader(connection, self, self._lane_key)
            return not self._closed

    def take_from_lane(self, frame: memoryview) -> bool:
        """See `LaneOwner`."""
        request_id = peek_request_id(frame)
        index = request_id % len(self.slots)
        slot = self.slots[index]
        with self._delivering:
            is_old = request_id <= self._disowned[index]
            if self._busy[index] or is_old or len(frame) > len(slot.request):
                self.n_dropped += 1
                return False
            slot.request[: len(frame)] = frame
            self._incoming[index].request_id = request_id
            self.received(slot, len(frame), by_lane=True)
        self.do_work()
        return True

    def lane_ended(self) -> None:
        """See `LaneOwner`."""
        unsent = None if self.express is None else self.express.unsent
        if unsent is not None:
            self._listener.send(self.routing_id, peek_request_id(unsent), OutgoingFrame(unsent), len(unsent))

"""The server's end of a lane: the thread that reads it, for the channel it belongs to."""

from __future__ import annotations

import mmap
import socket
import threading
from typing import Final, Protocol

from moeoffload.kernels.watch import Seen
from moeoffload.transport.base import Express
from moeoffload.transport.lane import LANE_BYTES, Lane, LaneEndedError, address_of
from moeoffload.transport.lane_key import LaneKey

READ_POLL_S: Final = 0.5


class LaneOwner(Protocol):
    """The channel, as the reader sees it."""

    express: Express | None
    most_reply_bytes: int
    """Of the longest reply that the host takes."""

    def take_from_lane(self, frame: memoryview) -> bool:
        """Copies a request and does what it asks for; False if the host does not keep to the rules."""

    def lane_ended(self) -> None:
        """The lane is of no use any more."""


class LaneReader:
    """Reads until the lane ends. Replies are sent by whoever has them."""

    def __init__(self, connection: socket.socket, owner: LaneOwner, key: LaneKey | None) -> None:
        """Starts to read."""
        self.lane = Lane(connection, room=LANE_BYTES, most_bytes=owner.most_reply_bytes, key=key)
        self._frame = memoryview(mmap.mmap(-1, LANE_BYTES))
        self.lane.aim(address_of(self._frame), LANE_BYTES)
        self._owner = owner
        self._sending = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._read, name="lane-reader", daemon=True)
        self._thread.start()

    def send(self, frame: memoryview) -> bool:
        """Sends a reply, from any thread; False if it cannot be had on the lane, which has ended then."""
        with self._sending:  # the reader frees the descriptor
            sent = not self._closed and self.lane.send(frame)
        if not sent:
            self.lane.end()
        return sent

    def end(self) -> None:
        """Ends the lane; the reader frees it."""
        self.lane.end()

    def close(self) -> None:
        """Ends the lane and waits for the reader, unless that is this thread."""
        self.lane.end()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _read(self) -> None:
        lane, owner = self.lane, self._owner
        try:
            while True:
                seen = None
                if (express := owner.express) is not None:
                    seen = express.serve(lane.spin)
                    if express.unsent is not None:
                        return
                    lane.looked_since = None if seen is None else express.looked_since
                n_bytes = lane.receive()
                if n_bytes:
                    lane.looked_since = None
                    if not owner.take_from_lane(self._frame[:n_bytes]):
                        return
                    lane.taken()
                elif seen != Seen.CALLED:
                    lane.wait(READ_POLL_S)
        except LaneEndedError:
            pass
        finally:
            owner.lane_ended()  # first: the host asks for what it waits for as soon as the lane has ended
            with self._sending:
                self._closed = True
                lane.close()

"""Replies of a server on their way through the host's ends of both transports to the link that awaits them."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from typing import Any

import torch
from shapes import EPOCH, LAYOUT, N_EXPERTS, ScriptedSocket, pack_messages, reply_frame, seal, unpack_messages

from moeoffload.errors import MoeOffloadError
from moeoffload.host.link import Deadlines, ExpertLink, LinkInfo
from moeoffload.host.recorder import CallCounters
from moeoffload.placement import ExpertTable
from moeoffload.transport import ChannelSizes, HostChannel, SharedServerEnd, open_shared
from moeoffload.transport.spin import AdaptiveSpin
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.transport.zmq_socket import ROUTING_ID_BYTES, TAG
from moeoffload.wire import ErrorCode, FrameHeader, Kind

STREAM = 1
SEAL = 2
RIGHT_ID = 4
SIZES = ChannelSizes(2, LAYOUT.request_bytes, LAYOUT.reply_bytes)
ROWS = 3


class _Peer:
    """What a link needs of its client and its lease."""

    def listen(self, on_end: object) -> None:
        """It never ends."""

    def why_ended(self, timeout_s: float) -> None:
        """It has not ended."""


class _Host:
    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self._server = SharedServerEnd(SIZES, lambda channel, slot: None)
        self.shared = open_shared(self._server.offer)
        self.shared._spin = AdaptiveSpin(0)
        self.stream = StreamHostEnd(SIZES, "tcp://127.0.0.1:9", b"m" + secrets.token_bytes(ROUTING_ID_BYTES - 1), None)
        self.socket = ScriptedSocket()
        self.stream._wire.socket = self.socket  # type: ignore[assignment]
        self.links = {
            channel.name: self._link(channel, timeout_s)
            for channel, timeout_s in ((self.shared, 0.002), (self.stream, 0.0))
        }
        generator = torch.Generator().manual_seed(0)
        self._rows = torch.randn(ROWS, LAYOUT.hidden, generator=generator).to(torch.bfloat16)
        self._ids = torch.tensor([[0, 1], [2, 2], [1, 0]])
        self._weights = torch.ones(ROWS, LAYOUT.top_k)

    def _link(self, channel: HostChannel, timeout_s: float) -> ExpertLink:
        peer: Any = _Peer()
        return ExpertLink(
            LinkInfo("server:1", "cpu", "", channel.name, "", "", N_EXPERTS, 0),
            peer,
            peer,
            channel,
            LAYOUT,
            EPOCH,
            ExpertTable((tuple(range(N_EXPERTS)),)),
            [N_EXPERTS],
            torch.device("cpu"),
            Deadlines(timeout_s, timeout_s, len(channel.slots), []),
        )

    def exchange(self, mode: int, data: bytes) -> None:
        """Sends one request; ``data`` is what comes back."""
        name = "stream" if mode & STREAM else "shared"
        link, channel = self.links[name], (self.stream if mode & STREAM else self.shared)
        flight: Any = link.take(wait=True)
        if not link.send(flight, 0, 0, (self._rows, self._ids, self._weights), CallCounters()):
            raise AssertionError("nothing was sent")
        index = flight.slot.index
        try:
            if mode & STREAM:
                self._script(data, mode, flight.request_id)
            else:
                self._write(data, mode, index, flight.request_id)
            sums = link.receive(flight, CallCounters())
            if sums is None or sums.shape != (ROWS, LAYOUT.hidden):
                raise AssertionError("no sums of the right shape")
        except MoeOffloadError as error:
            if not str(error).isprintable():
                raise AssertionError(f"not one line: {error!r}") from error
        finally:
            self.socket.forget()
            self.stream._closed = ""  # a server may say so at any time
            link.release(flight)
            if channel._n_abandoned:
                self._answer_late(mode, index, flight.request_id)

    def _script(self, data: bytes, mode: int, request_id: int) -> None:
        for parts in unpack_messages(data):
            if mode & RIGHT_ID and len(parts) > 1:
                parts[0] = request_id.to_bytes(8, "little") + parts[0][8:]
                parts[1] = _with_id(parts[1], request_id)
            if mode & SEAL and len(parts) > 1:
                parts[1] = seal(parts[1])
            self.socket.messages.append(parts)

    def _write(self, data: bytes, mode: int, index: int, request_id: int) -> None:
        length, frame = data[0], data[1:]
        if mode & RIGHT_ID:
            frame = _with_id(frame, request_id)
        if mode & SEAL:
            frame = seal(frame)
        area = self._server.slots[index].reply
        area[: len(frame)] = frame[: len(area)]
        n_bytes = len(frame) if length <= 250 else (0, 63, LAYOUT.reply_bytes + 1, 2**63, 2**64 - 1)[length - 251]
        self._announce(index, n_bytes, request_id)

    def _announce(self, index: int, n_bytes: int, request_id: int) -> None:
        words, at = self._server._words, self._server._segment.reply_at[index]
        words[at], words[at + 1] = n_bytes, request_id
        self._server._segment.reply_semaphores[index].release()
        words[at + 2] = request_id

    def _answer_late(self, mode: int, index: int, request_id: int) -> None:
        """Else the slot would wait for its reply for ever."""
        if mode & STREAM:
            self.socket.messages = [[TAG.pack(request_id, 0, 64), bytes(64)]]
            self.stream._collect_late()
            self.stream._closed = ""
        else:
            self._announce(index, 64, request_id)
            self.shared._collect_late()


def _with_id(frame: bytes, request_id: int) -> bytes:
    return frame[:8] + request_id.to_bytes(8, "little") + frame[16:] if len(frame) >= 16 else frame


def make() -> Callable[[bytes], None]:
    """The function to be fuzzed."""
    host = _Host()

    def one_input(data: bytes) -> None:
        if 4 < len(data) <= LAYOUT.reply_bytes:
            host.exchange(data[0], data[1:])

    return one_input


def seeds() -> dict[str, bytes]:
    """Inputs made of real frames."""
    ping = bytearray(64)
    FrameHeader(Kind.CANCEL, request_id=2).pack_into(memoryview(ping))
    frames = {
        "sum": reply_frame(2, ROWS),
        "payload": reply_frame(2, 1, Kind.ERROR, b"holds a value that is not finite", ErrorCode.PAYLOAD),
        "payload-row": reply_frame(2, 2**31, Kind.ERROR, b"x\ny", ErrorCode.PAYLOAD),
        "busy": reply_frame(2, 0, Kind.ERROR, "d\u00e9j\u00e0 vu \u2028".encode(), ErrorCode.BUSY),
        "ping": bytes(ping),
    }
    found = {f"shared-{name}": bytes([SEAL | RIGHT_ID, 0]) + frame for name, frame in frames.items()}
    for name, frame in frames.items():
        message = [TAG.pack(2, 0, len(frame)), frame]
        found[f"stream-{name}"] = bytes([STREAM | SEAL | RIGHT_ID]) + pack_messages([message])
    lies = [[TAG.pack(2, 0, 2**31), b""], [TAG.pack(2, 1 << 20, 100), b"x"], [b"no tag"], [TAG.pack(0, 0, 0), b""]]
    found["stream-lies"] = bytes([STREAM]) + pack_messages(lies)
    return found

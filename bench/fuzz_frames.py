"""Fuzzed frames over both transports of a real server."""

from __future__ import annotations

import random
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import zmq
from fuzz_peer import INTERESTING_64, Attached, Model, Server, mutated, sealed

from moeoffload.errors import ProtocolError
from moeoffload.transport.segment import HOST_CLOSED, Segment
from moeoffload.transport.zmq_socket import PIECE_BYTES, TAG
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind

ANSWER_S: Final = 20.0
"""Longest wait for an answer, on a machine that may be busy."""


@dataclass
class Counts:
    """What came of the inputs of one part of a run."""

    inputs: int = 0
    good: int = 0
    """Answered with a result."""
    refused: int = 0
    dropped: int = 0
    """Not to be answered: no such slot, no such sender, no tag."""
    crashes: int = 0
    """Answers that say that the server did not foresee it."""
    hangs: int = 0

    def answer(self, header: FrameHeader, frame: memoryview) -> None:
        """Counts one reply."""
        try:
            header.unpack_from(frame)
        except ProtocolError:
            self.crashes += 1
            return
        if header.kind == Kind.COMBINE:
            self.good += 1
        elif header.kind == Kind.ERROR:
            self.refused += 1
            self.crashes += header.code == ErrorCode.INTERNAL
        else:
            self.dropped += header.kind == Kind.CANCEL


def fuzzed_frame(frames: list[bytearray], request_id: int, epoch: int, rng: random.Random) -> bytes:
    """A frame that is almost right, most of the time with the checksum and the ids that it needs to get far."""
    frame = bytearray(rng.choice(frames))
    struct.pack_into("<QI", frame, 8, request_id, epoch)
    kind = rng.randrange(8)
    if kind == 0:
        return sealed(frame)
    if kind < 4:  # one field of the header
        at, width = rng.choice(((4, 1), (5, 1), (6, 1), (7, 1), (16, 4), (20, 2), (22, 2), (24, 4), (28, 4), (32, 8)))
        value = rng.choice(INTERESTING_64) if rng.random() < 0.7 else rng.getrandbits(64)
        frame[at : at + width] = (value & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        return sealed(frame)
    if kind < 6:  # something of the body: values that are none, slots that are none
        at = rng.randrange(HEADER_BYTES, len(frame))
        frame[at : at + 16] = rng.choice((b"\xff" * 16, b"\x7f" * 16, rng.randbytes(16)))[: len(frame) - at]
        return sealed(frame)
    changed = mutated(bytes(frame), rng)
    return sealed(changed) if kind == 6 else changed


class SharedFuzz:
    """Writes into the segment what it likes, as a host can."""

    def __init__(self, server: Server, model: Model) -> None:
        self.peer = Attached(server.address, model, "shared")
        self._segment = Segment.open(self.peer.channel.parameters["segment"], self.peer.sizes)
        self._requests, self._replies = zip(*self.peer.sizes.buffers(self._segment.buffers), strict=True)
        self.peer.epoch = self.peer.lease.accept("shared", self._segment.nonce, "fuzz")
        self._n_sent = 0
        self._awaited: dict[int, int] = {}
        self._unanswered: set[int] = set()
        """Places of the ring with entries that name no slot; the entry of slot i is at place i otherwise."""
        self._header = FrameHeader()

    def exchange(self, frame: bytes | bytearray, request_id: int) -> bytes:
        """A request that is answered; its reply."""
        counts = Counts()
        self._requests[0][: len(frame)] = frame
        self._post(0, len(frame), request_id)
        self._awaited[0] = request_id
        self._settle(0, counts)
        assert not counts.hangs
        n_bytes = self._segment.words[self._segment.reply_at[0]]
        return bytes(self._replies[0][:n_bytes])

    def run(self, seconds: float, least: int, rng: random.Random, counts: Counts) -> None:
        """Sends frames for ``seconds`` or until there are ``least``, whatever takes longer."""
        frames = self.peer.frames()
        areas, n_slots = self._requests, self.peer.n_slots
        until = time.monotonic() + seconds
        while counts.inputs < least or time.monotonic() < until:
            if counts.hangs:
                return
            index = counts.inputs % n_slots
            counts.inputs += 1
            request_id = rng.getrandbits(64) if rng.random() < 0.05 else n_slots * counts.inputs + index
            frame = fuzzed_frame(frames, request_id, self.peer.epoch, rng)
            n_bytes = min(len(frame), len(areas[index]))
            if index in self._awaited and rng.random() < 0.05:
                areas[index][:n_bytes] = frame[:n_bytes]  # under the hands of the server
            self._settle(index, counts)
            areas[index][:n_bytes] = frame[:n_bytes]
            self._wait_until_read(index, counts)
            if rng.random() < 0.03:
                self._unanswered.add(index)
                self._post(rng.choice((n_slots, 2**32, 2**64 - 1)), n_bytes, request_id)
                counts.dropped += 1
                continue
            if rng.random() < 0.05:
                n_bytes = rng.choice(INTERESTING_64)
            # Unlike the one before, so that the answer can be told from it.
            self._awaited[index] = request_id
            self._segment.words[self._segment.reply_at[index] + 1] = request_id ^ 1
            self._post(index, n_bytes, request_id)
        for index in range(n_slots):
            self._settle(index, counts)

    def _post(self, index: int, n_bytes: int, request_id: int) -> None:
        words, at = self._segment.words, self._segment.ring_at[self._n_sent % self.peer.n_slots]
        self._n_sent += 1
        words[at], words[at + 1], words[at + 2] = index, n_bytes, request_id
        self._segment.request_semaphore.release()
        words[at + 3] = self._n_sent

    def _wait_until_read(self, place: int, counts: Counts) -> None:
        """An entry that nobody answers must not be overwritten either: it is read when one after it is answered."""
        if place not in self._unanswered:
            return
        self._unanswered.discard(place)
        n_slots = self.peer.n_slots
        following = [index % n_slots for index in range(place + 1, place + n_slots)]
        answered = next((index for index in following if index in self._awaited), None)
        if answered is None:  # all around the ring: none of them tells
            time.sleep(0.1)
        else:
            self._settle(answered, counts)

    def _settle(self, index: int, counts: Counts) -> None:
        request_id = self._awaited.pop(index, None)
        if request_id is None:
            return
        words, at = self._segment.words, self._segment.reply_at[index]
        deadline = time.monotonic() + ANSWER_S
        while words[at + 1] != request_id:
            time.sleep(0)
            if time.monotonic() > deadline:
                counts.hangs += 1
                return
        # The token comes after the id.
        self._segment.reply_semaphores[index].acquire(ANSWER_S)
        counts.answer(self._header, self._replies[index])

    def close(self) -> None:
        """Leaves the server."""
        self._segment.words[HOST_CLOSED] = 1
        self._segment.request_semaphore.release()
        self._segment.close()
        self.peer.close()


class StreamFuzz:
    """Sends ZeroMQ messages as it likes, also under names that the server does not know."""

    def __init__(self, server: Server, model: Model) -> None:
        self.peer = Attached(server.address, model, "stream")
        parameters = self.peer.channel.parameters
        self.port = int(parameters["port"])
        self.peer.epoch = self.peer.lease.accept("stream", b"", "fuzz")
        self._context = zmq.Context()
        self._socket = self._connect(bytes.fromhex(parameters["routing_id"]))
        self._strangers = [self._connect(b"m" + random.randbytes(length)) for length in (4, 31, 200)]
        self._header = FrameHeader()
        self._reply = bytearray(PIECE_BYTES)

    def _connect(self, routing_id: bytes) -> zmq.Socket[bytes]:
        socket_ = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 64), (zmq.SNDTIMEO, 20_000)):
            socket_.setsockopt(option, value)
        socket_.setsockopt(zmq.ROUTING_ID, routing_id)
        socket_.connect(f"tcp://127.0.0.1:{self.port}")
        return socket_

    def run(self, seconds: float, least: int, rng: random.Random, counts: Counts) -> None:
        """As `SharedFuzz.run`."""
        frames = self.peer.frames()
        until = time.monotonic() + seconds
        while counts.inputs < least or time.monotonic() < until:
            counts.inputs += 1
            self._send_one(frames, rng, counts)
            # Some in step, so that slots are free again; some as fast as they go.
            if counts.inputs % (4 if counts.inputs & 1024 else 256) == 0 and not self._in_step(counts):
                return

    def _send_one(self, frames: list[bytearray], rng: random.Random, counts: Counts) -> None:
        request_id = counts.inputs if rng.random() < 0.9 else rng.getrandbits(64)
        frame = fuzzed_frame(frames, request_id, self.peer.epoch, rng)
        kind = rng.random()
        if kind < 0.7:
            parts = [TAG.pack(request_id, 0, len(frame)), frame]
        elif kind < 0.9:
            values = [rng.choice(INTERESTING_64), rng.choice(INTERESTING_64), rng.choice(INTERESTING_64)]
            if rng.random() < 0.5:
                values = [request_id, rng.choice((0, PIECE_BYTES, 2 * PIECE_BYTES)), rng.choice(INTERESTING_64)]
            parts = [TAG.pack(values[0], values[1] & 0xFFFFFFFF, values[2] & 0xFFFFFFFF), frame]
        elif kind < 0.999:
            parts = [rng.randbytes(rng.choice((0, 1, 15, 16, 17, 64))) for _ in range(rng.randint(1, 5))]
        else:  # cut off by the server, and connected again by ZeroMQ
            parts = [TAG.pack(request_id, 0, 2 * PIECE_BYTES), bytes(PIECE_BYTES + 1)]
        to = self._socket if rng.random() < 0.95 else rng.choice(self._strangers)
        to.send_multipart(parts)

    def _read(self, counts: Counts, awaited: int | None = None) -> bool:
        """Takes in what has come; whether the answer to ``awaited`` was there."""
        found = False
        with suppress(zmq.Again):
            while True:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(parts) != 2 or len(parts[0]) != TAG.size:
                    counts.crashes += 1
                    continue
                found = found or TAG.unpack(parts[0])[0] == awaited
                counts.answer(self._header, memoryview(parts[1]))
        return found

    def _in_step(self, counts: Counts) -> bool:
        """Waits for a cancellation to come back: the server has seen all that came before."""
        deadline = time.monotonic() + ANSWER_S
        ping = bytearray(HEADER_BYTES)
        request_id = 2**62 + 4 * counts.inputs
        FrameHeader(Kind.CANCEL, request_id=request_id).pack_into(memoryview(ping))
        while time.monotonic() < deadline:
            self._socket.send_multipart([TAG.pack(request_id, 0, HEADER_BYTES), ping])
            if self._socket.poll(50) and self._read(counts, request_id):
                return True
        counts.hangs += 1
        return False

    def close(self) -> None:
        """Leaves the server."""
        for each in (self._socket, *self._strangers):
            each.close()
        self._context.term()
        self.peer.close()


def _connect(port: int, patience_s: float = 5.0) -> socket.socket:
    """A connection. A server may stop listening for a moment, while it begins to listen anew."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=patience_s)
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
            time.sleep(0.01)


def fuzz_connections(port: int, seconds: float, least: int, greetings: list[bytes], rng: random.Random) -> Counts:
    """TCP connections that begin almost as they should and then say anything; some stay open for a while."""
    counts = Counts()
    kept: list[socket.socket] = []
    until = time.monotonic() + seconds
    while counts.inputs < least or time.monotonic() < until:
        counts.inputs += 1
        try:
            connection = _connect(port)
        except OSError:
            counts.hangs += 1
            break
        data = rng.choice(greetings)
        data = mutated(data, rng, 6) if rng.random() < 0.8 else data
        with suppress(OSError):
            connection.sendall(data + rng.randbytes(rng.choice((0, 0, 7, 300))))
            if rng.random() < 0.3:
                connection.settimeout(0.01)
                connection.recv(4096)
        counts.dropped += 1
        kept.append(connection)
        if len(kept) > 32:
            kept.pop(rng.randrange(len(kept))).close()
    for connection in kept:
        connection.close()
    return counts


ZMTP_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(16) + b"\x00" + bytes(31)
ZMTP_READY: Final = (
    ZMTP_GREETING + b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"
)
HTTP2_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS: Final = HTTP2_PREFACE + bytes.fromhex("000000040000000000")
# A HEADERS frame with a request for /moeoffload.v1.ExpertService/Stats, literal fields, then an empty gRPC message.
_FIELDS: Final = b"".join(
    b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/moeoffload.v1.ExpertService/Stats"),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)
HTTP2_CALL: Final = (
    HTTP2_SETTINGS
    + len(_FIELDS).to_bytes(3, "big")
    + b"\x01\x04\x00\x00\x00\x01"
    + _FIELDS
    + b"\x00\x00\x05\x00\x01\x00\x00\x00\x01\x00\x00\x00\x00\x00"
)

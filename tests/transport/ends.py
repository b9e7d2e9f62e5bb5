"""What the transport tests do with two ends: calls with a body, servers that answer when told to."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq
from server_processes import wait_until

from moeoffload.transport import ChannelSizes, HostChannel, HostSlot, ServerChannel, ServerSlot
from moeoffload.wire import HEADER_BYTES, FrameHeader, peek_request_id

SIZES = ChannelSizes(n_slots=4, request_bytes=HEADER_BYTES + 8192, reply_bytes=HEADER_BYTES + 8192)
SOON_S = 10.0
"""Deadline for what must happen, on a machine that may be busy."""


@dataclass
class Ends:
    host: HostChannel
    server: ServerChannel


def echo(channel: ServerChannel, slot: ServerSlot) -> None:
    slot.reply[: slot.n_bytes] = slot.request[: slot.n_bytes]
    channel.reply(slot, slot.n_bytes)


@dataclass
class OnDemand:
    """A server that answers only when told to."""

    requests: queue.SimpleQueue[tuple[ServerChannel, ServerSlot]] = field(default_factory=queue.SimpleQueue)

    def __call__(self, channel: ServerChannel, slot: ServerSlot) -> None:
        self.requests.put((channel, slot))

    def take(self) -> tuple[ServerChannel, ServerSlot]:
        return self.requests.get(timeout=SOON_S)

    def answer(self) -> None:
        echo(*self.take())


def send(host: HostChannel, slot: HostSlot, body: bytes = b"") -> int:
    """Sends a frame with this body; returns its request id."""
    header = FrameHeader(request_id=host.next_id(slot), body_bytes=len(body))
    header.pack_into(slot.request)
    slot.request[HEADER_BYTES : HEADER_BYTES + len(body)] = body
    host.send(slot, HEADER_BYTES + len(body))
    return header.request_id


def begin(host: HostChannel, body: bytes = b"") -> tuple[HostSlot, int]:
    """Sends a frame in a slot of its own; returns the slot and the request id."""
    slot = host.acquire(SOON_S)
    return slot, send(host, slot, body)


def receive(host: HostChannel, slot: HostSlot, request_id: int, timeout_s: float = SOON_S) -> bytes:
    """Waits for the reply to this request; returns its body."""
    n_bytes = host.wait(slot, timeout_s)
    assert peek_request_id(slot.reply) == request_id
    return bytes(slot.reply[HEADER_BYTES:n_bytes])


def call(host: HostChannel, body: bytes = b"", timeout_s: float = SOON_S) -> bytes:
    slot = host.acquire(timeout_s)
    try:
        return receive(host, slot, send(host, slot, body), timeout_s)
    finally:
        host.release(slot)


def reply_header(slot: HostSlot) -> FrameHeader:
    header = FrameHeader()
    header.unpack_from(slot.reply)
    return header


def eventually(true: Callable[[], object]) -> None:
    """Waits for what must become true."""
    wait_until(true, "what must become true", SOON_S)


@contextlib.contextmanager
def bare_dealer(
    port: int, routing_id: bytes, prepare: Callable[[zmq.Socket[bytes]], object] = lambda dealer: None
) -> Iterator[zmq.Socket[bytes]]:
    """A peer of the stream that sends what a test tells it to."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, routing_id)
        dealer.setsockopt(zmq.RCVTIMEO, int(SOON_S * 1000))
        prepare(dealer)
        dealer.connect(f"tcp://127.0.0.1:{port}")
        yield dealer

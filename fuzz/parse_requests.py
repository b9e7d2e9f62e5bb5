"""Requests of hosts on their way through the ends of both transports into the engine, with real kernels behind it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from shapes import EPOCH, LAYOUT, ScriptedSocket, dispatch_frame, experts, pack_messages, seal, unpack_messages

from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost, Request
from moeoffload.kernels import LayerKernels
from moeoffload.transport import ChannelSizes, ServerChannel, ServerSlot, SharedServerEnd, StreamListener
from moeoffload.transport.base import Work
from moeoffload.transport.segment import unlink
from moeoffload.transport.zmq_socket import TAG
from moeoffload.wire import HEADER_BYTES, ErrorCode, FrameHeader, Kind, read_error_text

STREAM = 1
SEAL = 2
SIZES = ChannelSizes(2, LAYOUT.request_bytes, LAYOUT.reply_bytes)
US = b"us"
"""Stands for the routing id of the channel, which is a secret."""


class _Server:
    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        self.engine = Engine()
        kernels = LayerKernels(experts(), self.engine.kernel_workspace)
        kernels.reserve(LAYOUT.capacity, LAYOUT.top_k)
        arena = HostArena(LAYOUT, torch.bfloat16)
        share = self.engine.shares.join("fuzz")
        self.host = ActiveHost(EPOCH, LAYOUT, [kernels, None], torch.bfloat16, arena, share)
        self.shared = SharedServerEnd(SIZES, self._deliver)
        unlink(self.shared._segment.name, SIZES.n_slots)
        self.listener = StreamListener()
        # Its reader goes: messages come from the script, in this thread.
        self.listener._closing = True
        self.listener._wire.wake()
        self.listener._reader.join()
        self.listener._closing = False
        self.socket = ScriptedSocket()
        self.listener._wire.socket = self.socket  # type: ignore[assignment]
        self.stream = self.listener.open_channel(SIZES, self._deliver)

    def _deliver(self, channel: ServerChannel, slot: ServerSlot) -> Work | None:
        if slot.owner is None:
            slot.owner = Request(self.host, channel, slot)
        slot.reply[:HEADER_BYTES] = bytes(HEADER_BYTES)
        return self.engine.submit(channel, slot)

    def _do(self, work: Work | None) -> None:
        if work is not None:
            work()

    def over_shared(self, data: bytes, reseal: bool) -> None:
        """Ring entry (slot, bytes, request id) of three bytes, then the frame."""
        index, length, request_id = data[0] % 4, data[1], data[2]
        frame = seal(data[3:]) if reseal else data[3:]
        if index < len(self.shared.slots):
            request = self.shared.slots[index].request
            n_bytes = min(len(frame), len(request))
            request[:n_bytes] = frame[:n_bytes]
        # Up to 250: as many bytes as there are; above: lengths that lie.
        n_bytes = len(frame) if length <= 250 else (0, 63, LAYOUT.request_bytes + 1, 2**63, 2**64 - 1)[length - 251]
        words, at = self.shared._words, self.shared._segment.ring_at[0]
        words[at], words[at + 1], words[at + 2] = (index if index < 3 else 2**64 - 1), n_bytes, request_id
        self._do(self.shared._take(at))

    def over_stream(self, data: bytes, reseal: bool) -> None:
        """A script of messages: routing id, tag, piece, more."""
        for parts in unpack_messages(data):
            if parts[0] == US:
                parts[0] = self.stream.routing_id
            if reseal and len(parts) > 2:
                parts[2] = seal(parts[2])
            if len(parts) == 1:
                parts.insert(0, b"stranger")  # a ROUTER always puts the sender's id in front
            self.socket.messages.append(parts)
        while self.listener._wire.readable():
            received = self.listener._receive()
            if received is not None:
                channel, slot, n_bytes = received
                self._do(channel.received(slot, n_bytes))

    def check(self, channel: Any) -> None:
        """Every request that was taken has its answer, and what is in the reply areas are frames."""
        if any(channel._busy):
            raise AssertionError("a request was not answered")
        header = FrameHeader()
        for slot in channel.slots:
            if not any(slot.reply[:HEADER_BYTES]):
                continue
            header.unpack_from(slot.reply)
            if header.kind == Kind.ERROR:
                text = read_error_text(slot.reply, header.body_bytes)
                if header.code == ErrorCode.INTERNAL:
                    raise AssertionError(f"not foreseen: {text}")


def make() -> Callable[[bytes], None]:
    """The function to be fuzzed."""
    server = _Server()

    def one_input(data: bytes) -> None:
        if len(data) < 5:
            return
        mode, rest = data[0], data[1:]
        if mode & STREAM:
            server.over_stream(rest, bool(mode & SEAL))
            server.check(server.stream)
        else:
            server.over_shared(rest, bool(mode & SEAL))
            server.check(server.shared)

    return one_input


def seeds() -> dict[str, bytes]:
    """Inputs made of real frames."""
    good = dispatch_frame(2, 1)
    found = {
        "shared": bytes([SEAL, 0, 0, 2]) + good,
        "shared-rows": bytes([SEAL, 1, 0, 3]) + dispatch_frame(3, 4, slot=2),
        "shared-bad-slot": bytes([SEAL, 0, 0, 2]) + dispatch_frame(2, 2, slot=-2),
        "shared-no-layer": bytes([0, 0, 0, 2]) + dispatch_frame(2, 2, layer=1),
        "shared-length": bytes([0, 0, 254, 2]) + good,
    }
    ping = bytearray(HEADER_BYTES)
    FrameHeader(Kind.CANCEL, request_id=2).pack_into(memoryview(ping))
    for name, messages in {
        "stream": [[US, TAG.pack(2, 0, len(good)), good]],
        "stream-two": [[US, TAG.pack(i, 0, len(good)), dispatch_frame(i, 1, slot=1)] for i in (2, 3)],
        "stream-ping": [[US, TAG.pack(2, 0, HEADER_BYTES), bytes(ping)]],
        "stream-lies": [[US, TAG.pack(2, 0, 2**31), good], [US, TAG.pack(2, 1 << 20, len(good)), good]],
        "stream-stranger": [[b"m" * 32, TAG.pack(2, 0, len(good)), good], [US, b"no tag"]],
    }.items():
        found[name] = bytes([STREAM | SEAL]) + pack_messages(messages)
    return found

"""What several targets share: a small model's experts, frames that belong to it, a socket that plays a script."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, Final

import torch
import zmq
from transformers import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from moeoffload.payload import PayloadDtype
from moeoffload.wire import HEADER_BYTES, FrameHeader, FrameLayout, Kind

N_EXPERTS: Final = 3
EPOCH: Final = 1
LAYOUT: Final = FrameLayout(16, 2, PayloadDtype.BF16, PayloadDtype.BF16, 4)


def experts() -> Any:
    """An experts module with random weights in bfloat16."""
    config = CONFIG_MAPPING["qwen3_moe"](
        hidden_size=LAYOUT.hidden, moe_intermediate_size=8, num_experts=N_EXPERTS, num_experts_per_tok=LAYOUT.top_k
    )
    config._experts_implementation = "eager"
    module = Qwen3MoeExperts(config).to(torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return module


def dispatch_frame(request_id: int, rows: int, slot: int = 0, layer: int = 0) -> bytes:
    """A good request."""
    frame = bytearray(HEADER_BYTES + rows * LAYOUT.dispatch_row_bytes)
    views = LAYOUT.dispatch_views(memoryview(frame), rows)
    views.rows.fill_(0.5)
    views.weights.fill_(0.25)
    views.slots.fill_(slot)
    FrameHeader(
        Kind.DISPATCH,
        LAYOUT.dtype_out,
        LAYOUT.dtype_back,
        request_id,
        EPOCH,
        layer,
        LAYOUT.top_k,
        rows,
        body_bytes=len(frame) - HEADER_BYTES,
    ).pack_into(memoryview(frame))
    return bytes(frame)


def reply_frame(
    request_id: int, rows: int, kind: Kind = Kind.COMBINE, body: bytes | None = None, code: int = 0
) -> bytes:
    """A good reply, or with ``body`` any other one."""
    if body is None:
        body = bytes(rows * LAYOUT.combine_row_bytes)
    frame = bytearray(HEADER_BYTES) + body
    FrameHeader(
        kind, LAYOUT.dtype_out, LAYOUT.dtype_back, request_id, EPOCH, rows=rows, body_bytes=len(body), code=code
    ).pack_into(memoryview(frame))
    return bytes(frame)


def seal(frame: bytes) -> bytes:
    """The frame with the checksum that belongs to its header."""
    if len(frame) < HEADER_BYTES:
        return frame
    return frame[:60] + struct.pack("<I", zlib.crc32(frame[:60])) + frame[HEADER_BYTES:]


def pack_messages(messages: Sequence[Sequence[bytes]]) -> bytes:
    """Messages of parts as one input; `unpack_messages` is the way back."""
    return b"".join(
        bytes([len(parts)]) + b"".join(struct.pack("<H", len(part)) + part for part in parts) for parts in messages
    )


def unpack_messages(data: bytes) -> list[list[bytes]]:
    """Any bytes as messages of one to four parts."""
    messages: list[list[bytes]] = []
    at = 0
    while at < len(data) and len(messages) < 32:
        n_parts, at = 1 + (data[at] - 1) % 4, at + 1
        parts = []
        for _ in range(n_parts):
            length = int.from_bytes(data[at : at + 2], "little")
            parts.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        messages.append(parts)
    return messages


class ScriptedSocket:
    """Looks to a `FrameSocket` like a ZeroMQ socket to which these messages have come; swallows what is sent."""

    def __init__(self) -> None:
        self.messages: list[list[bytes]] = []
        self._parts: list[bytes] = []

    def recv_into(self, buffer: Any, flags: int = 0) -> int:
        """As that of pyzmq: cut to what fits; returns the true length."""
        if not self._parts:
            if not self.messages:
                raise zmq.Again
            self._parts = self.messages.pop(0)
        part = self._parts.pop(0)
        view = memoryview(buffer)
        n_bytes = min(len(view), len(part))
        view[:n_bytes] = part[:n_bytes]
        return len(part)

    def getsockopt(self, option: int) -> int:
        """RCVMORE and EVENTS."""
        if option == zmq.RCVMORE:
            return bool(self._parts)
        return zmq.POLLIN if self.messages or self._parts else 0

    def setsockopt(self, option: int, value: object) -> None:
        """Nothing to set."""

    def send(self, data: object, flags: int = 0, *, copy: bool = True) -> None:
        """Goes nowhere."""

    def forget(self) -> None:
        """Drops what was not read."""
        self.messages, self._parts = [], []

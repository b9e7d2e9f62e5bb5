"""An engine and hosts whose frames reach it as if a transport had received them; and frames that a host spoils."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import pytest
import torch

from moeoffload.expert_server.arena import HostArena
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost, Request
from moeoffload.host.link import ExpertLink
from moeoffload.payload import PayloadDtype
from moeoffload.transport import ChannelOffer, ChannelSizes, ServerChannel, ServerSlot
from moeoffload.transport.base import Work
from moeoffload.wire import HEADER_BYTES, FrameHeader, FrameLayout, Kind, read_error_text

SOON_S = 30.0
N_EXPERTS, HIDDEN, TOP_K = 8, 64, 2
BF16, F16, F32 = PayloadDtype.BF16, PayloadDtype.F16, PayloadDtype.F32
Spoil = Callable[[FrameHeader, Any], None]


def unspoilt(header: FrameHeader, rest: Any) -> None:
    """Spoils nothing."""


class Channel(ServerChannel):
    """Stands for a transport: counts the replies."""

    name = "test"

    def __init__(self, n_slots: int, layout: FrameLayout) -> None:
        sizes = ChannelSizes(n_slots, layout.request_bytes, layout.reply_bytes)
        super().__init__(sizes, memoryview(bytearray(sizes.buffer_bytes)), lambda channel, slot: None)
        self.offer = ChannelOffer("test", sizes)
        self.replies = threading.Semaphore(0)
        self.replied = [threading.Semaphore(0) for _ in range(n_slots)]
        self.cancelled: set[int] = set()

    def reply(self, slot: ServerSlot, n_bytes: int) -> None:
        self.replied[slot.index].release()
        self.replies.release()

    def is_cancelled(self, slot: ServerSlot) -> bool:
        return slot.index in self.cancelled

    def _send_reply(self, slot: ServerSlot, n_bytes: int) -> None: ...

    def _close(self) -> None: ...


@dataclass
class Host:
    """One attached host of an engine."""

    engine: Engine
    name: str
    layers: Any
    out: PayloadDtype = BF16
    back: PayloadDtype = BF16
    capacity: int = 64
    n_sent: int = 0
    channel: Channel = field(init=False)

    def __post_init__(self) -> None:
        self.layout = FrameLayout(HIDDEN, TOP_K, self.out, self.back, self.capacity)
        self.channel = Channel(64, self.layout)
        self.share = self.engine.shares.join(self.name)
        arena = HostArena(self.layout, torch.bfloat16)
        self.active = ActiveHost(1, self.layout, self.layers, torch.bfloat16, arena, self.share)
        for slot in self.channel.slots:
            slot.owner = Request(self.active, self.channel, slot)

    def submit(
        self, n_rows: int, seed: int = 0, spoil: Spoil = unspoilt, *, received_at: float | None = None
    ) -> Work | None:
        """Puts a request into the next slot; returns what the thread that received it has to do."""
        slot = self.channel.slots[self.n_sent % len(self.channel.slots)]
        self.n_sent += 1
        views = self.layout.dispatch_views(slot.request, n_rows)
        generator = torch.Generator().manual_seed(seed)
        views.rows.copy_(torch.randn(n_rows, HIDDEN, generator=generator))
        views.weights.copy_(torch.rand(n_rows, TOP_K, generator=generator))
        views.slots.copy_(torch.rand(n_rows, N_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K])
        body = n_rows * self.layout.dispatch_row_bytes
        header = FrameHeader(Kind.DISPATCH, self.out, self.back, 1, 1, top_k=TOP_K, rows=n_rows, body_bytes=body)
        spoil(header, views)
        header.pack_into(slot.request)
        slot.n_bytes = HEADER_BYTES + body
        slot.received_at = perf_counter() if received_at is None else received_at
        return self.engine.submit(self.channel, slot)

    def send(self, n_rows: int, seed: int, spoil: Spoil = unspoilt) -> int:
        """Submits a request as the thread of a transport does; returns its number."""
        if (work := self.submit(n_rows, seed, spoil)) is not None:
            work()
        return self.n_sent - 1

    def receive(self, number: int) -> tuple[torch.Tensor, FrameHeader]:
        """The sums, empty if there is an error instead, and the header."""
        index = number % len(self.channel.slots)
        assert self.channel.replied[index].acquire(timeout=SOON_S)
        header, reply = FrameHeader(), self.channel.slots[index].reply
        header.unpack_from(reply)
        sums = self.layout.combine_view(reply, header.rows).clone() if header.kind == Kind.COMBINE else torch.empty(0)
        return sums, header

    def alone(self, n_rows: int, seed: int) -> torch.Tensor:
        return self.receive(self.send(n_rows, seed))[0]

    def comes_at(self, used_s: float) -> None:
        """Decides whose turn is next: that of who has used least."""
        self.share.used_s, self.share.is_idle = float(used_s), False

    def code_of(self, number: int) -> int:
        """The error code of the reply to a request; 0 if it has sums."""
        return self.receive(number)[1].code

    def wait(self, n_replies: int) -> None:
        for _ in range(n_replies):
            assert self.channel.replies.acquire(timeout=SOON_S), f"{self.name} got no reply"


@pytest.fixture
def engine() -> Iterator[Engine]:
    """One that a test starts."""
    engine = Engine()
    yield engine
    engine.stop(SOON_S)


def raw_exchange(link: ExpertLink, change: Callable[[FrameHeader, memoryview], None]) -> tuple[int, str, torch.Tensor]:
    """Sends one dispatch of a row that ``change`` has spoilt; the error code of the reply, its text, or the sums."""
    channel, layout = link.channel, link.layout
    slot = channel.acquire(SOON_S)
    try:
        views = layout.dispatch_views(slot.request, 1)
        views.rows.fill_(0.5)
        views.weights.fill_(0.1)
        views.slots.copy_(torch.arange(layout.top_k))
        body = layout.dispatch_row_bytes
        header = FrameHeader(
            Kind.DISPATCH, layout.dtype_out, layout.dtype_back, channel.next_id(slot), link._epoch,
            top_k=layout.top_k, rows=1, body_bytes=body,
        )  # fmt: skip
        change(header, slot.request)
        header.pack_into(slot.request)
        channel.send(slot, HEADER_BYTES + body)
        channel.wait(slot, SOON_S)
        header.unpack_from(slot.reply)
        if header.kind == Kind.ERROR:
            return header.code, read_error_text(slot.reply, header.body_bytes), torch.empty(0)
        return 0, "", layout.combine_view(slot.reply, 1).clone()
    finally:
        channel.release(slot)


def set_slot(value: int) -> Callable[[FrameHeader, memoryview], None]:
    def change(header: FrameHeader, frame: memoryview) -> None:
        end = HEADER_BYTES + header.body_bytes
        frame[end - 2 : end] = value.to_bytes(2, "little", signed=True)

    return change


def set_field(name: str, value: int) -> Callable[[FrameHeader, memoryview], None]:
    return lambda header, frame: setattr(header, name, value)

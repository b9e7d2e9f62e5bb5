"""An engine with real experts and hosts of it over shared memory; and frames that a host sends as it likes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cpu_kernels.experts import gated_experts

from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.requests import ActiveHost, SlotContext
from moeoffload.expert_server.workspace import Workspace
from moeoffload.host.link import ExpertLink
from moeoffload.kernels import prepare_layer
from moeoffload.payload import PayloadDtype
from moeoffload.transport import ChannelSizes, HostChannel, HostSlot, ServerChannel, SharedServerEnd, open_shared
from moeoffload.transport.base import Work
from moeoffload.wire import HEADER_BYTES, FrameHeader, FrameLayout, Kind, read_error_text

SOON_S = 30.0
N_EXPERTS, HIDDEN, TOP_K = 8, 64, 2
BF16, F16, F32 = PayloadDtype.BF16, PayloadDtype.F16, PayloadDtype.F32


class Server:
    """An engine with one layer's experts; ``calls`` has the rows of every kernel call."""

    def __init__(self, **options: Any) -> None:
        self.engine = Engine(**options)
        self.layer = prepare_layer(
            gated_experts(N_EXPERTS, HIDDEN, 32, torch.bfloat16), self.engine.kernel_workspace, "tiled"
        )
        self.calls: list[int] = []
        kernels: Any = self
        self.layers = [kernels]
        self.n_experts = N_EXPERTS
        self.is_batch_invariant = True
        self.shape = None
        self.engine.start()

    def __call__(self, rows: torch.Tensor, *others: Any) -> None:
        self.calls.append(rows.shape[0])
        self.layer(rows, *others)

    def in_slices(self, rows: torch.Tensor, *others: Any) -> Iterator[None]:
        self.calls.append(rows.shape[0])
        yield from self.layer.in_slices(rows, *others)

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """Something else is computed until the block ends: what comes meanwhile waits."""
        share, goes_on, begun = self.engine.shares.join("busy"), threading.Event(), threading.Event()
        other = self.engine.shares.join("another")  # with which it took turns before

        def wait() -> None:
            begun.set()
            goes_on.wait(SOON_S)

        working = threading.Thread(target=self.engine.run, args=(wait, share, SOON_S))
        working.start()
        assert begun.wait(SOON_S)
        try:
            yield
        finally:
            goes_on.set()
            working.join(SOON_S)
            self.engine.leave(share)
            self.engine.leave(other)


@dataclass
class Host:
    """One host of a `Server`: its share, its lease and its channel."""

    server: Server
    name: str
    out: PayloadDtype = BF16
    back: PayloadDtype = BF16
    capacity: int = 64
    n_slots: int = 8
    layers: Any = None
    channel: HostChannel = field(init=False)

    def __post_init__(self) -> None:
        engine = self.server.engine
        self.layout = layout = FrameLayout(HIDDEN, TOP_K, self.out, self.back, self.capacity)
        workspace = Workspace(layout, torch.bfloat16, torch.device("cpu"))
        self.share = engine.shares.join(self.name)
        layers = self.server.layers if self.layers is None else self.layers
        self.active = ActiveHost(1, layout, layers, torch.bfloat16, workspace, self.share)
        sizes = ChannelSizes(self.n_slots, layout.request_bytes, layout.reply_bytes)

        def deliver(channel: ServerChannel, slot: Any) -> Work | None:
            if slot.owner is None:
                slot.owner = SlotContext(self.active, slot)
            return engine.submit(channel, slot)

        self.end = SharedServerEnd(sizes, deliver)
        self.channel = open_shared(self.end.offer)

    def send(self, n_rows: int, seed: int, spoil: Callable[[FrameHeader, Any], None] | None = None) -> HostSlot:
        slot = self.channel.acquire(SOON_S)
        views = self.layout.dispatch_views(slot.request, n_rows)
        generator = torch.Generator().manual_seed(seed)
        views.rows.copy_(torch.randn(n_rows, HIDDEN, generator=generator))
        views.weights.copy_(torch.rand(n_rows, TOP_K, generator=generator))
        views.slots.copy_(torch.rand(n_rows, N_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K])
        header = FrameHeader(
            Kind.DISPATCH, self.out, self.back, self.channel.next_id(slot), 1, top_k=TOP_K, rows=n_rows,
            body_bytes=self.layout.dispatch_body_bytes(n_rows),
        )  # fmt: skip
        n_bytes = HEADER_BYTES + header.body_bytes
        if spoil is not None:
            spoil(header, views)
        header.pack_into(slot.request)
        self.channel.send(slot, n_bytes)
        return slot

    def receive(self, slot: HostSlot) -> tuple[torch.Tensor, FrameHeader]:
        """The sums, empty if there is an error instead, and the header."""
        self.channel.wait(slot, SOON_S)
        header = FrameHeader()
        header.unpack_from(slot.reply)
        sums = torch.empty(0)
        if header.kind == Kind.COMBINE:
            sums = self.layout.combine_view(slot.reply, header.rows).clone()
        self.channel.release(slot)
        return sums, header

    def waits_for(self, n_requests: int) -> None:
        """Returns when so many of its requests lie in the engine's queues."""
        until = time.monotonic() + SOON_S
        while len(self.share.small) + len(self.share.large) < n_requests:
            assert time.monotonic() < until
            time.sleep(1e-4)

    def comes_at(self, used_s: float) -> None:
        """Decides whose turn is next: that of who has used least."""
        self.share.used_s, self.share.is_idle = float(used_s), False

    def alone(self, n_rows: int, seed: int) -> torch.Tensor:
        return self.receive(self.send(n_rows, seed))[0]

    def close(self) -> None:
        self.channel.close()
        self.end.close()


@pytest.fixture
def make() -> Iterator[Callable[..., Any]]:
    """``make(Server)`` and ``make(Host, server, "a")``, closed after the test."""
    made: list[Any] = []

    def build(kind: type, *args: Any, **options: Any) -> Any:
        made.append(kind(*args, **options))
        return made[-1]

    yield build
    for each in made:
        if isinstance(each, Host):
            each.close()
    for each in made:
        if isinstance(each, Server):
            each.engine.stop(SOON_S)


def raw_exchange(link: ExpertLink, change: Callable[[FrameHeader, memoryview], None]) -> tuple[int, str, torch.Tensor]:
    """Sends one dispatch of a row that ``change`` has spoilt; the error code of the reply, its text, or the sums."""
    channel, layout = link._channel, link.layout
    slot = channel.acquire(SOON_S)
    try:
        views = layout.dispatch_views(slot.request, 1)
        views.rows.fill_(0.5)
        views.weights.fill_(0.1)
        views.slots.copy_(torch.arange(layout.top_k))
        body = layout.dispatch_body_bytes(1)
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


def unchanged(header: FrameHeader, frame: memoryview) -> None:
    """Spoils nothing."""


def set_slot(value: int) -> Callable[[FrameHeader, memoryview], None]:
    def change(header: FrameHeader, frame: memoryview) -> None:
        frame[HEADER_BYTES + header.body_bytes - 2 : HEADER_BYTES + header.body_bytes] = value.to_bytes(
            2, "little", signed=True
        )

    return change


def set_field(name: str, value: int) -> Callable[[FrameHeader, memoryview], None]:
    return lambda header, frame: setattr(header, name, value)

"""A host's decode step in compiled code: the frames of the long way, and what is unusual is left to that."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from moeoffload.errors import ServerError
from moeoffload.host.exchange import Exchange
from moeoffload.kernels.pack import RowPacker
from moeoffload.kernels.watch import Seen
from moeoffload.payload import PayloadDtype
from moeoffload.transport import (
    ChannelSizes,
    ServerChannel,
    ServerSlot,
    SharedHostEnd,
    SharedServerEnd,
    StreamListener,
    StreamServerEnd,
    open_shared,
    open_stream,
)
from moeoffload.transport.stream import StreamHostEnd
from moeoffload.transport.waiting import AdaptiveSpin
from moeoffload.wire import HEADER_BYTES, ErrorCode, Flag, FrameHeader, FrameLayout, Kind
from moeoffload.wire.layout import write_error_text

SOON_S = 30.0
N_EXPERTS, HIDDEN, TOP_K, EPOCH, LAYER = 6, 64, 3, 9, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Reply = Callable[[FrameHeader, ServerSlot], int]


def answer(header: FrameHeader, slot: ServerSlot) -> int:
    """A reply whose body is of ones."""
    header.kind, header.queue_us, header.compute_us = Kind.COMBINE, 3, 5
    header.body_bytes = header.rows * HIDDEN * 4
    slot.reply[HEADER_BYTES : HEADER_BYTES + header.body_bytes] = torch.ones(header.rows * HIDDEN).numpy().tobytes()
    header.pack_into(slot.reply)
    return HEADER_BYTES + header.body_bytes


class Ends:
    """Both ends of a channel; ``frames`` has what arrived, ``reply`` says what goes back."""

    def __init__(
        self, way: str = "shared", dtype: torch.dtype = torch.bfloat16, payload: torch.dtype | None = None
    ) -> None:
        self.layout = FrameLayout(HIDDEN, TOP_K, PayloadDtype.from_torch(payload or dtype), PayloadDtype.F32, 16)
        self.frames: list[bytes] = []
        self.reply: Reply = answer
        self.times = 1
        sizes = ChannelSizes(2, self.layout.request_bytes, self.layout.reply_bytes)
        self._end = contextlib.ExitStack()
        self.server: SharedServerEnd | StreamServerEnd
        self.host: SharedHostEnd | StreamHostEnd
        if way == "shared":
            self.server = SharedServerEnd(sizes, self._deliver)
            self.host = open_shared(self.server.offer, spin_limit_s=60.0)
        else:
            listener = StreamListener(max_request_bytes=sizes.request_bytes, lane_port=0)
            self._end.callback(listener.close)
            self.server = listener.open_channel(sizes, self._deliver)
            self.host = open_stream(self.server.offer, "127.0.0.1", timeout_s=SOON_S)
            assert self.host._lane is not None
            self.host._lane.spin = AdaptiveSpin(60.0)
        self.slot = slot = self.host.acquire(SOON_S)
        body = torch.frombuffer(slot.request, dtype=torch.uint8, offset=HEADER_BYTES).data_ptr()
        self.packer = RowPacker(body, dtype, self.layout.dtype_out.torch_dtype, hidden=HIDDEN, top_k=TOP_K)
        self.exchange = Exchange(self.host, slot, self.packer, self.layout, EPOCH)

    def _deliver(self, channel: ServerChannel, slot: ServerSlot) -> None:
        self.frames.append(bytes(slot.request[: slot.n_bytes]))
        header = FrameHeader()
        header.unpack_from(slot.request)
        n_bytes = self.reply(header, slot)
        channel.reply(slot, n_bytes)
        for _ in range(self.times - 1):
            self.server._busy[slot.index] = True
            channel.reply(slot, n_bytes)

    def send(self, rows: Rows, table: torch.Tensor, *, holds_all: bool) -> int:
        self.request_id = self.host.next_id(self.slot)
        return self.exchange.send(LAYER, rows.hidden, rows.ids, rows.weights, table, holds_all=holds_all, timeout_s=2.5)

    def receive(self, n_rows: int) -> bool:
        return self.exchange.receive(self.request_id, LAYER, n_rows, SOON_S)

    def close(self) -> None:
        self.host.release(self.slot)
        self.host.close()
        self.server.close()
        self._end.close()


class Rows:
    """A call of the routed experts."""

    def __init__(self, n_rows: int, dtype: torch.dtype = torch.bfloat16, weights: torch.dtype = torch.float32) -> None:
        generator = torch.manual_seed(n_rows)
        self.hidden = torch.randn(n_rows, HIDDEN, generator=generator).to(dtype)
        self.ids = torch.rand(n_rows, N_EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K].contiguous()
        self.weights = torch.rand(n_rows, TOP_K, generator=generator).to(weights)


@pytest.fixture(autouse=True)
def _cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever else keeps this machine busy: who looks does not give up for that.
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for name in ("transport.waiting", "expert_server.turnaround", "host.exchange"):
        monkeypatch.setattr(f"moeoffload.{name}.CROWDED_S", 3600.0)


WAYS = ("shared", "lane")


@pytest.fixture(params=WAYS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    ends = Ends(request.param)
    yield ends
    ends.close()


@pytest.fixture
def shared() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


@pytest.fixture
def lane() -> Iterator[Ends]:
    ends = Ends("lane")
    yield ends
    ends.close()


def table(*held: int) -> torch.Tensor:
    slots = torch.full((N_EXPERTS,), -1, dtype=torch.int16)
    slots[list(held)] = torch.arange(len(held), dtype=torch.int16)
    return slots


ALL = table(*range(N_EXPERTS))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("payload", DTYPES)
def test_frames_are_those_of_the_long_way(way: str, dtype: torch.dtype, payload: torch.dtype) -> None:
    ends = Ends(way, dtype, payload)
    try:
        for n_rows in (1, 3, 16):
            for weights, held in ((torch.float32, ALL), (dtype, table(1, 4))):
                rows = Rows(n_rows, dtype, weights)
                n_bytes = ends.send(rows, held, holds_all=held is ALL)
                index, n_hit = ends.packer.look(), ends.packer.n_rows
                if not n_hit:
                    assert n_bytes == 0
                    continue
                assert ends.receive(n_hit)
                frame = memoryview(bytearray(ends.layout.request_bytes))
                body = torch.frombuffer(frame, dtype=torch.uint8, offset=HEADER_BYTES).data_ptr()
                packer = RowPacker(body, dtype, payload, hidden=HIDDEN, top_k=TOP_K)
                expected = packer.pack(rows.hidden, rows.ids, rows.weights, held, holds_all=held is ALL)
                assert packer.n_rows == n_hit
                assert index is expected or torch.equal(index, expected)  # type: ignore[arg-type]
                flags = Flag.WEIGHTS_F32 if rows.weights.dtype == torch.float32 else Flag.NONE
                FrameHeader(
                    Kind.DISPATCH, ends.layout.dtype_out, ends.layout.dtype_back, ends.request_id, EPOCH, LAYER,
                    TOP_K, n_hit, flags, ends.layout.dispatch_body_bytes(n_hit), 2_500_000,
                ).pack_into(frame)  # fmt: skip
                assert ends.frames[-1] == bytes(frame[:n_bytes])
    finally:
        ends.close()


def test_the_sums_lie_in_the_slot_with_the_servers_times(ends: Ends) -> None:
    for n_rows in (1, 2, 1):
        ends.send(Rows(n_rows), ALL, holds_all=True)
        assert ends.receive(n_rows)
        assert torch.equal(ends.layout.combine_view(ends.slot.reply, n_rows), torch.ones(n_rows, HIDDEN))
        assert ends.exchange.n_bytes == HEADER_BYTES + n_rows * HIDDEN * 4
        assert (ends.exchange.queue_s, ends.exchange.compute_s) == pytest.approx((3e-6, 5e-6))
    assert not ends.receive(1), "nothing is in flight"


def test_rows_without_an_expert_there_are_not_sent(ends: Ends) -> None:
    rows = Rows(1)
    absent = next(expert for expert in range(N_EXPERTS) if expert not in rows.ids)
    assert ends.send(rows, table(absent), holds_all=False) == 0
    assert not ends.frames
    assert ends.send(rows, ALL, holds_all=True) > 0
    assert ends.receive(1)


@pytest.mark.parametrize("what", ["value", "expert"])
def test_what_cannot_be_sent_is_left_to_the_long_way(ends: Ends, what: str) -> None:
    rows = Rows(2)
    if what == "value":
        rows.hidden[1, 5] = float("inf")
    else:
        rows.ids[0, 1] = N_EXPERTS
    assert ends.send(rows, ALL, holds_all=True) < 0
    assert not ends.frames
    assert ends.send(Rows(2), ALL, holds_all=True) > 0  # the slot is still good
    assert ends.receive(2)


def refuse(header: FrameHeader, slot: ServerSlot) -> int:
    header.kind, header.code = Kind.ERROR, ErrorCode.PAYLOAD
    header.body_bytes = write_error_text(slot.reply, "no")
    header.pack_into(slot.reply)
    return HEADER_BYTES + header.body_bytes


def of_another_epoch(header: FrameHeader, slot: ServerSlot) -> int:
    header.epoch += 1
    return answer(header, slot)


def damaged(header: FrameHeader, slot: ServerSlot) -> int:
    n_bytes = answer(header, slot)
    slot.reply[50] ^= 1
    return n_bytes


def short(header: FrameHeader, slot: ServerSlot) -> int:
    return answer(header, slot) - 4


@pytest.mark.parametrize(("way", "reply"), [*product(WAYS, [refuse, of_another_epoch, damaged]), ("shared", short)])
def test_any_other_reply_is_still_there_for_the_long_way(way: str, reply: Reply) -> None:
    ends = Ends(way)
    ends.reply = reply
    ends.send(Rows(1), ALL, holds_all=True)
    assert not ends.receive(1)
    assert ends.host.wait(ends.slot, SOON_S) >= HEADER_BYTES
    ends.reply = answer
    ends.send(Rows(1), ALL, holds_all=True)
    assert ends.receive(1)
    ends.close()


def test_replies_that_come_twice_are_dropped_and_counted(shared: Ends) -> None:
    ends, host = shared, shared.host
    assert isinstance(host, SharedHostEnd)
    ends.times = 3
    ends.send(Rows(1), ALL, holds_all=True)
    assert ends.receive(1)
    ends.times = 1
    until = time.monotonic() + SOON_S
    while host._segment.reply_semaphores[ends.slot.index].value < 2:  # the two others are on their way
        assert time.monotonic() < until
    ends.send(Rows(1), ALL, holds_all=True)
    assert ends.receive(1)
    assert ends.host.n_stale == 2


def test_what_was_sent_the_long_way_can_be_collected(ends: Ends) -> None:
    for n_rows in (1, 16):
        ends.send(Rows(n_rows), ALL, holds_all=True)
        assert ends.receive(n_rows)
        ends.request_id = ends.host.next_id(ends.slot)
        again = bytearray(ends.frames[-1])
        header = FrameHeader()
        header.unpack_from(memoryview(again))
        header.request_id = ends.request_id
        ends.slot.request[: len(again)] = again
        header.pack_into(ends.slot.request)
        ends.exchange._code.lane.value = 0
        ends.host.send(ends.slot, len(again))
        assert ends.receive(n_rows)


def interrupted(run: Callable[..., int]) -> Callable[..., int]:
    """As a compiled piece during which Ctrl-C was pressed: the exception comes when it returns."""

    def run_and_raise(*values: int) -> int:
        run(*values)
        raise KeyboardInterrupt

    return run_and_raise


def test_a_send_that_is_interrupted_keeps_the_channel_in_step(ends: Ends) -> None:
    code = ends.exchange._code
    for _ in range(3):
        ends.exchange._code = replace(code, post=interrupted(code.post))
        with pytest.raises(KeyboardInterrupt):
            ends.send(Rows(1), ALL, holds_all=True)
        ends.exchange._code = code
        assert ends.receive(1), "the request was on its way"
        assert ends.send(Rows(2), ALL, holds_all=True) > 0
        assert ends.receive(2)
    assert ends.server.n_dropped == 0


def test_a_wait_that_is_interrupted_does_not_lose_the_slot(ends: Ends) -> None:
    code = ends.exchange._code
    for _ in range(3):
        ends.send(Rows(1), ALL, holds_all=True)
        ends.exchange._code = replace(code, collect=interrupted(code.collect))
        with pytest.raises(KeyboardInterrupt):
            ends.receive(1)
        ends.exchange._code = code
        ends.host.release(ends.slot)
        assert ends.host.is_idle
        assert ends.host.acquire(SOON_S) is ends.slot
    assert ends.host.n_abandoned == 0


def test_a_look_that_found_nothing_does_not_count_for_the_next_request(shared: Ends) -> None:
    ends, host = shared, shared.host
    assert isinstance(host, SharedHostEnd)
    ends.send(Rows(1), ALL, holds_all=True)
    code = replace(ends.exchange._code, collect=lambda *values: Seen.NOTHING)
    assert not host.look_by(ends.slot, code, timeout_s=1.0)
    assert host._looked_since[ends.slot.index] is not None
    assert ends.receive(1)
    ends.send(Rows(1), ALL, holds_all=True)
    assert host._looked_since[ends.slot.index] is None
    assert ends.receive(1)


def test_a_channel_that_either_side_has_closed_says_so(ends: Ends) -> None:
    ends.send(Rows(1), ALL, holds_all=True)
    assert ends.receive(1)
    ends.server.close()

    def call() -> None:
        ends.send(Rows(1), ALL, holds_all=True)
        assert not ends.receive(1)
        ends.host.wait(ends.slot, SOON_S)

    with pytest.raises(ServerError, match="closed"):
        call()
    with pytest.raises(ServerError, match="closed"):
        ends.host.acquire(0.0)

"""Decode steps answered in compiled code: the bits and the refusals of the long way, and nobody is kept waiting."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from cpu_kernels.experts import gated_experts
from hypothesis import given, settings
from hypothesis import strategies as st

from moeoffload.expert_server.calibrate import Pace
from moeoffload.expert_server.engine import Engine
from moeoffload.expert_server.fair_share import BRIEF_PRICE, FairShares
from moeoffload.expert_server.requests import ActiveHost, SlotContext
from moeoffload.expert_server.turnaround import Turnaround
from moeoffload.expert_server.workspace import Workspace
from moeoffload.kernels import LayerKernels, prepare_layer
from moeoffload.kernels import turnaround_words as tw
from moeoffload.kernels.frame_program import header_crc
from moeoffload.kernels.program import openmp_runtime
from moeoffload.kernels.turnaround_words import MOST_ROWS
from moeoffload.payload import PayloadDtype
from moeoffload.transport import (
    ChannelSizes,
    HostChannel,
    ServerChannel,
    SharedServerEnd,
    StreamListener,
    open_shared,
    open_stream,
)
from moeoffload.transport.base import Work
from moeoffload.transport.waiting import AdaptiveSpin
from moeoffload.wire import HEADER_BYTES, ErrorCode, Flag, FrameHeader, FrameLayout, Kind

SOON_S = 30.0
LONG_S = 300.0
"""A look that ends only if it is called off, or when what it looks for comes."""
N_EXPERTS, HIDDEN, TOP_K, EPOCH = 6, 64, 3, 7
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BF16 = torch.bfloat16
WAYS = ("shared", "lane")


class Server:
    """An engine with two layers' experts; the second one has another shape."""

    def __init__(self, dtype: torch.dtype = BF16, **options: Any) -> None:
        self.dtype = dtype
        self.engine = Engine(Pace(), **options)
        self.layers: list[LayerKernels | None] = [
            prepare_layer(gated_experts(N_EXPERTS, HIDDEN, inter, dtype), self.engine.kernel_workspace, "tiled")
            for inter in (32, 48)
        ]
        self.layers.append(None)
        self.engine.start()


class Host:
    """One host of a server over shared memory or a lane, with or without the compiled way."""

    def __init__(
        self,
        server: Server,
        *,
        compiled: bool,
        out: torch.dtype | None = None,
        back: torch.dtype | None = None,
        way: str = "shared",
    ) -> None:
        self.server, engine = server, server.engine
        codes = [PayloadDtype.from_torch(each or server.dtype) for each in (out, back)]
        self.layout = FrameLayout(HIDDEN, TOP_K, codes[0], codes[1], 16)
        self.share = engine.shares.join(str(id(self)))
        workspace = Workspace(self.layout, server.dtype, torch.device("cpu"))
        self.active = ActiveHost(EPOCH, self.layout, server.layers, server.dtype, workspace, self.share)
        sizes = ChannelSizes(2, self.layout.request_bytes, self.layout.reply_bytes)
        self._close = contextlib.ExitStack()
        self.end: ServerChannel
        self.channel: HostChannel
        if way == "shared":
            self.end = SharedServerEnd(sizes, self._deliver, spin_limit_s=LONG_S if compiled else 0.0)
            self.channel = open_shared(self.end.offer)
        else:
            listener = StreamListener(max_request_bytes=sizes.request_bytes, lane_port=0)
            self._close.callback(listener.close)
            self.end = listener.open_channel(sizes, self._deliver)
            self.channel = open_stream(self.end.offer, "127.0.0.1", timeout_s=SOON_S)
            assert self.end._lane is not None
            self.end._lane.lane.spin = AdaptiveSpin(LONG_S)
        self.turnaround = Turnaround.for_channel(engine, self.active, self.end) if compiled else None
        if self.turnaround is not None:
            engine.add_turnaround(self.turnaround)
            self.end.express = self.turnaround

    def _deliver(self, channel: ServerChannel, slot: Any) -> Work | None:
        if slot.owner is None:
            slot.owner = SlotContext(self.active, slot)
        return self.server.engine.submit(channel, slot)

    def header(self, request_id: int, n_rows: int, layer: int = 0, flags: int = Flag.WEIGHTS_F32) -> FrameHeader:
        layout = self.layout
        return FrameHeader(
            Kind.DISPATCH, layout.dtype_out, layout.dtype_back, request_id, EPOCH, layer, TOP_K, n_rows, flags,
            layout.dispatch_body_bytes(n_rows),
        )  # fmt: skip

    def call(self, n_rows: int, seed: int, *, bad: str = "", **header: Any) -> tuple[FrameHeader, bytes]:
        """Sends rows made from a seed; the reply's header and body."""
        slot = self.channel.acquire(SOON_S)
        try:
            head = self.header(self.channel.next_id(slot), n_rows, **header)
            head.pack_into(slot.request)
            generator = torch.manual_seed(seed)
            views = self.layout.dispatch_views(slot.request, n_rows)
            views.rows.copy_(torch.randn(n_rows, HIDDEN, generator=generator))
            views.weights.copy_(torch.rand(n_rows, TOP_K, generator=generator))
            order = torch.rand(n_rows, N_EXPERTS + 2, generator=generator).argsort(dim=1)[:, :TOP_K]
            views.slots.copy_(order.masked_fill(order >= N_EXPERTS, -1))
            if bad == "slot":
                views.slots[-1, 0] = N_EXPERTS
            elif bad == "row":
                views.rows[-1, 3], views.slots[-1, 0] = float("nan"), 1
            elif bad == "checksum":
                slot.request[60] ^= 1
            self.channel.send(slot, HEADER_BYTES + head.body_bytes)
            return self.reply(slot)
        finally:
            self.channel.release(slot)

    def raw(self, change: dict[int, int], n_bytes: int | None) -> FrameHeader:
        """Sends a good frame whose header has other bytes in some places; the checksum is right."""
        slot = self.channel.acquire(SOON_S)
        try:
            head = self.header(self.channel.next_id(slot), 1)
            head.pack_into(slot.request)
            slot.request[HEADER_BYTES : HEADER_BYTES + head.body_bytes] = bytes(head.body_bytes)
            for at, value in change.items():
                slot.request[at] = value
            slot.request[60:64] = zlib.crc32(slot.request[:60]).to_bytes(4, "little")
            self.channel.send(slot, n_bytes or HEADER_BYTES + head.body_bytes)
            return self.reply(slot)[0]
        finally:
            self.channel.release(slot)

    def reply(self, slot: Any) -> tuple[FrameHeader, bytes]:
        n_bytes = self.channel.wait(slot, SOON_S)
        header = FrameHeader()
        header.unpack_from(slot.reply)
        return header, bytes(slot.reply[HEADER_BYTES:n_bytes])

    @property
    def n_compiled(self) -> int:
        assert self.turnaround is not None
        return self.turnaround.totals[0]

    def warm_up(self) -> None:
        """Until the compiled loop has the channel: the thread that reads it waits in another way at first."""
        until = time.monotonic() + SOON_S
        before = self.n_compiled
        while self.n_compiled == before:
            assert time.monotonic() < until, "no request was answered in compiled code"
            self.call(1, 0)

    def close(self) -> None:
        self.channel.close()
        self.end.close()
        self._close.close()
        if self.turnaround is not None:
            self.server.engine.forget_turnaround(self.turnaround)
        self.server.engine.leave(self.share)


@pytest.fixture(autouse=True)
def _cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever else keeps this machine busy: who looks does not give up for that.
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    for name in ("transport.waiting", "expert_server.turnaround", "host.exchange"):
        monkeypatch.setattr(f"moeoffload.{name}.CROWDED_S", 3600.0)


@contextmanager
def one_host(dtype: torch.dtype = BF16, **options: Any) -> Iterator[Host]:
    server = Server(dtype)
    host = Host(server, compiled=True, **options)
    host.warm_up()
    yield host
    host.close()
    server.engine.stop(SOON_S)


@contextmanager
def long_way(dtype: torch.dtype = BF16, **options: Any) -> Iterator[Host]:
    server = Server(dtype)
    host = Host(server, compiled=False, **options)
    yield host
    host.close()
    server.engine.stop(SOON_S)


@pytest.mark.parametrize(
    ("way", "dtype", "out", "back"),
    [("shared", *dtypes) for dtypes in product(DTYPES, repeat=3)]
    + [("lane", *dtypes) for dtypes in zip(DTYPES, DTYPES[1:] + DTYPES, DTYPES, strict=False)],
)
def test_replies_have_the_bits_of_the_long_way(
    way: str, dtype: torch.dtype, out: torch.dtype, back: torch.dtype
) -> None:
    with one_host(dtype, out=out, back=back, way=way) as host, long_way(dtype, out=out, back=back) as other:
        before, n = host.n_compiled, 0
        for n_rows in (1, 2, MOST_ROWS):
            for flags in (Flag.NONE, Flag.WEIGHTS_F32):
                n += 1
                header, body = host.call(n_rows, n, flags=flags)
                expected, expected_body = other.call(n_rows, n, flags=flags)
                assert body == expected_body
                assert any(body)
                assert header.kind == Kind.COMBINE
                for name in ("dtype_out", "dtype_back", "epoch", "layer", "top_k", "rows", "flags", "body_bytes"):
                    assert getattr(header, name) == getattr(expected, name), name
        assert host.n_compiled > before


@pytest.mark.parametrize("way", WAYS)
def test_what_it_is_not_made_for_is_computed_all_the_same(way: str) -> None:
    with one_host(way=way) as host, long_way() as other:
        for n_rows, layer in ((MOST_ROWS + 1, 0), (2, 1), (1, 0), (16, 1)):
            assert host.call(n_rows, 5, layer=layer)[1] == other.call(n_rows, 5, layer=layer)[1]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"bad": "slot"}, ErrorCode.BAD_SLOT),
        ({"bad": "row"}, ErrorCode.PAYLOAD),
        ({"bad": "checksum"}, ErrorCode.BAD_FRAME),
        ({"layer": 2}, ErrorCode.BAD_SLOT),
        ({"layer": 3}, ErrorCode.BAD_FRAME),
    ],
)
def test_what_is_wrong_is_told_and_the_next_request_is_answered(
    options: dict[str, Any], code: ErrorCode, way: str
) -> None:
    with one_host(way=way) as host:
        good = host.call(2, 9)[1]
        header, _ = host.call(2, 9, **options)
        assert (header.kind, header.code) == (Kind.ERROR, code)
        assert host.call(2, 9)[1] == good
        assert host.server.engine.counters.errors == 1


@pytest.mark.parametrize("way", WAYS)
def test_any_header_has_the_answer_of_the_long_way(way: str) -> None:
    places = st.integers(0, 59).filter(lambda at: not 8 <= at < 16)  # a channel sends no other id than its own

    with one_host(way=way) as host, long_way() as other:

        @settings(max_examples=150, deadline=None)
        @given(st.dictionaries(places, st.integers(0, 255), max_size=3), st.none() | st.integers(64, 400))
        def same(change: dict[int, int], n_bytes: int | None) -> None:
            headers = host.raw(change, n_bytes), other.raw(change, n_bytes)
            assert (headers[0].kind, headers[0].code) == (headers[1].kind, headers[1].code)

        same()
        before = host.n_compiled
        host.warm_up()
        assert host.n_compiled > before


@pytest.mark.parametrize("way", WAYS)
def test_another_host_interrupts_the_look(way: str) -> None:
    with one_host(way=way) as host:
        other = Host(host.server, compiled=False, way=way)
        for seed in range(5):
            assert other.call(1, seed)[1] == host.call(1, seed)[1]
        other.close()
        host.warm_up()


@pytest.mark.parametrize("way", WAYS)
def test_a_host_with_an_idle_one_beside_it_is_answered_in_compiled_code(way: str) -> None:
    with one_host(way=way) as host:
        other = Host(host.server, compiled=False, way=way)
        other.call(1, 0)
        host.warm_up()
        other.close()


@pytest.mark.parametrize("way", WAYS)
def test_jobs_and_large_requests_interrupt_the_look(way: str) -> None:
    with one_host(way=way) as host:
        assert host.server.engine.run(lambda: "done", host.share, SOON_S) == "done"
        host.warm_up()


@pytest.mark.parametrize("way", WAYS)
def test_a_channel_closes_while_it_looks(way: str) -> None:
    with one_host(way=way) as host:
        closing = threading.Thread(target=host.end.close)
        closing.start()
        closing.join(SOON_S)
        assert not closing.is_alive()


@pytest.mark.parametrize("way", WAYS)
def test_what_was_done_stays_counted_and_shared_out(way: str) -> None:
    with one_host(way=way) as host:
        before = host.server.engine.counters
        used_s = host.share.used_s
        for seed in range(40):
            host.call(2, seed)
        engine, turnaround = host.server.engine, host.turnaround
        assert turnaround is not None
        after = engine.counters
        assert after.requests - before.requests == 40
        assert after.rows - before.rows == 80
        assert sum(after.members) - sum(before.members) == 40
        assert after.compute_s > before.compute_s
        assert host.share.used_s > used_s
        host.end.close()
        at_the_end = engine.counters
        engine.forget_turnaround(turnaround)
        engine.forget_turnaround(turnaround)
        assert engine.counters == at_the_end


def test_a_host_that_was_alone_does_not_pay_for_it_when_others_come() -> None:
    shares: FairShares[str] = FairShares()
    first, second = shares.join("first"), shares.join("second")
    second.small.append("before")
    assert shares.pick() is second
    second.next()
    second.charge(1e-3, 1.0)
    shares.served_alone(first, 100, 1.0)
    turns = []
    for _ in range(6):
        for share in (first, second):
            if not share.small:
                share.small.append("request")
        turn = shares.pick()
        assert turn is not None
        turn.next()
        turn.charge(10e-3, BRIEF_PRICE)
        turns.append(turn.key)
    assert turns.count("first") == turns.count("second") == 3


@pytest.mark.parametrize("has_team", [True, False])
def test_two_threads_compute_the_same_and_one_where_there_is_no_pool(has_team: bool) -> None:
    with one_host() as host:
        expected = host.call(2, 4)[1]
        assert host.turnaround is not None
        block = host.turnaround._block
        assert block[tw.TEAM]
        if not has_team:
            block[tw.TEAM] = 0
        threads = (ctypes.c_int64 * (MOST_ROWS + 1)).from_address(block[tw.THREADS])
        for n_rows in range(MOST_ROWS + 1):
            threads[n_rows] = 2
        before = host.n_compiled
        assert host.call(2, 4)[1] == expected
        assert host.n_compiled == before + 1


def test_the_pool_is_found_in_a_folder_with_spaces() -> None:
    line = "7f60e4000000-7f60e4040000 r-xp 00002000 fe:00 1234                       "
    for path in ("/home/a lab/.venv/lib/torch/lib/libgomp.so.1", "/opt/libomp-123.so", "/opt/my libs/libiomp5.so"):
        maps = f"{line}/opt/libgompertz.so\n{line}[heap]\n{line}{path}\n{line}/usr/lib/libc.so.6\n"
        assert openmp_runtime(maps) == path
    assert openmp_runtime(f"{line}/home/libgomp.so/libc.so.6\n") is None


def test_servers_that_wait_for_company_or_are_slowed_have_none() -> None:
    for pace, window_s in ((Pace(factor=2.0), 0.0), (Pace(), 1e-3)):
        server = Server(collect_window_s=window_s)
        server.engine.pace = pace
        host = Host(server, compiled=True)
        assert host.turnaround is None
        host.close()
        server.engine.stop(SOON_S)


def test_the_checksum_is_that_of_the_wire() -> None:
    header = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.manual_seed(2))
    assert header_crc(header.data_ptr()) == zlib.crc32(bytes(header[:60].tolist()))

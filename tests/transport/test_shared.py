"""Shared memory: two real processes, nothing left behind, nothing wrong opened."""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import posix_ipc
import pytest
import torch
from server_processes import PipedProcess

from moeoffload.errors import ProtocolError, ServerError
from moeoffload.transport import (
    ChannelOffer,
    ChannelSizes,
    SharedServerEnd,
    open_channel,
    open_shared,
    sweep_stale_segments,
)
from moeoffload.transport.segment import SHM_FOLDER, Segment, segment_bytes
from moeoffload.transport.shared import SharedHostEnd
from moeoffload.wire import HEADER_BYTES, ErrorCode, Kind

from .conftest import both_ends
from .ends import SIZES, SOON_S, OnDemand, begin, call, echo, eventually, receive, reply_header

ME = os.getpid()


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert not names_of(ME)


def test_names_live_from_create_to_open_and_are_private() -> None:
    server = SharedServerEnd(SIZES, echo)
    names = names_of(ME)
    assert len(names) == 2 + SIZES.n_slots
    assert {Path(SHM_FOLDER, name).stat().st_mode & 0o777 for name in names} == {0o600}
    host = open_shared(server.offer)
    assert not names_of(ME)
    with pytest.raises(ServerError, match="not on this host"):
        open_shared(server.offer)
    assert call(host, b"works without a name") == b"works without a name"
    assert host.nonce == server.nonce
    assert len(host.nonce) == 16
    host.close()
    server.close()


def test_a_server_killed_before_the_host_opens_is_swept(tmp_path: Path) -> None:
    server = PipedProcess(tmp_path / "log", hold)
    offer = server.asks()
    pid = server.pid
    assert sweep_stale_segments(min_age_s=0) == 0, "the server is alive"
    server.close()
    assert len(names_of(pid)) == 2 + SIZES.n_slots
    sweep_stale_segments()
    assert names_of(pid), "too young: it might be alive in another container"
    assert sweep_stale_segments(min_age_s=0) == 2 + SIZES.n_slots
    assert not names_of(pid)
    with pytest.raises(ServerError, match="not on this host"):
        open_shared(offer)


@pytest.mark.parametrize("moment", ["before open", "after open", "in flight"])
def test_a_host_killed_at_any_moment_leaves_nothing(moment: str, tmp_path: Path) -> None:
    engine = OnDemand()
    server = SharedServerEnd(SIZES, engine)
    host = PipedProcess(tmp_path / "log", connect)
    if moment != "before open":
        assert host.asks(server.offer) == server.nonce
    if moment == "in flight":
        engine.answer()
        assert host.asks() == "in flight"
    host.close()
    if moment == "in flight":
        engine.answer()
    server.close()
    assert not names_of(ME)


def test_more_than_there_is_room_for_is_a_clear_error() -> None:
    sizes = ChannelSizes(64, 2**30, 2**30)
    with pytest.raises(ServerError, match=f"needs {segment_bytes(sizes)} bytes in /dev/shm, available are [0-9]+"):
        SharedServerEnd(sizes, echo)


def test_a_segment_may_be_larger_than_its_frames_need() -> None:
    larger = segment_bytes(SIZES) + 100_000
    for asked, made in ((larger, larger), (1, segment_bytes(SIZES))):
        server = SharedServerEnd(replace(SIZES, shared_bytes=asked), echo)
        assert Path(SHM_FOLDER, server.offer.parameters["segment"][1:]).stat().st_size == made
        open_shared(replace(server.offer, sizes=SIZES)).close()
        server.close()


def test_what_cannot_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SharedServerEnd(SIZES, echo)
    offer = server.offer
    name = offer.parameters["segment"]

    def refused(match: str, offer: ChannelOffer = offer) -> None:
        with pytest.raises(ServerError, match=match):
            open_shared(offer)

    refused("does not name", replace(offer, parameters={}))
    for wrong in ("/etc/passwd", "/moeoffload-1-short", name + "/..", name[1:], name + "\n"):
        refused("not the name", replace(offer, parameters={"segment": wrong}))
    refused("bytes, expected", replace(offer, sizes=ChannelSizes(8, 1 << 20, 1 << 20)))
    refused("starts with", replace(offer, sizes=ChannelSizes(4, 64, 64)))
    refused("starts with", replace(offer, sizes=ChannelSizes(4, SIZES.request_bytes - 1, SIZES.reply_bytes)))
    server._segment.words[0] += 1
    refused("starts with")
    server._segment.words[0] -= 1
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    refused("expected 4321 and 600")
    monkeypatch.undo()
    shm = posix_ipc.SharedMemory(name)
    os.fchmod(shm.fd, 0o644)
    refused("mode 644")
    os.fchmod(shm.fd, 0o600)
    shm.close_fd()
    posix_ipc.unlink_semaphore(f"{name}-r2")
    refused("semaphores")
    assert names_of(ME), "who cannot open it takes no names away"
    server.close()


@pytest.mark.parametrize("n_bytes", [0, HEADER_BYTES - 1, SIZES.request_bytes + 1, 2**64 - 1])
def test_an_announced_length_is_checked_before_it_is_used(n_bytes: int) -> None:
    with both_ends("shared") as ends:
        host = ends.host
        assert isinstance(host, SharedHostEnd)
        slot = host.acquire(SOON_S)
        request_id = host.next_id(slot)
        host._send(slot, n_bytes, request_id)
        answer = receive(host, slot, request_id)
        assert b"a slot takes" in answer
        assert (reply_header(slot).kind, reply_header(slot).code) == (Kind.ERROR, ErrorCode.BAD_FRAME)
        host.release(slot)
        assert ends.server.n_dropped == 1
        assert call(host, b"and on") == b"and on"


def test_a_request_for_no_slot_or_a_busy_one_is_dropped() -> None:
    engine = OnDemand()
    with both_ends("shared", engine) as ends:
        segment: Segment = ends.host._segment  # type: ignore[attr-defined]
        slot, request_id = begin(ends.host, b"mine")
        taken = engine.take()
        for n_sent, number in ((1, slot.index), (2, 4), (3, 2**64 - 1)):
            segment.words[segment.ring_at[n_sent]] = number
            segment.request_semaphore.release()
        eventually(lambda: ends.server.n_dropped == 3)
        echo(*taken)
        assert receive(ends.host, slot, request_id) == b"mine"


def test_a_reply_of_an_impossible_length_is_an_error() -> None:
    engine = OnDemand()
    with both_ends("shared", engine) as ends:
        segment: Segment = ends.host._segment  # type: ignore[attr-defined]
        slot, request_id = begin(ends.host)
        at = segment.reply_at[slot.index]
        segment.words[at], segment.words[at + 1] = 2**40, request_id
        segment.reply_semaphores[slot.index].release()
        with pytest.raises(ProtocolError, match=f"{2**40} bytes"):
            ends.host.wait(slot, SOON_S)


def open_semaphore(name: str) -> mmap.mmap:
    descriptor = os.open(Path(SHM_FOLDER, name), os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def fill(semaphore: mmap.mmap) -> None:
    """Sets a semaphore to the most that one can hold; its owner's next post fails."""
    semaphore[:4] = (2**31 - 1).to_bytes(4, "little")


def test_a_host_that_fills_its_semaphores_ends_no_thread_of_the_server() -> None:
    on_demand = OnDemand()
    server = SharedServerEnd(SIZES, on_demand)
    other = SharedServerEnd(SIZES, echo)
    try:
        name = server.offer.parameters["segment"].removeprefix("/")
        semaphores = [open_semaphore(f"sem.{name}-r{index}") for index in range(SIZES.n_slots)]
        host = open_channel(server.offer, host="", timeout_s=SOON_S)
        with contextlib.closing(open_channel(other.offer, host="", timeout_s=SOON_S)) as good:
            for _ in range(2 * SIZES.n_slots):
                slot, request_id = begin(host, b"more")
                fill(semaphores[slot.index])
                on_demand.answer()
                assert receive(host, slot, request_id) == b"more"
                host.release(slot)
            assert call(good, b"other") == b"other"
        assert server.n_dropped >= 1, "a token that did not fit"
        host.close()
        eventually(lambda: not server._reader.is_alive())
    finally:
        server.close()
        other.close()


def test_views_outlive_close_and_the_last_one_unmaps() -> None:
    gc.collect()
    maps_before = _n_maps()
    fds_before = len(os.listdir("/proc/self/fd"))
    with both_ends("shared") as ends:
        view = torch.frombuffer(ends.host.slots[0].request, dtype=torch.uint8)
        ends.host.slots[1].owner = torch.frombuffer(ends.host.slots[1].reply, dtype=torch.uint8)
    view.fill_(7)  # no crash
    assert int(view.sum()) == 7 * len(view)
    del ends
    gc.collect()
    assert _n_maps() == maps_before + 1
    del view
    gc.collect()
    assert _n_maps() == maps_before
    assert len(os.listdir("/proc/self/fd")) == fds_before


def _n_maps() -> int:
    with open("/proc/self/maps") as maps:
        return sum("/dev/shm/moeoffload-" in line for line in maps)


def hold(pipe: Connection) -> None:
    """Creates a channel, says its offer, and waits to be killed."""
    pipe.send(SharedServerEnd(SIZES, echo).offer)
    pipe.recv()


def connect(pipe: Connection) -> None:
    """Opens the channel whose offer it is told, calls once, then leaves a request in flight."""
    offer: ChannelOffer = pipe.recv()
    host = open_channel(offer, host="", timeout_s=SOON_S)
    pipe.send(host.nonce)
    call(host, b"hello")
    begin(host)
    pipe.send("in flight")
    pipe.recv()


def names_of(pid: int) -> set[str]:
    """What of the moeoffload server with this pid is in /dev/shm."""
    return {name for name in os.listdir(SHM_FOLDER) if f"moeoffload-{pid}-" in name}

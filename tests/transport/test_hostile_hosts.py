"""Hosts and servers that do what they like with the memory and the semaphores they share."""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import pytest

from moeoffload.errors import ProtocolError
from moeoffload.transport import ServerChannel, ServerSlot, SharedServerEnd, open_channel
from moeoffload.transport.segment import SHM_FOLDER

from .ends import SIZES, SOON_S, OnDemand, call, echo, eventually, receive, send


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
                slot = host.acquire(SOON_S)
                request_id = send(host, slot, b"more")
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


@pytest.mark.parametrize(
    ("index", "n_bytes"),
    [(SIZES.n_slots, 64), (2**32, 64), (2**64 - 1, 64), (0, 0), (0, 63), (0, 2**40), (0, 2**64 - 1)],
)
def test_ring_entries_that_lie_are_dropped_or_refused_and_the_next_is_served(index: int, n_bytes: int) -> None:
    delivered: list[int] = []

    def deliver(channel: ServerChannel, slot: ServerSlot) -> None:
        delivered.append(slot.n_bytes)
        echo(channel, slot)

    server = SharedServerEnd(SIZES, deliver)
    host = open_channel(server.offer, host="", timeout_s=SOON_S)
    try:
        segment = host._segment  # type: ignore[attr-defined]
        with host._ring:  # type: ignore[attr-defined]
            at = segment.ring_at(0)
            segment.words[at], segment.words[at + 1], segment.words[at + 2] = index, n_bytes, 5
            host._n_sent = 1  # type: ignore[attr-defined]
            segment.request_semaphore.release()
        eventually(lambda: server.n_dropped == 1)
        assert call(host, b"good") == b"good"
        assert delivered == [64 + 4]
    finally:
        host.close()
        server.close()


def test_a_reply_of_an_impossible_length_is_refused() -> None:
    def lie(channel: ServerChannel, slot: ServerSlot) -> None:
        echo(channel, slot)
        segment = channel._segment  # type: ignore[attr-defined]
        segment.words[segment.reply_at(slot.index)] = 2**63

    server = SharedServerEnd(SIZES, lie)
    host = open_channel(server.offer, host="", timeout_s=SOON_S)
    try:
        slot = host.acquire(SOON_S)
        send(host, slot, b"x")
        segment = host._segment  # type: ignore[attr-defined]
        eventually(lambda: segment.words[segment.reply_at(slot.index)] == 2**63)
        with pytest.raises(ProtocolError, match="reply of 9223372036854775808 bytes"):
            host.wait(slot, SOON_S)
        host.release(slot)
    finally:
        host.close()
        server.close()

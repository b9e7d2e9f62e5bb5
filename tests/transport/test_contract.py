"""What every transport promises."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeoffload.errors import CapacityError, DeadlineError, ProtocolError, ServerError
from moeoffload.transport import ChannelSizes, ServerChannel, ServerSlot
from moeoffload.wire import HEADER_BYTES, ErrorCode, Kind

from .conftest import TRANSPORTS, OpenEnds, both_ends
from .ends import SIZES, SOON_S, OnDemand, begin, call, echo, eventually, receive, reply_header, send

LARGEST = SIZES.request_bytes - HEADER_BYTES


def test_frames_too_large_to_be_copied_come_back(open_ends: OpenEnds) -> None:
    largest = 3 * 2**20 + 5
    host = open_ends(sizes=ChannelSizes(2, HEADER_BYTES + largest, HEADER_BYTES + largest)).host
    for n_bytes in (largest, 2**20, 2**20, largest, 100):
        body = random.randbytes(n_bytes)
        assert call(host, body) == body


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_bodies_in_any_order(transport: str) -> None:
    server = OnDemand()
    with both_ends(transport, server) as ends:

        @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
        @given(bodies=st.lists(st.binary(max_size=LARGEST), min_size=1, max_size=4), seed=st.integers())
        def check(bodies: list[bytes], seed: int) -> None:
            order = random.Random(seed)
            slots = [ends.host.acquire(SOON_S) for _ in bodies]
            ids = [send(ends.host, slot, body) for slot, body in zip(slots, bodies, strict=True)]
            taken = [server.take() for _ in bodies]
            order.shuffle(taken)
            for request in taken:
                echo(*request)
            waits = list(zip(slots, ids, bodies, strict=True))
            order.shuffle(waits)
            for slot, request_id, body in waits:
                assert receive(ends.host, slot, request_id) == body
                ends.host.release(slot)

        check()
        assert ends.host.n_stale == 0


@pytest.mark.timeout(60)
def test_many_threads_share_a_channel(open_ends: OpenEnds) -> None:
    """The waits are longer than the test may take: a wake-up that gets lost does not go unnoticed."""
    host = open_ends().host

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(150):
            body = rng.randbytes(rng.randrange(LARGEST))
            assert call(host, body, 120) == body

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert host.n_stale == 0


def test_threads_that_wait_get_their_own_reply_in_reverse_order(open_ends: OpenEnds) -> None:
    server = OnDemand()
    host = open_ends(server).host
    slots = [host.acquire(SOON_S) for _ in range(4)]
    ids = [send(host, slot, bytes([slot.index])) for slot in slots]
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(receive, host, slot, i) for slot, i in zip(slots, ids, strict=True)]
        taken = sorted((server.take() for _ in slots), key=lambda request: -request[1].request[HEADER_BYTES])
        for request in taken:
            echo(*request)
        assert [wait.result(SOON_S) for wait in waits] == [bytes([slot.index]) for slot in slots]


def test_a_late_reply_is_dropped_and_its_slot_is_not_used_before(open_ends: OpenEnds) -> None:
    server = OnDemand()
    host = open_ends(server, ChannelSizes(1, 128, 128)).host
    slot, _ = begin(host)
    with pytest.raises(DeadlineError, match="slot 0"):
        host.wait(slot, 0.01)
    host.release(slot)
    with pytest.raises(DeadlineError, match="1 wait for a late reply"):
        host.acquire(0.02)
    server.answer()
    again = host.acquire(SOON_S)
    assert again is slot
    assert host.n_stale == 1
    request_id = send(host, again, b"new")
    server.answer()
    assert receive(host, again, request_id) == b"new"
    host.release(again)
    assert host.n_stale == 1


def test_ctrl_c_at_the_end_of_a_wait_leaves_the_slot_usable(
    open_ends: OpenEnds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that sleeps on a semaphore holds signals back until it has its token."""
    host: Any = open_ends(sizes=ChannelSizes(1, 128, 128)).host
    awaits = host._await_reply

    def interrupted(*args: Any) -> int:
        awaits(*args)
        raise KeyboardInterrupt

    slot, _ = begin(host, b"first")
    monkeypatch.setattr(host, "_await_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.wait(slot, SOON_S)
    monkeypatch.undo()
    host.release(slot)
    assert call(host, b"other", 1) == b"other"
    assert host.is_idle


def test_a_reply_that_was_waited_for_too_briefly_can_be_waited_for_again(open_ends: OpenEnds) -> None:
    server = OnDemand()
    host = open_ends(server).host
    slot, request_id = begin(host, b"slow")
    with pytest.raises(DeadlineError):
        host.wait(slot, 0)
    server.answer()
    assert receive(host, slot, request_id) == b"slow"
    host.release(slot)
    assert host.n_stale == 0


def test_slots_go_to_who_waits_longest(open_ends: OpenEnds) -> None:
    host = open_ends(sizes=ChannelSizes(1, 128, 128)).host
    order: list[int] = []

    def acquire(number: int) -> None:
        slot = host.acquire(SOON_S)
        order.append(number)
        host.release(slot)

    slot = host.acquire(SOON_S)
    threads = [threading.Thread(target=acquire, args=(number,)) for number in range(4)]
    for number, thread in enumerate(threads):
        thread.start()
        eventually(lambda n=number: len(host._line) == n + 1)  # type: ignore[attr-defined, misc]
    host.release(slot)
    acquire(4)
    for thread in threads:
        thread.join(SOON_S)
    assert order == [0, 1, 2, 3, 4]


def test_wrong_use_is_named(open_ends: OpenEnds) -> None:
    host = open_ends().host
    slot = host.acquire(SOON_S)
    with pytest.raises(RuntimeError, match="wait needs it sent"):
        host.wait(slot, 1)
    with pytest.raises(CapacityError, match="64 to"):
        host.send(slot, HEADER_BYTES - 1)
    with pytest.raises(CapacityError, match="64 to"):
        host.send(slot, len(slot.request) + 1)
    with pytest.raises(ProtocolError, match="request id"):
        host.send(slot, HEADER_BYTES)
    host.release(slot)
    with pytest.raises(RuntimeError, match="twice"):
        host.release(slot)
    with pytest.raises(RuntimeError, match="FREE"):
        host.send(slot, HEADER_BYTES)
    assert call(host, b"still works") == b"still works"


@pytest.mark.parametrize("side", ["host", "server"])
def test_closing_either_side_wakes_every_thread_that_waits(open_ends: OpenEnds, side: str) -> None:
    server = OnDemand()
    ends = open_ends(server)
    host = ends.host
    slots = [host.acquire(SOON_S) for _ in range(4)]
    for slot in slots:
        send(host, slot)
        server.take()

    def wait(number: int) -> None:
        waits = partial(host.wait, slots[number]) if number < len(slots) else host.acquire
        with pytest.raises(ServerError, match="closed") as caught:
            waits(60)
        if number < len(slots):
            host.release(slots[number])
        assert not isinstance(caught.value, DeadlineError)

    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(wait, number) for number in range(5)]
        while sum(thread.name.startswith("ThreadPool") for thread in threading.enumerate()) < 5:
            pass
        getattr(ends, side).close()
        for waiting in waits:
            waiting.result(SOON_S)
    with pytest.raises(ServerError, match="closed"):
        host.acquire(1)
    ends.host.close()
    ends.server.close()
    getattr(ends, side).close()


def test_replies_after_either_side_closed_are_dropped(open_ends: OpenEnds) -> None:
    server = OnDemand()
    ends = open_ends(server)
    for _ in range(2):
        begin(ends.host)
    first, second = server.take(), server.take()
    ends.host.close()
    echo(*first)
    ends.server.close()
    echo(*second)


def test_nothing_is_delivered_after_close(open_ends: OpenEnds) -> None:
    n_delivered = 0

    def count(channel: ServerChannel, slot: ServerSlot) -> None:
        nonlocal n_delivered
        n_delivered += 1
        echo(channel, slot)

    ends = open_ends(count)
    slot, _ = begin(ends.host)
    ends.host.wait(slot, SOON_S)
    ends.server.close()
    with contextlib.suppress(ServerError):
        send(ends.host, slot)
    with contextlib.suppress(ServerError, RuntimeError):
        ends.host.wait(slot, 0.05)
    assert n_delivered == 1


def test_deliver_may_close_the_channel(open_ends: OpenEnds) -> None:
    ends = open_ends(lambda channel, slot: channel.close())
    slot, _ = begin(ends.host)
    with pytest.raises(ServerError, match="closed"):
        ends.host.wait(slot, SOON_S)


def test_a_request_that_deliver_cannot_take_is_answered_with_an_error(open_ends: OpenEnds) -> None:
    def broken(channel: ServerChannel, slot: ServerSlot) -> None:
        raise ZeroDivisionError

    host = open_ends(broken).host
    for _ in range(2):
        slot, request_id = begin(host)
        assert b"could not take" in receive(host, slot, request_id)
        assert (reply_header(slot).kind, reply_header(slot).code) == (Kind.ERROR, ErrorCode.INTERNAL)
        host.release(slot)


def test_a_server_slot_is_answered_once(open_ends: OpenEnds) -> None:
    server = OnDemand()
    ends = open_ends(server)
    begin(ends.host)
    channel, taken = server.take()
    with pytest.raises(CapacityError):
        channel.reply(taken, len(taken.reply) + 1)
    echo(channel, taken)
    with pytest.raises(RuntimeError, match="no request"):
        channel.reply(taken, HEADER_BYTES)


def test_a_release_before_the_reply_tells_the_server_and_counts_for_that_request_alone(open_ends: OpenEnds) -> None:
    engine = OnDemand()
    host = open_ends(engine).host
    given_up, kept = host.acquire(SOON_S), host.acquire(SOON_S)
    send(host, given_up)
    channel, taken = engine.take()
    kept_id = send(host, kept)
    _, other = engine.take()
    assert not channel.is_cancelled(taken)
    host.release(given_up)
    eventually(lambda: channel.is_cancelled(taken))
    assert not channel.is_cancelled(other)
    echo(channel, taken)
    echo(channel, other)
    receive(host, kept, kept_id)
    eventually(lambda: not host._collect_late() and host._n_abandoned == 0)  # type: ignore[func-returns-value]
    again = host.acquire(SOON_S)
    assert again is given_up
    request_id = send(host, again, b"new")
    _, taken = engine.take()
    assert not channel.is_cancelled(taken)
    echo(channel, taken)
    assert receive(host, again, request_id) == b"new"


@pytest.mark.parametrize(
    ("sizes", "named"),
    [((0, 64, 64), "n_slots"), ((65, 64, 64), "n_slots"), ((1, 63, 64), "request_bytes"), ((1, 64, 2**31), "reply_b")],
)
def test_sizes_out_of_range_are_named(sizes: tuple[int, int, int], named: str) -> None:
    with pytest.raises(ProtocolError, match=named):
        ChannelSizes(*sizes)


@pytest.mark.parametrize("transport", ["stream", "stream encrypted"])
def test_threads_and_descriptors_return_to_the_start(transport: str) -> None:
    def use() -> None:
        with both_ends(transport, echo, ChannelSizes(2, 2**20, 2**20)) as ends:
            for n_bytes in (10, 2**20 - HEADER_BYTES):
                assert len(call(ends.host, bytes(n_bytes))) == n_bytes

    def counts() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    use()  # makes what is made once per process
    before = counts()
    for _ in range(3):
        use()
    # What an earlier test left may have ended meanwhile.
    eventually(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)))

"""What nobody waits for any more is not computed: cancelled, late, of a lease that has ended; no other host is hurt."""

from __future__ import annotations

from time import sleep

import pytest
from engine_kit import engine, set_field
from test_fairness import BRIEF, LARGE, Engine, logging_host
from transport.conftest import OpenEnds, open_ends
from transport.ends import SOON_S, OnDemand, echo, eventually, receive, send

from moeoffload.wire import ErrorCode

__all__ = ["engine", "open_ends"]


@pytest.mark.parametrize("n_rows", [BRIEF, LARGE])
def test_a_request_whose_time_limit_passes_in_the_queue_is_not_computed(engine: Engine, n_rows: int) -> None:
    log: list[str] = []
    host = logging_host(engine, "a", log)
    for timeout_us in (1000, 60_000_000, 0):
        host.submit(n_rows, spoil=set_field("timeout_us", timeout_us))
    sleep(0.01)
    engine.start()
    engine.run(lambda: None, host.share, SOON_S)
    host.wait(3)
    assert [host.code_of(number) for number in range(3)] == [ErrorCode.TOO_LATE, 0, 0]
    assert log == [f"a{n_rows}"] * 2
    assert (engine.counters.skipped, engine.counters.errors) == (1, 0)


def test_a_request_that_its_host_has_cancelled_is_not_computed(engine: Engine) -> None:
    log: list[str] = []
    host = logging_host(engine, "a", log)
    host.submit(LARGE)
    host.submit(LARGE)
    host.channel.cancelled.add(0)
    engine.start()
    host.wait(2)
    assert [host.code_of(number) for number in range(2)] == [ErrorCode.TOO_LATE, 0]
    assert log == ["a64"]
    assert engine.counters.skipped == 1


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

"""A lease that ends while its requests are chosen or computed ends no thread, and is blamed on no other host."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from test_fairness import BRIEF, LARGE, SOON_S, Engine, Host, engine

from moeoffload.wire import ErrorCode, FrameHeader, Kind

__all__ = ["engine"]


def test_a_lease_that_ends_between_the_choice_of_its_host_and_of_its_request_ends_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    leaving, other = Host(engine, "a", log), Host(engine, "b", log)
    pick = engine.shares.pick

    def pick_and_leave() -> Any:
        share = pick()
        if share is leaving.share:
            engine.leave(share)
        return share

    monkeypatch.setattr(engine.shares, "pick", pick_and_leave)
    leaving.submit(LARGE)
    other.submit(LARGE)
    engine.start()
    other.wait(1)
    assert log[-1] == "b64"
    assert "a64" not in log


def test_a_lease_that_ends_while_a_batch_is_filled_with_its_requests_ends_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moeoffload.expert_server import batcher

    log: list[str] = []
    first, leaving = Host(engine, "a", log), Host(engine, "b", log)
    kernel = first.active.layers[0]
    kernel.is_batch_invariant = True  # type: ignore[union-attr]
    leaving.active.layers = [kernel]
    check, ending = batcher.check, []

    def check_and_leave(*arguments: Any) -> Any:
        ending.append(threading.Thread(target=engine.leave, args=(leaving.share,)))
        ending[-1].start()
        ending[-1].join(0.2)  # it waits for the batch to be full
        return check(*arguments)

    monkeypatch.setattr(batcher, "check", check_and_leave)
    leaving.submit(20)
    first.submit(20)
    first.share.used_s, leaving.share.used_s = 0.0, 1.0
    first.share.is_idle = leaving.share.is_idle = False
    engine.start()
    first.wait(1)
    assert ending
    monkeypatch.undo()
    first.submit(BRIEF)
    engine.run(lambda: None, first.share, SOON_S)
    first.wait(1)


def test_what_goes_wrong_between_two_slices_is_not_blamed_on_the_slots_of_the_long_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    long, _ = Host(engine, "a", log), Host(engine, "b", log)

    def broken(*_: Any) -> None:
        raise IndexError("pop from an empty deque")

    monkeypatch.setattr(engine.shares, "rival", broken)
    long.submit(LARGE)
    engine.start()
    long.wait(1)
    header = FrameHeader()
    header.unpack_from(long.channel.slots[0].reply)
    assert header.kind == Kind.ERROR
    assert header.code == ErrorCode.INTERNAL

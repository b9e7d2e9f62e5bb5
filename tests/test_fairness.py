"""Who is served when: the order in which the engine computes the requests of several hosts. Nothing is timed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from engine_kit import N_EXPERTS, Host, engine
from transport.ends import eventually

from moeoffload.errors import ServerError
from moeoffload.expert_server.engine import RECENT_S, Engine
from moeoffload.expert_server.fair_share import SMALL_IN_A_ROW, SMALL_PRICE, FairShares
from moeoffload.expert_server.requests import Request
from moeoffload.kernels import KernelInput
from moeoffload.wire import ErrorCode

__all__ = ["engine"]

SOON_S = 20.0
LARGE, BRIEF = 64, 1
N_STEPS = 20


@dataclass
class Kernel:
    """Stands for a layer: notes what is computed; a call in steps has so many, and ``between`` runs before each."""

    log: list[str]
    name: str
    between: Callable[[int], None] = lambda step: None
    n_experts: int = N_EXPERTS
    is_batch_invariant: bool = False
    shape: None = None

    def __call__(self, call: KernelInput, workspace: Any = None) -> None:
        call.out.copy_(call.rows)
        self.log.append(f"{self.name}{len(call.rows)}")

    def in_slices(self, call: KernelInput, workspace: Any = None) -> Iterator[None]:
        for step in range(N_STEPS):
            self.between(step)
            self.log.append(f"{self.name}.")
            yield
        self(call)


def logging_hosts(engine: Engine, names: str) -> tuple[Any, ...]:
    """What is computed for hosts of these names, each a letter, and the hosts."""
    log: list[str] = []
    return log, *(Host(engine, name, [Kernel(log, name)]) for name in names)


def test_a_brief_request_waits_for_one_step_of_anothers_long_ones_at_most(engine: Engine) -> None:
    log, quiet, flooder = logging_hosts(engine, "ab")

    def at_step(step: int) -> None:
        if step == 5 and "a1" not in log:
            quiet.submit(BRIEF)

    flooder.layers[0].between = at_step
    for _ in range(4):
        flooder.submit(LARGE)
    engine.start()
    quiet.wait(1)
    flooder.wait(4)
    assert log[:7] == ["b."] * 6 + ["a1"]
    assert log.count("b64") == 4
    assert log.count("b.") == 4 * N_STEPS


def test_a_lone_host_is_computed_in_one_go(engine: Engine) -> None:
    log, host = logging_hosts(engine, "a")
    engine.start()
    host.submit(LARGE)
    host.wait(1)
    work = host.submit(BRIEF)
    assert work is not None, "the thread that receives computes it"
    work()
    assert log == ["a64", "a1"]


def test_a_thread_that_received_a_request_goes_back_to_receiving_while_others_flood(engine: Engine) -> None:
    threads: list[threading.Thread] = []
    _, lone, *flooders = logging_hosts(engine, "abc")

    class Endless(Kernel):
        """Has all flooders send again."""

        def __call__(self, call: KernelInput, workspace: Any = None) -> None:
            super().__call__(call, workspace)
            threads.append(threading.current_thread())
            for host in flooders if len(threads) < 100 else ():
                host.submit(BRIEF)

    for host in (lone, *flooders):
        host.layers[0] = Endless([], host.name)
    engine.start()
    work = lone.submit(BRIEF)
    assert work is not None, "the thread that receives computes it"
    work()
    assert len(threads) <= 3
    eventually(lambda: len(threads) >= 100)


def test_hosts_whose_requests_go_to_and_fro_are_computed_by_a_thread_of_its_own(engine: Engine) -> None:
    """Else one's frames would wait while the thread that received another's computes them; a hop costs a lone one."""
    _, first, second = logging_hosts(engine, "ab")
    engine.start()

    def is_handed_over(host: Host, at: float) -> bool:
        return host.submit(BRIEF, received_at=at) is None

    assert not is_handed_over(first, 0.0)
    assert not is_handed_over(second, 10.0)
    assert not is_handed_over(second, 10.1), "one has followed the other"
    assert is_handed_over(first, 10.2)
    assert is_handed_over(first, 10.2 + RECENT_S / 2)
    assert not is_handed_over(first, 10.3 + RECENT_S)


def test_brief_requests_without_end_leave_the_other_host_its_part(engine: Engine) -> None:
    log, greedy, other = logging_hosts(engine, "ab")

    def always_one_more(step: int) -> None:
        if len(greedy.share.small) < 2:
            greedy.submit(BRIEF)

    other.layers[0].between = always_one_more
    other.submit(LARGE)
    engine.start()
    other.wait(1)
    assert log.count("b.") == N_STEPS
    assert "a1" in log


def test_large_requests_of_two_hosts_take_turns_though_one_has_many(engine: Engine) -> None:
    log, flooder, other = logging_hosts(engine, "ba")
    for _ in range(40):
        flooder.submit(LARGE)
    other.submit(LARGE)
    engine.start()
    other.wait(1)
    flooder.wait(40)
    done = [entry for entry in log if entry in ("a64", "b64")]
    assert done.index("a64") <= 1, done


def test_small_requests_of_a_host_do_not_starve_its_large_one(engine: Engine) -> None:
    log, host = logging_hosts(engine, "a")
    host.submit(LARGE)
    for _ in range(3 * SMALL_IN_A_ROW):
        host.submit(BRIEF)
    engine.start()
    host.wait(1 + 3 * SMALL_IN_A_ROW)
    assert log.index("a64") == SMALL_IN_A_ROW


def test_a_lease_that_ends_while_it_waits_for_the_compute_thread_is_told_so(engine: Engine) -> None:
    share = engine.shares.join("a")  # the engine is not started: nothing is computed
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(engine.run, lambda: None, share, SOON_S)
        while not share.large:
            pass
        engine.leave(share)
        with pytest.raises(ServerError, match="the lease ended"):
            waiting.result(SOON_S)
    engine.start()


def test_work_of_a_lease_that_has_ended_is_refused_and_not_waited_for(engine: Engine) -> None:
    done: list[int] = []
    share = engine.shares.join("host")
    engine.leave(share)  # the host is gone while a call of it still reads the experts to be timed
    with pytest.raises(ServerError, match="the lease ended"):
        engine.run(lambda: done.append(1), share, 5.0)
    assert not done
    assert not share.large, "nothing may keep the work, and with it the experts"


def test_a_lease_that_ends_between_the_choice_of_its_host_and_of_its_request_ends_no_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, leaving, other = logging_hosts(engine, "ab")
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
    _, first, leaving = logging_hosts(engine, "ab")
    kernel = first.active.layers[0]
    kernel.is_batch_invariant = True  # type: ignore[union-attr]
    leaving.active.layers = [kernel]
    check, ending = Request.check, []

    def check_and_leave(*arguments: Any) -> Any:
        ending.append(threading.Thread(target=engine.leave, args=(leaving.share,)))
        ending[-1].start()
        ending[-1].join(0.2)  # it waits for the batch to be full
        return check(*arguments)

    monkeypatch.setattr(Request, "check", check_and_leave)
    leaving.submit(20)
    first.submit(20)
    for turn, host in enumerate((first, leaving)):
        host.comes_at(turn)
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
    _, long, _ = logging_hosts(engine, "ab")

    def broken(*_: Any) -> None:
        raise IndexError("pop from an empty deque")

    monkeypatch.setattr(engine.shares, "rival", broken)
    long.submit(LARGE)
    engine.start()
    long.wait(1)
    assert long.code_of(0) == ErrorCode.INTERNAL


def test_leases_of_one_host_have_one_share_and_who_comes_later_saved_nothing_up() -> None:
    shares: FairShares[str] = FairShares()
    first, again, late = shares.join("a"), shares.join("a"), shares.join("b")
    assert first is again
    assert len(shares.all) == 2
    for _ in range(3):
        first.small.append("a")
        picked = shares.pick()
        assert picked is first
        shares.take(picked)
        picked.charge(1.0, 1.0)
    late.small.append("b")
    first.small.append("a")
    assert shares.pick() is late
    assert 2.0 <= late.used_s <= 3.0, "it starts where the others are"
    assert shares.leave(first) == []
    assert len(shares.all) == 2
    assert shares.leave(first) == ["a"]
    assert len(shares.all) == 1


def turns(calls: dict[str, float], flooders: str, n: int) -> str:
    """Who is served in ``n`` turns. A call of each host takes so long; who is no flooder asks again one turn later."""
    shares: FairShares[str] = FairShares()
    hosts = {name: shares.join(name) for name in calls}
    order = ""
    for _ in range(n):
        for name, share in hosts.items():
            if not share.small and (name in flooders or not order.endswith(name)):
                share.small.append(name)
        picked = shares.pick()
        assert picked is not None
        shares.take(picked)
        order += picked.key
        picked.charge(calls[picked.key], SMALL_PRICE)
    return order


@pytest.mark.parametrize("length", [0.7, 1.0, 1.1, 1.4])
def test_a_decode_step_waits_for_one_brief_request_of_a_flood_not_two(length: float) -> None:
    assert "bb" not in turns({"a": length, "b": 1.0}, "b", 200)[20:]


def test_hosts_that_take_turns_do_not_forget_a_third() -> None:
    order = turns({"a": 1.1, "b": 1.0, "c": 0.9}, "", 300)
    assert min(order.count(name) for name in "abc") >= 95
    order = turns({"a": 1.1, "b": 1.0, "c": 0.9}, "bc", 300)
    assert min(order.count(name) for name in "abc") >= 70


def test_turns_are_for_calls_of_like_length_else_time_counts() -> None:
    order = turns({"a": 4.0, "b": 1.0}, "ab", 1000)
    assert 3.0 <= order.count("b") / order.count("a") <= 4.5

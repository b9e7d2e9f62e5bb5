"""The adaptive spin: pays where waits are short, costs nothing where they are long."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import posix_ipc
import pytest

from moeoffload.kernels.watch import Seen, watch
from moeoffload.transport.waiting import CROWDED_S, AdaptiveSpin


@pytest.fixture
def semaphore() -> Iterator[posix_ipc.Semaphore]:
    semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)
    semaphore.unlink()
    yield semaphore
    semaphore.close()


@pytest.fixture(autouse=True)
def _several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def test_short_waits_are_worth_spinning_for_a_little_longer() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(30e-6)
    assert 30e-6 < spin.budget_s < 150e-6


def test_the_budget_never_exceeds_the_limit() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(190e-6)
        assert spin.budget_s <= 200e-6


def test_long_waits_are_slept_through_and_forgotten_when_they_end() -> None:
    spin = AdaptiveSpin(200e-6)
    for _ in range(50):
        spin.learn(10.0)
    assert spin.budget_s == 0
    for _ in range(30):
        spin.learn(50e-6)
    assert spin.budget_s > 0


def test_a_single_core_and_a_limit_of_zero_never_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert AdaptiveSpin(0).budget_s == 0
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    assert AdaptiveSpin(200e-6).budget_s == 0


class Bell:
    """An int64 that can be watched."""

    def __init__(self) -> None:
        self._word = ctypes.c_int64(0)
        self.address = ctypes.addressof(self._word)

    def ring(self, value: int) -> None:
        self._word.value = value


def test_a_look_by_somebody_else_counts_and_is_not_repeated(semaphore: posix_ipc.Semaphore) -> None:
    spin, bell = AdaptiveSpin(200e-6), Bell()
    assert spin.budget_s > 0
    assert not spin.acquire(semaphore, bell.address, 1, 0.01, looked_since=perf_counter() - 10.0)
    before = spin._mean_s
    semaphore.release()
    assert spin.acquire(semaphore, bell.address, 1, 1.0, looked_since=perf_counter() - 10.0)  # the bell is silent
    assert spin._mean_s > before


def test_exactly_one_token_is_taken(semaphore: posix_ipc.Semaphore) -> None:
    spin, bell = AdaptiveSpin(), Bell()
    semaphore.release()
    semaphore.release()
    bell.ring(1)
    assert spin.acquire(semaphore, bell.address, 1, 1)
    assert semaphore.value == 1
    assert spin.acquire(semaphore, bell.address, 1, 0)
    assert semaphore.value == 0
    assert not spin.acquire(semaphore, bell.address, 1, 0)
    assert not spin.acquire(semaphore, bell.address, 1, -1)
    assert not spin.acquire(semaphore, bell.address, 2, 0.001)
    assert semaphore.value == 0


def test_a_bell_without_its_token_and_a_token_without_its_bell_are_waited_for(semaphore: posix_ipc.Semaphore) -> None:
    spin, bell = AdaptiveSpin(), Bell()
    bell.ring(7)
    assert not spin.acquire(semaphore, bell.address, 7, 0.01)
    late = threading.Timer(0.05, semaphore.release)
    late.start()
    assert spin.acquire(semaphore, bell.address, 7, 10)
    late = threading.Timer(0.05, semaphore.release)
    late.start()
    assert spin.acquire(semaphore, bell.address, 8, 10), "the token is what counts"


def sleep_until_the_alarm(semaphore: posix_ipc.Semaphore, after_s: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, after_s)  # on a busy machine it may go off before the sleep
    for _ in range(100):  # it waits for the end of a sleep
        AdaptiveSpin(0).acquire(semaphore, Bell().address, 1, 0.1)


def test_what_a_signal_handler_raises_is_not_lost_in_a_sleep(semaphore: posix_ipc.Semaphore) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(10):
            with pytest.raises(KeyboardInterrupt):
                sleep_until_the_alarm(semaphore, 0.02)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_a_signal_that_another_thread_takes_leaves_none_blocked(semaphore: posix_ipc.Semaphore) -> None:
    """As in a real host, whose control plane has threads; else Ctrl-C and SIGTERM would do nothing from then on."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    previous, over = signal.signal(signal.SIGALRM, interrupt), threading.Event()
    other = threading.Thread(target=over.wait, args=(30.0,))
    other.start()
    try:
        for _ in range(20):
            with pytest.raises(KeyboardInterrupt):
                sleep_until_the_alarm(semaphore, 0.01)
            assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        over.set()
        other.join()


def test_looking_lets_other_threads_have_the_interpreter() -> None:
    """The bell is rung by a Python thread, which could not run if looking kept the interpreter lock."""
    bell = Bell()
    threading.Timer(0.02, bell.ring, (3,)).start()
    assert watch().word(bell.address, 3, 30.0, 30.0) == Seen.NEWS


def test_a_watch_ends_when_its_time_is_over() -> None:
    bell = Bell()
    assert watch().word(bell.address, 1, 0.001, 30.0) == Seen.NOTHING
    reader, writer = os.pipe()
    pollfds = (ctypes.c_int32 * 2)(reader, select.POLLIN)
    try:
        assert watch().descriptors(ctypes.addressof(pollfds), 1, 0.001, 30.0) == Seen.NOTHING
        os.write(writer, b"x")
        assert watch().descriptors(ctypes.addressof(pollfds), 1, 30.0, 30.0) == Seen.NEWS
    finally:
        os.close(reader)
        os.close(writer)


@pytest.fixture
def busy_process() -> Iterator[None]:
    """Computes all the time, on the only core that the calling thread may use."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            yield
            process.kill()
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.usefixtures("busy_process")
def test_looking_ends_where_somebody_else_wants_the_core() -> None:
    reader, writer = os.pipe()
    pollfds = (ctypes.c_int32 * 2)(reader, select.POLLIN)
    try:
        assert watch().word(Bell().address, 1, 30.0, CROWDED_S) == Seen.CROWDED
        assert watch().descriptors(ctypes.addressof(pollfds), 1, 30.0, CROWDED_S) == Seen.CROWDED
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("what", ["word", "descriptors"])
def test_only_a_core_that_others_of_this_system_had_is_crowded(
    what: str, others: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a hypervisor lent the core to another machine. None is at hand, so the clock is made to jump."""
    n_calls = [0, 0]

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    def clock_gettime(clock: int, time: Any) -> int:
        n_calls[0] += 1
        time[0], time[1] = divmod(n_calls[0] * 50_000_000, 1_000_000_000)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64))
    def getrusage(who: int, usage: Any) -> int:
        n_calls[1] += 1
        usage[17] = n_calls[1] if others else 7
        return 0

    look, (reader, writer) = watch(), os.pipe()
    monkeypatch.setattr(look, "_clock", ctypes.cast(clock_gettime, ctypes.c_void_p).value)
    monkeypatch.setattr(look, "_getrusage", ctypes.cast(getrusage, ctypes.c_void_p).value)
    pollfds = (ctypes.c_int32 * 2)(reader, select.POLLIN)
    try:
        if what == "word":
            seen = look.word(Bell().address, 1, 10.0, CROWDED_S)
        else:
            seen = look.descriptors(ctypes.addressof(pollfds), 1, 10.0, CROWDED_S)
    finally:
        os.close(reader)
        os.close(writer)
    assert seen == (Seen.CROWDED if others else Seen.NOTHING)


def test_who_met_a_crowd_rests_longer_each_time() -> None:
    spin = AdaptiveSpin(200e-6)
    rests = []
    for _ in range(4):
        spin.met(Seen.CROWDED)
        rest = 0
        while spin.budget_s == 0:
            spin.learn(50e-6)
            rest += 1
        rests.append(rest)
    assert rests == [1, 2, 4, 8]
    spin.met(Seen.NEWS)
    spin.met(Seen.CROWDED)
    spin.learn(50e-6)
    assert spin.budget_s > 0

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

import posix_ipc
import pytest

from moeoffload.transport import spin as spin_module
from moeoffload.transport.spin import CROWDED, CROWDED_S, NEWS, NOTHING, AdaptiveSpin, Readable


@pytest.fixture
def semaphore() -> Iterator[posix_ipc.Semaphore]:
    semaphore = posix_ipc.Semaphore(None, posix_ipc.O_CREX, initial_value=0)
    semaphore.unlink()
    yield semaphore
    semaphore.close()


@pytest.fixture(autouse=True)
def _several_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)


def test_a_spin_lasts_a_little_longer_than_recent_waits_if_those_were_short() -> None:
    spin = AdaptiveSpin(200e-6)
    for wait_s, least_s, most_s in (
        (30e-6, 30e-6, 150e-6),
        (190e-6, 190e-6, 200e-6),
        (10.0, 0, 0),
        (50e-6, 1e-6, 2e-4),
    ):
        for _ in range(50):
            spin.learn(wait_s)
            assert spin.budget_s <= 200e-6
        assert least_s <= spin.budget_s <= most_s


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


def test_what_a_signal_handler_raises_in_a_sleep_is_not_lost_and_leaves_none_blocked(
    semaphore: posix_ipc.Semaphore,
) -> None:
    """Also where another thread takes the signal, as one of the control plane may."""

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


def spin(bell: Bell, value: int, limit_s: float, crowded_s: float = 30.0) -> int:
    library = spin_module._library()
    assert library is not None, "the C library is not built"
    return int(library.moeoffload_spin(bell.address, value, None, 0, int(limit_s * 1e9), int(crowded_s * 1e9)))


def test_spinning_lets_other_threads_have_the_interpreter() -> None:
    """The bell is rung by a Python thread, which could not run if spinning kept the interpreter lock."""
    bell = Bell()
    threading.Timer(0.02, bell.ring, (3,)).start()
    assert spin(bell, 3, 30.0) == NEWS


def test_a_spin_ends_when_its_time_is_over() -> None:
    assert spin(Bell(), 1, 0.001) == NOTHING


def test_without_the_library_every_wait_sleeps(semaphore: posix_ipc.Semaphore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spin_module, "native_library", lambda: None)
    spin = AdaptiveSpin()
    assert spin.budget_s == 0
    assert not spin.acquire(semaphore, Bell().address, 1, 0.001)
    semaphore.release()
    assert spin.acquire(semaphore, Bell().address, 1, 1)
    read_end, write_end = os.pipe()
    try:
        assert spin.poll(Readable(read_end), 0.001) == []
        os.write(write_end, b"x")
        assert spin.poll(Readable(read_end), 1) == [(read_end, select.POLLIN)]
    finally:
        os.close(read_end)
        os.close(write_end)


@pytest.mark.parametrize("after_s", [0.0, 0.002, 0.05], ids=["there", "spinning", "asleep"])
def test_what_can_be_read_ends_a_wait_whenever_it_comes(after_s: float) -> None:
    """Before the wait, while it spins (10 ms at most), and when it sleeps; a Python thread writes meanwhile."""
    pipes = [os.pipe() for _ in range(2)]
    readable = Readable(*(read_end for read_end, _ in pipes))
    try:
        for read_end, write_end in pipes:
            timer = threading.Timer(after_s, os.write, (write_end, b"x"))
            timer.start()
            if not after_s:
                timer.join()
            assert AdaptiveSpin().poll(readable, 30.0) == [(read_end, select.POLLIN)]
            os.read(read_end, 1)
            timer.join()
        assert AdaptiveSpin().poll(readable, 0.002) == []
    finally:
        for ends in pipes:
            for end in ends:
                os.close(end)


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
def test_a_spin_ends_where_another_process_wants_the_core() -> None:
    assert spin(Bell(), 1, 30.0, CROWDED_S) == CROWDED


def test_waits_without_a_spin_follow_one_that_met_others_twice_as_many_each_time() -> None:
    spin = AdaptiveSpin(200e-6)
    rests = []
    for _ in range(4):
        spin.met(CROWDED)
        rest = 0
        while spin.budget_s == 0:
            spin.learn(50e-6)
            rest += 1
        rests.append(rest)
    assert rests == [1, 2, 4, 8]
    spin.met(NEWS)
    spin.met(CROWDED)
    spin.learn(50e-6)
    assert spin.budget_s > 0

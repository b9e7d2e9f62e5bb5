"""Waiting for a peer: spin for a while, if that has paid off recently, then sleep on a semaphore or in poll(2).

A spin lasts up to a few times as long as recent waits took, never longer than a limit: during generation that covers
the whole wait; an idle channel costs a dozen spins and then nothing. After a spin during which another thread wanted
the core, the next waits do not spin, twice as many each time. Without the C library (see `spin.c`) every wait sleeps.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from time import perf_counter
from typing import Any, Final

import posix_ipc

from moeoffload.native import native_library

SPIN_LIMIT_S: Final = 10e-3
"""Default limit of a spin in seconds: computing one layer's experts for a few rows takes less."""
CROWDED_S: Final = 1e-3
"""A thread that does not get its core back from ``sched_yield`` for this long shares the core with a busy thread."""
NOTHING, NEWS, CROWDED = 0, 1, 2
"""Why a spin ended: its time was over, the awaited event happened, or another thread wants the core."""
_CROWDED_NS: Final = int(CROWDED_S * 1e9)
_WEIGHT: Final = 0.125
"""Weight of the newest wait in the mean of recent waits."""
_LONGEST: Final = 1.25
"""A long wait counts as at most this many limits, so that after a pause only about three short waits do not spin."""
_MAX_REST: Final = 64
"""Most waits without a spin after a crowded one."""
_HELD_BACK: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1})
"""Signals blocked during a sleep: posix_ipc drops what a signal handler raises, so Ctrl-C would be lost."""


def _library() -> Any:
    """Returns the library with the function of `spin.c`, which releases the GIL; None if it was not built."""
    library = native_library()
    if library is not None:
        awaited = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int)
        library.moeoffload_spin.argtypes = [*awaited, ctypes.c_int64, ctypes.c_int64]
    return library


class Readable:
    """File descriptors to wait for until one of them is readable."""

    class _PollFd(ctypes.Structure):
        _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))

    def __init__(self, *descriptors: int) -> None:
        self.poll = select.poll()
        for fd in descriptors:
            self.poll.register(fd, select.POLLIN)
        self.structures = (self._PollFd * len(descriptors))(*(self._PollFd(fd, select.POLLIN, 0) for fd in descriptors))
        self.address = ctypes.addressof(self.structures)


class AdaptiveSpin:
    """Waits for one thread at a time and adapts to how long recent waits took. All times in seconds."""

    __slots__ = ("_library", "_limit_s", "_mean_s", "_n_crowded", "_rest")

    def __init__(self, limit_s: float = SPIN_LIMIT_S) -> None:
        """A limit of 0 disables spinning; so does a single core, on which a spin would keep the peer from working."""
        self._library = _library()
        self._limit_s = limit_s if self._library is not None and (os.cpu_count() or 1) > 1 else 0.0
        self._mean_s = self._limit_s / 2
        self._rest = self._n_crowded = 0

    @property
    def budget_s(self) -> float:
        """How long to spin now: about four times the mean of recent waits, or 0 if that mean is above the limit."""
        if self._rest or self._mean_s >= self._limit_s:
            return 0.0
        return min(self._limit_s, 4 * self._mean_s + 10e-6)

    def learn(self, waited_s: float) -> None:
        """Adds one wait to the mean."""
        self._mean_s += _WEIGHT * (min(waited_s, _LONGEST * self._limit_s) - self._mean_s)
        if self._rest:
            self._rest -= 1

    def met(self, seen: int) -> None:
        """Records why a spin ended: after a crowded one, the next waits do not spin."""
        if seen != CROWDED:
            self._n_crowded = 0
            return
        self._rest = min(2**self._n_crowded, _MAX_REST)
        self._n_crowded = min(self._n_crowded + 1, 8)

    def acquire(self, semaphore: posix_ipc.Semaphore, bell: int, value: int, timeout_s: float) -> bool:
        """Takes one token of ``semaphore``; returns False if there was none within ``timeout_s`` (or a signal arrived).

        While spinning it watches an int64 at address ``bell``, to which the poster writes ``value`` after posting.
        """
        started = perf_counter()
        budget_s = min(self.budget_s, timeout_s)
        try:
            if budget_s > 0:
                self.met(self._library.moeoffload_spin(bell, value, None, 0, int(budget_s * 1e9), _CROWDED_NS))
            left_s = timeout_s - (perf_counter() - started)
            if left_s <= 0 or semaphore.value:
                semaphore.acquire(0)
            else:
                _sleep(semaphore, left_s)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            self.learn(perf_counter() - started)
        return True

    def poll(self, readable: Readable, timeout_s: float) -> list[tuple[int, int]]:
        """Returns which of ``readable`` can be read, as `select.poll.poll` does; nothing after ``timeout_s``."""
        started = perf_counter()
        budget_s = min(self.budget_s, timeout_s)
        if budget_s > 0:
            awaited = None, 0, readable.address, len(readable.structures)
            self.met(self._library.moeoffload_spin(*awaited, int(budget_s * 1e9), _CROWDED_NS))
        found = readable.poll.poll(max(timeout_s - (perf_counter() - started), 0) * 1000)
        self.learn(perf_counter() - started)
        return found


def _sleep(semaphore: posix_ipc.Semaphore, timeout_s: float) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        semaphore.acquire(timeout_s)
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            # Another thread may have received the signal: its handler then raises here, before the mask was set.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise

"""Waiting for a semaphore: first look a few microseconds without sleeping, if that has paid off lately.

Waking a sleeping thread on another core costs 20 to 50 microseconds, as much as a whole small round trip. A thread
that looks again and again instead answers within 2 microseconds, but takes a core and, in Python, the interpreter lock
from others. So it looks only for as long as recent waits took, never longer than a limit, and between two looks it lets
other processes (sched_yield) and other threads of this process (a pause without the interpreter lock) run.
"""

from __future__ import annotations

import os
import zlib
from time import perf_counter
from typing import Final

import posix_ipc

SPIN_LIMIT_S: Final = 200e-6
"""Default of the longest look without sleeping, in seconds."""
_WEIGHT: Final = 0.125
"""Of the newest wait in the mean of recent waits."""
_PAUSE: Final = bytes(6144)
"""zlib.crc32 gives the interpreter lock up for more than 5 KiB: about 1 microsecond in which other threads can take it.
time.sleep(0) would do the same but takes 70 microseconds (timer slack)."""


class AdaptiveSpin:
    """How long it pays to look before sleeping, learned from how long recent waits were."""

    __slots__ = ("_limit_s", "_mean_s")

    def __init__(self, limit_s: float = SPIN_LIMIT_S) -> None:
        """A limit of 0 never spins; nor does a machine with a single core, where only a sleeper lets the peer work."""
        self._limit_s = limit_s if (os.cpu_count() or 1) > 1 else 0.0
        self._mean_s = self._limit_s / 2

    @property
    def budget_s(self) -> float:
        """Seconds worth spinning now: twice the mean of recent waits, or 0 if those were longer than the limit."""
        return min(self._limit_s, 2 * self._mean_s + 10e-6) if self._mean_s < self._limit_s else 0.0

    def learn(self, waited_s: float) -> None:
        """Takes one wait into the mean; a very long one counts as four limits, so that it is soon forgotten."""
        self._mean_s += _WEIGHT * (min(waited_s, 4 * self._limit_s) - self._mean_s)

    def acquire(self, semaphore: posix_ipc.Semaphore, timeout_s: float) -> bool:
        """Takes one token of ``semaphore``; False if there was none within ``timeout_s`` (or a signal came)."""
        start = perf_counter()
        until = start + min(self.budget_s, timeout_s)
        while not semaphore.value and perf_counter() < until:
            os.sched_yield()
            zlib.crc32(_PAUSE)
        try:
            semaphore.acquire(0 if semaphore.value or timeout_s <= 0 else timeout_s)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            self.learn(perf_counter() - start)
        return True

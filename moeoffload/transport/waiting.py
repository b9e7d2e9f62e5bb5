"""Waiting for a peer: first look for a while without sleeping, if that has paid off lately.

Waking a sleeping thread on another core costs 20 to 50 microseconds, and what it needs has left the caches by then. So
a thread looks for a few times as long as recent waits took, never longer than a limit: in a generation that is the
whole wait, and an idle channel costs a dozen such looks and then nothing. It gives up at once when somebody else wants
its core, and rests for more and more waits as long as that goes on.
"""

from __future__ import annotations

import os
import signal
from time import perf_counter
from typing import Final

import posix_ipc

from moeoffload.kernels.watch import Seen, watch

SPIN_LIMIT_S: Final = 10e-3
"""Default of the longest look without sleeping, in seconds: the experts of one layer for a few rows take less."""
CROWDED_S: Final = 1e-3
"""Who does not get the core back from ``sched_yield`` for so long shares it: a busy process keeps it for milliseconds,
while what the system does now and then, and what would not be helped by a sleep, takes tenths of one."""
_WEIGHT: Final = 0.125
"""Of the newest wait in the mean of recent waits."""
_LONGEST: Final = 1.25
"""Limits that a long wait counts as: after a prompt, or a pause of any length, three short waits are slept through."""
_HELD_BACK: Final = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1})
"""Signals that wait until a sleep is over: posix_ipc drops what a signal's handler raises, so Ctrl-C would be lost."""
_MAX_REST: Final = 64
"""Most waits without a look after one that met a crowd: one after the first, twice as many after every further one."""


class AdaptiveSpin:
    """How long it pays to look before sleeping, learned from how long recent waits were."""

    __slots__ = ("_crowds", "_limit_s", "_mean_s", "_rest", "_watch")

    def __init__(self, limit_s: float = SPIN_LIMIT_S) -> None:
        """A limit of 0 never spins; nor does a machine with a single core, where only a sleeper lets the peer work."""
        self._limit_s = limit_s if (os.cpu_count() or 1) > 1 else 0.0
        self._mean_s = self._limit_s / 2
        self._rest = self._crowds = 0
        self._watch = watch()

    @property
    def budget_s(self) -> float:
        """Seconds worth looking now: four times the mean of recent waits, or 0 if those were longer than the limit."""
        if self._rest or self._mean_s >= self._limit_s:
            return 0.0
        return min(self._limit_s, 4 * self._mean_s + 10e-6)

    def learn(self, waited_s: float) -> None:
        """Takes one wait into the mean; a long one counts as hardly more than the limit, and is soon forgotten."""
        self._mean_s += _WEIGHT * (min(waited_s, _LONGEST * self._limit_s) - self._mean_s)
        if self._rest:
            self._rest -= 1

    def learn_from(self, n_waits: int, waited_s: float) -> None:
        """As `learn`, for several waits that took ``waited_s`` seconds together."""
        for _ in range(n_waits):
            self.learn(waited_s / n_waits)

    def met(self, seen: int) -> None:
        """Draws the conclusion from the `Seen` of one look."""
        if seen != Seen.CROWDED:
            self._crowds = 0
            return
        self._rest = min(2**self._crowds, _MAX_REST)
        self._crowds = min(self._crowds + 1, 8)

    def acquire(
        self,
        semaphore: posix_ipc.Semaphore,
        bell: int,
        value: int,
        timeout_s: float,
        looked_since: float | None = None,
    ) -> bool:
        """Takes one token of ``semaphore``; False if there was none within ``timeout_s`` (or a signal came).

        Args:
            semaphore: whoever posts it writes the bell afterwards.
            bell: address of the int64 to look at meanwhile.
            value: what the bell shows when the token is there.
            timeout_s: deadline in seconds; 0 does not wait.
            looked_since: since when (perf_counter seconds) somebody else has looked, as long as it pays.
        """
        begun = perf_counter()
        start = begun if looked_since is None else looked_since
        budget_s = min(self.budget_s, timeout_s) if looked_since is None else 0.0
        try:
            if budget_s > 0:
                seen = self._watch.word(bell, value, budget_s, CROWDED_S)
                if seen != Seen.NEWS or self._crowds:
                    self.met(seen)
            left_s = timeout_s - (perf_counter() - begun)
            if semaphore.value or left_s <= 0:
                semaphore.acquire(0)
            else:
                _sleep(semaphore, left_s)
        except (posix_ipc.BusyError, posix_ipc.SignalError):
            return False
        finally:
            self.learn(perf_counter() - start)
        return True

    def descriptors(self, pollfds: int, count: int, timeout_s: float) -> bool:
        """Looks whether something happens on ``count`` C ``struct pollfd`` at the address ``pollfds``.

        Does not sleep: False if nothing happened within the time it pays to look.
        """
        budget_s = min(self.budget_s, timeout_s)
        return budget_s > 0 and self._watch.descriptors(pollfds, count, budget_s, CROWDED_S) == Seen.NEWS


def _sleep(semaphore: posix_ipc.Semaphore, timeout_s: float) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
        semaphore.acquire(timeout_s)
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        except BaseException:
            # Another thread may have taken the signal: its handler then raises here before anything was set.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise

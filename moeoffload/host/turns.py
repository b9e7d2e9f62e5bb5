"""The right to compute on the host, when two groups of requests share it."""

from __future__ import annotations

import threading
from time import perf_counter

from moeoffload.errors import DeadlineError


class Turns:
    """The right to compute on the host: held by the group that does, given up while it waits for servers."""

    def __init__(self, timeout_s: float) -> None:
        """``timeout_s``: the longest wait for the other group, in seconds."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._holder = 0
        """The thread that has it."""

    def take(self) -> float:
        """Waits for the right; the seconds that took.

        Raises:
            DeadlineError: the other group did not give it up in time.
        """
        started = perf_counter()
        if not self._lock.acquire(timeout=self._timeout_s):
            raise DeadlineError(f"a group of requests waited {self._timeout_s:g} s for the other one")
        self._holder = threading.get_ident()
        return perf_counter() - started

    def give(self) -> None:
        """Lets the other group go on; does nothing on a thread whose `take` failed."""
        if self._holder == threading.get_ident():
            self._holder = 0
            self._lock.release()

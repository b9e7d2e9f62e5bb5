"""Whose turn it is to compute on the host, when two groups of requests share it."""

from __future__ import annotations

import threading
from time import perf_counter


class Turns:
    """The right to compute on the host: held by the group that does, given up while it waits for servers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def take(self) -> float:
        """Waits for the right; the seconds that took. The other group gives it up within a dispatch's deadline."""
        started = perf_counter()
        self._lock.acquire()
        return perf_counter() - started

    def give(self) -> None:
        """Lets the other group go on."""
        self._lock.release()

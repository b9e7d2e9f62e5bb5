"""Whose request is computed next: every host gets the same share of the time, small requests at half the price.

Each host has a clock of the compute time it has used; the host with the least is next. A host that had nothing to do
starts where the others are, so no host saves time up. Start-time fair queueing, with the time that was really used.

Hosts whose clocks are as good as equal take turns, and what lay between their clocks is forgotten. Else requests a bit
longer than another host's would add up until that host has two turns in a row: each tenth token of a generation
would wait for two foreign calls instead of one.

Readers append to the queues at any time, a lease may end at any time, and one thread at a time computes. So what is
taken is taken under ``lock``, which `leave` holds too: what was there a moment ago may be gone.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Generic, TypeVar

SMALL_ROWS: Final = 16
"""Requests of at most this many rows are decode- or verify-shaped: another host's long request makes room for them."""
SMALL_PRICE: Final = 0.5
"""Every token waits for them: a host that decodes beside one that floods gets two thirds of the time, not half."""
SMALL_IN_A_ROW: Final = 16
"""After this many small requests of one host its large ones have a turn."""
_AS_GOOD_AS_EQUAL: Final = 0.5
"""Clocks that differ by less than this part of a small request."""
_FIRST_GUESS_S: Final = 4e-3
_WEIGHT: Final = 0.125
"""Of the newest small request in the mean of what they take."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Share(Generic[T]):
    """What one host waits for, and the time it has used. Any thread may append."""

    key: str
    """Who the host is."""
    small: deque[T] = field(default_factory=deque)
    large: deque[T] = field(default_factory=deque)
    used_s: float = 0.0
    small_s: float = _FIRST_GUESS_S
    """What a small request takes, on average."""
    is_idle: bool = True
    """Whether it had nothing to do when last looked at."""
    n_users: int = 1
    served_at: float = 0.0
    """When its last request was done, perf_counter seconds."""
    in_a_row: int = 0
    """Small requests since its last large one."""

    def charge(self, took_s: float, price: float, part: float = 1.0) -> None:
        """Counts a call that took so many seconds, of which this host had a part."""
        if price == SMALL_PRICE:
            self.small_s += _WEIGHT * (took_s - self.small_s)
        self.used_s += took_s * price * part
        self.served_at = perf_counter()


class FairShares(Generic[T]):
    """The shares of all attached hosts. `pick`, `take` and `rival` are for the thread that computes."""

    def __init__(self) -> None:
        self.all: tuple[Share[T], ...] = ()
        """Those of all attached hosts."""
        self.n_leases = 0
        """Of all hosts together."""
        self.lock = threading.Lock()
        self._clock_s = 0.0
        """Where the host that was served last stood: a host that comes starts there."""

    def join(self, key: str) -> Share[T]:
        """The share of the host ``key``, the same for all its leases; `leave` gives it back."""
        with self.lock:
            self.n_leases += 1
            for share in self.all:
                if share.key == key:
                    share.n_users += 1
                    return share
            share = Share(key)
            self.all = (*self.all, share)
            return share

    def leave(self, share: Share[T]) -> list[T]:
        """One lease of the host has ended; returns what will not be served any more, if that was the last."""
        with self.lock:
            self.n_leases -= 1
            share.n_users -= 1
            if share.n_users:
                return []
            self.all = tuple(other for other in self.all if other is not share)
            left = [*share.small, *share.large]
            # A thread that still holds the share must not keep its requests, and with them their channels' memory.
            share.small.clear()
            share.large.clear()
            return left

    def has_small(self) -> bool:
        """Whether any host waits for a small request."""
        for share in self.all:  # noqa: SIM110 (a generator costs each request more than the rest of this)
            if share.small:
                return True
        return False

    def pick(self) -> Share[T] | None:
        """The host whose turn it is; None if none waits."""
        least = self._least(None)
        if least is None:
            return None
        self._clock_s = max(self._clock_s, least.used_s)
        close_s = least.used_s + _AS_GOOD_AS_EQUAL * SMALL_PRICE * least.small_s
        turn = least
        for share in self.all:
            if (share.small or share.large) and share.used_s <= close_s and share.served_at < turn.served_at:
                turn = share
        turn.used_s = least.used_s
        return turn

    def take(self, share: Share[T]) -> T | None:
        """Takes the next request of a host; None if its lease has ended meanwhile."""
        with self.lock:
            if share.small and not (share.large and share.in_a_row >= SMALL_IN_A_ROW):
                share.in_a_row += 1
                return share.small.popleft()
            share.in_a_row = 0
            return share.large.popleft() if share.large else None

    def rival(self, running: Share[T], clock_s: float) -> tuple[Share[T], T] | None:
        """Takes the small request that comes before what ``running`` computes and has used up to ``clock_s`` for."""
        self._clock_s = max(self._clock_s, clock_s)
        share = self._least(running)
        if share is None or share.used_s > clock_s:
            return None
        with self.lock:
            return (share, share.small.popleft()) if share.small else None

    def _least(self, running: Share[T] | None) -> Share[T] | None:
        """The least share that waits: for anything if nothing runs, for a small request beside ``running``."""
        best = None
        for share in self.all:
            if share is running:
                continue
            if not share.small and not share.large:
                share.is_idle = True
                continue
            if share.is_idle:
                share.is_idle = False
                share.used_s = max(share.used_s, self._clock_s)
            if (running is None or share.small) and (best is None or share.used_s < best.used_s):
                best = share
        return best

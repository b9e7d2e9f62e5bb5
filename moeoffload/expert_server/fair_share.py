"""Decides whose request is computed next: hosts get equal shares of the time, small requests at half the price.

This is start-time fair queueing with measured times. Each host has a clock of the compute time it has used; the host
with the lowest clock is next. A host that was idle starts where the others are, so no host accumulates credit.

Hosts with nearly equal clocks take turns, and the difference of their clocks is dropped. Otherwise the excess of
slightly longer requests would add up until the other host has two turns in a row: every tenth token of a generation
would wait for two calls of another host instead of one.

Reader threads append to the queues at any time, a lease may end at any time, and one thread at a time computes. So
requests are taken under ``lock``, which `leave` holds too, and the code copes with a queue that was emptied meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Generic, TypeVar

SMALL_ROWS: Final = 16
"""Requests of at most this many rows are decode- or verify-shaped: they may interrupt another host's long request."""
SMALL_PRICE: Final = 0.5
"""Every token waits for small requests: a host that decodes beside one that floods gets 2/3 of the time, not half."""
SMALL_IN_A_ROW: Final = 16
"""After this many small requests of a host in a row, one of its large requests is taken."""
_AS_GOOD_AS_EQUAL: Final = 0.5
"""Clocks count as equal if they differ by at most this fraction of the price of a small request."""
_FIRST_GUESS_S: Final = 4e-3
_WEIGHT: Final = 0.125
"""Weight of the newest small request in the moving average of their times."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Share(Generic[T]):
    """One host's queued requests and the time it has used. Any thread may append to the queues."""

    key: str
    """Identifies the host."""
    small: deque[T] = field(default_factory=deque)
    large: deque[T] = field(default_factory=deque)
    used_s: float = 0.0
    small_s: float = _FIRST_GUESS_S
    """Moving average of the seconds of a small request."""
    is_idle: bool = True
    """Whether its queues were empty when last looked at."""
    n_users: int = 1
    served_at: float = 0.0
    """When its last request was charged, perf_counter seconds."""
    in_a_row: int = 0
    """Small requests taken since its last large one."""

    def charge(self, took_s: float, price: float, part: float = 1.0) -> None:
        """Charges this host for ``part`` of a call that took ``took_s`` seconds."""
        if price == SMALL_PRICE:
            self.small_s += _WEIGHT * (took_s - self.small_s)
        self.used_s += took_s * price * part
        self.served_at = perf_counter()


class FairShares(Generic[T]):
    """The shares of all attached hosts. Only the computing thread calls `pick`, `take` and `rival`."""

    def __init__(self) -> None:
        self.all: tuple[Share[T], ...] = ()
        """Shares of all attached hosts."""
        self.n_leases = 0
        """Leases of all hosts together."""
        self.lock = threading.Lock()
        self._clock_s = 0.0
        """The clock of the served hosts, where a new or idle host starts."""

    def join(self, key: str) -> Share[T]:
        """Returns the share of the host ``key``, the same for all its leases; `leave` gives it back."""
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
        """Notes that a lease of the host has ended; if it was the last, returns its requests, now not to be served."""
        with self.lock:
            self.n_leases -= 1
            share.n_users -= 1
            if share.n_users:
                return []
            self.all = tuple(other for other in self.all if other is not share)
            left = [*share.small, *share.large]
            # A thread may still hold the share: it must not keep the requests, and with them their channels' memory.
            share.small.clear()
            share.large.clear()
            return left

    def has_small(self) -> bool:
        """Whether any host has a small request queued."""
        for share in self.all:  # noqa: SIM110 (a generator costs each request more than the rest of this)
            if share.small:
                return True
        return False

    def has_any(self) -> bool:
        """Whether any host has a request queued."""
        for share in self.all:  # noqa: SIM110 (as in `has_small`)
            if share.small or share.large:
                return True
        return False

    def pick(self) -> Share[T] | None:
        """Returns the host whose turn it is; None if no request is queued."""
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
        """Takes the next request of a host; returns None if its lease has ended meanwhile."""
        with self.lock:
            if share.small and not (share.large and share.in_a_row >= SMALL_IN_A_ROW):
                share.in_a_row += 1
                return share.small.popleft()
            share.in_a_row = 0
            return share.large.popleft() if share.large else None

    def rival(self, running: Share[T], clock_s: float) -> tuple[Share[T], T] | None:
        """Takes the small request of another host whose clock is at most ``clock_s``, that of ``running`` by now;
        returns None if there is none."""
        self._clock_s = max(self._clock_s, clock_s)
        share = self._least(running)
        if share is None or share.used_s > clock_s:
            return None
        with self.lock:
            return (share, share.small.popleft()) if share.small else None

    def _least(self, running: Share[T] | None) -> Share[T] | None:
        """Returns the share with the lowest clock among those with queued requests: any request if ``running`` is None,
        else a small request of another host."""
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

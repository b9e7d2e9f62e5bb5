"""Whose request is computed next: every host gets the same share of the time, brief requests at half the price.

Each host has a clock of the compute time it has used; the host with the least is next. A host that had nothing to do
starts where the others are, so nobody saves time up. Start-time fair queueing, with the time that was really used.

Hosts whose clocks are as good as equal take turns, and what lay between their clocks is forgotten. Else requests a bit
longer than another host's would add up until that host has two turns in a row: each tenth token of a generation
would wait for two foreign calls instead of one.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field
from time import perf_counter
from typing import Final, Generic, TypeVar

BRIEF_ROWS: Final = 16
"""Requests of up to so many rows are decode- or verify-shaped: another host's long request is interrupted for them."""
BRIEF_PRICE: Final = 0.5
"""Somebody waits for each token: a host that decodes beside one that floods gets two thirds of the time, not half."""
SMALL_IN_A_ROW: Final = 16
"""After so many small requests of one host its large ones have a turn."""
_AS_GOOD_AS_EQUAL: Final = 0.5
"""Clocks that differ by less than this part of a brief request."""
_LEAST_STEP_S: Final = 0.2e-3
_LARGEST_STEP_S: Final = 4e-3
_STEP_PART: Final = 0.25
_WEIGHT: Final = 0.125
"""Of the newest brief request in the mean of what they take."""

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Share(Generic[T]):
    """What one host waits for, and the time it has used. Anyone may append; only who computes takes."""

    key: str
    """Who the host is."""
    small: deque[T] = field(default_factory=deque)
    large: deque[T] = field(default_factory=deque)
    used_s: float = 0.0
    brief_s: float = _LARGEST_STEP_S
    """What a brief request takes, on average."""
    is_idle: bool = True
    """Whether it had nothing to do when last looked at."""
    n_users: int = 1
    served_at: float = 0.0
    """When its last request was done, perf_counter seconds."""
    _in_a_row: int = 0

    def next(self) -> tuple[T, bool]:
        """Takes the next request; whether it is a large one. There must be one."""
        if self.small and not (self.large and self._in_a_row >= SMALL_IN_A_ROW):
            self._in_a_row += 1
            return self.small.popleft(), False
        self._in_a_row = 0
        return self.large.popleft(), True

    def charge(self, took_s: float, price: float, part: float = 1.0) -> None:
        """Counts a call that took so many seconds, of which this host had a part."""
        if price == BRIEF_PRICE:
            self.brief_s += _WEIGHT * (took_s - self.brief_s)
        self.used_s += took_s * price * part
        self.served_at = perf_counter()


class FairShares(Generic[T]):
    """The shares of all attached hosts. `pick` and `rival` are for the thread that computes."""

    def __init__(self) -> None:
        self._shares: tuple[Share[T], ...] = ()
        self._clock_s = 0.0
        """Where the host that was served last stood: a host that comes starts there."""
        self._lock = threading.Lock()
        self.n_leases = 0
        """Of all hosts together."""

    @property
    def all(self) -> tuple[Share[T], ...]:
        """Those of all attached hosts."""
        return self._shares

    @property
    def n_shares(self) -> int:
        """Hosts that have one."""
        return len(self._shares)

    def join(self, key: str) -> Share[T]:
        """The share of the host ``key``, the same for all its leases; `leave` gives it back."""
        with self._lock:
            self.n_leases += 1
            for share in self._shares:
                if share.key == key:
                    share.n_users += 1
                    return share
            share = Share(key)
            self._shares = (*self._shares, share)
            return share

    def leave(self, share: Share[T]) -> list[T]:
        """One lease of the host has ended; returns what will not be served any more, if that was the last."""
        with self._lock:
            self.n_leases -= 1
            share.n_users -= 1
            if share.n_users:
                return []
            self._shares = tuple(other for other in self._shares if other is not share)
        left = [*share.small, *share.large]
        # Whoever still holds the share must not keep its requests, and with them the memory of their channels.
        share.small.clear()
        share.large.clear()
        return left

    def has_small(self) -> bool:
        """Whether any host waits for a small request."""
        for share in self._shares:  # noqa: SIM110 (a generator costs each request more than the rest of this)
            if share.small:
                return True
        return False

    def pick(self) -> Share[T] | None:
        """The host whose turn it is; None if nobody waits."""
        least = self._least(None)
        if least is None:
            return None
        self._clock_s = max(self._clock_s, least.used_s)
        close_s = least.used_s + _AS_GOOD_AS_EQUAL * BRIEF_PRICE * least.brief_s
        turn = least
        for share in self._shares:
            if (share.small or share.large) and share.used_s <= close_s and share.served_at < turn.served_at:
                turn = share
        turn.used_s = least.used_s
        return turn

    def served_alone(self, share: Share[T], n_requests: int, took_s: float) -> None:
        """Counts brief requests that were served without `pick`, while nobody else had any."""
        if not n_requests:
            return
        # As if each request had been picked: who has nothing to do is idle, and starts where this one stands.
        for other in self._shares:
            if other is not share and not other.small and not other.large:
                other.is_idle = True
        if share.is_idle:
            share.is_idle = False
            share.used_s = max(share.used_s, self._clock_s)
        for _ in range(n_requests):
            share.charge(took_s / n_requests, BRIEF_PRICE)
        self._clock_s = max(self._clock_s, share.used_s)

    def rival(self, running: Share[T], clock_s: float) -> Share[T] | None:
        """The host whose small request comes before what ``running`` computes and has used up to ``clock_s`` for."""
        self._clock_s = max(self._clock_s, clock_s)
        share = self._least(running)
        return share if share is not None and share.used_s <= clock_s else None

    def step_s(self, running: Share[T]) -> float:
        """How long others can wait: a part of what a brief request of theirs takes."""
        others = min((share.brief_s for share in self._shares if share is not running), default=_LARGEST_STEP_S)
        return min(max(others * _STEP_PART, _LEAST_STEP_S), _LARGEST_STEP_S)

    def _least(self, running: Share[T] | None) -> Share[T] | None:
        """The least share that waits: for anything if nothing runs, for a small request beside ``running``."""
        best = None
        for share in self._shares:
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

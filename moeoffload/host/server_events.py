"""Server events of a run (lost, returned, drained, ...): counted for the report, and logged."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Final

logger = logging.getLogger(__name__)

KEPT_EVENTS: Final = 256  # the newest events; a report does not grow without bound


@dataclass(frozen=True, slots=True)
class Event:
    """``at_s`` counts from the opening of the model; ``seconds`` is how long the server was away, or 0."""

    at_s: float
    server: str
    what: str
    why: str
    seconds: float = 0.0


class ServerEvents:
    """Thread-safe counters and events of one open model."""

    def __init__(self) -> None:
        self._started = perf_counter()
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(("lost", "returned", "drained", "verified", "replica_calls", "stale"), 0)
        self._events: deque[Event] = deque(maxlen=KEPT_EVENTS)
        self._away: Counter[str] = Counter()
        """By server, the number of shards that other links compute for it now; one warning covers all of them."""

    def count(self, what: str, n: int = 1) -> None:
        """Adds ``n`` to the count of ``what``; ``stale`` counts replies that came late, twice or unasked."""
        with self._lock:
            self._counts[what] += n

    def lost(self, server: str, why: str, instead: str) -> None:
        """Records that a server is no longer used."""
        self._record("lost", server, why, 1, f"{why}; its experts are computed by {instead}")

    def drained(self, server: str, instead: str) -> None:
        """Records that a server is draining and no longer used."""
        message = f"expert server {server} is draining; its experts are computed by {instead}"
        self._record("drained", server, "it is draining", 1, message)

    def returned(self, server: str, away_s: float) -> None:
        """Records that a server is used again."""
        message = f"expert server {server} is back after {away_s:.1f} s"
        self._record("returned", server, "it answers again", -1, message, away_s)

    def _record(self, what: str, server: str, why: str, n_more: int, message: str, seconds: float = 0.0) -> None:
        """Adds an event. Logs a warning when the first shard moves away from ``server``, and when the last is back."""
        with self._lock:
            self._away[server] += n_more
            is_news = self._away[server] == max(0, n_more)
            self._counts[what] += 1
            self._events.append(Event(perf_counter() - self._started, server, what, why, seconds))
        logger.log(logging.WARNING if is_news else logging.INFO, "%s", message)

    def to_json(self, **more: int) -> dict[str, Any]:
        """Returns the report's figures; ``more`` are the counts of links that are still open."""
        with self._lock:
            counts = {name: count + more.pop(name, 0) for name, count in self._counts.items()}
            return counts | more | {"events": [asdict(event) for event in self._events]}

"""Counts who was refused, and says so in the log: not more often than a reader can bear."""

from __future__ import annotations

import logging
import threading
from collections import deque
from time import monotonic
from typing import Final

LINES: Final = 10
WINDOW_S: Final = 60.0
"""At most `LINES` refusals are logged within this many seconds; the next one tells how many were left out."""

_log = logging.getLogger(__name__)


class Refusals:
    """Thread-safe. ``count`` is how many connections, calls and keys were refused since the start."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._logged: deque[float] = deque(maxlen=LINES)
        self._left_out = 0

    def add(self, peer: str, reason: str) -> None:
        """Counts one. ``reason`` is the server's own words: nothing that a peer sent, no secret."""
        now = monotonic()
        with self._lock:
            self.count += 1
            if len(self._logged) == LINES and now - self._logged[0] < WINDOW_S:
                self._left_out += 1
                return
            self._logged.append(now)
            left_out, self._left_out = self._left_out, 0
        more = f" ({left_out} more refusals were not logged)" if left_out else ""
        _log.warning("refused %s: %s%s", peer, reason, more)

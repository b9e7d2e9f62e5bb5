"""Counts refused peers and logs them at a limited rate."""

from __future__ import annotations

import logging
import threading
from typing import Final

from moeoffload.logs import RateLimit

LINES: Final = 10
WINDOW_S: Final = 60.0
"""At most `LINES` refusals are logged within this many seconds; the next log line says how many were dropped."""

_log = logging.getLogger(__name__)


class Refusals:
    """Thread-safe. ``count`` is how many connections, calls and keys were refused since the start."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._limit = RateLimit(LINES, WINDOW_S)

    def add(self, peer: str, reason: str) -> None:
        """Counts one refusal. ``reason`` is the server's own text: nothing that a peer sent, no secret."""
        with self._lock:
            self.count += 1
        left_out = self._limit.admit()
        if left_out is not None:
            more = f" ({left_out} more refusals were not logged)" if left_out else ""
            _log.warning("refused %s: %s%s", peer, reason, more)

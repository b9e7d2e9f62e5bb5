"""Counts and logs refused peers."""

from __future__ import annotations

import logging
import threading

_log = logging.getLogger(__name__)


class Refusals:
    """Thread-safe. ``count`` is how many connections, calls and keys were refused since the start."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()

    def add(self, peer: str, reason: str) -> None:
        """Counts one refusal. ``reason`` is the server's own text: nothing that a peer sent, no secret."""
        with self._lock:
            self.count += 1
        _log.warning("refused %s: %s", peer, reason)

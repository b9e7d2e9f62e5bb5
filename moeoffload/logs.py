"""Log formatting: one line per event whatever text it quotes, and rate limits, so that no peer can fill a disk."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from time import monotonic
from typing import Final

from moeoffload.text import one_line

MAX_LINE: Final = 4096
BURST: Final = 50  # lines of one kind logged within `WINDOW_S` seconds; further ones are only counted
WINDOW_S: Final = 10.0
_MAX_KINDS: Final = 256


class OneLineFormatter(logging.Formatter):
    """Formats messages as one printable line; a traceback is indented, so that it cannot be mistaken for a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return one_line(super().formatMessage(record), MAX_LINE)

    def formatException(self, ei: object) -> str:
        """See `logging.Formatter`."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  | {one_line(line, MAX_LINE)}" for line in text.splitlines())


class RateLimit:
    """Lets ``burst`` events through in ``window_s`` seconds. Thread-safe."""

    def __init__(self, burst: int, window_s: float) -> None:
        self._burst = burst
        self._window_s = window_s
        self._began = -window_s
        self._n = 0
        self._lock = threading.Lock()

    def admit(self) -> int | None:
        """Returns None for an event to be dropped, else how many were dropped since the last admitted one."""
        now = monotonic()
        with self._lock:
            left_out = 0
            if now - self._began >= self._window_s:
                left_out = max(0, self._n - self._burst)
                self._began, self._n = now, 0
            self._n += 1
            return None if self._n > self._burst else left_out


class FloodFilter(logging.Filter):
    """Lets `BURST` records of one kind (logger, level, text without its values) through in `WINDOW_S` seconds.

    The first record of a later window says how many were dropped.
    """

    def __init__(self, burst: int = BURST, window_s: float = WINDOW_S) -> None:
        super().__init__()
        self._make = lambda: RateLimit(burst, window_s)
        self._kinds: OrderedDict[tuple[str, int, str], RateLimit] = OrderedDict()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        kind = (record.name, record.levelno, str(record.msg)[:200])
        with self._lock:
            limit = self._kinds.get(kind) or self._make()
            self._kinds[kind] = limit
            self._kinds.move_to_end(kind)
            if len(self._kinds) > _MAX_KINDS:
                self._kinds.popitem(last=False)
        left_out = limit.admit()
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it were left out)", None
        return left_out is not None


def log_to(handler: logging.Handler, level: str, form: str) -> None:
    """Sends all logs of ``level`` and above to ``handler``, in the format ``form`` of the `logging` module."""
    handler.setLevel(level)
    handler.setFormatter(OneLineFormatter(form))
    handler.addFilter(FloodFilter())
    logging.basicConfig(level=level, handlers=[handler])

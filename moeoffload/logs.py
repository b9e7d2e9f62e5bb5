"""Logs: one line per event whatever text it quotes, rate limits, so that no peer can fill a disk, refused peers."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from time import monotonic
from typing import Final

from moeoffload.text import one_line

DATED_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
MAX_LINE: Final = 4096
BURST: Final = 50  # lines of one kind logged within `WINDOW_S` seconds; further ones are only counted
WINDOW_S: Final = 10.0
_MAX_KINDS: Final = 256

_log = logging.getLogger(__name__)


class OneLineFormatter(logging.Formatter):
    """Formats messages as one printable line; a traceback is indented, so that it cannot be mistaken for a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`."""
        return one_line(super().formatMessage(record), MAX_LINE)

    def formatException(self, ei: object) -> str:
        """See `logging.Formatter`."""
        text = super().formatException(ei)  # type: ignore[arg-type]
        return "\n".join(f"  | {one_line(line, MAX_LINE)}" for line in text.splitlines())


class FloodFilter(logging.Filter):
    """Lets `BURST` records of one kind (logger, level, text without its values) through in `WINDOW_S` seconds.

    The first record of a later window says how many were dropped.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: OrderedDict[tuple[str, int, str], tuple[float, int]] = OrderedDict()
        """Of each kind, when its window began and how many records it has had."""
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """See `logging.Filter`."""
        kind, now, left_out = (record.name, record.levelno, str(record.msg)[:200]), monotonic(), 0
        with self._lock:
            began, n = self._kinds.get(kind, (now, 0))
            if now - began >= WINDOW_S:
                left_out = max(0, n - BURST)
                began, n = now, 0
            self._kinds[kind] = began, n + 1
            self._kinds.move_to_end(kind)
            if len(self._kinds) > _MAX_KINDS:
                self._kinds.popitem(last=False)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more like it were left out)", None
        return n < BURST


def log_to(handler: logging.Handler, level: str, form: str) -> None:
    """Sends all logs of ``level`` and above to ``handler``, in the format ``form`` of the `logging` module."""
    handler.setLevel(level)
    handler.setFormatter(OneLineFormatter(form))
    handler.addFilter(FloodFilter())
    logging.basicConfig(level=level, handlers=[handler])


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

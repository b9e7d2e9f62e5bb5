"""What an expert server shows on its terminal while it loads: a bar for each host, below the log lines."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

from moeoffload.cli.display import bytes_of, log_handler, temporary_lines
from moeoffload.text import one_line

_LONGEST_NAME = 30


class LoadBars:
    """Bars of the hosts whose experts are being loaded, on stderr, which is a terminal. Thread-safe."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._lines: Progress | None = None  # while any host's experts are being loaded
        self._lock = threading.Lock()

    def log_handler(self) -> logging.Handler:
        """Returns a handler that writes log lines above the bars."""
        return log_handler(self._console)

    @contextmanager
    def show(self, host: str) -> Iterator[Callable[[int, int], None]]:
        """Shows a bar while open; yields a function that is told the bytes loaded so far and all of them."""
        with self._lock:
            if self._lines is None:
                self._lines = temporary_lines(self._console, hidden=False)
                self._lines.start()
            lines = self._lines
            bar = lines.add_task(f"loading for {one_line(host, _LONGEST_NAME)}", total=None, count="")
        try:
            yield lambda loaded, total: lines.update(bar, completed=loaded, total=total, count=bytes_of(loaded, total))
        finally:
            with self._lock:
                if len(lines.tasks) == 1:
                    self.close()
                lines.remove_task(bar)

    def close(self) -> None:
        """Erases the bars."""
        lines, self._lines = self._lines, None
        if lines is not None:
            lines.stop()

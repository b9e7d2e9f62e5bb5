"""Ctrl-C and SIGTERM: at first they end a command at once, later they unwind what it has opened."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT  # as a shell reports it
_AGAIN_S: Final = 0.01
"""How long after a signal whose exception was lost it is sent again."""
_SHOW_CURSOR: Final = b"\r\x1b[K\x1b[?25h"  # a progress bar may have hidden it


def leave_at_once_on_ctrl_c() -> None:
    """Makes Ctrl-C end the process with one line; an exception might be lost in half-imported modules.

    A process that ignores Ctrl-C keeps ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os.write(2, (_SHOW_CURSOR if os.isatty(2) else b"") + b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


@contextmanager
def signals_unwind() -> Iterator[None]:
    """While open, Ctrl-C and SIGTERM end the command through ``finally`` blocks, which stop servers and end leases."""

    def on_term(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, on_term)}
    if signal.getsignal(signal.SIGINT) is _leave:
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook_before, sys.unraisablehook = sys.unraisablehook, _send_again
    try:
        yield
    finally:
        sys.unraisablehook = hook_before
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_again(lost: sys.UnraisableHookArgs) -> None:
    """Sends a signal again whose exception Python drops, since it was raised in a ``__del__`` or a weak reference's
    callback. Importing and loading run thousands of those."""
    error = lost.exc_value
    if isinstance(error, KeyboardInterrupt):
        number = signal.SIGINT
    elif isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM:
        number = signal.SIGTERM
    else:
        sys.__unraisablehook__(lost)
        return
    again = threading.Timer(_AGAIN_S, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()

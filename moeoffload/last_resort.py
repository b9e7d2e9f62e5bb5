"""Long-lived threads that do not die silently: an unexpected error is logged and reported."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


def start_thread(name: str, run: Callable[[], None], on_failure: Callable[[str], None]) -> threading.Thread:
    """Starts a daemon thread that runs ``run``.

    If ``run`` raises, the error is logged with its traceback and ``on_failure`` is called in that thread with one line.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException as error:
            logger.critical("thread %s has failed", name, exc_info=error)
            try:
                on_failure(f"its thread {name} failed: {type(error).__name__}: {error}")
            except Exception:
                logger.exception("the failure of thread %s could not be told", name)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread

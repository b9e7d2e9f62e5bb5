"""Long-lived threads that do not die silently, and calls without a time limit of their own that get one."""

from __future__ import annotations

import logging
import mmap
import resource
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

_Answer = TypeVar("_Answer")
_USUAL_STACK: Final = 8 << 20
_FIRST_OBJECTS: Final = 2 << 20  # what Python and libc take at most while a thread begins

logger = logging.getLogger(__name__)


def check_room_for_thread() -> None:
    """Raises RuntimeError: there is no memory for a thread. With memory for its stack only, `Thread.start` would wait
    for ever, because the thread ends before it can tell that it has begun."""
    stack = resource.getrlimit(resource.RLIMIT_STACK)[0]
    stack = _USUAL_STACK if stack == resource.RLIM_INFINITY else stack
    try:
        mmap.mmap(-1, stack + _FIRST_OBJECTS, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, ValueError, OverflowError, MemoryError):
        raise RuntimeError("can't start new thread: no memory for it") from None


def start(thread: threading.Thread) -> None:
    """Starts a thread. Raises RuntimeError: the system allows no more."""
    check_room_for_thread()
    thread.start()


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
    start(thread)
    return thread


def answer_within(timeout_s: float, name: str, ask: Callable[[], _Answer]) -> _Answer:
    """Returns ``ask()``, which a daemon thread runs: name resolution, for instance, may take longer than any limit.
    Raises TimeoutError: no answer within ``timeout_s`` seconds, the thread is left to itself; and what ``ask`` raises.
    """
    answer: Future[_Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except BaseException as error:
            answer.set_exception(error)

    start(threading.Thread(target=run, name=name, daemon=True))
    return answer.result(timeout_s)

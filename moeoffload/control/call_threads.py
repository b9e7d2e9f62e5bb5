"""The threads in which gRPC runs calls: one per call, which ends with it, and one that waits for the next call."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, Final

MOST_CALLS: Final = 64
"""Most calls at a time; further ones wait. Calls that send no request end after some seconds."""


class CallThreads(Executor):
    """Keeps one idle thread, so that calls can be refused even when the system allows no more threads.

    A ThreadPoolExecutor would never shrink below the most threads that it ever needed at once.
    """

    def __init__(self) -> None:
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._n_threads = self._n_idle = 0
        self._ended = False
        self._add_thread()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs ``fn`` in a thread of its own, or after another call if no thread is available."""
        done: Future[Any] = Future()

        def call() -> None:
            try:
                done.set_result(fn(*args, **kwargs))
            except BaseException as error:
                done.set_exception(error)

        with self._changed:
            self._calls.append(call)
            if self._n_idle <= len(self._calls):
                self._add_thread()
            self._changed.notify()
        return done

    def end(self, timeout_s: float) -> bool:
        """Lets the threads end; returns whether all running calls have ended within ``timeout_s`` seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._n_threads == 0, timeout_s)

    def _add_thread(self) -> None:
        if self._n_threads >= MOST_CALLS or self._ended:
            return
        try:
            threading.Thread(target=self._run, name="call", daemon=True).start()
        except RuntimeError:
            return  # the system allows no more: existing threads serve, or refuse, the waiting calls
        self._n_threads += 1
        self._n_idle += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._ended)
                self._n_idle -= 1
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                call()
                del call
            with self._changed:
                if self._ended or self._n_idle > len(self._calls):
                    self._n_threads -= 1
                    self._changed.notify_all()
                    return
                self._n_idle += 1

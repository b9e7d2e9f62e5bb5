"""Two threads run two halves of a pass through a model in turns: one computes while the other waits for servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from time import perf_counter
from typing import TypeVar

import torch

from moeoffload.errors import DeadlineError
from moeoffload.host.recorder import Recorder

_Result = TypeVar("_Result")


class _Half(threading.local):
    number: int | None = None
    """Which half this thread runs."""


class Turns:
    """Passes the turn from one half to the other wherever one waits for servers.

    Two threads that compute together would take cores and caches from each other. And since they take strict turns, the
    second one enters a layer after the first one, whose keys and values it may need. As a context manager it is entered
    where a thread waits for servers; a thread that runs no half passes nothing.
    """

    def __init__(self, recorder: Recorder, timeout_s: float) -> None:
        """``timeout_s``: how long the other half may need for its turn."""
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._half = _Half()
        self._moved = threading.Condition()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="half")
        self._turn = self._head_start = 0
        self._over = self._failed = False

    def close(self) -> None:
        """Ends the second thread. Idempotent."""
        self._pool.shutdown()

    def run(
        self,
        phase: str,
        halves: tuple[Callable[[], _Result], Callable[[], _Result]],
        waited: Callable[[float], None],
        *,
        head_start: int = 0,
        n_tokens: int = 0,
    ) -> tuple[_Result, _Result]:
        """Returns the results of both halves; the second one runs in the second thread. For one thread at a time.

        Args:
            phase: what both count as, see `Recorder.beside`; so is ``n_tokens``, for the second half.
            waited: called with the seconds that the first one waited for the second one in the end.
            head_start: MoE layers at which the first half keeps its turn.

        Raises what a half raised, once both have ended; DeadlineError: a half did not pass its turn on in time.
        """
        self._turn, self._head_start, self._over, self._failed = 0, head_start, False, False
        inference = torch.is_inference_mode_enabled()

        def beside() -> _Result:
            # Grad and inference mode belong to a thread.
            with torch.inference_mode(inference), torch.no_grad(), self._recorder.beside(phase, n_tokens), self._of(1):
                return halves[1]()

        other = self._pool.submit(beside)
        try:
            with self._of(0):
                first = halves[0]()
            started = perf_counter()
            second = other.result()
        except BaseException:
            self._failed = True  # also if Ctrl-C came while this thread only waited
            # The first failure is the one to tell; the other thread's is its consequence.
            error = _outlast(other)
            if error is not None and not isinstance(error, _OtherHalfFailedError):
                raise error from None
            raise
        waited(perf_counter() - started)
        return first, second

    def __enter__(self) -> None:
        if (number := self._half.number) is not None:
            with self._moved:
                if number or not self._head_start:
                    self._turn = 1 - number
                    self._moved.notify_all()
                else:
                    self._head_start -= 1

    def __exit__(self, *error: object) -> None:
        if (number := self._half.number) is not None and error[0] is None:
            self._take(number)

    @contextmanager
    def _of(self, number: int) -> Iterator[None]:
        self._half.number = number
        try:
            self._take(number)
            yield
        except BaseException:
            self._failed = True
            raise
        finally:
            self._half.number = None
            with self._moved:
                self._over = True
                self._moved.notify_all()

    def _take(self, number: int) -> None:
        started = perf_counter()
        with self._moved:
            if not self._moved.wait_for(lambda: self._turn == number or self._over, self._timeout_s):
                raise DeadlineError(f"half of a pass waited {self._timeout_s:.0f} s for the other one")
        if self._failed:
            raise _OtherHalfFailedError
        self._recorder.counters.turn(perf_counter() - started)


class _OtherHalfFailedError(Exception):
    """This half ends because the other one failed."""


def _outlast(beside: Future[_Result]) -> BaseException | None:
    """Returns how the other thread ended. Waits for that whatever a signal raises, and raises it afterwards: until then
    the thread uses the model and adds to the cache. It ends within a layer, each of whose waits has a deadline."""
    try:
        return beside.exception()
    except (KeyboardInterrupt, SystemExit):
        _outlast(beside)
        raise

"""Computes a step in two halves: the host computes one while servers compute the experts of the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from time import perf_counter
from typing import Final

import torch

from moeoffload.errors import DeadlineError
from moeoffload.host.pipeline import outlast
from moeoffload.host.recorder import PREFILL, Recorder
from moeoffload.host.session import OffloadedModel
from moeoffload.host.speculative import GuessLength
from moeoffload.serve.model_runner import ModelRunner
from moeoffload.serve.sequence import Share

_LEAST_CUT: Final = 64
"""Steps of so many rows always have halves, and a prompt's part of so many rows may be cut."""


class _Half(threading.local):
    number: int | None = None


class Turns:
    """Lets two threads compute on the host in turns, from where one waits for servers to where the other one does.

    Two that compute together would take cores and caches from each other. And since they take strict turns, the second
    one enters a layer after the first one, whose keys and values it may need. As a context manager it passes the turn
    on while a thread waits for servers; a thread that is in no half passes nothing.
    """

    def __init__(self, recorder: Recorder, timeout_s: float) -> None:
        self._recorder = recorder
        self._timeout_s = timeout_s
        self._half = _Half()
        self._moved = threading.Condition()
        self._turn = 0
        self._over = [False, False]

    def begin(self) -> None:
        """Before a step; the first turn is that of half 0."""
        self._turn, self._over = 0, [False, False]

    @contextmanager
    def of(self, number: int) -> Iterator[None]:
        """What this thread runs is half ``number``. Raises DeadlineError: the other half did not pass the turn on."""
        self._half.number = number
        try:
            self._take(number)
            yield
        finally:
            self._half.number = None
            with self._moved:
                self._over[number], self._turn = True, 1 - number
                self._moved.notify_all()

    def __enter__(self) -> None:
        if (number := self._half.number) is not None:
            with self._moved:
                self._turn = 1 - number
                self._moved.notify_all()

    def __exit__(self, *error: object) -> None:
        if (number := self._half.number) is not None and error[0] is None:
            self._take(number)

    def _take(self, number: int) -> None:
        started = perf_counter()
        with self._moved:
            if not self._moved.wait_for(lambda: self._turn == number or self._over[1 - number], self._timeout_s):
                raise DeadlineError(f"half of a step waited {self._timeout_s:.0f} s for the other one")
        self._recorder.counters.turn(perf_counter() - started)


class Halves:
    """Runs steps on a model in halves; those of few rows whole if that was faster for as many. For one thread.

    Halves are for hosts that compute on the CPU: on a GPU calls cost more than their work.
    """

    def __init__(self, offloaded: OffloadedModel, runner: ModelRunner) -> None:
        self._runner = runner
        self._dispatcher = offloaded.dispatcher
        self._recorder = offloaded.recorder
        settings = offloaded.settings
        # The other half may have to wait for a dispatch, and then to read the experts of a lost server.
        self._turns = Turns(self._recorder, settings.dispatch_timeout_s + settings.load_timeout_s)
        self._choices: dict[int, GuessLength] = {}
        self._pool: ThreadPoolExecutor | None = None
        if offloaded.model.device.type == "cpu" and settings.pipeline != "off" and offloaded.links:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="half")
            self._dispatcher.away = self._turns

    def close(self) -> None:
        """Ends the second thread. Idempotent."""
        if self._pool is not None:
            self._dispatcher.away = nullcontext()
            self._pool.shutdown()
            self._pool = None

    def forward(self, shares: Sequence[Share], *, whole: bool) -> torch.Tensor:
        """As `ModelRunner.forward`; ``whole``: not in halves."""
        halves = [] if self._pool is None or whole else cut(shares)
        if not halves or self._pool is None:
            return self._runner.forward(shares)
        n_rows = sum(len(share.tokens) for share in shares)
        if n_rows >= _LEAST_CUT:
            return self._in_halves(self._pool, *halves)
        # To guess one token or none: these are the two ways to choose from.
        choice = self._choices.setdefault(n_rows.bit_length(), GuessLength(1, adaptive=True))
        started = perf_counter()
        logits = self._in_halves(self._pool, *halves) if choice.choose() else self._runner.forward(shares)
        choice.count(n_rows, perf_counter() - started)
        return logits

    def _in_halves(self, pool: ThreadPoolExecutor, first: Sequence[Share], second: Sequence[Share]) -> torch.Tensor:
        phase = self._recorder.own.next_phase or PREFILL
        n_rows = sum(len(share.tokens) for share in second)
        self._turns.begin()

        def beside() -> torch.Tensor:
            with torch.inference_mode(), self._recorder.beside(phase, n_rows), self._turns.of(1):
                return self._runner.forward(second, beside=True)

        other = pool.submit(beside)
        try:
            with self._turns.of(0):
                logits = self._runner.forward(first)
            waited = perf_counter()
            logits = torch.cat([logits, other.result()])
        except BaseException:
            outlast(other)
            raise
        self._recorder.waited_beside(perf_counter() - waited)
        return logits


def cut(shares: Sequence[Share]) -> list[list[Share]]:
    """Two halves of about as many rows, in this order; none if there is no place to cut."""
    middle, start = sum(len(share.tokens) for share in shares) // 2, 0
    for number, share in enumerate(shares):
        n_before, n_rows = middle - start, len(share.tokens)
        if n_before >= n_rows:
            start += n_rows
            continue
        if n_rows >= _LEAST_CUT and n_before:
            begin = replace(share, tokens=share.tokens[:n_before], has_token=False)
            end = replace(share, tokens=share.tokens[n_before:], past=share.past + n_before)
            return [[*shares[:number], begin], [end, *shares[number + 1 :]]]
        after = number if 2 * n_before < n_rows else number + 1
        return [[*shares[:after]], [*shares[after:]]] if 0 < after < len(shares) else []
    return []

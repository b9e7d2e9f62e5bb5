"""Two groups in flight: while the experts of one half of a step's requests are away, the host computes the other half.

Each group runs through the model on a thread of its own. Only one of them has the host at a time: a group that waits
for expert servers lets the other one go on. Requests are not cut, so every row is computed as it would be in one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from time import perf_counter
from typing import Any, Final

import torch

from moeoffload.host.dispatcher import Dispatcher
from moeoffload.host.recorder import Recorder
from moeoffload.host.turns import Turns
from moeoffload.serve.model_runner import Inputs, ModelRunner
from moeoffload.serve.sequence import Share

LEARN_STEPS: Final = 6
"""Steps of each kind that are timed before one is preferred."""
LOOK_AGAIN: Final = 512
"""Steps after which the other kind is timed again."""
MARGIN: Final = 0.97
"""Two groups have to take less than this part of the time of one."""


class TwoBatchOverlap:
    """Runs one step in two groups. For one thread; the second one is its own."""

    def __init__(self, model: Any, dispatcher: Dispatcher, recorder: Recorder, timeout_s: float) -> None:
        """``timeout_s``: the longest wait of one group for the other, in seconds."""
        self._model = model
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._turns = Turns(timeout_s)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="second-batch")

    def close(self) -> None:
        """Ends the second thread. Idempotent."""
        self._pool.shutdown()

    def forward(self, runner: ModelRunner, shares: Sequence[Share]) -> torch.Tensor:
        """The logits of a step of at least two shares; see `ModelRunner.forward`."""
        cut = split(shares)
        first, second = runner.prepare(shares[:cut]), runner.prepare(shares[cut:])
        dispatcher, turns = self._dispatcher, self._turns
        dispatcher.turns = turns
        try:
            beside = self._pool.submit(self._forward_beside, runner, second)
            turns.take()
            try:
                logits = runner.forward(first)
            finally:
                turns.give()
                waited = perf_counter()
                beside.exception()  # it must not outlive this step, whatever became of the first group
                self._recorder.counters.turn_s += perf_counter() - waited
        finally:
            dispatcher.turns = None
        n_first, n_second = (sum(share.n_logits for share in part) for part in (shares[:cut], shares[cut:]))
        # A group of which no token comes out has one row of logits all the same.
        return torch.cat([logits[:n_first], beside.result()[:n_second]])

    def _forward_beside(self, runner: ModelRunner, inputs: Inputs) -> torch.Tensor:
        counters = self._recorder.counters
        started = perf_counter()
        counters.turn_s += self._turns.take()
        try:
            counters.mark = perf_counter()
            counters.tokens += inputs["input_ids"].shape[1]
            with torch.inference_mode():
                return runner.forward(inputs, self._model.forward)
        finally:
            self._turns.give()
            ended = perf_counter()
            counters.lap_dense(ended)
            counters.thread_s += ended - started


def split(shares: Sequence[Share]) -> int:
    """Where to cut shares in two, about as many rows each; requests are not cut."""
    ends = [0, *accumulate(len(share.tokens) for share in shares)]
    return min(range(1, len(shares)), key=lambda i: abs(2 * ends[i] - ends[-1]))


class Preference:
    """Learns for each size of batch whether two groups are faster than one, from the time of steps."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, bool], float] = {}
        self._timed: dict[tuple[int, bool], int] = {}
        self._since: dict[int, int] = {}

    def wants_two(self, n_requests: int) -> bool:
        """Whether the next step of so many requests should be run in two groups."""
        size = n_requests.bit_length()
        for two in (False, True):
            if self._timed.get((size, two), 0) < LEARN_STEPS:
                return two
        better = self._seconds[size, True] < MARGIN * self._seconds[size, False]
        self._since[size] = self._since.get(size, 0) + 1
        if self._since[size] >= LOOK_AGAIN:
            self._since[size] = self._timed[size, not better] = 0
        return better

    def took(self, n_requests: int, two: bool, seconds: float) -> None:
        """Takes the time of one step in which every request decoded."""
        key = (n_requests.bit_length(), two)
        n = self._timed[key] = self._timed.get(key, 0) + 1
        each = seconds / n_requests
        # The first one after a change finds everything cold.
        known = self._seconds.get(key) if n > 2 else None
        self._seconds[key] = each if known is None else known + 0.2 * (each - known)

"""Two groups in flight: while the experts of one half of a step's requests are away, the host computes the other half.

Each group runs through the model on a thread of its own, with its own part of the packed batch. Only one of them has
the host at a time: who waits for expert servers lets the other one go on. Requests are not cut, so every row is
computed as it would be in one group.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, Final

import torch

from moeoffload.host.dispatcher import Dispatcher
from moeoffload.host.recorder import Recorder
from moeoffload.host.turns import Turns

LEARN_STEPS: Final = 6
"""Steps of each kind that are timed before one is preferred."""
LOOK_AGAIN: Final = 512
"""Steps after which the other kind is timed again."""
MARGIN: Final = 0.97
"""Two groups have to take less than this part of the time of one."""


class PingPong:
    """Runs one step in two groups. For one thread; the second one is its own."""

    def __init__(self, model: Any, dispatcher: Dispatcher, recorder: Recorder, timeout_s: float) -> None:
        """``timeout_s``: the longest wait of one group for the other, in seconds."""
        self._model = model
        self._dispatcher = dispatcher
        self._recorder = recorder
        self._turns = Turns(timeout_s)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ping-pong")

    def close(self) -> None:
        """Ends the second thread. Idempotent."""
        self._pool.shutdown()

    def run(self, **arguments: Any) -> Any:
        """What ``model(**arguments)`` gives for a packed batch of at least two requests without attention masks."""
        first, second = split(arguments)
        dispatcher, turns = self._dispatcher, self._turns
        dispatcher.turns = turns
        try:
            beside = self._pool.submit(self._run_beside, second)
            turns.take()
            try:
                result = self._model(**first)
            finally:
                turns.give()
                waited = perf_counter()
                beside.exception()  # it must not outlive this step, whatever became of the first group
                self._recorder.counters.turn_s += perf_counter() - waited
        finally:
            dispatcher.turns = None
        result.logits = torch.cat([result.logits, beside.result().logits], dim=1)
        return result

    def _run_beside(self, arguments: dict[str, Any]) -> Any:
        counters = self._recorder.counters
        started = perf_counter()
        counters.turn_s += self._turns.take()
        try:
            counters.mark = perf_counter()
            counters.tokens += arguments["input_ids"].shape[1]
            with torch.inference_mode():
                return self._model.forward(**arguments)
        finally:
            self._turns.give()
            ended = perf_counter()
            counters.lap_dense(ended)
            counters.thread_s += ended - started


def split(arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of a packed batch for its first and its second half of requests, about as many rows each."""
    ends = arguments["cu_seq_lens_q"].tolist()
    cut = min(range(1, len(ends) - 1), key=lambda i: abs(2 * ends[i] - ends[-1]))
    return _part(arguments, ends, 0, cut), _part(arguments, ends, cut, len(ends) - 1)


def _part(arguments: dict[str, Any], ends: list[int], first: int, last: int) -> dict[str, Any]:
    """The arguments for requests ``first`` up to ``last``."""
    rows = slice(ends[first], ends[last])
    keep = arguments["logits_indices"]
    keep = keep[(keep >= rows.start) & (keep < rows.stop)] - rows.start
    key_ends = {name: each[first : last + 1] for name, each in arguments["cu_seq_lens_k"].items()}
    read = [
        index[each[0] : each[-1]] if index.numel() else index
        for index, each in zip(arguments["read_index"], key_ends.values(), strict=True)
    ]
    return arguments | {
        "input_ids": arguments["input_ids"][:, rows],
        "position_ids": arguments["position_ids"][:, rows],
        "cu_seq_lens_q": arguments["cu_seq_lens_q"][first : last + 1] - rows.start,
        "cu_seq_lens_k": {name: each - each[0] for name, each in key_ends.items()},
        "logits_indices": keep,
        "logits_to_keep": keep,
        "read_index": read,
        "write_index": [index[rows] for index in arguments["write_index"]],
    }


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
